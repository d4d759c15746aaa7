"""Path C: dense attention under a bias row per resource, for tokens that meet a good part of all resources.

A tile of tokens meets every block of resources of which some token chose one; whom it did not choose, a token does not
see. Where that is most of them, nothing is sorted and nothing gathered, and the price is the pairs that nobody chose:
it is the faster path when more than a quarter to two fifths of the pairs are chosen, as in short contexts.

A block is of context chunks or of experts, never of both: they meet different queries.

Shapes: T tokens, W tokens padded to whole tiles, K slots, R resources, m keys a resource, H heads, d head size,
B blocks, n resources a block, S keys of all blocks, G head groups, h heads a group, E lanes of a token, D = h*d,
t tokens a tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.block_sizes import BlockSizes
from pallas_kernels.block_sparse_attention.tile import finite
from pallas_kernels.block_sparse_attention.tpu import dense_kernels
from pallas_kernels.block_sparse_attention.tpu import window as tpu_window
from pallas_kernels.block_sparse_attention.tpu.dense_kernels import Arrays, Layout, Steps
from pallas_kernels.block_sparse_attention.tpu.lanes import from_lanes, group_heads, pad_rows, to_lanes, to_stats
from pallas_kernels.block_sparse_attention.types import Cotangents, Gradients, Inputs, Pairs, Partial, Problem
from pallas_kernels.tpu import LANES, compiled_or_interpreted, round_up

SUBLANES = 16  # rows of a register of bfloat16; float32 has half as many
GROUP = 1024  # lanes of a head group: more make code that takes long to compile
TILE, KEYS = 512, 512  # a tile and a block: what is read of a resource, or added to a sum, is small beside the scores
VMEM_BYTES = 56 * 2**20  # of the 64 MiB that the smallest chips have (v5p, TPU7x)
VMEM_SLACK = 6 * 2**20  # what the compiler wants beside the arrays: scores and weights of two heads


class Tables(NamedTuple):
    """The pairs that count, and the steps of both passes: by tile (forward), by block (backward)."""

    chosen: Int[Array, "T K"]  # the row of the resource; -1 where a slot is not used
    by_tile: Steps
    by_block: Steps


class Path(NamedTuple):
    """See `operation.Path`. A row is a resource, or padding of the last block of its kind."""

    problem: Problem
    layout: Layout

    @property
    def block_sizes(self) -> BlockSizes:
        """A tile of tokens, and the keys of a block of resources."""
        return BlockSizes(tokens=self.layout.tile, keys=self.layout.keys)

    @property
    def _tokens(self) -> int:
        return self.layout.tiles * self.layout.tile  # padded to whole tiles

    def tables(self, pairs: Pairs) -> Tables:
        """Pairs past the bound are not chosen."""
        problem, layout = self.problem, self.layout
        first = jnp.cumsum(pairs.count, dtype=jnp.int32) - pairs.count
        used = jnp.arange(problem.slots) < jnp.clip(problem.max_pairs - first, 0, pairs.count)[:, None]
        padding = jnp.where(pairs.resource < problem.num_context, 0, -problem.num_context % layout.block)
        chosen = jnp.where(used, pairs.resource + padding, -1)
        block = jnp.where(used, chosen // layout.block, -1)
        block = pad_rows(block, self._tokens, fill=-1).reshape(layout.tiles, -1)
        wanted = (jnp.arange(sum(layout.blocks))[:, None, None] == block).any(2)
        by_block, by_tile = _places(wanted), _places(wanted.T)
        return Tables(chosen, Steps(*by_tile), Steps(by_block[1], by_block[0], by_block[2]))

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, Float[Array, "G B hn W"]]:
        """The sums of a tile begin as the window's."""
        layout, (tokens, heads, d) = self.layout, inputs.query.shape
        state = self._lanes(start.output), to_stats(start.lse, layout, self._tokens, fill=-jnp.inf)
        output, lse, pair_lse = self._run(dense_kernels.forward, self._arrays(inputs, tables), *state, tables.by_tile)
        whole = Partial(
            from_lanes(output[:tokens], layout, heads, d), lse.reshape(-1, lse.shape[-1])[:heads, :tokens].T
        )
        return whole, pair_lse

    def mass(
        self, inputs: Inputs, tables: Tables, parts: Float[Array, "G B hn W"], lse: Float[Array, "T H"]
    ) -> Float[Array, "T K"]:
        """From the log-sum-exp of every row of a block; heads that are padding do not count."""
        layout, heads = self.layout, self.problem.heads
        parts = parts.reshape(*parts.shape[:2], layout.heads, layout.block, -1)
        share = jnp.exp(parts - to_stats(finite(lse), layout, self._tokens, fill=0.0)[:, None, :, None])
        real = jnp.arange(layout.groups * layout.heads).reshape(layout.groups, 1, -1, 1, 1) < heads
        rows = jnp.where(real, share, 0.0).sum((0, 2)).reshape(-1, self._tokens)
        return _to_slots(rows / heads, tables.chosen)

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """One pass: the gradients of all queries stay in fast memory."""
        layout, (tokens, heads, d) = self.layout, inputs.query.shape
        given = self._lanes(cotangents.output), *(to_stats(x, layout, self._tokens, fill=0.0) for x in cotangents[1:])
        d_query, d_key, d_value, d_rows = self._run(
            dense_kernels.backward, self._arrays(inputs, tables), *given, tables.by_block
        )
        d_query = from_lanes(d_query.reshape(2, self._tokens, -1)[:, :tokens], layout, heads, d)
        d_queries = (x if blocks else jnp.zeros_like(x) for x, blocks in zip(d_query, layout.blocks, strict=True))
        d_bias = _to_slots(d_rows.sum(0).reshape(-1, d_rows.shape[-1]), tables.chosen)
        routed = Gradients._make((*d_queries, self._resources(d_key), self._resources(d_value), d_bias))
        return jax.tree.map(jnp.add, start, routed).finished(self.problem)

    def _arrays(self, inputs: Inputs, tables: Tables) -> Arrays:
        pairs, layout = inputs.pairs, self.layout

        def row(x: Shaped[Array, "T K"]) -> Shaped[Array, "B n W"]:
            # Compared, not scattered: a few operations a pair. 0 where a token did not choose the row.
            number = jnp.arange(sum(layout.blocks) * layout.block, dtype=jnp.int32)
            x = jnp.where(number[:, None, None] == tables.chosen.T, x.T, 0).sum(1)
            return pad_rows(x.T, self._tokens).T.reshape(-1, layout.block, self._tokens)

        rows = row(pairs.bias.astype(jnp.float32)), row(jnp.clip(pairs.visible, 0, self.problem.m))
        query = jnp.stack([self._lanes(x) for x in (inputs.query, inputs.query_expert)])
        return Arrays(*rows, query, self._table(inputs.key), self._table(inputs.value))

    def _lanes(self, x: Shaped[Array, "T H d"]) -> Shaped[Array, "W E"]:
        """Heads side by side, for every token."""
        return pad_rows(to_lanes(x, self.layout), self._tokens)

    def _table(self, x: Shaped[Array, "R m H d"]) -> Shaped[Array, "S E"]:
        """Heads side by side, for every key of every row; nothing moves where nothing is padded."""
        layout, context = self.layout, self.problem.num_context
        x = jnp.pad(to_lanes(x, layout), ((0, 0), (0, layout.m - self.problem.m), (0, 0)))
        if sum(layout.blocks) * layout.block > len(x):
            parts = zip((x[:context], x[context:]), layout.blocks, strict=True)
            x = jnp.concatenate([pad_rows(part, blocks * layout.block) for part, blocks in parts])
        return x.reshape(-1, x.shape[-1])

    def _resources(self, x: Float[Array, "S E"]) -> Float[Array, "R m H d"]:
        """The inverse of `_table`."""
        layout, problem = self.layout, self.problem
        x = from_lanes(x.reshape(-1, layout.m, x.shape[1])[:, : problem.m], layout, problem.heads, problem.d)
        if len(x) > problem.resources:
            experts = x[layout.blocks[0] * layout.block :]
            x = jnp.concatenate([x[: problem.num_context], experts[: problem.resources - problem.num_context]])
        return x

    def _run(self, kernel, *arrays):
        size = vmem_bytes(self.layout, self.problem.dtype.itemsize)
        options = {"layout": self.layout, "scale": self.problem.scale, "vmem_bytes": size}
        return compiled_or_interpreted(kernel, *arrays, **options)


