"""Softmax attention in memory that grows with the length of a row, not with its square (Dao 2023, FlashAttention-2).

The scores of one block of queries against one of keys are all that is ever held: a block is added to a running softmax,
and the backward pass computes it again from the log-sum-exp that the forward pass saved. Blocks of which no query sees
a key are skipped: those in the future, out of reach, or of other documents. So a window costs linear time.

Shapes: b rows, S keys per row, q queries of them, H heads, G heads of keys and values, r = H / G, k = d / H, t queries
(and keys) per block, n blocks of queries, m blocks of keys; a = b, or 1 where queries and keys are the same in all
rows, whose products are then computed once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Shaped

from aamoe_jax.mixers.costs import Loop
from pallas_kernels import chips
from pallas_kernels.residuals import RESIDUALS
from pallas_kernels.varying import varying

LOWEST = -1e30
"""The score of what is not seen, and the log-sum-exp of nothing: finite, so that differences are numbers."""
BLOCK = 128
"""t: the scores of a few heads stay in the cache of a core."""
GPU_BLOCK = 512
"""t of `flash_attention` on a GPU, where each block launches kernels of its own."""

Queries = Float[Array, "n a G r t k"]
Keys = Float[Array, "m a G t k"]
Values = Float[Array, "m b G t k"]
Outputs = tuple[Float[Array, "n b G r t k"], Float[Array, "n b G r t"]]
"""The output, and the log-sum-exp of the scores."""
Place = Int[Array, ""] | int


class Attended(NamedTuple):
    """Softmax attention over some of the keys."""

    output: Float[Array, "b q H k"]
    lse: Float[Array, "b q H"]
    """log sum_j e^(score_j) in float32; LOWEST where no key is seen, and the output 0."""


class Blocks(NamedTuple):
    """What attends to what, block by block."""

    query: Queries
    key: Keys
    value: Values


class Places(NamedTuple):
    """The documents of blocks, and the place in the row of the first query."""

    of_queries: Int[Array, "n b t"]
    of_keys: Int[Array, "m b t"]
    first: Int[Array, ""]


class Band(NamedTuple):
    """Which distances i - j from a query to a key are seen: nearest <= i - j < reach."""

    nearest: int = 0
    reach: int | None = None
    """None: however far."""

    def sees(self, distance: Int[Array, "*b"]) -> Bool[Array, "*b"]:
        """Of keys at these distances."""
        near = distance >= self.nearest
        return near if self.reach is None else near & (distance < self.reach)

    def meets(self, queries: int, keys: int, block: int, first: Place) -> Bool[Array | np.ndarray, "n m"]:
        """Which blocks of queries, the first of them at `first`, have a pair that is seen with which blocks of keys."""
        gap = first + block * (np.arange(queries)[:, None] - np.arange(keys))  # between the first of each
        farthest, least = gap + block - 1, gap - block + 1
        some = farthest >= self.nearest
        return some if self.reach is None else some & (least < self.reach)


CAUSAL = Band()


def flash_attention(
    query: Float[Array, "a q H k"],
    key: Float[Array, "a S G k"],
    value: Float[Array, "b S G k"],
    segment_ids: Int[Array, "b S"],
    band: Band = CAUSAL,
    *,
    first: Place = 0,
    query_segments: Int[Array, "b q"] | None = None,
    block: int | None = None,
) -> Attended:
    """softmax(q K^T / sqrt(k)) V over the keys of a query's document at the distances of `band`.

    Args:
      segment_ids: documents of the keys.
      first: the place in the row of the first query, where queries are a part of it; the others follow.
      query_segments: documents of the queries; None: those that stand at their places in `segment_ids`.
      block: t; None: `block_size`, on a GPU with blocks of up to GPU_BLOCK.

    Returns:
      `Attended`, differentiable in query, key and value through both. Products in the type of the inputs, sums and
      softmax in float32. What no query sees changes no bit of it.
    """
    (maps, queries, heads, size), (rows, keys, groups, _) = query.shape, value.shape
    if query_segments is None:
        query_segments = jax.lax.dynamic_slice_in_dim(segment_ids, first, queries, axis=1)
    block = _flash_block(max(queries, keys)) if block is None else block
    of_queries = jnp.moveaxis(token_blocks(query, block).reshape(-1, maps, block, groups, heads // groups, size), 2, 4)
    of_keys, of_values = (token_blocks(x, block).swapaxes(2, 3) for x in (key, value))
    # Tokens that fill the last block are of the last document, but later than all of it: nothing real sees them.
    mine, theirs = (token_blocks(x, block, "edge") for x in (query_segments, segment_ids))
    places = Places(mine, theirs, jnp.asarray(first))
    output, lse = _flash(band, *varying((Blocks(of_queries, of_keys, of_values), places)))
    output, lse = (jnp.moveaxis(jnp.moveaxis(x, 4, 2), 0, 1) for x in (output, lse))
    return Attended(output.reshape(rows, -1, heads, size)[:, :queries], lse.reshape(rows, -1, heads)[:, :queries])


@jax.checkpoint  # what it keeps in between is twice what it is given
def merged(parts: Sequence[Attended]) -> Float[Array, "b q H k"]:
    """Attention over the keys of all parts together, of which no two have a key in common."""
    shares = jax.nn.softmax(jnp.stack([part.lse for part in parts]), axis=0)[..., None]
    mixed = sum(share * part.output for share, part in zip(shares, parts, strict=True))
    return jnp.asarray(mixed, parts[0].output.dtype)


def block_size(length: int, most: int = BLOCK) -> int:
    """t: at most `most`, and such that the last block of a row is nearly full."""
    return -(-length // -(-length // most))


def _flash_block(length: int) -> int:
    return block_size(length, GPU_BLOCK if chips.is_gpu() else BLOCK)


def loop(queries: int, keys: int, band: Band = CAUSAL, first: int = 0) -> Loop:
    """What `flash_attention` computes where all keys are of one document."""
    turn = _flash_block(max(queries, keys))
    meets = band.meets(-(-queries // turn), -(-keys // turn), turn, first)
    return Loop(turn**2 * int(meets.sum()), turn**2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(band: Band, blocks: Blocks, places: Places) -> Outputs:
    return _forward(band, blocks, places)[0]


def _forward(band: Band, blocks: Blocks, places: Places) -> tuple[Outputs, tuple[Any, ...]]:
    query, _, value = blocks
    shape = value.shape[1], *query.shape[2:]
    begin, end = _bounds(_meets(band, places), axis=1)

    def of_queries(i: Array) -> tuple[Float[Array, "b G r t k"], Float[Array, "b G r t"]]:
        def meet(j: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            output, top, total = state
            scores, seen = _scores(band, blocks, places, i, j)
            new_top = jnp.maximum(top, scores.max(-1))
            weights, decay = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0), jnp.exp(top - new_top)
            values = _product("bgrts,bgsk->bgrtk", weights.astype(value.dtype), value[j])
            return output * decay[..., None] + values, new_top, total * decay + weights.sum(-1)

        zeros = jnp.zeros_like(jnp.broadcast_to(query[i], shape), jnp.float32)
        output, top, total = jax.lax.fori_loop(begin[i], end[i], meet, (zeros, zeros[..., 0] + LOWEST, zeros[..., 0]))
        total = jnp.where(total > 0, total, 1)
        return (output / total[..., None]).astype(value.dtype), top + jnp.log(total)

    output, lse = checkpoint_name(jax.lax.map(of_queries, jnp.arange(len(query))), RESIDUALS)
    return (output, lse), (blocks, places, output, lse)


def _backward(band: Band, residuals: tuple[Any, ...], cotangents: Outputs) -> tuple[Blocks, None]:
    blocks, places, output, lse = residuals
    query, key, value = blocks
    d_output, d_lse = cotangents
    # d score = weight (d weight - delta); of the log-sum-exp the weights are the gradient.
    delta = jnp.sum(output.astype(jnp.float32) * d_output.astype(jnp.float32), axis=-1) - d_lse
    scale = query.shape[-1] ** -0.5
    begin, end = _bounds(_meets(band, places), axis=0)

    def of_keys(d_query: Queries, j: Array) -> tuple[Queries, tuple[Array, Array]]:
        def meet(i: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            d_query, d_keys, d_values = state
            scores, seen = _scores(band, blocks, places, i, j)
            weights = jnp.where(seen, jnp.exp(scores - lse[i][..., None]), 0)
            d_weights = _product("bgrtk,bgsk->bgrts", d_output[i], value[j])
            d_scores = scale * weights * (d_weights - delta[i][..., None])
            if query.shape[1] < len(d_scores):  # one map for all rows
                d_scores = d_scores.sum(0, keepdims=True)
            d_scores = d_scores.astype(query.dtype)
            d_queries = d_query[i] + _product("bgrts,bgsk->bgrtk", d_scores, key[j])
            return (
                jax.lax.dynamic_update_index_in_dim(d_query, d_queries, i, axis=0),
                d_keys + _product("bgrts,bgrtk->bgsk", d_scores, query[i]),
                d_values + _product("bgrts,bgrtk->bgsk", weights.astype(value.dtype), d_output[i]),
            )

        zeros = (jnp.zeros_like(x[j], jnp.float32) for x in (key, value))
        d_query, *d_both = jax.lax.fori_loop(begin[j], end[j], meet, (d_query, *zeros))
        return d_query, tuple(x.astype(key.dtype) for x in d_both)

    d_query, d_both = jax.lax.scan(of_keys, jnp.zeros_like(query, jnp.float32), jnp.arange(len(key)))
    return Blocks(d_query.astype(query.dtype), *d_both), None


_flash.defvjp(_forward, _backward)


def _scores(
    band: Band, blocks: Blocks, places: Places, i: Array, j: Array
) -> tuple[Float[Array, "b G r t t"], Bool[Array, "b 1 1 t t"]]:
    """Scores of block i of queries against block j of keys, LOWEST where they are not seen; and where they are."""
    query, key = blocks.query[i], blocks.key[j]
    place = jnp.arange(query.shape[-2])
    distance = places.first + (i - j) * len(place) + place[:, None] - place
    seen = band.sees(distance) & (places.of_queries[i][:, :, None] == places.of_keys[j][:, None, :])
    scores = query.shape[-1] ** -0.5 * _product("bgrtk,bgsk->bgrts", query, key)
    return jnp.where(seen[:, None, None], scores, LOWEST), seen[:, None, None]


def _meets(band: Band, places: Places) -> Bool[Array, "n m"]:
    """Which blocks may have a pair that is seen in any row: at the distances of the band, of one document."""
    of_queries, of_keys, first = places
    (low, high), (low_key, high_key) = ((x.min(-1), x.max(-1)) for x in (of_queries, of_keys))
    together = (low[:, None] <= high_key) & (low_key <= high[:, None])
    return together.any(-1) & band.meets(len(low), len(low_key), of_keys.shape[-1], first)


def _bounds(meets: Bool[Array, "n m"], axis: int) -> tuple[Int[Array, "_"], Int[Array, "_"]]:
    """From which block on, and up to which, a block has any to meet along this axis."""
    begin, end = jnp.argmax(meets, axis), meets.shape[axis] - jnp.argmax(jnp.flip(meets, axis), axis)
    return begin, jnp.where(meets.any(axis), end, begin)


def _product(dimensions: str, left: Array, right: Array) -> Array:
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)


def token_blocks(x: Shaped[Array, "b L *rest"], block: int, mode: str = "constant") -> Shaped[Array, "n b t *rest"]:
    """Blocks of tokens, of which the last is filled up."""
    filled = jnp.pad(x, [(0, -x.shape[1] % block if axis == 1 else 0) for axis in range(x.ndim)], mode=mode)
    return filled.reshape(len(x), -1, block, *x.shape[2:]).swapaxes(0, 1)
