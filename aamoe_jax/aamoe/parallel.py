"""The same attention with resources divided over the mesh: queries travel, resources stay.

Every shard of the axis `resource` holds a part of the row's tokens, of its chunks and of the experts. It attends for
all tokens of the row to its own resources; what all shards found is merged by log-sum-exp in a reduce-scatter, which
returns every token to its shard. A local window needs no more than the end of the part before.

Chunks go to the shards in turn, chunk j of the row to shard j mod R: later chunks are seen by fewer tokens, so that
contiguous chunks would leave the last shard with little to do. Every part sends every shard equally many, the last of
them empty where its chunks are no multiple of R.

Shapes: b rows, L tokens per row, s = L / R of them here, R shards, m tokens per chunk, E experts, e = E / R of them
here, K slots, H heads here, k head size.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import collapse
from jaxtyping import Array, Bool, Float, Int, Num

from aamoe_jax.aamoe.router import Heads
from aamoe_jax.layers import RotaryTable, apply_rotary
from aamoe_jax.mixers.base import Context
from aamoe_jax.shards import RESOURCE, Shards
from pallas_kernels.block_sparse_attention import Pairs, Window, block_sparse_attention


class Softmax(NamedTuple):
    """Attention over some keys, and the log-sum-exp of its scores: -inf where there are none."""

    output: Float[Array, "b s H k"]
    lse: Float[Array, "b s H"]


class Attended(NamedTuple):
    """The attention of the tokens that attend together."""

    attention: Softmax
    mass: Float[Array, "b s K"]
    """Share of the attention on each slot, mean over heads."""
    overflow: Num[Array, ""] | float = 0
    """Pairs dropped past `MeshConfig.pair_bound`."""


class Location(NamedTuple):
    """Where resources are."""

    shard: Int[Array, "*slots"]
    row: Int[Array, "*slots"]
    """In the table of that shard: chunks of all rows, then its experts."""


def attend_everywhere(
    heads: Heads,
    pairs: Pairs,
    window_bias: Float[Array, "b L"] | None,
    context: Context,
    rotary: RotaryTable,
    *,
    max_pairs: int,
    **options: Any,
) -> Attended:
    """`attend.attend` where resources are divided.

    Args:
      rotary: of all tokens of the row.
    """
    shards = context.shards
    routed = routed_attention(heads, pairs, rotary, shards, max_pairs=max_pairs, **options)
    if window_bias is None:
        return routed
    near = window_attention(heads, shards.part(window_bias, RESOURCE), context.segment_ids, shards, **options)
    whole = merge(routed.attention, near)
    left = jax.lax.stop_gradient(jnp.exp(routed.attention.lse - whole.lse)).mean(-1, keepdims=True)
    return Attended(whole, jnp.concatenate([1.0 - left, left * routed.mass], axis=-1), routed.overflow)


def routed_attention(
    heads: Heads, pairs: Pairs, rotary: RotaryTable, shards: Shards, *, max_pairs: int, **options: Any
) -> Attended:
    """Attention of the tokens here to the resources of all shards. The mass of a slot is the mean over heads on its
    shard, times the mean share of that shard; overflow is of the pairs of this shard, past its bound.

    Args:
      pairs: of whole rows.
      rotary: of all tokens of the row: queries travel without it, for experts meet them so.
      max_pairs: static bound on the pairs of all tokens.
    """
    experts, m = heads.expert_key.shape[:2]
    count = heads.key.shape[1] // m
    query = shards.gather(heads.query, RESOURCE)
    bound = pair_bound(max_pairs, shards)
    pairs, place = _pairs_here(pairs, location_of(pairs.resource, count, experts, shards))
    keys, values = (_spread(x.reshape(len(x), count, m, *x.shape[2:]), shards) for x in (heads.key, heads.value))
    found = block_sparse_attention(
        collapse(apply_rotary(query, rotary), 0, 2),
        collapse(query, 0, 2),
        jnp.concatenate([keys, heads.expert_key.astype(keys.dtype)]),
        jnp.concatenate([values, heads.expert_value.astype(values.dtype)]),
        Pairs(*(collapse(x, 0, 2) for x in pairs)),
        num_context=len(keys),
        max_pairs=bound,
        row_chunks=len(keys) // len(query),
        **options,
    )
    output, lse, mass = (x.reshape(*query.shape[:2], *x.shape[1:]) for x in found)
    merged, share = _merge(Softmax(output, lse), shards)
    mass = jnp.where(_at(place), mass[..., None, :], 0).sum(-1) * jax.lax.stop_gradient(share).mean(-1, keepdims=True)
    return Attended(merged, shards.scatter_sum(mass, RESOURCE), jnp.maximum(pairs.count.sum() - bound, 0))


def window_attention(
    heads: Heads, bias: Float[Array, "b s"], segment_ids: Int[Array, "b L"], shards: Shards, **options: Any
) -> Softmax:
    """Attention to the last m tokens, self included: those of the part before come from the shard before.

    Args:
      bias: of the window; -inf for a token without one.
      segment_ids: documents of whole rows.
    """
    (rows, s), m = heads.key.shape[:2], heads.expert_key.shape[1]
    # The first part gets zeros, of no document.
    key, value = (jnp.concatenate([shards.end_of_part_before(x, m), x], axis=1) for x in (heads.key, heads.value))
    query = jnp.pad(heads.rotated_query, ((0, 0), (m, 0), (0, 0), (0, 0)))
    bias = jnp.pad(bias, ((0, 0), (m, 0)), constant_values=-jnp.inf)
    start = jax.lax.axis_index(RESOURCE) * s
    segment = jax.lax.dynamic_slice_in_dim(jnp.pad(segment_ids, ((0, 0), (m, 0))), start, s + m, axis=1)
    segment += (segment_ids.shape[1] + 1) * jnp.arange(rows)[:, None]
    nothing = jnp.zeros((rows * (s + m), 0), jnp.int32)
    found = block_sparse_attention(
        collapse(query, 0, 2),
        collapse(query, 0, 2),
        key.reshape(-1, m, *key.shape[2:]),
        value.reshape(-1, m, *value.shape[2:]),
        Pairs(nothing, nothing.astype(jnp.float32), nothing, jnp.zeros(len(nothing), jnp.int32)),
        num_context=rows * (s // m + 1),
        max_pairs=0,
        window=Window(bias.reshape(-1), segment.reshape(-1)),
        row_chunks=s // m + 1,
        **options,
    )
    return Softmax(*(x.reshape(rows, s + m, *x.shape[1:])[:, m:] for x in found[:2]))


def merge(one: Softmax, other: Softmax) -> Softmax:
    """One softmax over the keys of both."""
    top = _finite(jax.lax.stop_gradient(jnp.maximum(one.lse, other.lse)))
    weights = [jnp.exp(part.lse - top) for part in (one, other)]
    total = weights[0] + weights[1]
    shares = [(weight / jnp.where(total > 0, total, 1))[..., None] for weight in weights]
    outputs = [part.output.astype(jnp.float32) * share for part, share in zip((one, other), shares, strict=True)]
    output = outputs[0] + outputs[1]
    return Softmax(output.astype(one.output.dtype), _log(total) + top)


def pair_bound(max_pairs: int, shards: Shards) -> int:
    """Static bound on the pairs of one shard: all there are, or a multiple of its even share."""
    if shards.pair_bound is None or shards.exact:
        return max_pairs
    return min(max_pairs, math.ceil(shards.pair_bound * max_pairs / shards.resource))


def location_of(resource: Int[Array, "b L K"], count: int, experts: int, shards: Shards) -> Location:
    """Where the resources of rows are, by the row's index.

    Args:
      count: chunks of one part of a row.
      experts: experts of one shard.
    """
    part, j = jnp.divmod(resource, count)
    sent = -(-count // shards.resource)  # chunks that one part sends to one shard
    per_row = shards.resource * sent
    row = jnp.arange(len(resource))[:, None, None]
    chunk = Location(resource % shards.resource, row * per_row + part * sent + j // shards.resource)
    if experts == 0:
        return chunk
    shard, place = jnp.divmod(resource - count * shards.resource, experts)
    is_chunk = resource < count * shards.resource
    expert = Location(shard, len(resource) * per_row + place)
    return Location(*(jnp.where(is_chunk, x, y) for x, y in zip(chunk, expert, strict=True)))


def _pairs_here(pairs: Pairs, location: Location) -> tuple[Pairs, Int[Array, "b L K"]]:
    """The slots whose resource is here, moved together in their order; and where each slot went, -1 if it is not."""
    here = (location.shard == jax.lax.axis_index(RESOURCE)) & (
        jnp.arange(location.shard.shape[-1]) < pairs.count[..., None]
    )
    place = jnp.where(here, jnp.cumsum(here, -1) - 1, -1)
    resource, bias, visible = (_move(x, place) for x in (location.row, pairs.bias, pairs.visible))
    return Pairs(resource, bias, visible, here.sum(-1, dtype=jnp.int32)), place


@jax.checkpoint  # so that of [b, L, K, K] nothing is kept
def _move(x: Num[Array, "b L K"], place: Int[Array, "b L K"]) -> Num[Array, "b L K"]:
    """Every slot to its place; 0 where none goes."""
    return jnp.where(_at(place), x[..., None], 0).sum(-2).astype(x.dtype)


def _at(place: Int[Array, "b L K"]) -> Bool[Array, "b L K K"]:
    """Which slot goes to which place."""
    return place[..., None] == jnp.arange(place.shape[-1])


def _spread(chunks: Float[Array, "b c m H k"], shards: Shards) -> Float[Array, "C m H k"]:
    """Chunk j of every row goes to shard j mod R: the chunks that are here afterwards, as `location_of` counts them."""
    rows, count = chunks.shape[:2]
    each = -(-count // shards.resource)
    chunks = jnp.pad(chunks, ((0, 0), (0, shards.resource * each - count), *((0, 0),) * 3))
    chunks = chunks.reshape(rows, each, shards.resource, *chunks.shape[2:])
    first = jax.lax.axis_index(RESOURCE) * count  # where in the row this part begins
    chunks = jnp.roll(chunks, first % shards.resource, axis=2)
    sent = jax.lax.all_to_all(chunks, RESOURCE, split_axis=2, concat_axis=1, tiled=True)
    return sent.reshape(-1, *chunks.shape[3:])


def _merge(found: Softmax, shards: Shards) -> tuple[Softmax, Float[Array, "b L H"]]:
    """One softmax over the keys of all shards, for the tokens here; and this shard's share in it, for all tokens."""
    top = _finite(jax.lax.pmax(jax.lax.stop_gradient(found.lse), RESOURCE))
    weight = jnp.exp(found.lse - top)
    total = jax.lax.psum(weight, RESOURCE)
    share = weight / jnp.where(total > 0, total, 1)
    output = shards.scatter_sum(found.output.astype(jnp.float32) * share[..., None], RESOURCE)
    return Softmax(output.astype(found.output.dtype), shards.part(_log(total) + top, RESOURCE)), share


def _finite(x: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    return jnp.where(jnp.isfinite(x), x, 0)


def _log(total: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """log, whose gradient at 0 is 0."""
    return jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)), -jnp.inf)
