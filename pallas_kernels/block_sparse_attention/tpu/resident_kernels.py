"""The TPU kernels of path A: a tile of pairs that share a resource, with the queries and the sums of a window of tokens
in fast memory.

A token is one vector register of a head group, so that picking the tokens of a tile and adding to their sums are loads
and stores at an address from scalar memory: no gather, no scatter, no partial results in main memory. Scores are
transposed, keys by tokens: everything per token is a row of lanes. Tiles of a window run in order, on one core, so
sums are deterministic. While the products of one tile run, the tokens of the next are picked and the sums of the one
before are added up: they are in other slots of the same bundles.

Arrays of tokens are those of all windows: a kernel copies what its window needs, and leaves the rest as it is.

Shapes: L tokens, G head groups, Q = 8 G rows of a token, S = 16 G rows in float32, or Q; N tiles, t rows a tile, R
resources, m keys a resource, E lanes of all groups, C cores that take a window each.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.block_sparse_attention.tpu.jobs import (
    Job,
    Sums,
    by_head,
    later,
    load,
    own,
    stack,
    staggered,
)
from pallas_kernels.block_sparse_attention.tpu.layout import GROUP, PIECE, TOTAL, Layout
from pallas_kernels.block_sparse_attention.tpu.phases import (
    NEIGHBOURS,
    Bounds,
    Phases,
    Rows,
    Step,
    for_rows,
    in_series,
    overlapped,
    pitch,
    row_slice,
)
from pallas_kernels.block_sparse_attention.tpu.slots import (
    Memory,
    clear,
    clear_tokens,
    load_kind,
    scale_heads,
    token,
)
from pallas_kernels.tpu import F32, LANES, LOG2_E, ROWS, call, dot

ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)  # a kernel copies what it needs itself

Maximum = Literal["bounded", "running"]
"""What scores are measured from: 0, where the caller has made sure that they stay small; or the largest seen so far."""


class Tiles(NamedTuple):
    """What the kernels read of every tile. Padding rows: the first slot of padding, bias -inf."""

    resource: Int[Array, "N"]
    row: Int[Array, "N2 1 t"]  # the token's slot in its window, times ROWS; with an empty tile more at either end
    bias: Float[Array, "N 1 t"]
    visible: Int[Array, "N 1 t"]


def _forward_kernel(
    step, resource, rows, bias_ref, visible_ref,
    output_in, stats_in, start_in, key_ref, value_ref, queries_in,
    output_out, stats_out,
    query_ref, sum_ref, stats_ref,  # scratch: the window's tokens
    queries, outputs, stats, decays,  # scratch: the tile's rows
    copied,
    *, layout: Layout, scale: float, interpret: bool, maximum: Maximum,
):  # fmt: skip
    del resource, output_in
    running, memory = maximum == "running", Memory.here(step, start_in, layout, copied)
    scale_sums = functools.partial(scale_heads, sum_ref, stats_ref, layout=layout, interpret=interpret)
    query = _query(step.kind(), key_ref.dtype, layout)

    def begin(before):
        @pl.when(step.number == 0)
        def _():
            clear(layout, query_ref, sum_ref, stats_ref)
            memory.load((memory.rows(start_in), sum_ref), (memory.stats(stats_in), stats_ref))
            scale_sums(TOTAL)

        load_kind(memory, queries_in, query_ref)
        if not running:
            outputs[before], stats[before] = (jnp.zeros(x.shape[1:], F32) for x in (outputs, stats))

    def gather(buffer):
        def body(rows, first):
            for j, row in enumerate(rows):
                queries[buffer, row_slice(first + j), :] = token(query_ref, row, interpret)[...]
                if running:
                    stats[buffer, pl.ds(first + j, 1), :] = token(stats_ref, row, interpret)[...]

        return body

    def attend(buffer, between):
        old = stats[buffer].T if running else None
        seen = jax.lax.broadcasted_iota(jnp.int32, (key_ref.shape[1], layout.tile), 0) < visible_ref[0]
        bias, sums, jobs = bias_ref[0] * LOG2_E, Sums(outputs.at[buffer], layout), Job.all_of(layout)

        def score(job, _):
            return dot(key_ref[0, :, job.lanes(layout)], query(queries.at[buffer], job), (1, 1))

        def softmax(job, score):
            columns = job.columns(layout)
            score = jnp.where(seen[:, columns], score * (scale * LOG2_E) + bias[:, columns], -jnp.inf)
            if running:
                top = jnp.maximum(old[job.head : job.head + 1, columns], jnp.max(score, axis=0, keepdims=True))
                score = score - top
            weight = jnp.exp2(score)
            rounded, total = weight.astype(value_ref.dtype), jnp.sum(weight, axis=0, keepdims=True)
            # A largest weight of 1 is not rounded. Any other is: its output is divided by what it was rounded to.
            return rounded, total, top if running else jnp.sum(rounded.astype(F32), axis=0, keepdims=True)

        def output(job, state):
            weight, total, other = state
            sums.add(job, dot(weight, value_ref[0, :, job.lanes(layout)], (0, 0)))
            return total, other

        products = (score, later) if layout.columns < 2 * LANES else (score,)
        found = zip(*staggered(jobs, *products, softmax, output, between=between), strict=True)
        totals, others = (by_head(jobs, x, layout) for x in found)
        if running:
            factors = [jnp.exp2(old[h : h + 1] - top) for h, top in enumerate(others)]
            totals = [old[TOTAL + h : TOTAL + h + 1] * factors[h] + total for h, total in enumerate(totals)]
            factor = stack(factors, LANES).T
            decay = Sums(decays, layout)
            for job in jobs:
                column = factor[job.columns(layout), job.head : job.head + 1]
                decay.add(job, jnp.broadcast_to(column, (len(column), layout.rows_a_unit * LANES)))
        stats[buffer] = jnp.concatenate([stack(others, TOTAL), stack(totals, LANES - TOTAL)], axis=0).T

    def accumulate(buffer):
        def body(rows, first):
            olds = [(token(sum_ref, row, interpret)[...], token(stats_ref, row, interpret)[...]) for row in rows]
            news = []
            for j, (old, total) in enumerate(olds):
                mine = row_slice(first + j)
                new, more = outputs[buffer, mine, :], stats[buffer, pl.ds(first + j, 1), :]
                news.append((old * decays[mine, :] + new, more) if running else (old + new, total + more))
            for row, (new, total) in zip(rows, news, strict=True):
                token(sum_ref, row, interpret)[...] = new
                token(stats_ref, row, interpret)[...] = total

        return body

    def end():
        @pl.when(step.number == step.bounds.number - 1)
        def _():
            scale_sums(TOTAL if running else 0, divide=True)
            memory.store((memory.rows(output_out), sum_ref), (memory.stats(stats_out), stats_ref))

    # What a tile finds depends on a running maximum of the one before.
    run = in_series if running else overlapped
    run(step, rows, Phases(begin, gather, attend, accumulate, end), interpret)


def _mass_kernel(
    step, resource, rows, bias_ref, visible_ref, shares_in, stats_in, key_ref, queries_in,
    shares_ref,
    query_ref, stats_ref,  # scratch: the window's tokens
    queries, stats,  # scratch: the tile's rows
    copied,
    *, layout: Layout, scale: float, interpret: bool,
):  # fmt: skip
    del resource, shares_in
    memory = Memory.here(step, queries_in[0], layout, copied)

    @pl.when(step.number == 0)
    def _():
        clear(layout, query_ref, stats_ref)
        memory.load((memory.stats(stats_in), stats_ref))

    load_kind(memory, queries_in, query_ref)
    query = _query(step.kind(), key_ref.dtype, layout)

    def gather(rows, first):
        for j, row in enumerate(rows):
            queries[row_slice(first + j), :] = token(query_ref, row, interpret)[...]
            stats[pl.ds(first + j, 1), :] = token(stats_ref, row, interpret)[...]

    for_rows(rows.here, interpret, gather)
    seen = jax.lax.broadcasted_iota(jnp.int32, (key_ref.shape[1], layout.tile), 0) < visible_ref[0]
    lse, bias, jobs = stats[...].T, bias_ref[0], Job.all_of(layout)

    def score(job, _):
        return dot(key_ref[0, :, job.lanes(layout)], query(queries, job), (1, 1))

    def share(job, score):
        columns = job.columns(layout)
        shift = (bias[:, columns] - lse[job.head : job.head + 1, columns]) * LOG2_E
        weight = jnp.where(seen[:, columns], jnp.exp2(score * (scale * LOG2_E) + shift), 0.0)
        return jnp.sum(weight, axis=0, keepdims=True)

    shares = staggered(jobs, score, share, between=lambda i, n: None)
    shares_ref[0, 0] = functools.reduce(jnp.add, by_head(jobs, shares, layout))


def _backward_kernel(
    step, resource, rows, bias_ref, visible_ref,
    d_query_in, d_query_expert_in, d_bias_in, d_key_in, d_value_in, start_in, packed_in, packed_expert_in, stats_in,
    key_ref, value_ref,
    d_query_out, d_query_expert_out, d_bias_ref, d_key_ref, d_value_ref,
    packed_ref, d_query_ref, stats_ref, leaving,  # scratch: the window's tokens
    packed, outputs, stats,  # scratch: the tile's rows
    copied,
    *, layout: Layout, scale: float, interpret: bool, size: int,
):  # fmt: skip
    del d_query_in, d_query_expert_in, d_bias_in
    dtype, memory = key_ref.dtype, Memory.here(step, packed_in, layout, copied)

    def start(kind: int) -> None:
        if kind == 0:
            memory.load((memory.rows(start_in), d_query_ref))
        else:
            clear_tokens(layout, d_query_ref, interpret)

    def finish(kind: int) -> None:
        out = memory.lanes((d_query_out, d_query_expert_out)[kind])
        memory.store_as(out, d_query_ref, leaving, scale, interpret)

    def begin(before):
        @pl.when(step.number == 0)
        def _():
            clear(layout, packed_ref, d_query_ref, stats_ref)
            memory.load((memory.stats(stats_in), stats_ref))

        @pl.when((step.number == 0) & (step.kind() == 1))  # the window meets no context
        def _():
            start(0)
            finish(0)

        load_kind(memory, (packed_in, packed_expert_in), packed_ref)
        for kind in range(2):
            pl.when(step.kind() == kind)(functools.partial(start, kind))
        outputs[before] = jnp.zeros(outputs.shape[1:], F32)

    @pl.when((step.number == 0) | (resource[step.tile] != resource[jnp.maximum(step.tile - 1, 0)]))
    def _():
        d_key_ref[...] = d_key_in[...]
        d_value_ref[...] = d_value_in[...]

    def gather(buffer):
        def body(rows, first):
            for j, row in enumerate(rows):
                packed[buffer, row_slice(first + j, size), :] = token(packed_ref, row, interpret)[...]
                stats[buffer, pl.ds(first + j, 1), :] = token(stats_ref, row, interpret)[...]

        return body

    def attend(buffer, between):
        seen = jax.lax.broadcasted_iota(jnp.int32, (key_ref.shape[1], layout.tile), 0) < visible_ref[0]
        statistics, bias = stats[buffer].T, bias_ref[0] * LOG2_E
        sums, jobs = Sums(outputs.at[buffer], layout), Job.all_of(layout)

        def products(job, _):
            lanes, both = job.lanes(layout), _unpack(packed.at[buffer], job, layout, size)
            query, d_output = (own(x, job, layout).astype(dtype) for x in both)
            score, d_weight = dot(key_ref[0, :, lanes], query, (1, 1)), dot(value_ref[0, :, lanes], d_output, (1, 1))
            return query, d_output, score, d_weight

        def softmax(job, state):
            query, d_output, score, d_weight = state
            columns = job.columns(layout)
            lse, delta = (statistics[x + job.head : x + job.head + 1, columns] for x in (0, TOTAL))
            shift = bias[:, columns] - lse * LOG2_E
            weight = jnp.where(seen[:, columns], jnp.exp2(score * (scale * LOG2_E) + shift), 0.0)
            d_score = weight * (d_weight - delta)
            d_bias = jnp.sum(d_score, axis=0, keepdims=True)
            return query, d_output, weight.astype(dtype), d_score.astype(dtype), d_bias

        def gradients(job, state):
            query, d_output, weight, d_score, d_bias = state
            lanes = job.lanes(layout)
            d_value_ref[0, :, lanes] += dot(weight, d_output, (1, 0))
            d_key_ref[0, :, lanes] += dot(d_score, query, (1, 0))
            sums.add(job, dot(d_score, key_ref[0, :, lanes], (0, 0)))
            return d_bias

        d_bias = by_head(jobs, staggered(jobs, products, softmax, gradients, between=between), layout)
        d_bias_ref[0, 0] = functools.reduce(jnp.add, d_bias)

    def accumulate(buffer):
        def body(rows, first):
            olds = [token(d_query_ref, row, interpret)[...] for row in rows]
            news = [old + outputs[buffer, row_slice(first + j), :] for j, old in enumerate(olds)]
            for row, new in zip(rows, news, strict=True):
                token(d_query_ref, row, interpret)[...] = new

        return body

    def end():
        for kind in range(2):
            pl.when(step.kind() == kind)(functools.partial(finish, kind))

        @pl.when((step.number == step.bounds.number - 1) & (step.kind() == 0))  # it meets no expert
        def _():
            start(1)
            finish(1)

    overlapped(step, rows, Phases(begin, gather, attend, accumulate, end), interpret)


def _query(phase, dtype, layout: Layout) -> Callable[[Any, Job], Any]:
    """query(rows, job): those of a job, of the phase, from the rows of a tile: float32, or halves of words."""

    def query(rows, job: Job):
        x = load(rows, job, layout)
        if rows.dtype != F32:
            x = (x << (16 * (1 - phase)).astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
            x = jax.lax.bitcast_convert_type(x, F32)
        return own(x, job, layout).astype(dtype)

    return query


def _unpack(packed, job: Job, layout: Layout, size: int):
    """Query and output gradient of one unit: halves of a word, or rows 0 to 7 and 8 to 15 of a token."""
    if size > ROWS:
        return tuple(load(packed, job, layout, row, size) for row in (0, ROWS))
    words = load(packed, job, layout)
    halves = words << 16, words & jnp.uint32(0xFFFF0000)
    return tuple(jax.lax.bitcast_convert_type(x, F32) for x in halves)


class _Blocks(NamedTuple):
    """Which part of every array a step sees; tokens are not among them, see `slots`."""

    layout: Layout

    def block(self, shape: tuple, index: Callable, **options: Any) -> pl.BlockSpec:
        """index(step, resource): of the block that a step sees. Where the tiles of a core's window are at an end, and
        the other's are not, the last one stays where it is."""

        def of_step(i, j, resource, bounds):
            step = Step.here(i, j, bounds, self.layout.cores)
            if self.layout.cores > 1:
                step = step._replace(number=jnp.minimum(j, step.bounds.number - 1))
            return index(step, resource)

        return pl.BlockSpec(shape, of_step, **options)

    def rows(self) -> pl.BlockSpec:
        """Addresses of the tile before, of this one and of the next, see `Rows`."""
        shape = pl.Element(NEIGHBOURS), pl.Element(1), pl.Element(self.layout.tile)
        return self.block(shape, lambda step, _: (step.tile, 0, 0), memory_space=pltpu.SMEM)

    def by_tile(self) -> pl.BlockSpec:
        return self.block((1, 1, self.layout.tile), lambda step, _: (step.tile, 0, 0))

    def by_pair(self, rows: int) -> pl.BlockSpec:
        return self.block((1, 1, rows, self.layout.tile), lambda step, _: (step.group, step.tile, 0, 0))

    def table(self, m: int) -> pl.BlockSpec:
        return self.block((1, m, self.layout.lanes), lambda step, resource: (resource[step.tile], 0, step.group))

    def gradient(self, m: int) -> pl.BlockSpec:
        """Of a table: every core has one of its own."""
        shape = None, 1, m, self.layout.lanes
        return self.block(shape, lambda step, resource: (step.core, resource[step.tile], 0, step.group))


