"""The TPU kernels: a tile of pairs that share a resource, with the queries and the sums of all tokens in fast memory.

A token is one vector register of a head group, 8 rows of 128 lanes, so that picking the tokens of a tile and adding to
their sums are loads and stores at an address from scalar memory: no gather, no scatter, no partial results in main
memory. Scores are transposed, keys by tokens: everything per token is a row of lanes.

The forward pass carries a running maximum per token and head: any scores will do. The backward pass needs none, it has
the final log-sum-exp. Tiles run in order on one core, so sums are deterministic.

Shapes: G head groups, N tiles, t rows a tile, W tokens (the last ones: padding, where padding rows go), R resources,
m keys a resource, D lanes of a group, d head size; S rows of a token, 8 or 16.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

F32 = jnp.float32
ROWS, LANES = 8, 128  # one vector register
TOTAL = 64  # statistics of a token: lane h has the maximum (backward: log-sum-exp) of head h, lane TOTAL + h the sum
BATCH = 8  # tokens whose sums are read before the first is written: rows of a tile are different tokens
UNROLL = 32  # rows in one basic block: enough to hide the latency of a load
LOWEST = -1e30  # the maximum of nothing: finite, so that differences are numbers


class Layout(NamedTuple):
    """How tokens lie in registers. A group has `heads` heads of `d` lanes each (a power of 2, or whole registers)."""

    tile: int
    tokens: int
    groups: int
    heads: int
    d: int

    @property
    def lanes(self) -> int:
        """Lanes of a group in the keys and values: whole registers."""
        return -(-self.heads * self.d // LANES) * LANES

    @property
    def rows_a_unit(self) -> int:
        """A unit is what lies in whole rows: one head, or the heads that share a row."""
        return max(1, self.d // LANES)

    @property
    def units(self) -> list[list[int]]:
        """The heads of every unit."""
        per = max(1, LANES // self.d)
        return [list(range(h, min(h + per, self.heads))) for h in range(0, self.heads, per)]


class Tiles(NamedTuple):
    """What the kernels read of every tile. Padding rows: a padding token, bias -inf."""

    resource: Int[Array, "N"]
    bounds: Int[Array, "2"]  # the first tile of an expert; the number of tiles, at least 1
    row: Int[Array, "N 1 t"]  # ROWS * token
    bias: Float[Array, "N 1 t"]
    visible: Int[Array, "N 1 t"]


def _dot(a, b, dimensions: tuple[int, int]):
    # Products of bfloat16 are exact in float32; float32 asks for all its passes.
    precision = jax.lax.Precision.HIGHEST if a.dtype == F32 else None
    contract = ((dimensions[:1], dimensions[1:]), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=F32)


def _address(row, size: int, scale: int = 1):
    return pl.ds(pl.multiple_of(row * scale, size), size)


def _token(row):
    return pl.ds(jax.lax.shift_right_logical(row, 3), 1)


def _for_rows(tile: int, step: int, unroll: int, body) -> None:
    """body(first row of the batch) for every batch of `step` rows."""

    def several(i, carry):
        for j in range(0, unroll, step):
            body(i * unroll + j)
        return carry

    jax.lax.fori_loop(0, tile // unroll, several, 0)


def _unroll(interpret: bool) -> int:
    return 2 if interpret else UNROLL  # interpreted, every row is compiled as a slice of a whole array


def _fill(ref, value) -> None:
    """Writes `value`, of 8 rows, all over ref (rows, 128), without an unrolled store for each."""

    def body(i, carry):
        ref[_address(i, ROWS, ROWS), :] = value
        return carry

    jax.lax.fori_loop(0, ref.shape[0] // ROWS, body, 0)


def _load_unit(ref, unit: int, layout: Layout, row: int = 0, rows: int = ROWS):
    """The lanes of one unit of every token of a tile: (t, 128 or d)."""
    n = layout.rows_a_unit
    parts = [ref[pl.ds(row + unit * n + j, layout.tile, stride=rows), :] for j in range(n)]
    return parts[0] if n == 1 else jnp.concatenate(parts, axis=1)


def _store_unit(ref, unit: int, layout: Layout, parts: list) -> None:
    """The heads of one unit, each (t, d), back to their rows; lanes that no head has become 0."""
    n, lanes = layout.rows_a_unit, layout.d * len(parts)
    if lanes < LANES:
        parts = [*parts, jnp.zeros((layout.tile, LANES - lanes), F32)]
    x = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    for j in range(n):
        ref[pl.ds(unit * n + j, layout.tile, stride=ROWS), :] = x[:, j * LANES : (j + 1) * LANES]


def _head(x, position: int, layout: Layout):
    """Head number `position` of a unit's lanes."""
    return x if layout.d >= LANES else x[:, position * layout.d : (position + 1) * layout.d]


