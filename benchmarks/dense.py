"""Dense causal attention in several ways, so that AA-MoE is compared with the fastest on the device at each length.

Shapes: b rows, L tokens per row, H heads, k = d / H; t queries (keys) per block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from aamoe_jax.layers import apply_rotary, merge_heads
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.parts import SideBySide

Attend = Callable[[Array, Array, Array], Array]
Rows = Float[Array, "b L H k"]
Heads = Float[Array, "H L k"]
HIDDEN = -1e30
"""The score of a key in the future: finite, so that a block of such keys alone has no NaN."""


def parallel_layer(
    layer: SideBySide, attend: Attend, h: Float[Array, "b L d"], context: Context
) -> Float[Array, "b L d"]:
    """The parallel transformer layer (eq 1), one document per row, with another way to attend."""
    attention, feed_forward = layer.parts["attention"], layer.parts["feed_forward"]
    config = attention.config
    query, key, value = attention.qkv(h)
    rotary = context.rotary(config).heads
    heads = attend(apply_rotary(query, rotary), apply_rotary(key, rotary), value)
    return attention.output(merge_heads(heads)) + feed_forward(h, context)[0]


def masked(query: Rows, key: Rows, value: Rows) -> Rows:
    """JAX's attention under an explicit mask, as `mixers/attention.py` has it."""
    mask = jnp.tril(jnp.ones((query.shape[1],) * 2, bool))[None, None]
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def causal(query: Rows, key: Rows, value: Rows) -> Rows:
    """JAX's attention told that it is causal."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")


def over_rows(attend: Attend) -> Attend:
    """Attention over [b, L, H, k] from one over a single row, head-major [H, L, k]."""

    def attend_rows(query: Rows, key: Rows, value: Rows) -> Rows:
        rows = (x.swapaxes(1, 2) for x in (query, key, value))
        return jax.vmap(attend)(*rows).swapaxes(1, 2)

    return attend_rows


def query_blocks(query: Heads, key: Heads, value: Heads, *, block: int) -> Heads:
    """A loop over blocks of queries, each recomputed in the backward pass. It skips nothing."""
    heads, length, size = query.shape
    block = _block_of(block, length)
    blocks = query.reshape(heads, -1, block, size).swapaxes(0, 1)
    attend = jax.checkpoint(lambda each: _block_attention(each[0], key, value, each[1]))
    return _join(jax.lax.map(attend, (blocks, jnp.arange(0, length, block))))


def triangle(query: Heads, key: Heads, value: Heads, *, block: int) -> Heads:
    """Blocks of queries unrolled, each against the keys up to its own end: the future is skipped."""
    length = query.shape[1]
    block = _block_of(block, length)
    attend = jax.checkpoint(_block_attention)
    ends = range(block, length + 1, block)
    outputs = [attend(query[:, i - block : i], key[:, :i], value[:, :i], i - block) for i in ends]
    return jnp.concatenate(outputs, axis=1)


def _block_of(block: int, length: int) -> int:
    block = min(block, length)
    if length % block:
        raise ValueError(f"length = {length}: must be a multiple of the block of {block} queries")
    return block


def _block_attention(
    query: Float[Array, "H t k"], key: Float[Array, "H s k"], value: Float[Array, "H s k"], start: Int[Array, ""] | int
) -> Float[Array, "H t k"]:
    scores = _scores(query * query.shape[-1] ** -0.5, key, start, 0)
    return jnp.einsum("hij,hjk->hik", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


def _scores(
    query: Float[Array, "H t k"], key: Float[Array, "H s k"], first_query: Array | int, first_key: Array | int
) -> Float[Array, "H t s"]:
    scores = jnp.einsum("hik,hjk->hij", query, key, preferred_element_type=jnp.float32)
    later = (first_query + jnp.arange(query.shape[1]))[:, None] < first_key + jnp.arange(key.shape[1])
    return jnp.where(later, HIDDEN, scores)


# Flash attention in plain JAX: scores of one block of queries against one of keys are all that is ever held, and the
# backward pass computes them again from the saved log-sum-exp.


def flash(query: Heads, key: Heads, value: Heads, *, block: int) -> Heads:
    """Square blocks under an online softmax. Blocks in the future are skipped, in both passes."""
    scale = query.shape[-1] ** -0.5
    return _flash(_block_of(block, query.shape[1]), scale * query, key, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(block: int, query: Array, key: Array, value: Array) -> Array:
    return _flash_forward(block, query, key, value)[0]


def _flash_forward(block: int, query: Array, key: Array, value: Array) -> tuple[Array, tuple[Array, ...]]:
    def one_query_block(i: Array) -> tuple[Array, Array]:
        queries = _cut(query, i, block)

        def meet(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            output, top, total = state
            scores = _scores(queries, _cut(key, j, block), i * block, j * block)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, decay = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            values = jnp.einsum("hij,hjk->hik", weights.astype(value.dtype), _cut(value, j, block))
            return output * decay[..., None] + values, new_top, total * decay + weights.sum(-1)

        zeros = jnp.zeros(queries.shape, jnp.float32)
        output, top, total = jax.lax.fori_loop(0, i + 1, meet, (zeros, zeros[..., 0] + HIDDEN, zeros[..., 0]))
        return output / total[..., None], top + jnp.log(total)

    output, lse = jax.lax.map(one_query_block, jnp.arange(query.shape[1] // block))
    output, lse = _join(output), _join(lse)
    return output.astype(value.dtype), (query, key, value, output, lse)


def _flash_backward(block: int, residuals: tuple[Array, ...], d_output: Array) -> tuple[Array, Array, Array]:
    query, key, value, output, lse = residuals
    delta = jnp.sum(output * d_output, axis=-1)
    num_blocks = query.shape[1] // block

    def one_key_block(d_query: Array, j: Array) -> tuple[Array, tuple[Array, Array]]:
        keys, values = _cut(key, j, block), _cut(value, j, block)

        def meet(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_keys, d_values = state
            queries, d_out = _cut(query, i, block), _cut(d_output, i, block)
            weights = jnp.exp(_scores(queries, keys, i * block, j * block) - _cut(lse, i, block)[..., None])
            d_weights = jnp.einsum("hik,hjk->hij", d_out, values, preferred_element_type=jnp.float32)
            d_scores = (weights * (d_weights - _cut(delta, i, block)[..., None])).astype(query.dtype)
            d_block = _cut(d_query, i, block) + jnp.einsum("hij,hjk->hik", d_scores, keys)
            return (
                jax.lax.dynamic_update_slice_in_dim(d_query, d_block, i * block, axis=1),
                d_keys + jnp.einsum("hij,hik->hjk", d_scores, queries),
                d_values + jnp.einsum("hij,hik->hjk", weights.astype(query.dtype), d_out),
            )

        zeros = jnp.zeros(keys.shape, jnp.float32)
        d_query, *d_both = jax.lax.fori_loop(j, num_blocks, meet, (d_query, zeros, zeros))
        return d_query, tuple(d_both)

    zeros = jnp.zeros(query.shape, jnp.float32)
    d_query, d_both = jax.lax.scan(one_key_block, zeros, jnp.arange(num_blocks))
    return tuple(x.astype(query.dtype) for x in (d_query, *map(_join, d_both)))


_flash.defvjp(_flash_forward, _flash_backward)


def _cut(x: Float[Array, "H L *rest"], number: Array, block: int) -> Float[Array, "H t *rest"]:
    return jax.lax.dynamic_slice_in_dim(x, number * block, block, axis=1)


def _join(blocks: Float[Array, "n H t *rest"]) -> Float[Array, "H L *rest"]:
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1, *blocks.shape[3:])


CANDIDATES: dict[str, Attend] = {
    "masked": masked,
    "causal": causal,
    "query_blocks_512": over_rows(functools.partial(query_blocks, block=512)),
    "triangle_512": over_rows(functools.partial(triangle, block=512)),
    **{f"flash_{block}": over_rows(functools.partial(flash, block=block)) for block in (64, 128, 256)},
}
