"""The TPU kernels of path B: pairs meet their resource in tiles, and the results of a token's pairs are added up.

A row is what a pair brings or leaves in main memory: its query, its output not yet divided, its gradient. Rows are
registers of 128 words a token, the shape that XLA gathers fastest: one float32 a word, or two bfloat16 of neighbouring
columns. Tiles have scores transposed, keys by pairs, so that everything per pair is a row of lanes. A block of 128
tokens then adds the rows of its own run of pairs, as matrix products with a one-hot of tokens by pairs: no scatter, and
the same order of sums every time.

Shapes: G head groups, N tiles, t rows a tile, R resources, m keys a resource, E lanes of all groups, h heads of a
group, d head size, U units of 128 words of a pair (W of float32), P pairs (whole chunks of them), T tokens (whole
blocks), S steps of the sums.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.tpu import F32, LANES, LOG2_E, LOWEST, call, dot

U32 = jnp.uint32
BLOCK = 128  # tokens whose sums stay in fast memory
CHUNK = 512  # pairs a step of the sums: enough of them to hide latencies
HIGH = 0xFFFF0000  # the second bfloat16 of a word
VMEM_BYTES = 60 * 2**20  # what the smallest chips have, less what the compiler wants; the blocks take half of it
HALF = 0x8000  # half a unit in the last place of a bfloat16


class Layout(NamedTuple):
    """How heads lie in rows. A group has `heads` heads of `d` lanes: a power of 2, or whole units."""

    tile: int
    groups: int
    heads: int
    d: int
    units: int  # registers' rows of 128 words for a pair in a group
    halves: int  # numbers in a word

    @property
    def unit(self) -> int:
        """Lanes of a unit."""
        return LANES * self.halves

    @property
    def lanes(self) -> int:
        """Lanes of a group."""
        return self.units * self.unit

    def spans(self, lanes: int) -> list[tuple[slice, list[int]]]:
        """Columns of 128 lanes that hold whole heads, and those heads: of one head, or all heads of `lanes` lanes."""
        columns, per = max(self.d, lanes) // LANES, max(1, lanes // self.d)
        starts = range(0, self.heads, per)
        return [
            (slice(i * columns, (i + 1) * columns), list(range(h, min(h + per, self.heads))))
            for i, h in enumerate(starts)
        ]

    @property
    def wide(self) -> "Layout":
        """The same lanes as float32."""
        return self._replace(units=self.units * self.halves, halves=1)


class Tiles(NamedTuple):
    """What the tiles share besides rows."""

    resource: Int[Array, "N"]
    number: Int[Array, "1"]  # tiles to visit, at least 1
    visible: Int[Array, "N 1 t"]


class Steps(NamedTuple):
    """The sums, step by step: every block of tokens with each chunk that has pairs of it, and at least with one."""

    block: Int[Array, "S"]  # ascending
    chunk: Int[Array, "S"]
    number: Int[Array, "1"]
    token: Int[Array, "1 P"]  # of every pair; out of range past the last


def _bits(x, dtype):
    return jax.lax.bitcast_convert_type(x, dtype)


def _load(ref, columns: slice, rows: int, layout: Layout, first: int = 0):
    """Some columns of every row of a block: (rows, lanes), in the layout's dtype; a row's begin at unit `first`."""
    size = ref.shape[0] // rows
    parts = []
    for column in range(columns.start, columns.stop):
        words = ref[pl.ds(first + column // layout.halves, rows, stride=size), :]
        if layout.halves == 2:
            words = _bits(words & U32(HIGH) if column % 2 else words << 16, F32).astype(jnp.bfloat16)
        parts.append(words)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _store(ref, columns: slice, parts: list, layout: Layout) -> None:
    """The heads of a span, each (t, d) in float32, to their columns; lanes that no head has become 0."""
    missing = (columns.stop - columns.start) * LANES - layout.d * len(parts)
    if missing:
        parts = [*parts, jnp.zeros((layout.tile, missing), F32)]
    x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    words = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    if layout.halves == 2:
        # To the nearest, by adding half a unit and dropping what is below it.
        low, high = ([_bits(x, U32) + U32(HALF) for x in words[i::2]] for i in (0, 1))
        words = [(a >> 16) | (b & U32(HIGH)) for a, b in zip(low, high, strict=True)]
    for unit, x in enumerate(words, columns.start // layout.halves):
        ref[pl.ds(unit, layout.tile, stride=layout.units), :] = x


def _head(x, position: int, layout: Layout):
    """Head number `position` of a span's lanes."""
    return x[:, position * layout.d : (position + 1) * layout.d]


def _seen(visible_ref, m: int, tile: int):
    return jax.lax.broadcasted_iota(jnp.int32, (m, tile), 0) < visible_ref[...]


