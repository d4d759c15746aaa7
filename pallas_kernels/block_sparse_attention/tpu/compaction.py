"""Tiles of pairs, and back, on a TPU: nothing is gathered, scattered or sorted.

A TPU gathers and scatters single numbers one after the other, and a sort of all slots takes many passes. But a token
meets a resource at most once: pairs are the entries of a matrix, tokens by resources, and a resource's tiles are its
column with the gaps closed. What stands behind gaps moves up by as many rows as they have, one binary digit of that
number after the other: first by 1, then by 2, by 4. No two pairs ever meet, so that a pass is one selection between two
rows; and the same passes in the opposite order open the gaps again. `tables.build`, for other devices, makes the same
tiles from the pairs alone.

Shapes: T tokens, K slots, R resources, N tiles (static bound), t rows a tile; n windows, S and M are K and the tokens
of a window in whole registers, L the tokens of all windows, R1 = n R + 1. The kernels work on squares of 128 tokens by
128 resources; in the matrix rows are tokens, in slots and tiles tokens are lanes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.block_sparse_attention.tpu.layout import Layout
from pallas_kernels.tpu import F32, LANES, ROWS, call, compiled_or_interpreted, dot, round_up

INT, BF16 = jnp.int32, jnp.bfloat16
SQUARE = LANES
BATCH = 64  # rows of the matrix in one basic block: enough to hide the latency of a load
SHIFT = 16  # the matrix holds 1 + the keys that a pair sees, and below that how far it moves; 0: no pair
MOST_VISIBLE = 2**15 - 2
LARGEST_TILE = 512
VMEM_SLACK = 2 * 2**20


class Tables(NamedTuple):
    """Which pairs there are and how many tiles they make, in order of window and then of resource."""

    wanted: Int[Array, "n S M"]  # the resource of every slot; -1 without a pair
    resource: Int[Array, "N"]  # R * window + the resource that all pairs of the tile share
    begin: Int[Array, "R1"]  # the first tile of every window's every resource; last, how many tiles hold a pair


def build(
    resource: Int[Array, "T K"], count: Int[Array, "T"], num_resources: int, max_pairs: int, layout: Layout
) -> Tables:
    """The tiles of `tables.build`, of windows one after the other; and an empty one, last of all. A pair of resource R
    or more is in no tile."""
    # Pairs past the static bound are dropped with the last tokens: what an earlier token gets never depends on them.
    first = jnp.cumsum(count, dtype=INT) - count
    used = jnp.arange(resource.shape[1]) < jnp.clip(max_pairs - first, 0, count)[:, None]
    wanted = _by_slot(jnp.where(used & (resource < num_resources), resource, -1), layout, fill=-1)
    number = compiled_or_interpreted(_count, wanted, num_resources=num_resources).sum(-1)
    number = number[:, :num_resources].reshape(-1)
    begin = jnp.cumsum(jnp.pad(-(-number // layout.tile), (1, 0)), dtype=INT)
    n = jnp.arange(-(-max_pairs // layout.tile) + min(len(number), max_pairs) + 1, dtype=INT)
    resource_N = jnp.searchsorted(begin[1:], n, side="right", method="compare_all").astype(INT)
    return Tables(wanted, resource_N.clip(max=len(number) - 1), begin)


def to_tiles(
    bias: Float[Array, "T K"], visible: Int[Array, "T K"], tables: Tables, num_resources: int, layout: Layout
) -> tuple[Int[Array, "N 1 t"], Float[Array, "N 1 t"], Int[Array, "N 1 t"]]:
    """Of every row of a tile: its token (of the window), bias and visible keys. Padding rows, which come last:
    layout.tokens, -inf and 0."""
    seen = (jnp.clip(visible, 0, MOST_VISIBLE).astype(INT) + 1) << SHIFT
    slots = [_by_slot(x, layout, fill=0) for x in (seen, bias.astype(F32))]
    shape = len(tables.resource), *_tile_shape(layout)
    fills = (layout.tokens, INT), (-jnp.inf, F32), (0, INT)
    nothing = [jnp.full_like(bias, fill, dtype=kind, shape=shape) for fill, kind in fills]
    found = compiled_or_interpreted(_cut, tables, *slots, *nothing, num_resources=num_resources, layout=layout)
    row, bias, visible = (x.reshape(-1, 1, layout.tile) for x in found)
    return row, bias, visible


def from_tiles(
    x: Float[Array, "N 1 t"], row: Int[Array, "N 1 t"], tables: Tables, num_resources: int, layout: Layout
) -> Float[Array, "L S"]:
    """The value of every slot's row; 0 where a slot has none. `row` is what `to_tiles` gave."""
    tiles = [y.reshape(-1, *_tile_shape(layout)) for y in (row, x)]
    found = compiled_or_interpreted(_join, tables, *tiles, num_resources=num_resources, layout=layout)
    return found[:, :, : layout.tokens].swapaxes(1, 2).reshape(-1, found.shape[1])