def _stack(rows: list, size: int):
    return jnp.concatenate([*rows, jnp.zeros((size - len(rows), rows[0].shape[1]), F32)], axis=0)


def _seen(visible_ref, m: int, tile: int):
    return jax.lax.broadcasted_iota(jnp.int32, (m, tile), 0) < visible_ref[0]


def _forward_kernel(
    resource, bounds, row_ref, bias_ref, visible_ref, query_ref, key_ref, value_ref,  # in
    sum_ref, stats_ref, pair_lse_ref,  # out
    queries, outputs, decays, stats,  # scratch: the tile's rows
    *, layout: Layout, scale: float, unroll: int,
):  # fmt: skip
    del resource, bounds
    tile = layout.tile

    @pl.when(pl.program_id(1) == 0)
    def _():
        _fill(sum_ref.at[0], jnp.zeros((ROWS, LANES), F32))
        lane = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
        _fill(stats_ref.at[0], jnp.where(lane < TOTAL, LOWEST, 0.0))

    def gather(r):
        row = row_ref[0, 0, r]
        queries[_address(r, ROWS, ROWS), :] = query_ref[0, 0, _address(row, ROWS), :]
        stats[pl.ds(r, 1), :] = stats_ref[0, _token(row), :]

    _for_rows(tile, 1, unroll, gather)
    before = stats[...].T
    seen, bias = _seen(visible_ref, key_ref.shape[1], tile), bias_ref[0]
    tops, totals, factors, pair_totals = [], [], [], []
    for unit, heads in enumerate(layout.units):
        x, parts = _load_unit(queries, unit, layout), []
        for position, h in enumerate(heads):
            lanes = slice(h * layout.d, (h + 1) * layout.d)
            q = _head(x, position, layout).astype(key_ref.dtype)
            score = jnp.where(seen, _dot(key_ref[0, :, lanes], q, (1, 1)) * scale + bias, -jnp.inf)
            old = before[h : h + 1]
            top = jnp.maximum(old, jnp.max(score, axis=0, keepdims=True))
            weight, factor = jnp.exp(score - top), jnp.exp(old - top)
            total = jnp.sum(weight, axis=0, keepdims=True)
            parts.append(_dot(weight.astype(value_ref.dtype), value_ref[0, :, lanes], (0, 0)))
            tops.append(top)
            factors.append(factor)
            pair_totals.append(total)
            totals.append(before[TOTAL + h : TOTAL + h + 1] * factor + total)
        _store_unit(outputs, unit, layout, parts)
    pair_lse_ref[0, 0] = jnp.log(jnp.concatenate(pair_totals, axis=0)) + jnp.concatenate(tops, axis=0)
    stats[...] = jnp.concatenate([_stack(tops, TOTAL), _stack(totals, LANES - TOTAL)], axis=0).T
    factor = _stack(factors, LANES).T
    for unit, heads in enumerate(layout.units):
        _store_unit(decays, unit, layout, [jnp.broadcast_to(factor[:, h : h + 1], (tile, layout.d)) for h in heads])

    batch = min(BATCH, unroll)

    def accumulate(first):
        rows = [row_ref[0, 0, first + j] for j in range(batch)]
        mine = [_address(first + j, ROWS, ROWS) for j in range(batch)]
        sums = [
            sum_ref[0, _address(row, ROWS), :] * decays[r, :] + outputs[r, :] for row, r in zip(rows, mine, strict=True)
        ]
        new = [stats[pl.ds(first + j, 1), :] for j in range(batch)]
        for row, x, y in zip(rows, sums, new, strict=True):
            sum_ref[0, _address(row, ROWS), :] = x
            stats_ref[0, _token(row), :] = y

    _for_rows(tile, batch, unroll, accumulate)