def _begins(index):
    """Whether this step is the first with its number in `index`."""
    s = pl.program_id(1)
    return (s == 0) | (index[s] != index[jnp.maximum(s - 1, 0)])


def _forward_kernel(
    resource, visible_ref, query_ref, key_ref, value_ref,  # in
    output_ref, stats_ref,  # out
    *, layout: Layout, scale: float,
):  # fmt: skip
    del resource
    seen = _seen(visible_ref, key_ref.shape[0], layout.tile)
    tops, totals = [], []
    for columns, heads in layout.spans(LANES):
        x, parts = _load(query_ref, columns, layout.tile, layout), []
        for position, h in enumerate(heads):
            lanes = slice(h * layout.d, (h + 1) * layout.d)
            score = dot(key_ref[:, lanes], _head(x, position, layout), (1, 1)) * (scale * LOG2_E)
            score = jnp.where(seen, score, LOWEST)
            top = jnp.max(score, axis=0, keepdims=True)
            weight = jnp.exp2(score - top)
            tops.append(jnp.where(visible_ref[...] > 0, top / LOG2_E, -jnp.inf))
            totals.append(jnp.sum(weight, axis=0, keepdims=True))
            parts.append(dot(weight.astype(value_ref.dtype), value_ref[:, lanes], (0, 0)))
        _store(output_ref, columns, parts, layout.wide)
    stats_ref[...] = jnp.concatenate([*tops, *totals], axis=0)


def _backward_kernel(
    resource, visible_ref, packed_ref, stats_ref, key_ref, value_ref,  # in
    d_query_ref, d_bias_ref, d_key_ref, d_value_ref,  # out
    *, layout: Layout, scale: float,
):  # fmt: skip
    tile, dtype = layout.tile, key_ref.dtype

    @pl.when(_begins(resource))
    def _():
        d_key_ref[...] = jnp.zeros_like(d_key_ref)
        d_value_ref[...] = jnp.zeros_like(d_value_ref)

    seen = _seen(visible_ref, key_ref.shape[0], tile)
    d_bias = jnp.zeros((1, tile), F32)
    for columns, heads in layout.spans(layout.unit):
        queries, cotangents = (_load(packed_ref, columns, tile, layout, first) for first in (0, layout.units))
        parts = []
        for position, h in enumerate(heads):
            lanes = slice(h * layout.d, (h + 1) * layout.d)
            q, do = (_head(x, position, layout) for x in (queries, cotangents))
            k, v = key_ref[:, lanes], value_ref[:, lanes]
            shift, delta = (stats_ref[i : i + 1, :] for i in (h, layout.heads + h))
            score = dot(k, q, (1, 1)) * (scale * LOG2_E) + shift * LOG2_E
            weight = jnp.where(seen, jnp.exp2(score), 0.0)
            d_value_ref[:, lanes] += dot(weight.astype(dtype), do, (1, 0))
            d_score = weight * (dot(v, do, (1, 1)) - delta)
            d_bias += jnp.sum(d_score, axis=0, keepdims=True)
            d_score = d_score.astype(dtype)
            d_key_ref[:, lanes] += dot(d_score, q, (1, 0))
            parts.append(dot(d_score, k, (0, 0)))
        _store(d_query_ref, columns, parts, layout)
    d_bias_ref[...] = d_bias


def _own(block, token_ref):
    """Which pair of the chunk is of which token of the block: (tokens, pairs)."""
    first = block[pl.program_id(1)] * BLOCK
    return token_ref[...] - first == jax.lax.broadcasted_iota(jnp.int32, (BLOCK, CHUNK), 0)


def _merge_kernel(
    block, chunk, token_ref, stats_ref, lse_ref, rows_ref, start_ref,  # in
    output_ref, mass_ref,  # out
    *, layout: Layout,
):  # fmt: skip
    del chunk

    @pl.when(_begins(block))
    def _():
        output_ref[...] = start_ref[...]

    own = _own(block, token_ref)
    ones = own.astype(F32).astype(jnp.bfloat16)
    lse = sum(dot(part, ones, (1, 0)) for part in _parts(lse_ref[...], 3))  # of the token, for every pair
    weight = jnp.exp(stats_ref[: layout.heads, :] - lse)
    share = jnp.sum(weight * stats_ref[layout.heads :, :], axis=0, keepdims=True)
    mine = jnp.max(own.astype(F32), axis=0, keepdims=True) > 0  # other blocks' pairs of this chunk are theirs
    mass_ref[...] = jnp.where(mine, share, mass_ref[...])
    weight = jnp.where(mine, weight, 0.0)
    weight = jnp.concatenate([weight, jnp.zeros((-layout.heads % LANES, CHUNK), F32)], axis=0).T
    for columns, heads in layout.wide.spans(_width(layout)):
        factor = [jnp.broadcast_to(weight[:, h : h + 1], (CHUNK, layout.d)) for h in heads]
        lanes = slice(heads[0] * layout.d, (heads[-1] + 1) * layout.d)
        x = _load(rows_ref, columns, CHUNK, layout.wide)[:, : lanes.stop - lanes.start]
        x *= factor[0] if len(heads) == 1 else jnp.concatenate(factor, axis=1)
        output_ref[:, lanes] += sum(dot(ones, part, (1, 0)) for part in _parts(x, 4 - layout.halves))


