"""Path A: queries and sums of a window of tokens stay in a TPU's fast memory; only keys and values are streamed.

Rows longer than fast memory holds are taken window by window. A resource is then met once per window, by the tokens of
that window.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, N tiles, t rows a tile. Those of the
kernels are in `resident_kernels`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.block_sizes import BlockSizes, pairs_a_tile
from pallas_kernels.block_sparse_attention.tile import finite
from pallas_kernels.block_sparse_attention.tpu import compaction, resident_kernels
from pallas_kernels.block_sparse_attention.tpu import layout as layout_lib
from pallas_kernels.block_sparse_attention.tpu.lanes import from_lanes, pad_rows, to_lanes
from pallas_kernels.block_sparse_attention.tpu.layout import GROUP, PIECE, Layout
from pallas_kernels.block_sparse_attention.tpu.phases import Bounds, pitch
from pallas_kernels.block_sparse_attention.tpu.resident_kernels import Maximum, Tiles
from pallas_kernels.block_sparse_attention.tpu.words import words
from pallas_kernels.block_sparse_attention.types import Cotangents, Gradients, Inputs, Pairs, Partial, Problem
from pallas_kernels.tpu import LANES, LOG2_E, LOWEST, ROWS, compiled_or_interpreted, round_up, unwritten

SAFE_SCORE = 30.0  # exp(-2 * 30), the least that the largest weight can be, is far from the smallest float32
MOST_START = 60.0  # beside sums of exp(60), all weights of a token are less than a rounding


class Tables(NamedTuple):
    """What both passes share."""

    places: compaction.Tables
    tiles: Tiles  # its biases are less `shift`, as every logarithm in the kernels is
    shift: Float[Array, "T 1"]  # no weight is above 1 where no |score| exceeds SAFE_SCORE


class Path(NamedTuple):
    """See `operation.Path`."""

    problem: Problem
    layout: Layout

    @property
    def block_sizes(self) -> BlockSizes:
        """A tile, and a window."""
        return BlockSizes(pairs=self.layout.tile, tokens=self.layout.tokens)

    def tables(self, pairs: Pairs) -> Tables:
        """Pairs by window of the token, then by resource; an empty tile at the end."""
        problem, layout = self.problem, self.layout
        bias = jax.lax.stop_gradient(pairs.bias.astype(jnp.float32))  # its gradient is that of `inputs`
        used = jnp.arange(problem.slots) < pairs.count[:, None]
        shift = finite(jnp.where(used, bias, -jnp.inf).max(1, keepdims=True, initial=-jnp.inf) + SAFE_SCORE)
        # In a window there are only the chunks of its rows.
        chunks, resources = self._chunks, self._resources
        first = self._first_chunk(jnp.arange(problem.tokens)[:, None] // layout.tokens)
        local = pairs.resource - jnp.where(pairs.resource < problem.num_context, first, problem.num_context - chunks)
        places = compaction.build(local, pairs.count, resources, problem.max_pairs, layout)
        tiles = compaction.to_tiles(bias - shift, pairs.visible, places, resources, layout)
        window, local = jnp.divmod(places.resource, resources)
        resource = local + jnp.where(local < chunks, self._first_chunk(window), problem.num_context - chunks)
        row, *others = tiles
        row = jnp.pad(row * ROWS, ((1, 1), (0, 0), (0, 0)), constant_values=layout.tokens * ROWS)
        # The last tile, which is empty, may be of a chunk that there is not.
        return Tables(places, Tiles(jnp.minimum(resource, problem.resources - 1), row, *others), shift)

    def _first_chunk(self, window: Int[Array, "*N"]) -> Int[Array, "*N"]:
        """Of the row in which a window begins."""
        problem = self.problem
        if problem.rows == 1:
            return jnp.zeros_like(window)
        return window * self.layout.tokens // problem.row_length * problem.chunks_of_row

    @property
    def _chunks(self) -> int:
        """Of the rows that a window has tokens of; where most are."""
        size, tokens, length = self.layout.tokens, max(1, self.problem.tokens), self.problem.row_length
        begins = range(0, tokens, size)
        rows = max((min(begin + size, tokens) - 1) // length - begin // length + 1 for begin in begins)
        return rows * self.problem.chunks_of_row

    @property
    def _resources(self) -> int:
        """Those chunks, and all experts."""
        return self._chunks + self.problem.experts

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, None]:
        """From the start's sums on. Scores that are known to stay small need no running maximum."""
        start = start._replace(lse=start.lse - tables.shift)
        # Once for both branches.
        lanes = self._queries(inputs), *(to_lanes(x, self.layout) for x in (inputs.key, inputs.value))
        given = lanes, tables, start
        if inputs.max_score is None:
            whole = self._forward_running(*given)
        else:
            small = inputs.max_score <= SAFE_SCORE
            whole = jax.lax.cond(small, self._forward_bounded, self._forward_running, *given)
        # XLA would move what is done with the output into the branches, and do it twice.
        whole = jax.lax.optimization_barrier(whole)
        return whole._replace(lse=whole.lse + tables.shift), None

    def _forward_bounded(self, lanes, tables, start):
        # The largest weight of a head is at least exp(-2 SAFE_SCORE), over the pairs. A start that is far above them is
        # taken for as much as float32 can hold: beside it they are lost in rounding either way.
        over = jnp.maximum(start.lse - MOST_START, 0.0)
        total = jnp.exp(start.lse - over)
        given = lanes, tables, start.output, total, total
        output, (_, total) = self._run_forward("bounded", *given)
        return Partial(output, jnp.log(total) + over)

    def _forward_running(self, lanes, tables, start):
        total = (start.lse > -jnp.inf).astype(jnp.float32)
        top = jnp.maximum(start.lse * LOG2_E, LOWEST)
        given = lanes, tables, start.output, top, total
        output, (top, total) = self._run_forward("running", *given)
        return Partial(output, jnp.log(total) + top / LOG2_E)

    def _run_forward(self, maximum: Maximum, lanes, tables: Tables, output, first, total):
        (queries, key, value), layout, shape = lanes, self.layout, output.shape
        start = layout_lib.to_rows(output, layout)
        stats = layout_lib.to_stats(first, total, layout)

        def window(state, bounds):
            arrays = *state, start, queries, key, value, tables.tiles, bounds
            return self._run(resident_kernels.forward, *arrays, maximum=maximum), None

        (output, stats), _ = jax.lax.scan(window, (unwritten(start), stats), self._bounds(tables))
        return layout_lib.from_rows(output, layout, shape), layout_lib.from_stats(stats, layout, shape[:2])

    def mass(self, inputs: Inputs, tables: Tables, parts: None, lse: Float[Array, "T H"]) -> Float[Array, "T K"]:
        """By scores that are computed once more: it is asked for seldom, and would be dear beside the output."""
        layout, tiles, queries = self.layout, tables.tiles, self._queries(inputs)
        key = to_lanes(inputs.key, layout)
        lse = finite(lse - tables.shift)
        stats = layout_lib.to_stats(lse, jnp.zeros_like(lse), layout, padding=-LOWEST)  # heads that are padding

        def window(shares, bounds):
            return self._run(resident_kernels.mass, shares, queries, stats, key, tiles, bounds)[0], None

        shares = jnp.zeros_like(stats, shape=(layout.groups, len(tiles.bias), 1, layout.tile))
        shares, _ = jax.lax.scan(window, shares, self._bounds(tables))
        return self._from_tiles(shares.sum(0) / self.problem.heads, tables)

    def _queries(self, inputs: Inputs) -> tuple[Num[Array, "L Q 128"], ...]:
        """Both kinds: in bfloat16 as halves of words."""
        query, query_expert = inputs.query, inputs.query_expert
        if query.dtype == jnp.bfloat16:
            return _words(query_expert, query, layout=self.layout)
        return tuple(layout_lib.to_rows(x, self.layout) for x in (query, query_expert))

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """Window by window: gradients of queries and biases are written, those of keys and values added to."""
        query, query_expert, key, value, *_ = inputs
        layout, problem, tiles = self.layout, self.problem, tables.tiles
        cores = functools.partial(jnp.pad, pad_width=[(0, layout.cores - 1), *[(0, 0)] * 3])  # zeros for the others
        d_output, lse, delta = cotangents
        packed = _pack(d_output, query, query_expert, layout=layout)
        stats = layout_lib.to_stats(lse - tables.shift, delta, layout, padding=-LOWEST)  # no weight, whatever the bias
        of_window = layout_lib.to_rows(start.query, layout)
        key, value, d_key, d_value = (to_lanes(x, layout) for x in (key, value, start.key, start.value))
        d_key, d_value = cores(d_key[None]), cores(d_value[None])

        def window(state, bounds):
            *d_queries, d_bias, d_key, d_value = self._run(
                resident_kernels.backward, *state, of_window, packed, stats, key, value, tiles, bounds
            )
            return (tuple(d_queries), d_bias, d_key, d_value), None

        d_bias = jnp.zeros_like(d_key, shape=(layout.groups, len(tiles.bias), 1, layout.tile))
        in_lanes = of_window.reshape(len(of_window), -1)
        d_queries = unwritten(in_lanes, problem.dtype), unwritten(in_lanes, problem.dtype)
        state, _ = jax.lax.scan(window, (d_queries, d_bias, d_key, d_value), self._bounds(tables))
        d_queries, d_bias, d_key, d_value = state
        d_query, d_query_expert = (from_lanes(x[: problem.tokens], layout, *query.shape[1:]) for x in d_queries)
        # Of all cores. Not a sum over an axis: XLA would write it, and scale and round it in another pass.
        d_key, d_value = (functools.reduce(jnp.add, x) for x in (d_key, d_value))
        d_key, d_value = (from_lanes(x, layout, problem.heads, problem.d) for x in (d_key, d_value))
        d_key, d_value = (x.astype(problem.dtype) for x in (d_key * problem.scale, d_value))
        return Gradients(d_query, d_query_expert, d_key, d_value, self._from_tiles(d_bias.sum(0), tables))

    def _from_tiles(self, x: Float[Array, "N 1 t"], tables: Tables) -> Float[Array, "T K"]:
        """0 where a slot has no pair."""
        found = compaction.from_tiles(x, tables.tiles.row[1:-1] // ROWS, tables.places, self._resources, self.layout)
        return found[: self.problem.tokens, : self.problem.slots]

    def _bounds(self, tables: Tables) -> Bounds:
        """Of all windows; the last dimension is of those that the cores of a device take at the same time."""
        (_, resource, begin), resources = tables.places, self._resources
        window = jnp.arange(self.layout.windows)
        first, experts, last = (begin[window * resources + r] for r in (0, self._chunks, resources))
        first = jnp.where(first < last, first, len(resource) - 1)  # a window without pairs: the empty tile
        bounds = Bounds(first, experts, jnp.maximum(last - first, 1), window)
        return jax.tree.map(lambda x: x.reshape(-1, self.layout.cores), bounds)

    def _run(self, kernel, *arrays, **options):
        size = vmem_bytes(self.layout, self.problem.m, self.problem.dtype.itemsize)
        met = self.problem.met(self.layout.windows) / (self.layout.windows * self.problem.resources)
        options |= {"layout": self.layout, "scale": self.problem.scale, "vmem_bytes": size, "met": met}
        return compiled_or_interpreted(kernel, *arrays, **options)


def plan(problem: Problem, vmem: int | None = None) -> Path:
    """As few windows as `vmem` bytes of fast memory allow, None: as many as the chip has; or of the size that is asked
    for."""
    chip = chips.current_chip()
    vmem = chip.vmem if vmem is None else vmem
    shape = problem.tokens, problem.heads, problem.d, problem.max_pairs / problem.resources
    of_chip = {"cores": chip.device_cores, "matrix": chip.matrix}
    choose = functools.partial(layout_lib.choose, *shape, block_sizes=problem.block_sizes, **of_chip)
    layout = choose(most_tokens=max(problem.tokens, 1))
    itemsize = problem.dtype.itemsize
    fixed = vmem_bytes(layout._replace(tokens=0), problem.m, itemsize)
    a_token = vmem_bytes(layout._replace(tokens=1), problem.m, itemsize) - fixed
    most_tokens = min((vmem - fixed) // a_token, compaction.most_tokens(vmem, problem.slots)) // ROWS * ROWS
    if most_tokens <= 0:
        raise ValueError(
            f"keys of m={problem.m} rows need {fixed / 2**20:.0f} MiB of VMEM beside the tokens; wanted less than "
            f"{vmem / 2**20:.0f}: smaller resources, or implementation='xla'"
        )
    wanted = problem.block_sizes.tokens
    if wanted is not None and round_up(wanted, ROWS) > most_tokens:
        raise ValueError(f"block_sizes.tokens={wanted}; fast memory holds {most_tokens} tokens beside keys and tiles")
    whole = layout
    if wanted is None:
        layout = choose(most_tokens=most_tokens, batch=problem.rows)
    else:
        layout = choose(most_tokens=round_up(wanted, ROWS))
    if problem.block_sizes.pairs is None:  # of a batch of rows, a window does not meet every resource
        met = problem.met(layout.windows)
        layout = layout._replace(tile=min(whole.tile, pairs_a_tile(problem.max_pairs / met)))
    return Path(problem, layout)


def vmem_bytes(layout: Layout, m: int, itemsize: int) -> int:
    """Fast memory of the larger pass, where two tiles have their rows there at once.

    Beside the arrays the compiler wants room for scores and spilled registers: with keys of 64 to 512 rows, 0.1 to 3.7
    MiB in bfloat16 and 0.9 to 8.1 MiB in float32, where a product takes its arguments apart.
    """
    row, packed = LANES * 4, ROWS if itemsize == 2 else 2 * ROWS
    table = 2 * m * layout.lanes  # of one array, in two buffers
    forward = row * (layout.slots * (2 * ROWS + 1) + 2 * layout.tile * (2 * pitch(ROWS) + 1)) + table * 2 * itemsize
    # Gradients of keys and values come in and go out; those of queries leave in the type of the queries.
    backward = row * (layout.slots * (packed + ROWS + 1) + 2 * layout.tile * (pitch(packed) + pitch(ROWS) + 1))
    backward += table * (2 * itemsize + 4 * 4) + 2 * PIECE * GROUP * itemsize
    return max(forward, backward) + itemsize * (2**20 + 3 * m * layout.lanes)


def _words(
    high: Float[Array, "T H d"], *lows: Float[Array, "T H d"], layout: Layout
) -> tuple[Num[Array, "L Q 128"], ...]:
    """`high` and each of `lows`, in bfloat16, as the halves of words."""
    return words(*(pad_rows(to_lanes(x, layout, GROUP), round_up(len(x), ROWS)) for x in (high, *lows)))


def _pack(
    d_output: Float[Array, "T H d"], *queries: Float[Array, "T H d"], layout: Layout
) -> tuple[Num[Array, "L S 128"], ...]:
    """Each query of a token and its output gradient side by side: halves of a word, or a register each."""
    if d_output.dtype == jnp.bfloat16:
        return _words(d_output, *queries, layout=layout)
    rows = [layout_lib.to_rows(x, layout) for x in (d_output, *queries)]
    gradient, *others = (x.reshape(len(x), layout.groups, ROWS, LANES) for x in rows)
    return tuple(jnp.stack([x, gradient], axis=2).reshape(len(x), -1, LANES) for x in others)
