"""Path B: a row of main memory for every pair, gathered before the kernel and added up per token after it.

For contexts of any length: fast memory holds one tile at a time. The price is traffic: a pair's row is written and read
again as a query, as an output in order of resources, and as an output in order of tokens. Outputs are float32 whatever
the inputs: rounded to bfloat16, the gradient of every bias would be off by the rounding. Gradients of queries are in
the dtype of the inputs. Main memory holds two copies of max_pairs (and as much as a tile for each resource) outputs.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, G head groups, h heads of a group,
N tiles, t rows a tile, P pairs (whole chunks), E lanes of all groups, U units of 128 words of a pair.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, Shaped

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.block_sizes import DEFAULT, BlockSizes, pairs_a_tile
from pallas_kernels.block_sparse_attention.tile import finite
from pallas_kernels.block_sparse_attention.tpu import gathered_kernels
from pallas_kernels.block_sparse_attention.tpu.gathered_kernels import BLOCK, CHUNK, Layout, Steps, Tiles
from pallas_kernels.block_sparse_attention.tpu.lanes import from_lanes, pad_rows, to_lanes, to_stats
from pallas_kernels.block_sparse_attention.types import Cotangents, Gradients, Inputs, Pairs, Partial, Problem
from pallas_kernels.tpu import LANES, compiled_or_interpreted, round_up

MOST_UNITS = 8  # of a pair in one group: one vector register
NOTHING = 1e30  # log-sum-exp of heads that are padding: weights of 0, and finite, for products with a one-hot


class Tables(NamedTuple):
    """Pairs by resource, by token, and the way from the one to the other."""

    by_resource: tables_lib.Tables
    row: Int[Array, "P"]  # where among the tiles' rows every pair is; 0 past the last
    steps: Steps


class Path(NamedTuple):
    """See `operation.Path`."""

    problem: Problem
    layout: Layout

    @property
    def block_sizes(self) -> BlockSizes:
        """A tile."""
        return BlockSizes(pairs=self.layout.tile)

    def tables(self, pairs: Pairs) -> Tables:
        """Tiles of a resource, blocks of tokens."""
        most, tile = (self.problem.resources, self.problem.max_pairs), self.layout.tile
        resource = jnp.minimum(pairs.resource, self.problem.resources - 1)  # hidden, but every pair has a row
        by_resource = tables_lib.build(resource, pairs.count, *most, tile)
        number = jnp.arange(by_resource.pair.size, dtype=jnp.int32).reshape(-1, tile)
        row = tables_lib.rows_to_pairs(number, by_resource)
        return Tables(by_resource, _pad_to(CHUNK, row, 0), _steps(by_resource.numbering))

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, Float[Array, "G 1 P"]]:
        """Every pair on its own, then one distribution per token."""
        query, query_expert, key, value, pairs, _ = inputs
        layout, heads, numbering = self.layout, query.shape[1], tables.by_resource.numbering
        words = jnp.concatenate([_to_words(x, layout) for x in (query, query_expert)], axis=1)
        rows = _take(words, self._origin(tables))
        lanes = (to_lanes(x, layout) for x in (key, value))
        rows, stats = self._run(
            gathered_kernels.forward, rows, *lanes, self._tiles(pairs, tables), scale=self.problem.scale
        )

        bias_P = tables_lib.from_slots(pairs.bias.astype(jnp.float32), numbering, fill=-jnp.inf)
        in_rows = stats.swapaxes(2, 3).reshape(layout.groups, -1, 2 * layout.heads)
        stats = _take(in_rows, tables.row).swapaxes(1, 2)  # in order of tokens
        top, total = stats[:, : layout.heads] + _pad_to(CHUNK, bias_P, -jnp.inf), stats[:, layout.heads :]
        routed = _over_tokens(top + jnp.log(total), tables, self.problem.slots)[:, :heads]
        lse = jnp.logaddexp(routed, start.lse)
        before = start.output * jnp.exp(start.lse - finite(lse))[..., None]
        output, shares = self._run(
            gathered_kernels.merge,
            _take(rows, tables.row),
            jnp.concatenate([top, total], axis=1),
            to_stats(finite(lse), layout, round_up(len(lse), BLOCK), fill=NOTHING),
            _pad_to(BLOCK, to_lanes(before, layout), 0.0),
            tables.steps,
        )
        return Partial(from_lanes(output[: len(lse)], layout, *query.shape[1:]), lse), shares

    def mass(
        self, inputs: Inputs, tables: Tables, parts: Float[Array, "G 1 P"], lse: Float[Array, "T H"]
    ) -> Float[Array, "T K"]:
        """From the sum over a group's heads, which weights are anyway."""
        share_P = parts.sum((0, 1)) / self.problem.heads
        return tables_lib.to_slots(share_P, tables.by_resource.numbering, self.problem.slots)

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """What no tile visited was never written: those gradients are masked."""
        query, query_expert, key, value, pairs, _ = inputs
        layout, by_resource = self.layout, tables.by_resource
        *queries, d_output = (_to_words(x, layout) for x in (query, query_expert, cotangents.output))
        words = jnp.concatenate([jnp.concatenate([q, d_output], axis=2) for q in queries], axis=1)
        rows = _take(words, self._origin(tables))
        lanes = (to_lanes(x, layout) for x in (key, value))
        stats = self._stats(cotangents, pairs, tables)
        arrays = rows, stats, *lanes, self._tiles(pairs, tables)
        rows, d_bias, d_key, d_value = self._run(gathered_kernels.backward, *arrays, scale=self.problem.scale)

        first_expert = layout.tile * by_resource.begin[self.problem.num_context]
        d_queries = self._run(
            gathered_kernels.add,
            _take(rows, tables.row),
            (tables.row >= first_expert).astype(jnp.int32)[None],
            jnp.stack([_pad_to(BLOCK, to_lanes(x, layout), 0.0) for x in (start.query, start.query_expert)]),
            tables.steps,
        )
        d_query, d_query_expert = (from_lanes(x[: len(query)], layout, *query.shape[1:]) for x in d_queries)
        visited = (jnp.diff(by_resource.begin) > 0)[:, None, None, None]
        d_key, d_value = (jnp.where(visited, from_lanes(x, layout, *key.shape[2:]), 0.0) for x in (d_key, d_value))
        d_bias = d_bias.sum(0).reshape(-1)[tables.row]
        d_bias = tables_lib.to_slots(d_bias, by_resource.numbering, self.problem.slots)
        found = Gradients(d_query, d_query_expert, start.key + d_key, start.value + d_value, start.bias + d_bias)
        return found.finished(self.problem)

    def _tiles(self, pairs: Pairs, tables: Tables) -> Tiles:
        by_resource = tables.by_resource
        number = jnp.maximum(by_resource.begin[-1:], 1)
        return Tiles(by_resource.resource, number, tables_lib.slots_to_rows(pairs.visible, by_resource, 0))

    def _token(self, tables: Tables) -> Int[Array, "N t"]:
        """The token of every row; some token for padding rows."""
        token_P = tables.by_resource.numbering.token
        return jnp.minimum(token_P.at[tables.by_resource.pair].get(mode="clip"), self.problem.tokens - 1)

    def _origin(self, tables: Tables) -> Int[Array, "rows"]:
        """The row of (queries, then queries of experts) that every row of the tiles is."""
        expert = tables.by_resource.resource >= self.problem.num_context
        return (self._token(tables) + self.problem.tokens * expert[:, None]).reshape(-1)

    def _stats(self, cotangents: Cotangents, pairs: Pairs, tables: Tables) -> Float[Array, "G N h2 t"]:
        """Of every row: (bias - lse), then delta."""
        layout, by_resource = self.layout, tables.by_resource
        both = jnp.concatenate([to_stats(x, layout, len(x), fill=NOTHING) for x in cotangents[1:]], axis=1)
        tiles, tile = by_resource.pair.shape
        stats = _take(both.swapaxes(1, 2), self._token(tables).reshape(-1))
        stats = stats.reshape(layout.groups, tiles, tile, -1).swapaxes(2, 3)
        bias = tables_lib.slots_to_rows(pairs.bias.astype(jnp.float32), by_resource, -jnp.inf)
        return jnp.concatenate([bias - stats[:, :, : layout.heads], stats[:, :, layout.heads :]], axis=2)

    def _run(self, kernel, *arrays, **options):
        return compiled_or_interpreted(kernel, *arrays, layout=self.layout, **options)


