"""How tokens, heads and keys lie in a TPU's registers, and back.

A token of a head group is one register, 8 rows of 128 lanes. Keys and values have the heads of a group side by side in
their lanes. Kernels take tokens window by window, as many as fast memory holds, from arrays of all tokens.

Shapes: T tokens, L tokens in whole registers of statistics, H heads, d head size, G head groups, Q = 8 G rows.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.block_sparse_attention.block_sizes import DEFAULT, BlockSizes, pairs_a_tile
from pallas_kernels.block_sparse_attention.tpu.lanes import from_lanes, pad_rows, to_lanes
from pallas_kernels.tpu import LANES, ROWS, round_up

GROUP = ROWS * LANES  # lanes of a token in one group
PIECE = 64  # tokens that are copied at once: large windows are a multiple, so that most lengths of a row are too
TOTAL = 64  # two statistics for every head of a group: one in lane h, one in lane TOTAL + h


class Layout(NamedTuple):
    """A group has `heads` heads of `d` lanes each: a power of 2, or whole registers."""

    tile: int  # pairs a tile
    windows: int
    tokens: int  # of a window; whole registers of statistics
    groups: int
    heads: int
    d: int
    cores: int = 1  # of a device that take a window each at the same time; windows are a multiple of them
    matrix: int = LANES  # rows and columns of a matrix unit

    @property
    def columns(self) -> int:
        """Tokens of a tile whose scores are worked on together."""
        return min(self.tile, self.matrix)

    @property
    def slots(self) -> int:
        """Of a window in fast memory: its tokens, and padding, the first slot of which takes padding rows of tiles."""
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


def choose(
    tokens: int,
    heads: int,
    d: int,
    rows: float,
    most_tokens: int,
    block_sizes: BlockSizes = DEFAULT,
    cores: int = 1,
    matrix: int = LANES,
    batch: int = 1,
) -> Layout:
    """Groups of heads that fill a register a token; large tiles where resources have rows (on average) to fill them.

    Windows of equal size, of at most `most_tokens`; the last may have fewer, or none. Where the groups cannot be
    divided over the `cores` of a device, windows are. Of a `batch` of rows a window is some, or a part of one, where
    that takes no more than half as many windows again: then there are few chunks that its tokens may meet.
    """
    d = 2 ** math.ceil(math.log2(d)) if d < LANES else round_up(d, LANES)
    if d > GROUP:
        raise ValueError(f"head size {d}; wanted at most {GROUP}")
    groups = -(-heads // min(TOTAL, GROUP // d))
    cores = 1 if groups % cores == 0 else cores
    windows = max(-(-tokens // most_tokens), cores)
    if batch > 1:
        more = range(windows, windows * 3 // 2 + 1)
        whole = (n for n in more if (n % batch == 0 or batch % n == 0) and tokens % (n * ROWS) == 0 and n % cores == 0)
        windows = next(whole, windows)
    size = round_up(-(-tokens // windows), PIECE if windows > 1 else ROWS)
    if size > most_tokens:
        size = round_up(-(-tokens // windows), ROWS)
    windows = round_up(-(-tokens // size), cores)
    block_sizes.require_multiple("pairs", LANES)
    tile = block_sizes.pairs or pairs_a_tile(rows / windows)
    return Layout(tile, windows, size, groups, -(-heads // groups), d, cores, matrix)


def to_rows(x: Shaped[Array, "T H d"], layout: Layout) -> Shaped[Array, "L Q 128"]:
    """Every token a register in every head group: where heads fill registers, the array as it is."""
    x = pad_rows(to_lanes(x, layout, GROUP), round_up(len(x), ROWS))
    return x.reshape(len(x), layout.groups * ROWS, LANES)


def from_rows(x: Float[Array, "L Q 128"], layout: Layout, shape: tuple[int, ...]) -> Float[Array, "T H d"]:
    """What `to_rows` came from."""
    tokens, heads, d = shape
    return from_lanes(x.reshape(len(x), layout.groups * GROUP)[:tokens], layout, heads, d)


def to_stats(
    first: Float[Array, "T H"], second: Float[Array, "T H"], layout: Layout, padding: float = 0.0
) -> Float[Array, "G L 128"]:
    """Two numbers for every token and head, in one row of lanes a token; `padding` is the first of no head."""

    def place(x, padding):
        heads = [(0, 0), (0, layout.groups * layout.heads - x.shape[1])]
        x = pad_rows(jnp.pad(x, heads, constant_values=padding), round_up(len(x), ROWS))
        x = x.reshape(len(x), layout.groups, layout.heads)
        return jnp.pad(x, [(0, 0), (0, 0), (0, TOTAL - layout.heads)])

    return jnp.concatenate([place(first, padding), place(second, 0.0)], axis=2).swapaxes(0, 1)


def from_stats(x: Float[Array, "G L 128"], layout: Layout, shape: tuple[int, ...]) -> tuple:
    """What `to_stats` came from, (T, H) each."""
    x = x.swapaxes(0, 1)

    def pick(first):
        y = x[..., first : first + layout.heads].reshape(-1, layout.groups * layout.heads)
        return y[: shape[0], : shape[1]]

    return pick(0), pick(TOTAL)