def _by_slot(x: Shaped[Array, "T K"], layout: Layout, fill: int) -> Shaped[Array, "n S M"]:
    x = jnp.pad(x, ((0, layout.windows * layout.tokens - len(x)), (0, -x.shape[1] % ROWS)), constant_values=fill)
    x = x.reshape(layout.windows, layout.tokens, -1).swapaxes(1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, _padded(layout) - layout.tokens)), constant_values=fill)


def _padded(layout: Layout) -> int:
    """Tokens of a window in whole squares and tiles."""
    return round_up(layout.tokens, math.lcm(SQUARE, layout.tile))


def _tile_shape(layout: Layout) -> tuple[int, int, int]:
    """Of a tile, in pieces as wide as a register, or as the tile if that is narrower."""
    width = min(layout.tile, LANES)
    return layout.tile // width, 1, width


def _pieces_shape(layout: Layout) -> tuple[int, int, int]:
    """Of all tokens of a square's resources, in such pieces."""
    *_, width = _tile_shape(layout)
    return _padded(layout) // width, SQUARE, width


def _digits(layout: Layout) -> int:
    """Of the farthest that a pair can move."""
    return (_padded(layout) - 1).bit_length()


def _room(layout: Layout) -> int:
    """Rows beside the matrix that hold no pair: as many as a pair moves at once."""
    return 1 << (_digits(layout) - 1)


class _Step(NamedTuple):
    """What a step of the grid works on: one window and a square's resources."""

    first: Any  # resource
    origin: Any  # the same, by `Tables.resource`
    tiles: tuple[Any, Any]  # the first of these resources, and the first of the next ones

    @classmethod
    def here(cls, begin, num_resources: int) -> "_Step":
        first, window = pl.program_id(1) * SQUARE, pl.program_id(0) * num_resources
        ends = window + first, window + jnp.minimum(first + SQUARE, num_resources)
        return cls(first, window + first, (begin[ends[0]], begin[ends[1]]))

    def copy_tiles(self, begin, resource, layout: Layout, copies: Callable) -> None:
        """copies(n, where): of tile n, and where its pieces are. All at once."""
        pieces, *_ = _tile_shape(layout)

        def run(n, carry, what):
            number = n - begin[resource[n]]  # among those of its resource
            for copy in copies(n, (pl.ds(number * pieces, pieces), pl.ds(resource[n] - self.origin, 1))):
                what(copy)
            return carry

        for what in (lambda copy: copy.start(), lambda copy: copy.wait()):
            jax.lax.fori_loop(*self.tiles, functools.partial(run, what=what), 0)


def _tokens(b, before: int = 0):
    """The rows, or lanes, of square b."""
    return pl.ds(pl.multiple_of(b * SQUARE + before, SQUARE), SQUARE)


def _slots(i):
    return pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)