def _call(
    kernel, name, tiles: Tiles, bounds: Bounds, arrays, results, scratch, tables: Sequence[pl.BlockSpec],
    *, products: int, aliases: Mapping[int, int], unread: int, layout: Layout, scale: float, vmem_bytes: int,
    met: float, interpret: bool,
):  # fmt: skip
    """`aliases` of `arrays` alone, the first `unread` of which are only written. Keys, values and their gradients have
    the blocks `tables`, of which a window meets the share `met`; each score is worth as many `products` of d numbers.
    Where windows are divided over cores, a grid has as many steps as the longer needs."""

    def run(resource, bounds, row_ref, *refs):
        step = Step.here(pl.program_id(0), pl.program_id(1), bounds, layout.cores)
        options = {"layout": layout, "scale": scale, "interpret": interpret}
        work = functools.partial(kernel, step, resource, Rows.of(row_ref), *refs, **options)
        work() if layout.cores == 1 else pl.when(step.number < step.bounds.number)(work)

    blocks = _Blocks(layout)
    of_tiles = [(blocks.rows(), tiles.row), *((blocks.by_tile(), x) for x in (tiles.bias, tiles.visible))]
    # These windows' share of as many tiles as there may be: how many there are is known at run time only.
    keys, calls = next(x.shape[1] for block, x in arrays if block is tables[0]), layout.windows // layout.cores
    scores = tiles.bias.size * keys * layout.groups * layout.heads // calls
    moved = [(None, tiles), *arrays[unread:], *results]
    kept, others = (_bytes([x for block, x in moved if (block in tables) == which]) for which in (True, False))
    return call(
        run,
        name,
        (layout.groups * layout.cores, bounds.number.max()),
        (tiles.resource, jnp.stack(bounds)),
        [*of_tiles, *arrays],
        [(block, array.shape, array.dtype) for block, array in results],
        scratch=[*(pltpu.VMEM(*x) for x in scratch), pltpu.SemaphoreType.DMA((2,))],
        aliases={len(of_tiles) + source: to for source, to in aliases.items()},
        bounds_checks=False,  # every address comes from the tables, whose bounds the caller of the op holds
        vmem_bytes=vmem_bytes,
        cost=pl.CostEstimate(
            flops=2 * products * scores * layout.d,
            transcendentals=scores,
            bytes_accessed=int(met * kept) + others // calls,
        ),
        interpret=interpret,
    )


