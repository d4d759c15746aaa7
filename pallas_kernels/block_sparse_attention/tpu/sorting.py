"""Tiles of pairs, and back, by sorting: nothing is gathered or scattered slot by slot.

A TPU gathers and scatters single numbers one after the other, several cycles each, where it sorts many at once, each
with other values beside it. So every slot of every token is sorted, its values with it; tiles are then slices of what
is sorted, and what tiles found is sorted back. `tables.build`, for other devices, makes the same tiles from the pairs
alone.

Shapes: T tokens, K slots, S = T K, R resources, N tiles (static bound), t rows a tile, R1 = R + 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.block_sparse_attention.tables import INT32_MAX


class Tables(NamedTuple):
    """The tiles, in order of resource; a tile's rows are in order of token."""

    wanted: Int[Array, "S"]  # the resource of every slot, token by token; R without a pair
    slot: Int[Array, "S"]  # the slots in order of resource, then of token: those without a pair come last
    first: Int[Array, "N"]  # where in that order every tile begins
    rows: Int[Array, "N"]  # how many pairs it has; padding rows follow them
    resource: Int[Array, "N"]  # the one that all pairs of the tile share
    begin: Int[Array, "R1"]  # the first tile of every resource; last, how many tiles hold a pair

    def holds(self, tile: int) -> Bool[Array, "N t"]:
        """Which rows of tiles of this size are pairs."""
        return jnp.arange(tile) < self.rows[:, None]


def build(
    resource: Int[Array, "T K"], count: Int[Array, "T"], num_resources: int, max_pairs: int, tile: int, slack: int = 0
) -> Tables:
    """The tables of `tables.build`: the same tiles, of the same pairs in the same order."""
    # Pairs past the static bound are dropped with the last tokens: what an earlier token gets never depends on them.
    first = jnp.cumsum(count, dtype=jnp.int32) - count
    used = jnp.arange(resource.shape[1]) < jnp.clip(max_pairs - first, 0, count)[:, None]
    wanted = jnp.where(used, resource, num_resources).reshape(-1)
    sorted_resource, slot = _sort(wanted, num_resources)
    start = jnp.searchsorted(sorted_resource, jnp.arange(num_resources + 1, dtype=jnp.int32)).astype(jnp.int32)

    begin = jnp.cumsum(jnp.pad(-(-jnp.diff(start) // tile), (1, 0)), dtype=jnp.int32)
    bound = -(-max_pairs // tile) + min(num_resources, max_pairs)
    n = jnp.arange(bound + slack, dtype=jnp.int32)
    resource_N = jnp.searchsorted(begin[1:], n, side="right").astype(jnp.int32).clip(max=num_resources - 1)
    first_N = start[resource_N] + (n - begin[resource_N]) * tile
    rows = jnp.clip(start[resource_N + 1] - first_N, 0, tile)
    # Tiles without pairs, which come last, are of slots that come last.
    return Tables(wanted, slot, jnp.where(rows > 0, first_N, start[-1]), rows, resource_N, begin)


def to_tiles(
    arrays: Sequence[Shaped[Array, "T K"]], fills: Sequence[float | int], tables: Tables, tile: int
) -> list[Shaped[Array, "N t"]]:
    """The values of every row's slot, of arrays of 32 bits; `fills` in padding rows."""
    flat = [x.reshape(-1) for x in arrays]
    _, _, *ordered = _sort(tables.wanted, len(tables.begin) - 1, *flat)
    return slices(ordered, fills, tables, tile)


def slots(tables: Tables, tile: int) -> Int[Array, "N t"]:
    """The slot of every row, token * K + k; S in padding rows."""
    return slices([tables.slot], [len(tables.slot)], tables, tile)[0]


def slices(
    ordered: Sequence[Shaped[Array, "S"]], fills: Sequence[float | int], tables: Tables, tile: int
) -> list[Shaped[Array, "N t"]]:
    """Tiles of what is in order of resource already."""
    bits = jnp.stack([jax.lax.bitcast_convert_type(x, jnp.int32) for x in ordered])
    bits = jnp.pad(bits, ((0, 0), (0, tile)))  # a slice may begin at the end
    cut = jax.vmap(lambda first: jax.lax.dynamic_slice_in_dim(bits, first, tile, axis=1))(tables.first)
    found = [jax.lax.bitcast_convert_type(cut[:, i], x.dtype) for i, x in enumerate(ordered)]
    holds = tables.holds(tile)
    return [jnp.where(holds, x, jnp.asarray(fill, x.dtype)) for x, fill in zip(found, fills, strict=True)]


def from_tiles(x: Float[Array, "N t"], tables: Tables, num_slots: int) -> Float[Array, "T K"]:
    """The value of every slot's row; 0 where a slot has none."""
    tile = x.shape[1]
    x = jnp.where(tables.holds(tile), x, 0)

    def write(n: Int[Array, ""], ordered: Float[Array, "_"]) -> Float[Array, "_"]:
        row = jax.lax.dynamic_index_in_dim(x, n, keepdims=False)
        return jax.lax.dynamic_update_slice_in_dim(ordered, row, tables.first[n], axis=0)

    # One after the other: what a tile writes beyond its pairs the next one replaces.
    nothing = jnp.zeros_like(x, shape=(len(tables.slot) + tile,))
    ordered = jax.lax.fori_loop(0, len(x), write, nothing)[: len(tables.slot)]
    _, back = jax.lax.sort((tables.slot, ordered), num_keys=1, is_stable=False)
    return back.reshape(-1, num_slots)


def _sort(wanted: Int[Array, "S"], num_resources: int, *values: Shaped[Array, "S"]) -> tuple[Shaped[Array, "S"], ...]:
    """The slots in order of resource and then of themselves: their resources, their numbers and their values."""
    count = max(len(wanted), 1)
    slot = jnp.arange(len(wanted), dtype=jnp.int32)
    if (num_resources + 1) * count > INT32_MAX:
        return tuple(jax.lax.sort((wanted, slot, *values), num_keys=2, is_stable=False))
    key, *ordered = jax.lax.sort((wanted * count + slot, *values), num_keys=1, is_stable=False)
    return key // count, key % count, *ordered
