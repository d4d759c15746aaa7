"""From an allocation to tiles: the (token, resource) pairs sorted by resource, padded to whole tiles per resource.

All paths but `tpu.resident` and `tpu.dense` read these tables; `tpu.compaction` makes the same tiles in another form.
Pairs are numbered token by token, so a slot finds its pair by arithmetic and never by a scatter; tiles name pairs, in
order of resource and then of token.

Shapes: T tokens, K slots, R resources, P pairs (static bound), N tiles (static bound), t rows a tile,
R1 = R + 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels import chips

INT32_MAX = 2**31 - 1


class Numbering(NamedTuple):
    """The pairs one after the other, token by token. A number past the last pair names token T."""

    token: Int[Array, "P"]  # the token of every pair; ascending
    first: Int[Array, "T"]  # the number of a token's first pair; slot k of the token is pair first + k
    count: Int[Array, "T"]  # type: ignore[assignment]  # how many pairs a token has


class Tables(NamedTuple):
    """The tiles. A padding row of a tile names pair P."""

    pair: Int[Array, "N t"]  # the pairs of every tile; padding rows come last
    resource: Int[Array, "N"]  # the resource that all pairs of the tile share
    begin: Int[Array, "R1"]  # the first tile of every resource; last, how many tiles hold a pair
    numbering: Numbering


def build(
    resource: Int[Array, "T K"], count: Int[Array, "T"], num_resources: int, max_pairs: int, tile: int, slack: int = 0
) -> Tables:
    """Number the pairs, sort them by resource and cut every resource's run into tiles of `tile` rows.

    A pair of resource `num_resources` is in no tile.

    `slack` empty tiles follow the bound on tiles, for loops that take several tiles a step and may read past the end.
    """
    last = jnp.cumsum(count, dtype=jnp.int32)
    first = last - count
    # Pairs past the static bound are dropped with the last tokens: what an earlier token gets never depends on them.
    count = jnp.clip(max_pairs - first, 0, count)
    token = jnp.repeat(jnp.arange(len(count), dtype=jnp.int32), count, total_repeat_length=max_pairs)
    number = jnp.arange(max_pairs, dtype=jnp.int32)
    numbering = Numbering(jnp.where(number < last[-1], token, len(count)), first, count)

    # The pairs in order of (resource, number), and where in that order every resource starts.
    resource_P, bounds = from_slots(resource, numbering, num_resources), jnp.arange(num_resources + 1, dtype=jnp.int32)
    if (num_resources + 1) * max_pairs > INT32_MAX:
        resource_P, order = jax.lax.sort_key_val(resource_P, number, is_stable=True)
        start = _search(resource_P, bounds)
    else:  # One integer carries both: a single-operand sort is several times faster than a stable sort of two.
        key = jnp.sort(resource_P * max_pairs + number)
        order, start = key % max_pairs, _search(key, bounds * max_pairs)

    tiles_R = -(-jnp.diff(start) // tile)
    begin = jnp.cumsum(jnp.pad(tiles_R, (1, 0)), dtype=jnp.int32)
    bound = -(-max_pairs // tile) + min(num_resources, max_pairs)
    n = jnp.arange(bound + slack, dtype=jnp.int32)
    resource_N = _search(begin[1:], n, side="right").clip(max=num_resources - 1)
    row_N = start[resource_N] + (n - begin[resource_N]) * tile
    row_Nt = row_N[:, None] + jnp.arange(tile, dtype=jnp.int32)
    pair = jnp.where(row_Nt < start[resource_N + 1][:, None], order.at[row_Nt].get(mode="clip"), max_pairs)
    return Tables(pair, resource_N, begin, numbering)


def _search(ascending: Int[Array, "n"], wanted: Int[Array, "k"], side: str = "left") -> Int[Array, "k"]:
    # A loop would launch its kernels in every turn on a GPU; unrolled, it is one or two kernels.
    method = "scan_unrolled" if chips.is_gpu() else "scan"
    return jnp.searchsorted(ascending, wanted, side=side, method=method).astype(jnp.int32)


def from_slots(x_TK: Shaped[Array, "T K"], numbering: Numbering, fill: int | float) -> Shaped[Array, "P"]:
    """The value of every pair's slot; `fill` past the last pair."""
    token, first, _ = numbering
    slot = jnp.arange(len(token), dtype=jnp.int32) - first.at[token].get(mode="clip")
    return x_TK.at[token, slot].get(mode="fill", fill_value=fill)


def to_slots(x_P: Shaped[Array, "P"], numbering: Numbering, slots: int) -> Shaped[Array, "T K"]:
    """The value of every slot's pair; 0 at unused slots."""
    k = jnp.arange(slots, dtype=jnp.int32)
    return jnp.where(k < numbering.count[:, None], x_P.at[numbering.first[:, None] + k].get(mode="clip"), 0)


def slots_to_rows(x_TK: Shaped[Array, "T K"], tables: Tables, fill: int | float) -> Shaped[Array, "N 1 t"]:
    """The value of every row's slot; `fill` in padding rows."""
    return from_slots(x_TK, tables.numbering, fill).at[tables.pair[:, None]].get(mode="fill", fill_value=fill)


def rows_to_pairs(x_Nt: Shaped[Array, "N t"], tables: Tables) -> Shaped[Array, "P"]:
    """The value of every pair's row; 0 past the last pair."""
    zeros = jnp.zeros_like(tables.numbering.token, x_Nt.dtype)
    return zeros.at[tables.pair].set(x_Nt, mode="drop", unique_indices=True)