def _width(layout: Layout) -> int:
    """Lanes of one product: the width of the widest matrix unit, where there are as many."""
    return min(2 * LANES, layout.lanes)


def _parts(x, count: int) -> list:
    """Numbers of bfloat16 whose sum is x: 2 of them to 2^-16, 3 of them to the bit."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(count):
        part = _bits(_bits(x, U32) & U32(HIGH), F32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _sum_kernel(
    block, chunk, token_ref, kind_ref, rows_ref, start_ref,  # in
    total_ref,  # out
    *, layout: Layout,
):  # fmt: skip
    del chunk

    @pl.when(_begins(block))
    def _():
        total_ref[...] = start_ref[...]

    own = _own(block, token_ref)
    kinds = [(own & (kind_ref[...] == kind)).astype(F32).astype(jnp.bfloat16) for kind in (0, 1)]
    for columns, heads in layout.spans(_width(layout)):
        lanes = slice(heads[0] * layout.d, (heads[-1] + 1) * layout.d)
        x = _load(rows_ref, columns, CHUNK, layout)[:, : lanes.stop - lanes.start]
        parts = _parts(x, 3)
        for kind, ones in enumerate(kinds):
            total_ref[kind, :, lanes] += sum(dot(ones, part, (1, 0)) for part in parts)


def _call(kernel, name: str, scalars, number, blocks, arrays, results, work, *, layout: Layout, interpret: bool):
    """`number` of steps that read `scalars`. `arrays` and `results` name their blocks. `work`: FLOPs, exponentials."""
    moved = sum(x.size * x.dtype.itemsize for _, x in arrays)
    moved += sum(math.prod(shape) * jnp.dtype(dtype).itemsize for _, shape, dtype in results)
    return call(
        functools.partial(kernel, layout=layout),
        name,
        (layout.groups, number[0]),
        scalars,
        [(blocks[block], x) for block, x in arrays],
        [(blocks[block], shape, dtype) for block, shape, dtype in results],
        bounds_checks=False,  # every address comes from the tables
        vmem_bytes=VMEM_BYTES,
        cost=pl.CostEstimate(flops=work[0], bytes_accessed=moved, transcendentals=work[1]),
        interpret=interpret,
    )


def _by_tile(layout: Layout, m: int) -> dict[str, pl.BlockSpec]:
    """Which part of every array a step sees that takes a tile."""

    def rows(units: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, layout.tile * units, LANES), lambda g, n, *_: (g, n, 0))

    def numbers(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, size, layout.tile), lambda g, n, *_: (g, n, 0, 0))

    return {
        "visible": pl.BlockSpec((None, 1, layout.tile), lambda g, n, *_: (n, 0, 0)),
        "table": pl.BlockSpec((None, m, layout.lanes), lambda g, n, resource: (resource[n], 0, g)),
        "query": rows(layout.units),
        "both": rows(2 * layout.units),
        "output": rows(layout.wide.units),
        "stats": numbers(2 * layout.heads),
        "bias": numbers(1),
    }


def _by_chunk(layout: Layout) -> dict[str, pl.BlockSpec]:
    """Which part of every array a step sees that takes a chunk of pairs and a block of tokens."""

    def rows(units: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, CHUNK * units, LANES), lambda g, s, _, chunk: (g, chunk[s], 0))

    def numbers(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size, CHUNK), lambda g, s, _, chunk: (g, 0, chunk[s]))

    return {
        "pair": pl.BlockSpec((1, CHUNK), lambda g, s, _, chunk: (0, chunk[s])),
        "mass": numbers(1),
        "stats": numbers(2 * layout.heads),
        "output": rows(layout.wide.units),
        "gradient": rows(layout.units),
        "lse": pl.BlockSpec((None, layout.heads, BLOCK), lambda g, s, block, _: (g, 0, block[s])),
        "tokens": pl.BlockSpec((BLOCK, layout.lanes), lambda g, s, block, _: (block[s], g)),
        "two tokens": pl.BlockSpec((2, BLOCK, layout.lanes), lambda g, s, block, _: (0, block[s], g)),
    }


def _flat(rows: Num[Array, "G rows U 128"]) -> Num[Array, "G V 128"]:
    return rows.reshape(len(rows), -1, LANES)


def forward(
    query: Num[Array, "G rows U 128"],
    key: Num[Array, "R m E"],
    value: Num[Array, "R m E"],
    tiles: Tiles,
    *,
    layout: Layout,
    scale: float,
    **options: Any,
) -> tuple[Float[Array, "G rows W 128"], Float[Array, "G N h2 t"]]:
    """Per row, over the keys of its own resource: sum exp(score - top) value, and (top, sum exp(score - top)).

    Tiles past the last are not written.
    """
    (groups, count, *_), units, stats = query.shape, layout.wide.units, (2 * layout.heads, layout.tile)
    m, blocks = key.shape[1], _by_tile(layout, key.shape[1])
    arrays = [("visible", tiles.visible), ("query", _flat(query)), ("table", key), ("table", value)]
    results = [("output", (groups, count * units, LANES), F32), ("stats", (groups, len(tiles.resource), *stats), F32)]
    kernel, which = functools.partial(_forward_kernel, scale=scale), ((tiles.resource,), tiles.number)
    scores = m * tiles.visible.size * groups * layout.heads
    work = 4 * layout.d * scores, scores
    output, of_rows = _call(kernel, "gathered_forward", *which, blocks, arrays, results, work, layout=layout, **options)
    return output.reshape(groups, count, units, LANES), of_rows


def backward(
    packed: Num[Array, "G rows U2 128"],
    stats: Float[Array, "G N h2 t"],
    key: Num[Array, "R m E"],
    value: Num[Array, "R m E"],
    tiles: Tiles,
    *,
    layout: Layout,
    scale: float,
    **options: Any,
) -> tuple[Num[Array, "G rows U 128"], Float[Array, "G N 1 t"], Float[Array, "R m E"], Float[Array, "R m E"]]:
    """Gradients of rows of queries, biases, keys, values, from rows of (query, d output) and (bias - lse, delta).

    Whatever no tile visits is not written: the caller masks it.
    """
    (groups, count, size, _), m = packed.shape, key.shape[1]
    arrays = [("visible", tiles.visible), ("both", _flat(packed)), ("stats", stats), ("table", key), ("table", value)]
    d_query, d_bias = (groups, count * size // 2, LANES), (groups, len(tiles.resource), 1, layout.tile)
    results = [("query", d_query, packed.dtype), ("bias", d_bias, F32), *[("table", key.shape, F32)] * 2]
    kernel, which = functools.partial(_backward_kernel, scale=scale), ((tiles.resource,), tiles.number)
    scores, blocks = m * tiles.visible.size * groups * layout.heads, _by_tile(layout, m)
    work = 10 * layout.d * scores, scores
    rows, *others = _call(kernel, "gathered_backward", *which, blocks, arrays, results, work, layout=layout, **options)
    return rows.reshape(groups, count, -1, LANES), *others


def merge(
    rows: Float[Array, "G P W 128"],
    stats: Float[Array, "G h2 P"],
    lse: Float[Array, "G h T"],
    start: Float[Array, "T E"],
    steps: Steps,
    *,
    layout: Layout,
    **options: Any,
) -> tuple[Float[Array, "T E"], Float[Array, "G 1 P"]]:
    """start + the sum over a token's pairs of exp(top - lse) row; and of every pair exp(top - lse) total, over heads.

    `stats` has the tops, then the totals. Mass is written where there are pairs.
    """
    pairs, which = stats.shape[2], ((steps.block, steps.chunk), steps.number)
    arrays = [("pair", steps.token), ("stats", stats), ("lse", lse), ("output", _flat(rows)), ("tokens", start)]
    results = [("tokens", start.shape, F32), ("mass", (layout.groups, 1, pairs), F32)]
    work = 2 * BLOCK * start.shape[1] * pairs, layout.groups * layout.heads * pairs
    arguments = *which, _by_chunk(layout), arrays, results, work
    return _call(_merge_kernel, "gathered_merge", *arguments, layout=layout, **options)


def add(
    rows: Num[Array, "G P U 128"],
    kind: Int[Array, "1 P"],
    start: Float[Array, "2 T E"],
    steps: Steps,
    *,
    layout: Layout,
    **options: Any,
) -> Float[Array, "2 T E"]:
    """start + the sum of the rows of a token's pairs, apart for pairs of kind 0 and of kind 1."""
    arrays = [("pair", steps.token), ("pair", kind), ("gradient", _flat(rows)), ("two tokens", start)]
    results, work = [("two tokens", start.shape, F32)], (4 * BLOCK * start.shape[2] * kind.size, 0)
    arguments = (steps.block, steps.chunk), steps.number, _by_chunk(layout), arrays, results, work
    return _call(_sum_kernel, "gathered_add", *arguments, layout=layout, **options)[0]
