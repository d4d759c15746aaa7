"""Path B: a row of main memory for every pair, gathered before the kernel and added up per token after it.

For contexts of any length: fast memory holds one tile at a time. The price is traffic: a pair's row is written and read
again as a query, as an output in order of resources, and as an output in order of tokens. Outputs are float32 whatever
the inputs: rounded to bfloat16, the gradient of every bias would be off by the rounding. Gradients of queries are in
the dtype of the inputs. Main memory holds two copies of max_pairs (and as much as a tile for each resource) outputs.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, G head groups, h heads of a group,
N tiles, t rows a tile, P pairs (whole chunks), E lanes of all groups, U units of 128 words of a pair.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num, Shaped

from pallas_kernels.block_sparse_attention import operation
from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.operation import Cotangents, Gradients, Inputs, Partial, Problem
from pallas_kernels.block_sparse_attention.tile import finite
from pallas_kernels.block_sparse_attention.tpu import gathered_kernels, window
from pallas_kernels.block_sparse_attention.tpu.gathered_kernels import BLOCK, CHUNK, Layout, Steps, Tiles
from pallas_kernels.block_sparse_attention.types import Pairs
from pallas_kernels.tpu import LANES, compiled_or_interpreted

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

    def tables(self, pairs: Pairs) -> Tables:
        """Tiles of a resource, blocks of tokens."""
        problem, tile = self.problem, self.layout.tile
        by_resource = tables_lib.build(
            pairs.resource, pairs.count, num_resources=problem.resources, max_pairs=problem.max_pairs, tile=tile
        )
        number = jnp.arange(by_resource.pair.size, dtype=jnp.int32).reshape(-1, tile)
        row = jnp.zeros_like(by_resource.numbering.token)
        row = row.at[by_resource.pair].set(number, mode="drop", unique_indices=True)
        return Tables(by_resource, _pad_to(CHUNK, row, 0), _steps(by_resource.numbering))

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, Float[Array, "T K"]]:
        """Every pair on its own, then one distribution per token."""
        query, query_expert, key, value, pairs, _ = inputs
        layout, heads, numbering = self.layout, query.shape[1], tables.by_resource.numbering
        words = jnp.concatenate([_to_words(x, layout) for x in (query, query_expert)], axis=1)
        rows = _take(words, self._origin(tables))
        lanes = (_to_lanes(x, layout) for x in (key, value))
        rows, stats = self._run(gathered_kernels.forward, rows, *lanes, self._tiles(pairs, tables), **self._scale)

        bias_P = tables_lib.from_slots(pairs.bias.astype(jnp.float32), numbering, fill=-jnp.inf)
        stats = _in_token_order(stats, tables)
        top, total = stats[:, : layout.heads] + _pad_to(CHUNK, bias_P, -jnp.inf), stats[:, layout.heads :]
        routed = _over_tokens(top + jnp.log(total), tables, self.problem.slots)[:, :heads]
        lse = jnp.logaddexp(routed, start.lse)
        before = start.output * jnp.exp(start.lse - finite(lse))[..., None]
        output, mass = self._run(
            gathered_kernels.merge,
            _take(rows, tables.row),
            jnp.concatenate([top, total], axis=1),
            _to_stats(finite(lse), layout),
            _pad_to(BLOCK, _to_lanes(before, layout), 0.0),
            tables.steps,
        )
        mass = tables_lib.to_slots(mass.sum((0, 1)) / heads, numbering, self.problem.slots)
        return Partial(_from_lanes(output[: len(lse)], layout, query.shape), lse), mass

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """What no tile visited was never written: those gradients are masked."""
        query, query_expert, key, value, pairs, _ = inputs
        layout, by_resource = self.layout, tables.by_resource
        *queries, d_output = (_to_words(x, layout) for x in (query, query_expert, cotangents.output))
        words = jnp.concatenate([jnp.concatenate([q, d_output], axis=2) for q in queries], axis=1)
        rows = _take(words, self._origin(tables))
        lanes = (_to_lanes(x, layout) for x in (key, value))
        stats = self._stats(cotangents, pairs, tables)
        arrays = rows, stats, *lanes, self._tiles(pairs, tables)
        rows, d_bias, d_key, d_value = self._run(gathered_kernels.backward, *arrays, **self._scale)

        first_expert = layout.tile * by_resource.begin[self.problem.num_context]
        d_queries = self._run(
            gathered_kernels.add,
            _take(rows, tables.row),
            (tables.row >= first_expert).astype(jnp.int32)[None],
            jnp.stack([_pad_to(BLOCK, _to_lanes(x, layout), 0.0) for x in (start.query, start.query_expert)]),
            tables.steps,
        )
        d_query, d_query_expert = (_from_lanes(x[: len(query)], layout, query.shape) for x in d_queries)
        visited = (jnp.diff(by_resource.begin) > 0)[:, None, None, None]
        d_key, d_value = (jnp.where(visited, _from_lanes(x, layout, key.shape), 0.0) for x in (d_key, d_value))
        d_bias = d_bias.sum(0).reshape(-1)[tables.row]
        d_bias = tables_lib.to_slots(d_bias, by_resource.numbering, self.problem.slots)
        return Gradients(d_query, d_query_expert, start.key + d_key, start.value + d_value, start.bias + d_bias)

    @property
    def _scale(self) -> dict[str, float]:
        return {"scale": self.problem.scale}

    def _tiles(self, pairs: Pairs, tables: Tables) -> Tiles:
        by_resource = tables.by_resource
        visible_P = tables_lib.from_slots(pairs.visible, by_resource.numbering, fill=0)
        return Tiles(
            resource=by_resource.resource,
            count=jnp.maximum(by_resource.begin[-1:], 1),
            visible=visible_P.at[by_resource.pair[:, None]].get(mode="fill", fill_value=0),
        )

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
        both = jnp.concatenate([_to_stats(x, layout)[..., : len(x)] for x in cotangents[1:]], axis=1)
        tiles, tile = by_resource.pair.shape
        stats = _take(both.swapaxes(1, 2), self._token(tables).reshape(-1))
        stats = stats.reshape(layout.groups, tiles, tile, -1).swapaxes(2, 3)
        bias_P = tables_lib.from_slots(pairs.bias.astype(jnp.float32), by_resource.numbering, fill=-jnp.inf)
        bias = bias_P.at[by_resource.pair[:, None]].get(mode="fill", fill_value=-jnp.inf)
        return jnp.concatenate([bias - stats[:, :, : layout.heads], stats[:, :, layout.heads :]], axis=2)

    def _run(self, kernel, *arrays, **options):
        return compiled_or_interpreted(functools.partial(kernel, layout=self.layout, **options), *arrays)


def plan(problem: Problem) -> Path:
    """Heads in groups; refuses heads and numbers that do not go into rows."""
    rows = problem.max_pairs / problem.resources
    return Path(problem, choose_layout(problem.heads, problem.d, problem.dtype, rows))


attend = functools.partial(operation.attend, plan, local=window.ON_TPUS)


def choose_layout(heads: int, d: int, dtype: jnp.dtype, rows: float) -> Layout:
    """Groups of heads that fill a register a pair; large tiles where resources have rows (on average) to fill them."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {dtype}; wanted float32 or bfloat16")
    halves = 4 // jnp.dtype(dtype).itemsize
    unit = halves * LANES
    d = _power(d) if d < unit else -(-d // unit) * unit
    if d > MOST_UNITS * unit:
        raise ValueError(f"head size {d}; wanted at most {MOST_UNITS * unit} for {dtype}")
    groups = -(-heads // (MOST_UNITS * unit // d))
    heads = -(-heads // groups)
    tile = 512 if rows >= 1024 else 256 if rows >= 384 else 128
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


def _pad_to(multiple: int, x: Shaped[Array, "S *U"], value) -> Shaped[Array, "S2 *U"]:
    return jnp.pad(x, [(0, -len(x) % multiple)] + [(0, 0)] * (x.ndim - 1), constant_values=value)


def _to_lanes(x: Float[Array, "*S H d"], layout: Layout) -> Float[Array, "*S E"]:
    """Heads side by side, group after group."""
    *shape, heads, d = x.shape
    pad = [(0, 0)] * len(shape)
    x = jnp.pad(x, [*pad, (0, layout.groups * layout.heads - heads), (0, layout.d - d)])
    x = x.reshape(*shape, layout.groups, layout.heads * layout.d)
    x = jnp.pad(x, [*pad, (0, 0), (0, layout.lanes - x.shape[-1])])
    return x.reshape(*shape, layout.groups * layout.lanes)


def _from_lanes(x: Float[Array, "*S E"], layout: Layout, shape: tuple[int, ...]) -> Float[Array, "*S H d"]:
    x = x.reshape(*shape[:-2], layout.groups, layout.lanes)[..., : layout.heads * layout.d]
    return x.reshape(*shape[:-2], layout.groups * layout.heads, layout.d)[..., : shape[-2], : shape[-1]]


def _to_words(x: Float[Array, "T H d"], layout: Layout) -> Num[Array, "G T U 128"]:
    """A row of words for every token in every group; see `gathered_kernels`."""
    x = _to_lanes(x, layout).reshape(len(x), layout.groups, -1, LANES).swapaxes(0, 1)
    if layout.halves == 1:
        return x
    low, high = (jax.lax.bitcast_convert_type(x[:, :, i::2], jnp.uint16).astype(jnp.uint32) for i in (0, 1))
    return low | (high << 16)


def _to_stats(x: Float[Array, "T H"], layout: Layout) -> Float[Array, "G h T2"]:
    """A number per token and head; one without effect for heads that are padding."""
    x = jnp.pad(x, ((0, 0), (0, layout.groups * layout.heads - x.shape[1])), constant_values=NOTHING)
    return _pad_to(BLOCK, x, 0.0).T.reshape(layout.groups, layout.heads, -1)


def _take(x: Shaped[Array, "G S *U"], row: Int[Array, "P"]) -> Shaped[Array, "G P *U"]:
    """Rows of every group. As one gather of the first axis: of any other, XLA would transpose the result."""
    groups, size, *unit = x.shape
    index = row + size * jnp.arange(groups, dtype=jnp.int32)[:, None]
    return x.reshape(-1, *unit).at[index].get(mode="promise_in_bounds")


def _in_token_order(stats: Float[Array, "G N s t"], tables: Tables) -> Float[Array, "G s P"]:
    groups, _, size, _ = stats.shape
    return _take(stats.swapaxes(2, 3).reshape(groups, -1, size), tables.row).swapaxes(1, 2)


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