def plan(problem: Problem) -> Path:
    """The largest groups of heads with which the gradients of all tokens' queries fit into fast memory."""
    if problem.m > tpu_window.MOST_KEYS:
        raise ValueError(
            f"m={problem.m} keys a resource; wanted at most {tpu_window.MOST_KEYS}: smaller resources, or "
            "implementation='pallas_tpu_resident'"
        )
    sizes = problem.block_sizes
    sizes.require_multiple("tokens", LANES)
    tile = min(sizes.tokens or TILE, round_up(problem.tokens, LANES))
    tiles, m = -(-problem.tokens // tile), round_up(problem.m, SUBLANES)
    kinds = problem.num_context, problem.resources - problem.num_context
    sizes.require_multiple("keys", m)
    block = max(1, min((sizes.keys or KEYS) // m, max(kinds)))
    blocks = -(-kinds[0] // block), -(-kinds[1] // block)
    cores = chips.current_chip().device_cores
    for lanes in (GROUP >> i for i in range(4)):
        layout = Layout(tile, tiles, block, blocks, m, *group_heads(problem.heads, problem.d, lanes, cores))
        if vmem_bytes(layout, problem.dtype.itemsize) <= VMEM_BYTES:
            return Path(problem, layout)
    raise ValueError(
        f"{problem.tokens} tokens of head size {problem.d} and resources of {problem.m} keys need "
        f"{vmem_bytes(layout, problem.dtype.itemsize) / 2**20:.0f} MiB of VMEM in one call; wanted at most "
        f"{VMEM_BYTES // 2**20}: fewer tokens a device, or implementation='xla'"
    )


def vmem_bytes(layout: Layout, itemsize: int) -> int:
    """Fast memory of the pass that wants more. Blocks have two buffers: one is filled while the other is used."""
    row, tokens, keys = 4 * layout.tile, layout.tile * layout.lanes, layout.keys * layout.lanes
    stats = layout.heads * row
    shift = layout.keys * row
    forward = 2 * (tokens * (itemsize + 8) + 2 * keys * itemsize + layout.block * stats + 2 * stats) + 4 * tokens
    backward = 2 * (2 * tokens * itemsize + keys * 2 * (itemsize + 4) + 2 * stats) + layout.tiles * 4 * tokens
    return max(forward, backward) + shift + VMEM_SLACK


def _places(wanted: Bool[Array, "a b"]) -> tuple[Int[Array, "N"], Int[Array, "N"], Int[Array, ""]]:
    """Rows and columns of all that is wanted, in order, -1 past the last; and how many there are.

    A row in which nothing is wanted has its first column, so that its output is written.
    """
    rows, columns = wanted.shape
    wanted |= (jnp.arange(columns) == 0) & ~wanted.any(1, keepdims=True)
    number = jnp.cumsum(wanted.ravel(), dtype=jnp.int32)
    place = jnp.searchsorted(number, jnp.arange(1, rows * columns + 2, dtype=jnp.int32)).astype(jnp.int32)
    there = place < rows * columns
    return jnp.where(there, place // columns, -1), jnp.where(there, place % columns, -1), number[-1]


def _to_slots(x_RT: Float[Array, "R W"], chosen: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """What the rows hold for every slot's resource; 0 at unused slots, whatever unvisited places hold."""
    match = jnp.arange(len(x_RT), dtype=jnp.int32)[:, None, None] == chosen.T
    return jnp.where(match, x_RT[:, None, : len(chosen)], 0.0).sum(0).T