def _backward_kernel(
    resource, bounds, row_ref, bias_ref, visible_ref, packed_ref, stats_ref, key_ref, value_ref,  # in
    d_query_ref, d_bias_ref, d_key_ref, d_value_ref,  # out
    packed, outputs, stats,  # scratch
    *, layout: Layout, scale: float, size: int, unroll: int,
):  # fmt: skip
    t, tile, dtype = pl.program_id(1), layout.tile, key_ref.dtype

    @pl.when((t == 0) | (t == bounds[0]))
    def _():
        _fill(d_query_ref.at[0, 0], jnp.zeros((ROWS, LANES), F32))

    @pl.when((t == 0) | (resource[t] != resource[jnp.maximum(t - 1, 0)]))
    def _():
        d_key_ref[...] = jnp.zeros_like(d_key_ref)
        d_value_ref[...] = jnp.zeros_like(d_value_ref)

    def gather(r):
        row = row_ref[0, 0, r]
        packed[_address(r, size, size), :] = packed_ref[0, 0, _address(row, size, size // ROWS), :]
        stats[pl.ds(r, 1), :] = stats_ref[0, _token(row), :]

    _for_rows(tile, 1, unroll, gather)
    statistics = stats[...].T
    seen, bias = _seen(visible_ref, key_ref.shape[1], tile), bias_ref[0]
    d_bias = jnp.zeros((1, tile), F32)
    for unit, heads in enumerate(layout.units):
        q_unit, do_unit = _unpack(packed, unit, layout, size)
        parts = []
        for position, h in enumerate(heads):
            lanes = slice(h * layout.d, (h + 1) * layout.d)
            q, do = (_head(x, position, layout).astype(dtype) for x in (q_unit, do_unit))
            k, v = key_ref[0, :, lanes], value_ref[0, :, lanes]
            shift = bias - statistics[h : h + 1]
            weight = jnp.where(seen, jnp.exp(_dot(k, q, (1, 1)) * scale + shift), 0.0)
            d_value_ref[0, :, lanes] += _dot(weight.astype(dtype), do, (1, 0))
            d_score = weight * (_dot(v, do, (1, 1)) - statistics[TOTAL + h : TOTAL + h + 1])
            d_bias += jnp.sum(d_score, axis=0, keepdims=True)
            d_score = d_score.astype(dtype)
            d_key_ref[0, :, lanes] += _dot(d_score, q, (1, 0))
            parts.append(_dot(d_score, k, (0, 0)))
        _store_unit(outputs, unit, layout, parts)
    d_bias_ref[0, 0] = d_bias
    batch = min(BATCH, unroll)

    def accumulate(first):
        rows = [_address(row_ref[0, 0, first + j], ROWS) for j in range(batch)]
        sums = [d_query_ref[0, 0, row, :] + outputs[_address(first + j, ROWS, ROWS), :] for j, row in enumerate(rows)]
        for row, x in zip(rows, sums, strict=True):
            d_query_ref[0, 0, row, :] = x

    _for_rows(tile, batch, unroll, accumulate)


def _unpack(packed, unit: int, layout: Layout, size: int):
    """Query and output gradient of one unit: halves of a word, or rows 0 to 7 and 8 to 15 of a token."""
    if size > ROWS:
        return tuple(_load_unit(packed, unit, layout, row, size) for row in (0, ROWS))
    words = _load_unit(packed, unit, layout)
    halves = words << 16, words & jnp.uint32(0xFFFF0000)
    return tuple(jax.lax.bitcast_convert_type(x, F32) for x in halves)


def _phase(t, bounds):
    return (t >= bounds[0]).astype(jnp.int32)  # 0: context, rotated queries; 1: experts


def _blocks(layout: Layout, m: int) -> dict[str, pl.BlockSpec]:
    """Which part of every array a step sees. What stays for many steps has one buffer, or fast memory would not do."""
    tile, one = layout.tile, pl.Buffered(1)
    return {
        "scalars": pl.BlockSpec((1, 1, tile), lambda g, t, *_: (t, 0, 0), memory_space=pltpu.SMEM),
        "rows": pl.BlockSpec((1, 1, tile), lambda g, t, *_: (t, 0, 0)),
        "stats": pl.BlockSpec((1, layout.tokens, LANES), lambda g, t, *_: (g, 0, 0), pipeline_mode=one),
        "table": pl.BlockSpec((1, m, layout.lanes), lambda g, t, resource, _: (resource[t], 0, g)),
    }


def _queries(layout: Layout, size: int) -> pl.BlockSpec:
    shape = (1, 1, layout.tokens * size, LANES)
    return pl.BlockSpec(shape, lambda g, t, _, bounds: (_phase(t, bounds), g, 0, 0), pipeline_mode=pl.Buffered(1))


def _call(kernel, name: str, tiles: Tiles, layout: Layout, specs, shapes, scratch, vmem_bytes, arrays, interpret):
    # Inside shard_map a kernel must say over which axes of the mesh its results vary: over those of its arguments.
    varying = jax.typeof(arrays[0]).manual_axis_type
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(layout.groups, tiles.bounds[1]),
        in_specs=specs[0],
        out_specs=specs[1],
        scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
    )
    parameters = pltpu.CompilerParams(
        dimension_semantics=("arbitrary", "arbitrary"),
        disable_bounds_checks=True,  # every address comes from the tables, whose bounds the caller of the op holds
        vmem_limit_bytes=vmem_bytes,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=grid,
        out_shape=[jax.ShapeDtypeStruct(shape, F32, manual_axis_type=varying) for shape in shapes],
        compiler_params=parameters,
        interpret=interpret,
        name=name,
    )(*tiles, *arrays)


def forward(
    query: Float[Array, "2 G V 128"],
    key: Num[Array, "R m E"],
    value: Num[Array, "R m E"],
    tiles: Tiles,
    *,
    layout: Layout,
    scale: float,
    vmem_bytes: int,
    interpret: bool,
) -> tuple[Float[Array, "G V 128"], Float[Array, "G W 128"], Float[Array, "G N H t"]]:
    """Sums not yet divided, statistics (maxima, totals), and the log-sum-exp of every pair."""
    blocks, tile = _blocks(layout, key.shape[1]), layout.tile
    sums = pl.BlockSpec((1, layout.tokens * ROWS, LANES), lambda g, t, *_: (g, 0, 0), pipeline_mode=pl.Buffered(1))
    pair = pl.BlockSpec((1, 1, layout.heads, tile), lambda g, t, *_: (g, t, 0, 0))
    into = [*(blocks[x] for x in ("scalars", "rows", "rows")), _queries(layout, ROWS), blocks["table"], blocks["table"]]
    shapes = [
        (layout.groups, layout.tokens * ROWS, LANES),
        (layout.groups, layout.tokens, LANES),
        (layout.groups, len(tiles.resource), layout.heads, tile),
    ]
    scratch = [((tile * ROWS, LANES), F32)] * 3 + [((tile, LANES), F32)]
    kernel = functools.partial(_forward_kernel, layout=layout, scale=scale, unroll=_unroll(interpret))
    specs = into, [sums, blocks["stats"], pair]
    arrays = query, key, value
    name = "block_sparse_attention_forward"
    return tuple(_call(kernel, name, tiles, layout, specs, shapes, scratch, vmem_bytes, arrays, interpret))


def backward(
    packed: Num[Array, "2 G V 128"],
    stats: Float[Array, "G W 128"],
    key: Num[Array, "R m E"],
    value: Num[Array, "R m E"],
    tiles: Tiles,
    *,
    layout: Layout,
    scale: float,
    vmem_bytes: int,
    interpret: bool,
) -> tuple[Float[Array, "2 G U 128"], Float[Array, "G N 1 t"], Float[Array, "R m E"], Float[Array, "R m E"]]:
    """Gradients of queries, biases, keys, values. Whatever no tile visited is not written: the caller masks it."""
    blocks, tile, size = _blocks(layout, key.shape[1]), layout.tile, packed.shape[2] // layout.tokens
    bias = pl.BlockSpec((1, 1, 1, tile), lambda g, t, *_: (g, t, 0, 0))
    table = blocks["table"]
    into = [
        *(blocks[x] for x in ("scalars", "rows", "rows")),
        _queries(layout, size),
        *(blocks[x] for x in ("stats", "table", "table")),
    ]
    shapes = [
        (2, layout.groups, layout.tokens * ROWS, LANES),
        (layout.groups, len(tiles.resource), 1, tile),
        key.shape,
        key.shape,
    ]
    scratch = [((tile * size, LANES), packed.dtype), ((tile * ROWS, LANES), F32), ((tile, LANES), F32)]
    kernel = functools.partial(_backward_kernel, layout=layout, scale=scale, size=size, unroll=_unroll(interpret))
    specs = into, [_queries(layout, ROWS), bias, table, table]
    arrays = packed, stats, key, value
    name = "block_sparse_attention_backward"
    return tuple(_call(kernel, name, tiles, layout, specs, shapes, scratch, vmem_bytes, arrays, interpret))