def forward(
    output: Float[Array, "L Q 128"],
    stats: Float[Array, "G L 128"],
    start: Float[Array, "L Q 128"],
    queries: Sequence[Num[Array, "L Q 128"]],
    key: Num[Array, "R m E"],
    value: Num[Array, "R m E"],
    tiles: Tiles,
    bounds: Bounds,
    *,
    maximum: Maximum,
    layout: Layout,
    **options: Any,
) -> tuple[Float[Array, "L Q 128"], Float[Array, "G L 128"]]:
    """Adds the tiles of a window, or of one for every core, to what its tokens start from, and to their statistics.

    Statistics are totals, and before them the running maxima in base 2, or totals of the weights as they were rounded.
    Sums, an output times its total, are in fast memory alone.

    Args:
      output: what windows before have written; other tokens' is kept as it is.
      queries: in float32, those of the context and those of experts; or one array of words with halves of both.
    """
    running, kind = maximum == "running", queries[0].dtype
    table = _Blocks(layout).table(key.shape[1])
    arrays = [*((ANYWHERE, x) for x in (output, stats, start)), (table, key), (table, value), _everywhere(queries)]
    buffers, decays = (1, layout.tile * pitch(ROWS)) if running else (2, ROWS)
    scratch = [_slots(layout, ROWS, kind), _slots(layout, ROWS), _slots(layout)]
    scratch += [_rows(layout, n, x, buffers) for n, x in ((ROWS, kind), (ROWS, F32), (1, F32))]
    scratch += [((decays, LANES), F32)]
    kernel = functools.partial(_forward_kernel, maximum=maximum)
    name = {"bounded": "block_sparse_attention_forward", "running": "block_sparse_attention_forward_running"}[maximum]
    given, aliases = (arrays, arrays[:2], scratch, (table,)), {0: 0, 1: 1}
    return _call(kernel, name, tiles, bounds, *given, products=2, aliases=aliases, unread=1, layout=layout, **options)


