"""How tokens, heads and keys lie in a TPU's registers, and back.

A token of a head group is one register, 8 rows of 128 lanes. Keys and values have the heads of a group side by side in
their lanes. Tokens come in windows, as many as fast memory holds; every window ends in a few slots for padding.

Shapes: T tokens, R resources, m keys a resource, H heads, d head size, N windows, G head groups, W token slots of a
window, V = 8 W rows, E lanes of all groups.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.block_sparse_attention.block_sizes import DEFAULT, BlockSizes, pairs_a_tile
from pallas_kernels.block_sparse_attention.tpu.lanes import from_lanes, pad_rows, to_lanes
from pallas_kernels.tpu import LANES, ROWS, round_up

GROUP = ROWS * LANES  # lanes of a token in one group
TOTAL = 64  # two statistics for every head of a group: one in lane h, one in lane TOTAL + h


class Layout(NamedTuple):
    """A group has `heads` heads of `d` lanes each: a power of 2, or whole registers."""

    tile: int  # pairs a tile
    windows: int
    tokens: int  # of a window; without padding; whole registers of statistics
    groups: int
    heads: int
    d: int

    @property
    def slots(self) -> int:
        """Tokens of a window and the padding, the first slot of which is where padding rows of tiles go."""
        return self.tokens + ROWS

    @property
    def lanes(self) -> int:
        """Lanes of a group in the keys and values: whole registers."""
        return round_up(self.heads * self.d, LANES)

    @property
    def rows_a_unit(self) -> int:
        """A unit is what lies in whole rows: one head, or the heads that share a row."""
        return max(1, self.d // LANES)

    @property
    def units(self) -> list[list[int]]:
        """The heads of every unit."""
        per = max(1, LANES // self.d)
        return [list(range(h, min(h + per, self.heads))) for h in range(0, self.heads, per)]


def choose(tokens: int, heads: int, d: int, rows: float, most_tokens: int, block_sizes: BlockSizes = DEFAULT) -> Layout:
    """Groups of heads that fill a register a token; large tiles where resources have rows (on average) to fill them.

    Windows of equal size, of at most `most_tokens`.
    """
    d = 2 ** math.ceil(math.log2(d)) if d < LANES else round_up(d, LANES)
    if d > GROUP:
        raise ValueError(f"head size {d}; wanted at most {GROUP}")
    groups = -(-heads // min(TOTAL, GROUP // d))
    windows = -(-tokens // most_tokens)
    size = -(-tokens // (windows * ROWS)) * ROWS
    block_sizes.require_multiple("pairs", LANES)
    tile = block_sizes.pairs or pairs_a_tile(rows / windows)
    return Layout(tile, windows, size, groups, -(-heads // groups), d)


def _windows(x: Shaped[Array, "T *U"], layout: Layout) -> Shaped[Array, "N W *U"]:
    x = pad_rows(x, layout.windows * layout.tokens).reshape(layout.windows, layout.tokens, *x.shape[1:])
    return jnp.pad(x, [(0, 0), (0, ROWS), *[(0, 0)] * (x.ndim - 2)])


def to_rows(x: Shaped[Array, "T H d"], layout: Layout) -> Shaped[Array, "N G V 128"]:
    """Every token a register in every head group."""
    x = _windows(to_lanes(x, layout, GROUP), layout).reshape(layout.windows, layout.slots, layout.groups, GROUP)
    return x.swapaxes(1, 2).reshape(layout.windows, layout.groups, layout.slots * ROWS, LANES)


def from_rows(x: Float[Array, "N G V 128"], layout: Layout, shape: tuple[int, ...]) -> Float[Array, "T H d"]:
    """What `to_rows` came from."""
    tokens, heads, d = shape
    x = x.reshape(layout.windows, layout.groups, layout.slots, GROUP)[:, :, : layout.tokens].swapaxes(1, 2)
    return from_lanes(x.reshape(-1, layout.groups * GROUP)[:tokens], layout, heads, d)


def to_stats(
    first: Float[Array, "T H"], second: Float[Array, "T H"], layout: Layout, padding: float = 0.0
) -> Float[Array, "N G W 128"]:
    """Two numbers for every token and head, in one row of lanes a token; `padding` is the first of no head."""

    def place(x, padding):
        heads = [(0, 0), (0, layout.groups * layout.heads - x.shape[1])]
        x = jnp.pad(x, heads, constant_values=padding)
        x = _windows(x, layout).reshape(layout.windows, layout.slots, layout.groups, layout.heads)
        return jnp.pad(x, [(0, 0)] * 3 + [(0, TOTAL - layout.heads)])

    return jnp.concatenate([place(first, padding), place(second, 0.0)], axis=3).swapaxes(1, 2)


def from_stats(x: Float[Array, "N G W 128"], layout: Layout, shape: tuple[int, ...]) -> tuple:
    """What `to_stats` came from, (T, H) each."""
    x = x[:, :, : layout.tokens].swapaxes(1, 2)

    def pick(first):
        y = x[..., first : first + layout.heads].reshape(-1, layout.groups * layout.heads)
        return y[: shape[0], : shape[1]]

    return pick(0), pick(TOTAL)
