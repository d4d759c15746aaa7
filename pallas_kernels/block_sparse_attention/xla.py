"""Block-sparse attention in plain XLA: tiles of pairs sorted by resource, as batched matrix products.

A step of the loop takes a group of tiles: on a CPU the scores of one step stay in cache, and memory grows with T alone.
Every pair leaves a partial result (output and log-sum-exp over its own keys), which are merged per token in the fixed
order of its pairs: the result of a token is bit for bit independent of what later tokens hold.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, P pairs, N tiles a step, t rows a tile,
T2 = 2 T.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.block_sizes import BlockSizes
from pallas_kernels.block_sparse_attention.tables import Tables
from pallas_kernels.block_sparse_attention.tile import finite, partial_attention, partial_gradients, step_scores
from pallas_kernels.block_sparse_attention.types import Cotangents, Gradients, Inputs, Pairs, Partial, Problem

CLIP = {"mode": "clip", "wrap_negative_indices": False}  # an index out of range gives some row
MERGE_ROWS = 1024  # pairs merged a step: weighted outputs in cache, never all of them at once
GPU_MERGE_ROWS = 2**16


class Path(NamedTuple):
    """See `operation.Path`."""

    problem: Problem
    tile: int  # rows of a tile
    group: int  # tiles a step

    @property
    def block_sizes(self) -> BlockSizes:
        """A tile, and the tiles of a step."""
        return BlockSizes(pairs=self.tile, tiles=self.group)

    def tables(self, pairs: Pairs) -> Tables:
        """The tiles, and as many empty ones as the last step may read past their end."""
        most = self.problem.resources, self.problem.max_pairs
        return tables_lib.build(pairs.resource, pairs.count, *most, self.tile, slack=self.group - 1)

    def _group(self, i, tables: Tables, bias_P, visible_P):
        """The tiles of step i: pairs, and the rows of their queries, [N, t]; biases [N, 1, t], what is seen
        [N, 1, t, m], resources [N]. Padding rows: pair and row out of range, bias -inf, nothing visible."""
        first = i * self.group
        pair, resource = (jax.lax.dynamic_slice_in_dim(x, first, self.group) for x in (tables.pair, tables.resource))
        kind = jnp.where(resource < self.problem.num_context, 0, self.problem.tokens)[:, None]
        row = kind + tables.numbering.token.at[pair].get(mode="fill", fill_value=2 * self.problem.tokens)
        bias = bias_P.at[pair].get(mode="fill", fill_value=-jnp.inf)[:, None]
        seen = jnp.arange(self.problem.m) < visible_P.at[pair].get(mode="fill", fill_value=0)[:, None, :, None]
        # Without the barrier XLA computes these indices anew for every element of the gathers they feed.
        return jax.lax.optimization_barrier((pair, row, bias, seen, resource))

    def _steps(self, tables: Tables) -> Int[Array, ""]:
        return -(-tables.begin[-1] // self.group)

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, Float[Array, "P H"]]:
        """Output and log-sum-exp of every pair over its own keys alone, then one distribution per token."""
        *_, key, value, pairs, _ = inputs
        numbering, (token_P, _, count), (heads, d) = tables.numbering, tables.numbering, key.shape[2:]
        bias_P = tables_lib.from_slots(pairs.bias.astype(jnp.float32), numbering, fill=-jnp.inf)
        visible_P = tables_lib.from_slots(pairs.visible, numbering, fill=0)
        queries = _both_kinds(inputs.query, inputs.query_expert)

        def attend(i, state):
            pair, row, bias, seen, resource = self._group(i, tables, bias_P, visible_P)
            arrays = (queries, row), (key, resource), (value, resource)
            q, k, v = (x.at[index].get(**CLIP).swapaxes(1, 2) for x, index in arrays)
            output, lse = partial_attention(q, k, v, seen, self.problem.scale)
            new = output.swapaxes(1, 2), (lse + bias).swapaxes(1, 2)
            both = zip(state, new, strict=True)
            return tuple(x.at[pair].set(y, mode="drop", unique_indices=True) for x, y in both)

        zeros = functools.partial(jnp.zeros_like, key, jnp.float32)
        state = zeros(shape=(len(token_P), heads, d)), zeros(shape=(len(token_P), heads)) - jnp.inf
        output_PHd, lse_PH = jax.lax.fori_loop(0, self._steps(tables), attend, state)

        top = start.lse.at[token_P].max(lse_PH, mode="drop")
        top = jnp.where(top > -jnp.inf, top, 0.0)
        weight = jnp.exp(start.lse - top)

        at_once = GPU_MERGE_ROWS if chips.is_gpu() else MERGE_ROWS

        def merge(i, state):
            output, total = state
            rows = i * at_once + jnp.arange(at_once)
            token = token_P.at[rows].get(mode="fill", fill_value=len(top))
            weight = jnp.exp(lse_PH.at[rows].get(mode="clip") - top.at[token].get(mode="clip"))
            weighted = output_PHd.at[rows].get(mode="clip") * weight[..., None]
            # Adding in the order of a token's pairs.
            return output.at[token].add(weighted, mode="drop"), total.at[token].add(weight, mode="drop")

        sums = start.output * weight[..., None], weight
        output, total = jax.lax.fori_loop(0, -(-count.sum() // at_once), merge, sums)
        whole = Partial(output / jnp.where(total > 0, total, 1.0)[..., None], jnp.log(total) + top)
        return whole, lse_PH

    def mass(
        self, inputs: Inputs, tables: Tables, parts: Float[Array, "P H"], lse: Float[Array, "T H"]
    ) -> Float[Array, "T K"]:
        """From the log-sum-exp of every pair."""
        numbering = tables.numbering
        mass_P = jnp.exp(parts - finite(lse).at[numbering.token].get(mode="clip")).mean(1)
        return tables_lib.to_slots(mass_P, numbering, self.problem.slots)

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """The scores of every tile again, and what follows from them."""
        *_, key, value, pairs, _ = inputs
        numbering = tables.numbering
        bias_P = tables_lib.from_slots(pairs.bias.astype(jnp.float32), numbering, fill=-jnp.inf)
        visible_P = tables_lib.from_slots(pairs.visible, numbering, fill=0)
        queries, tokens = _both_kinds(inputs.query, inputs.query_expert), self.problem.tokens

        def step(i, state):
            d_queries, d_key, d_value, d_bias_P = state
            pair, row, bias, seen, resource = self._group(i, tables, bias_P, visible_P)
            token = jnp.where(row < tokens, row, row - tokens)
            arrays = (queries, row), *((x, token) for x in cotangents), (key, resource), (value, resource)
            q, do, lse, delta, k, v = (x.at[index].get(**CLIP).swapaxes(1, 2) for x, index in arrays)
            dq, dk, dv, db = partial_gradients(q, k, v, do, bias - lse, delta, seen, self.problem.scale)
            return (
                d_queries.at[row].add(dq.swapaxes(1, 2), mode="drop"),
                d_key.at[resource].add(dk.swapaxes(1, 2)),
                d_value.at[resource].add(dv.swapaxes(1, 2)),
                d_bias_P.at[pair].set(db, mode="drop", unique_indices=True),
            )

        d_queries = _both_kinds(start.query, start.query_expert)
        state = d_queries, start.key, start.value, jnp.zeros_like(numbering.token, jnp.float32)
        d_queries, d_key, d_value, d_bias_P = jax.lax.fori_loop(0, self._steps(tables), step, state)
        d_bias = start.bias + tables_lib.to_slots(d_bias_P, numbering, self.problem.slots)
        return Gradients(d_queries[:tokens], d_queries[tokens:], d_key, d_value, d_bias).finished(self.problem)


def _both_kinds(query: Float[Array, "T H d"], query_expert: Float[Array, "T H d"]) -> Float[Array, "T2 H d"]:
    """Queries of context, then those of experts: a tile reads the rows of its kind, and one loop serves both."""
    return jnp.concatenate([query, query_expert])


def plan(problem: Problem) -> Path:
    """Rows a tile and tiles a step, from static shapes. Tiles are chosen for a CPU, where padding costs as much as
    work. Of more rows than keys a tile has no use: what it spares in reading keys is less than reading the queries."""
    rows = problem.max_pairs / problem.resources
    sizes = problem.block_sizes
    tile = sizes.pairs or (max(8, min(problem.m, 64, 2 ** math.ceil(math.log2(rows / 2)))) if rows > 2 else 8)
    tiles = -(-problem.max_pairs // tile) + min(problem.resources, problem.max_pairs)
    step = sizes.tiles or step_scores() // (problem.heads * tile * problem.m)
    return Path(problem, tile, max(1, min(tiles, step)))