def mass(
    shares: Float[Array, "G N 1 t"],
    queries: Sequence[Num[Array, "L Q 128"]],
    stats: Float[Array, "G L 128"],
    key: Num[Array, "R m E"],
    tiles: Tiles,
    bounds: Bounds,
    *,
    layout: Layout,
    **options: Any,
) -> tuple[Float[Array, "G N 1 t"]]:
    """Writes the share of its token's attention that every pair of a window has, the sum over the group's heads.

    Args:
      queries: as in `forward`.
      stats: the log-sum-exp of all keys of a token.
    """
    blocks, kind = _Blocks(layout), queries[0].dtype
    table = blocks.table(key.shape[1])
    arrays = [(ANYWHERE, shares), (ANYWHERE, stats), (table, key), _everywhere(queries)]
    scratch = [_slots(layout, ROWS, kind), _slots(layout), _rows(layout, ROWS, kind), _rows(layout)]
    given, name = (arrays, [(blocks.by_pair(1), shares)], scratch, (table,)), "block_sparse_attention_mass"
    return _call(
        _mass_kernel, name, tiles, bounds, *given, products=1, aliases={0: 0}, unread=1, layout=layout, **options
    )


def backward(
    d_queries: Sequence[Float[Array, "L W"]],
    d_bias: Float[Array, "G N 1 t"],
    d_key: Float[Array, "C R m E"],
    d_value: Float[Array, "C R m E"],
    start: Float[Array, "L Q 128"],
    packed: Sequence[Num[Array, "L S 128"]],
    stats: Float[Array, "G L 128"],
    key: Num[Array, "R m E"],
    value: Num[Array, "R m E"],
    tiles: Tiles,
    bounds: Bounds,
    *,
    layout: Layout,
    **options: Any,
) -> tuple:
    """Writes the gradients of both queries of a window and of its pairs' biases; adds to those of keys and values.

    Args:
      d_queries: of the context, and of experts; the W = 1024 G lanes of a token side by side, as matrix products take
        them. What windows before have written, other tokens', is kept as it is.
      start: of the context, what the tiles' are added to, without the factor `scale`.
      packed: queries of the context, and of experts, each with the gradients of outputs.

    Returns:
      The first five, changed.
    """
    blocks, size, kind = _Blocks(layout), packed[0].shape[1] // layout.groups, packed[0].dtype
    table, gradient = blocks.table(key.shape[1]), blocks.gradient(key.shape[1])
    arrays = [*((ANYWHERE, x) for x in (*d_queries, d_bias)), (gradient, d_key), (gradient, d_value)]
    results = [*arrays[:2], (blocks.by_pair(1), d_bias), *arrays[3:]]
    arrays += [*((ANYWHERE, x) for x in (start, *packed, stats)), (table, key), (table, value)]
    scratch = [_slots(layout, size, kind), _slots(layout, ROWS), _slots(layout)]
    scratch += [((2, PIECE, GROUP), d_queries[0].dtype)]
    scratch += [_rows(layout, n, x, 2) for n, x in ((size, kind), (ROWS, F32), (1, F32))]
    kernel, name = functools.partial(_backward_kernel, size=size), "block_sparse_attention_backward"
    given, aliases = (arrays, results, scratch, (table, gradient)), {i: i for i in range(5)}
    return _call(kernel, name, tiles, bounds, *given, products=5, aliases=aliases, unread=3, layout=layout, **options)


def _bytes(arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _everywhere(arrays: Sequence) -> tuple[tuple, tuple]:
    return (ANYWHERE,) * len(arrays), tuple(arrays)


def _slots(layout: Layout, rows: int | None = None, dtype: Any = F32) -> tuple:
    """Scratch for the tokens of a window: `rows` a token, or one row of statistics."""
    return (layout.slots, LANES) if rows is None else (layout.slots, rows, LANES), dtype


def _rows(layout: Layout, rows: int = 1, dtype: Any = F32, buffers: int | None = None) -> tuple:
    """Scratch for the tokens of a tile."""
    shape = layout.tile * pitch(rows), LANES
    return shape if buffers is None else (buffers, *shape), dtype