def _number(dimension: int):
    return jax.lax.broadcasted_iota(INT, (SQUARE, SQUARE), dimension)


def _pieces(b, layout: Layout) -> list[tuple]:
    """Of square b, resources by tokens: (number of the piece, its columns)."""
    *_, width = _tile_shape(layout)
    parts = SQUARE // width
    return [(b * parts + part, slice(part * width, (part + 1) * width)) for part in range(parts)]


def _fill(ref, first: int, size: int, value: int, batch: int = BATCH) -> None:
    nothing = jnp.full((batch, *ref.shape[1:]), value, ref.dtype)

    def some(i, carry):
        ref[pl.ds(pl.multiple_of(first + i * batch, batch), batch)] = nothing
        return carry

    jax.lax.fori_loop(0, size // batch, some, 0)


def _move(words, values, digit: int, first: int, size: int, *, down: bool) -> None:
    """One pass: pairs whose number has this digit move by its value. In the order in which no row is overwritten before
    it has moved."""
    distance, last = -(1 << digit) if down else 1 << digit, size // BATCH - 1

    def some(i, carry):
        start = pl.multiple_of(first + (last - i if down else i) * BATCH, BATCH)
        here, there = pl.ds(start, BATCH), pl.ds(start + distance, BATCH)
        old, new = words[here, :], words[there, :]
        goes, comes = ((x & (1 << digit)) != 0 for x in (old, new))
        value = jnp.where(comes, values[there, :], values[here, :])
        words[here, :] = jnp.where(comes, new, jnp.where(goes, 0, old))
        values[here, :] = value
        return carry

    jax.lax.fori_loop(0, last + 1, some, 0)


def _count_kernel(wanted_ref, count_ref):
    mine = pl.program_id(1) * SQUARE + _number(0)
    nothing = jnp.zeros((SQUARE, SQUARE), INT)

    def square(b, count):
        def several(i, found):
            wanted = wanted_ref[0, _slots(i), _tokens(b)]
            for k in range(ROWS):
                found = jnp.where(wanted[k : k + 1] == mine, 1, found)
            return found

        return count + jax.lax.fori_loop(0, wanted_ref.shape[1] // ROWS, several, nothing)

    count_ref[0] = jax.lax.fori_loop(0, wanted_ref.shape[2] // SQUARE, square, nothing)


def _cut_kernel(
    begin, resource, wanted_ref, seen_ref, bias_ref, row_in, tile_bias_in, visible_in,  # in
    row_ref, tile_bias_ref, visible_ref,  # out
    words, values, row_pieces, bias_pieces, visible_pieces, copied,  # scratch
    *, num_resources: int, layout: Layout,
):  # fmt: skip
    del row_in, tile_bias_in, visible_in
    step, size = _Step.here(begin, num_resources), _padded(layout)

    def spread(b, before):
        """From slots to the matrix. `before` is how many pairs a resource has with the tokens before."""
        mine, lanes = step.first + _number(0), _tokens(b)

        def several(i, found):
            seen, bias = found
            wanted, seens, biases = (ref[0, _slots(i), lanes] for ref in (wanted_ref, seen_ref, bias_ref))
            for k in range(ROWS):
                here = wanted[k : k + 1] == mine
                seen, bias = jnp.where(here, seens[k : k + 1], seen), jnp.where(here, biases[k : k + 1], bias)
            return seen, bias

        nothing = jnp.zeros((SQUARE, SQUARE), INT), jnp.zeros((SQUARE, SQUARE), F32)
        seen, bias = jax.lax.fori_loop(0, wanted_ref.shape[1] // ROWS, several, nothing)
        pair = jnp.where(seen > 0, 1.0, 0.0).astype(BF16)
        no_later = jnp.where(_number(0) <= _number(1), 1.0, 0.0).astype(BF16)
        place = (before + dot(pair, no_later, (1, 0))).astype(INT) - 1
        gaps = b * SQUARE + _number(1) - place
        words[_tokens(b), :] = jnp.where(seen > 0, seen | gaps, 0).T
        values[_tokens(b), :] = bias.T
        return before + dot(pair, jnp.ones_like(no_later), (1, 0))

    def cut(b, carry):
        word, value = words[_tokens(b), :].T, values[_tokens(b), :].T
        pair, token = word > 0, b * SQUARE + _number(1) + (word & ((1 << SHIFT) - 1))
        row = jnp.where(pair, token, layout.tokens)
        bias, visible = jnp.where(pair, value, -jnp.inf), jnp.where(pair, (word >> SHIFT) - 1, 0)
        for piece, columns in _pieces(b, layout):
            for ref, x in ((row_pieces, row), (bias_pieces, bias), (visible_pieces, visible)):
                ref[piece] = x[:, columns]
        return carry

    def copies(n, where):
        pairs = enumerate(((row_pieces, row_ref), (bias_pieces, tile_bias_ref), (visible_pieces, visible_ref)))
        return [pltpu.make_async_copy(ref.at[where], to.at[n], copied.at[i]) for i, (ref, to) in pairs]

    @pl.when(step.tiles[0] < step.tiles[1])
    def _():
        _fill(words, size, _room(layout), 0)
        jax.lax.fori_loop(0, size // SQUARE, spread, jnp.zeros((SQUARE, SQUARE), F32))
        for digit in range(_digits(layout)):
            _move(words, values, digit, 0, size, down=False)
        jax.lax.fori_loop(0, size // SQUARE, cut, 0)
        step.copy_tiles(begin, resource, layout, copies)


def _join_kernel(
    begin, resource, wanted_ref, row_ref, x_ref,  # in
    found_ref,  # out
    words, values, row_pieces, x_pieces, copied,  # scratch
    *, num_resources: int, layout: Layout,
):  # fmt: skip
    step, size, room = _Step.here(begin, num_resources), _padded(layout), _room(layout)

    def copies(n, where):
        pairs = enumerate(((row_ref, row_pieces), (x_ref, x_pieces)))
        return [pltpu.make_async_copy(ref.at[n], to.at[where], copied.at[i]) for i, (ref, to) in pairs]

    def turn(b, carry):
        """Back to the matrix, gaps closed."""
        pieces = [piece for piece, _ in _pieces(b, layout)]
        row, x = (jnp.concatenate([ref[piece] for piece in pieces], axis=1) for ref in (row_pieces, x_pieces))
        gaps = row - b * SQUARE - _number(1)
        words[_tokens(b, room), :] = jnp.where(row < layout.tokens, 1 << SHIFT | gaps, 0).T
        values[_tokens(b, room), :] = x.T
        return carry

    def pick(b, carry):
        """From the matrix to slots. A slot finds one entry at most: the sum is exact."""
        mine, lanes = step.first + _number(0), _tokens(b)
        x = jnp.where(words[_tokens(b, room), :] > 0, values[_tokens(b, room), :], 0.0).T

        def several(i, carry):
            wanted = wanted_ref[0, _slots(i), lanes]
            found = [jnp.sum(jnp.where(wanted[k : k + 1] == mine, x, 0.0), axis=0, keepdims=True) for k in range(ROWS)]
            found_ref[0, _slots(i), lanes] += jnp.concatenate(found, axis=0)
            return carry

        return jax.lax.fori_loop(0, wanted_ref.shape[1] // ROWS, several, carry)

    @pl.when(pl.program_id(1) == 0)
    def _():
        found_ref[...] = jnp.zeros_like(found_ref)

    @pl.when(step.tiles[0] < step.tiles[1])
    def _():
        _fill(row_pieces, 0, row_pieces.shape[0], layout.tokens, batch=1)
        _fill(words, 0, room, 0)
        step.copy_tiles(begin, resource, layout, copies)
        jax.lax.fori_loop(0, size // SQUARE, turn, 0)
        for digit in reversed(range(_digits(layout))):
            _move(words, values, digit, room, size, down=True)
        jax.lax.fori_loop(0, size // SQUARE, pick, 0)


def most_tokens(vmem: int, slots: int) -> int:
    """Of a window, for which `vmem` bytes of fast memory will do whatever the tile."""
    return (vmem - VMEM_SLACK) // (4 * (7 * SQUARE + 3 * round_up(slots, ROWS))) - LARGEST_TILE


def vmem_bytes(layout: Layout, slots: int) -> int:
    """Fast memory of a step: the matrix and its room, pieces of tiles, and slots."""
    size = _padded(layout)
    return 4 * (SQUARE * (2 * _room(layout) + 5 * size) + 3 * round_up(slots, ROWS) * size) + VMEM_SLACK


def _by_window(x) -> pl.BlockSpec:
    return pl.BlockSpec((1, *x.shape[1:]), lambda window, *_: (window, 0, 0), pipeline_mode=pl.Buffered(1))


def _count(wanted: Int[Array, "n S M"], *, num_resources: int, interpret: bool) -> Int[Array, "n C 128"]:
    """How many tokens want every resource, the tokens of a lane together; C is R in whole squares."""
    windows, slots, size = wanted.shape
    squares = pl.cdiv(num_resources, SQUARE)
    block = pl.BlockSpec((1, SQUARE, SQUARE), lambda window, square: (window, square, 0))
    (count,) = call(
        _count_kernel,
        "pairs_of_resources",
        (windows, squares),
        (),
        [(_by_window(wanted), wanted)],
        [(block, (windows, squares * SQUARE, SQUARE), INT)],
        vmem_bytes=4 * slots * size + VMEM_SLACK,
        interpret=interpret,
    )
    return count


def _cut(tables: Tables, seen, bias, *nothing, layout: Layout, **options):
    """See `to_tiles`. `nothing` is what tiles without pairs hold."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    arrays = [(_by_window(x), x) for x in (seen, bias)] + [(anywhere, x) for x in nothing]
    results = [(anywhere, x.shape, x.dtype) for x in nothing]
    given, aliases = (arrays, results, (INT, F32, INT)), {3: 0, 4: 1, 5: 2}
    return _call(_cut_kernel, "tiles_of_slots", tables, *given, aliases, layout=layout, **options)


def _join(tables: Tables, *tiles, layout: Layout, **options) -> Float[Array, "n S M"]:
    """See `from_tiles`."""
    arrays = [(pl.BlockSpec(memory_space=pl.ANY), x) for x in tiles]
    results = [(_by_window(tables.wanted), tables.wanted.shape, F32)]
    return _call(_join_kernel, "slots_of_tiles", tables, arrays, results, (INT, F32), {}, layout=layout, **options)[0]


def _call(
    kernel, name: str, tables: Tables, arrays, results, kinds, aliases,
    *, num_resources: int, layout: Layout, interpret: bool,
):  # fmt: skip
    """`kinds` of the pieces of tiles."""
    windows, slots, size = tables.wanted.shape
    matrix = [pltpu.VMEM((size + _room(layout), SQUARE), kind) for kind in (INT, F32)]
    pieces = [pltpu.VMEM(_pieces_shape(layout), kind) for kind in kinds]
    return call(
        functools.partial(kernel, num_resources=num_resources, layout=layout),
        name,
        (windows, pl.cdiv(num_resources, SQUARE)),
        (tables.begin, tables.resource),
        [(_by_window(tables.wanted), tables.wanted), *arrays],
        results,
        scratch=[*matrix, *pieces, pltpu.SemaphoreType.DMA((len(pieces),))],
        aliases=aliases,
        vmem_bytes=vmem_bytes(layout, slots),
        interpret=interpret,
    )