def plan(problem: Problem) -> Path:
    """Heads in groups; refuses heads and numbers that do not go into rows."""
    rows = problem.max_pairs / problem.resources
    shape, cores = (problem.heads, problem.d, problem.dtype), chips.current_chip().device_cores
    return Path(problem, choose_layout(*shape, rows, problem.block_sizes, cores))


def choose_layout(
    heads: int, d: int, dtype: jnp.dtype, rows: float, block_sizes: BlockSizes = DEFAULT, cores: int = 1
) -> Layout:
    """Groups of heads that fill a register a pair, as many for every core of a device; large tiles where resources have
    rows (on average) to fill them."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {dtype}; wanted float32 or bfloat16")
    halves = 4 // jnp.dtype(dtype).itemsize
    unit = halves * LANES
    d = _power(d) if d < unit else round_up(d, unit)
    if d > MOST_UNITS * unit:
        raise ValueError(f"head size {d}; wanted at most {MOST_UNITS * unit} for {dtype}")
    groups = -(-heads // (MOST_UNITS * unit // d))
    groups = min(round_up(groups, cores), heads)
    heads = -(-heads // groups)
    block_sizes.require_multiple("pairs", LANES)
    # The padding of a tile moves through HBM, which binds here: large tiles need half as many rows again.
    tile = block_sizes.pairs or pairs_a_tile(rows / 1.5)
    return Layout(tile, groups, heads, d, _power(-(-heads * d // unit)), halves)


def _power(x: int) -> int:
    """The power of two at or above x."""
    return 2 ** math.ceil(math.log2(x))


def _steps(numbering: tables_lib.Numbering) -> Steps:
    """Every block of tokens with the chunks of its run of pairs."""
    token = _pad_to(CHUNK, numbering.token, len(numbering.first))
    chunks = len(token) // CHUNK
    blocks = -(-len(numbering.first) // BLOCK)
    edge = jnp.append(numbering.first[::BLOCK], numbering.first[-1] + numbering.count[-1])
    edge = jnp.minimum(edge, len(token))  # past the bound there are no pairs
    first = jnp.minimum(edge[:-1] // CHUNK, chunks - 1)
    begin = jnp.cumsum(jnp.maximum(-(-edge[1:] // CHUNK) - first, 1), dtype=jnp.int32)
    s = jnp.arange(blocks + chunks, dtype=jnp.int32)
    block = jnp.searchsorted(begin, s, side="right").astype(jnp.int32).clip(max=blocks - 1)
    chunk = jnp.minimum(first[block] + s - jnp.pad(begin, (1, 0))[block], chunks - 1)
    return Steps(block, chunk, begin[-1:], token[None])


def _pad_to(multiple: int, x: Shaped[Array, "S *U"], fill: int | float) -> Shaped[Array, "S2 *U"]:
    return pad_rows(x, round_up(len(x), multiple), fill)


def _to_words(x: Float[Array, "T H d"], layout: Layout) -> Num[Array, "G T U 128"]:
    """A row of words for every token in every group; see `gathered_kernels`."""
    x = to_lanes(x, layout).reshape(len(x), layout.groups, -1, LANES).swapaxes(0, 1)
    if layout.halves == 1:
        return x
    low, high = (jax.lax.bitcast_convert_type(x[:, :, i::2], jnp.uint16).astype(jnp.uint32) for i in (0, 1))
    return low | (high << 16)


def _take(x: Shaped[Array, "G S *U"], row: Int[Array, "P"]) -> Shaped[Array, "G P *U"]:
    """Rows of every group. As one gather of the first axis: of any other, XLA would transpose the result."""
    groups, size, *unit = x.shape
    index = row + size * jnp.arange(groups, dtype=jnp.int32)[:, None]
    return x.reshape(-1, *unit).at[index].get(mode="promise_in_bounds")


def _over_tokens(lse: Float[Array, "G h P"], tables: Tables, slots: int) -> Float[Array, "T heads"]:
    """The log-sum-exp of all pairs of a token: each takes in the one before it, the one 2, 4, 8... before it.

    What a token gets depends on no other token's pairs, not by a bit.
    """
    token, (_, first, count) = tables.steps.token[0], tables.by_resource.numbering
    shift = 1
    while shift < min(slots, len(token)):
        same = token[shift:] == token[:-shift]
        more = jnp.where(same, lse[..., :-shift], -jnp.inf)
        lse = jnp.concatenate([lse[..., :shift], jnp.logaddexp(lse[..., shift:], more)], axis=-1)
        shift *= 2
    last = lse.reshape(-1, len(token)).T.at[first + count - 1].get(mode="clip")
    return jnp.where(count[:, None] > 0, last, -jnp.inf)
