"""Path A: queries and sums of all tokens stay in a TPU's fast memory; only keys and values are streamed.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, G head groups, N tiles, t rows a tile.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, Shaped

from pallas_kernels.block_sparse_attention import operation
from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.operation import Cotangents, Gradients, Inputs, Partial, Problem
from pallas_kernels.block_sparse_attention.tables import Tables
from pallas_kernels.block_sparse_attention.tile import finite
from pallas_kernels.block_sparse_attention.tpu import resident_kernels
from pallas_kernels.block_sparse_attention.tpu.resident_kernels import LANES, ROWS, TOTAL, Layout, Tiles
from pallas_kernels.block_sparse_attention.types import Pairs

GROUP = ROWS * LANES  # lanes of a token in one pass
VMEM_BYTES = 128 * 2**20  # the largest there is (v5e, v6e); the compiler refuses what another chip cannot hold
VMEM_SLACK = 8 * 2**20  # what the compiler wants beside the arrays: scores of a tile, spilled registers


class Path(NamedTuple):
    """See `operation.Path`."""

    problem: Problem
    layout: Layout

    def tables(self, pairs: Pairs) -> Tables:
        """Pairs by resource."""
        problem = self.problem
        return tables_lib.build(
            pairs.resource,
            pairs.count,
            num_resources=problem.resources,
            max_pairs=problem.max_pairs,
            tile=self.layout.tile,
        )

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, Float[Array, "T K"]]:
        """Sums and running maxima of the routed pairs, merged with what there was."""
        query, query_expert, key, value, pairs = inputs
        layout, (tokens, heads, _) = self.layout, query.shape
        rows = jnp.stack([_to_rows(q.astype(jnp.float32), layout) for q in (query, query_expert)])
        lanes = (_to_lanes(x, layout) for x in (key, value))
        sums, stats, pair_lse = self._run(resident_kernels.forward, rows, *lanes, self._tiles(pairs, tables))
        top, total = (_from_stats(stats, tokens, heads, first, layout) for first in (0, TOTAL))
        new = jnp.maximum(top, start.lse)
        old, local = jnp.exp(top - new), jnp.exp(start.lse - new)
        output = _from_rows(sums, layout, query.shape) * old[..., None] + start.output * local[..., None]
        total = total * old + local
        lse = jnp.log(total) + new
        output = output / jnp.where(total > 0, total, 1.0)[..., None]
        return Partial(output, lse), _mass(pair_lse, lse, pairs, tables)

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """What no tile visited was never written: those gradients are masked."""
        query, query_expert, key, value, pairs = inputs
        layout, (heads, d) = self.layout, query.shape[1:]
        d_output, lse, delta = cotangents
        packed = jnp.stack([_pack(q, d_output, layout) for q in (query, query_expert)])
        stats = _to_stats(lse, delta, layout)
        lanes = (_to_lanes(x, layout) for x in (key, value))
        tiles = self._tiles(pairs, tables)
        d_rows, d_bias, d_key, d_value = self._run(resident_kernels.backward, packed, stats, *lanes, tiles)

        experts, end = tables.begin[self.problem.num_context], tables.begin[-1]
        d_query, d_query_expert = (
            jnp.where(visited, _from_rows(x, layout, query.shape), 0.0)
            for visited, x in zip((experts > 0, end > experts), d_rows, strict=True)
        )
        visited = (jnp.diff(tables.begin) > 0)[:, None, None, None]
        d_key, d_value = (jnp.where(visited, _from_lanes(x, layout, heads, d), 0.0) for x in (d_key, d_value))
        d_bias = tables_lib.to_slots(_to_pairs(d_bias.sum((0, 2)), tables), tables.numbering, self.problem.slots)
        routed = Gradients(d_query, d_query_expert, d_key, d_value, d_bias)
        return jax.tree.map(jnp.add, start, routed)

    def _tiles(self, pairs: Pairs, tables: Tables) -> Tiles:
        tokens, pair = len(pairs.count), tables.pair[:, None]

        def rows(x, fill):
            return tables_lib.from_slots(x, tables.numbering, fill=fill).at[pair].get(mode="fill", fill_value=fill)

        return Tiles(
            resource=tables.resource,
            bounds=jnp.stack([tables.begin[self.problem.num_context], jnp.maximum(tables.begin[-1], 1)]),
            row=ROWS * tables.numbering.token.at[pair].get(mode="fill", fill_value=tokens),
            bias=rows(pairs.bias.astype(jnp.float32), -jnp.inf),
            visible=rows(pairs.visible, 0),
        )

    def _run(self, kernel, *arrays):
        """The kernel for the TPU it is compiled for; interpreted elsewhere."""
        problem = self.problem
        size = vmem_bytes(self.layout, problem.m, problem.dtype.itemsize)
        kernel = functools.partial(kernel, layout=self.layout, scale=problem.scale, vmem_bytes=size)
        tpu, elsewhere = (functools.partial(kernel, interpret=interpret) for interpret in (False, True))
        return jax.lax.platform_dependent(*arrays, tpu=tpu, default=elsewhere)


def plan(problem: Problem) -> Path:
    """Heads in groups; refuses more tokens than fast memory holds."""
    layout = choose_layout(problem.tokens, problem.heads, problem.d, problem.max_pairs / problem.resources)
    vmem_bytes(layout, problem.m, problem.dtype.itemsize)
    return Path(problem, layout)


attend = functools.partial(operation.attend, plan)


def choose_layout(tokens: int, heads: int, d: int, rows: float) -> Layout:
    """Groups of heads that fill a register a token; large tiles where resources have rows (on average) to fill them."""
    d = 2 ** math.ceil(math.log2(d)) if d < LANES else -(-d // LANES) * LANES
    if d > GROUP:
        raise ValueError(f"head size {d}; wanted at most {GROUP}")
    groups = -(-heads // min(TOTAL, GROUP // d))
    tile = 512 if rows >= 1024 else 256 if rows >= 384 else 128
    # One more slot at least, for padding rows; 8 tokens of statistics are a register.
    return Layout(tile, -(-(tokens + 1) // ROWS) * ROWS, groups, -(-heads // groups), d)


def vmem_bytes(layout: Layout, m: int, itemsize: int) -> int:
    """Fast memory of the larger pass, the backward one; refuses what no chip has."""
    token, word = GROUP * 4, LANES * 4
    packed = token if itemsize == 2 else 2 * token
    resident = layout.tokens * (packed + token + word)
    tile = layout.tile * (packed + 2 * token + word)
    table = 2 * 2 * m * layout.lanes * (itemsize + 4)  # keys, values and their gradients, two buffers each
    need = resident + tile + table + VMEM_SLACK
    if need > VMEM_BYTES:
        raise ValueError(
            f"{layout.tokens - 1} tokens need {need / 2**20:.0f} MiB of VMEM in one call; wanted at most "
            f"{VMEM_BYTES // 2**20}: fewer tokens a device, or implementation='xla'"
        )
    return need


def _to_rows(x: Shaped[Array, "T H d"], layout: Layout) -> Shaped[Array, "G V 128"]:
    """Every token a register in every head group."""
    tokens, groups, heads, d = layout.tokens, layout.groups, layout.heads, layout.d
    pad = [(0, full - size) for full, size in zip((tokens, groups * heads, d), x.shape, strict=True)]
    x = jnp.pad(x, pad).reshape(tokens, groups, heads * d)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, GROUP - heads * d)))
    return x.swapaxes(0, 1).reshape(groups, tokens * ROWS, LANES)


def _from_rows(x: Float[Array, "G V 128"], layout: Layout, shape: tuple[int, int, int]) -> Float[Array, "T H d"]:
    groups, heads, d = layout.groups, layout.heads, layout.d
    x = x.reshape(groups, layout.tokens, GROUP)[:, : shape[0], : heads * d].swapaxes(0, 1)
    return x.reshape(shape[0], groups * heads, d)[:, : shape[1], : shape[2]]


def _to_lanes(x: Float[Array, "R m H d"], layout: Layout) -> Float[Array, "R m E"]:
    """Heads side by side, group after group."""
    (resources, m, heads, d), groups = x.shape, layout.groups
    x = jnp.pad(x, ((0, 0), (0, 0), (0, groups * layout.heads - heads), (0, layout.d - d)))
    x = x.reshape(resources, m, groups, -1)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, layout.lanes - x.shape[-1])))
    return x.reshape(resources, m, groups * layout.lanes)


def _from_lanes(x: Float[Array, "R m E"], layout: Layout, heads: int, d: int) -> Float[Array, "R m H d"]:
    (resources, m, _), groups = x.shape, layout.groups
    x = x.reshape(resources, m, groups, layout.lanes)[..., : layout.heads * layout.d]
    return x.reshape(resources, m, groups * layout.heads, layout.d)[:, :, :heads, :d]


def _from_stats(stats: Float[Array, "G W 128"], tokens: int, heads: int, first: int, layout: Layout):
    """Statistic `first` + head of every token: (T, H)."""
    x = stats[:, :tokens, first : first + layout.heads]
    return x.swapaxes(0, 1).reshape(tokens, layout.groups * layout.heads)[:, :heads]


def _to_stats(lse: Float[Array, "T H"], delta: Float[Array, "T H"], layout: Layout) -> Float[Array, "G W 128"]:
    def place(x):
        heads = layout.groups * layout.heads
        x = jnp.pad(x, ((0, layout.tokens - len(x)), (0, heads - x.shape[1])))
        x = x.reshape(layout.tokens, layout.groups, layout.heads)
        return jnp.pad(x, ((0, 0), (0, 0), (0, TOTAL - layout.heads)))

    return jnp.concatenate([place(lse), place(delta)], axis=2).swapaxes(0, 1)


def _mass(pair_lse: Float[Array, "G N h t"], lse: Float[Array, "T H"], pairs: Pairs, tables: Tables):
    groups, tiles, heads, tile = pair_lse.shape
    pair_lse = pair_lse.transpose(1, 3, 0, 2).reshape(tiles, tile, groups * heads)[..., : lse.shape[1]]
    token = tables.numbering.token.at[tables.pair].get(mode="clip")
    mass_Nt = jnp.exp(pair_lse - finite(lse).at[token].get(mode="clip")).mean(-1)
    return tables_lib.to_slots(_to_pairs(mass_Nt, tables), tables.numbering, pairs.resource.shape[1])


def _to_pairs(x: Float[Array, "N t"], tables: Tables) -> Float[Array, "P"]:
    """The value of every pair's row. Tiles past the last were never written, whatever they hold is dropped."""
    zeros = jnp.zeros_like(tables.numbering.token, jnp.float32)
    return zeros.at[tables.pair].set(x, mode="drop", unique_indices=True)


def _pack(query: Float[Array, "T H d"], d_output: Float[Array, "T H d"], layout: Layout) -> Num[Array, "G V 128"]:
    """Query and output gradient of a token side by side: halves of a word, or a register each."""
    q, do = (_to_rows(x, layout) for x in (query, d_output))
    if q.dtype == jnp.bfloat16:
        low, high = (jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in (q, do))
        return low | (high << 16)
    both = jnp.stack([x.reshape(layout.groups, layout.tokens, ROWS, LANES) for x in (q, do)], axis=2)
    return both.reshape(layout.groups, -1, LANES)
