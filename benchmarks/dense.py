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
from aamoe_jax.mixers.flash import flash_attention
from aamoe_jax.mixers.parts import SideBySide

Attend = Callable[[Array, Array, Array], Array]
Rows = Float[Array, "b L H k"]
Heads = Float[Array, "H L k"]


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
    """JAX's attention under an explicit mask."""
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
    query = query * query.shape[-1] ** -0.5
    scores = jnp.einsum("hik,hjk->hij", query, key, preferred_element_type=jnp.float32)
    later = (start + jnp.arange(query.shape[1]))[:, None] < jnp.arange(key.shape[1])
    weights = jax.nn.softmax(jnp.where(later, -jnp.inf, scores), axis=-1)
    return jnp.einsum("hij,hjk->hik", weights.astype(value.dtype), value)


def flash(query: Rows, key: Rows, value: Rows, *, block: int) -> Rows:
    """The library's own, with blocks of another size."""
    return flash_attention(query, key, value, jnp.ones(query.shape[:2], jnp.int32), block=block).output


def _join(blocks: Float[Array, "n H t *rest"]) -> Float[Array, "H L *rest"]:
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1, *blocks.shape[3:])


CANDIDATES: dict[str, Attend] = {
    "masked": masked,
    "causal": causal,
    "query_blocks_512": over_rows(functools.partial(query_blocks, block=512)),
    "triangle_512": over_rows(functools.partial(triangle, block=512)),
    **{f"flash_{block}": functools.partial(flash, block=block) for block in (64, 128, 256)},
}
