"""Block-sparse attention in plain XLA: tiles of pairs sorted by resource, as batched matrix products.

A step of the loop takes a group of tiles, so that the scores of one step stay in cache and memory grows with T alone.
Every pair leaves a partial result (output and log-sum-exp over its own keys), which are merged per token in the fixed
order of its pairs: the result of a token is bit for bit independent of what later tokens hold.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, P pairs, N tiles a step, t rows a tile.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.block_sparse_attention import operation
from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.operation import Cotangents, Gradients, Inputs, Partial, Problem
from pallas_kernels.block_sparse_attention.tables import Tables
from pallas_kernels.block_sparse_attention.tile import finite, head_major, partial_attention, partial_gradients
from pallas_kernels.block_sparse_attention.types import Pairs

STEP_SCORES = 2**18  # scores of one step: in cache, and enough of them for every core
MERGE_ROWS = 1024  # pairs merged a step: weighted outputs in cache, never all of them at once


class Path(NamedTuple):
    """See `operation.Path`."""

    problem: Problem
    tile: int  # rows of a tile
    group: int  # tiles a step

    def tables(self, pairs: Pairs) -> Tables:
        """The tiles, and as many empty ones as the last step may read past their end."""
        problem = self.problem
        return tables_lib.build(
            pairs.resource,
            pairs.count,
            num_resources=problem.resources,
            max_pairs=problem.max_pairs,
            tile=self.tile,
            slack=self.group - 1,
        )

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, Float[Array, "T K"]]:
        """Every pair on its own, then one distribution per token."""
        token_P, _, count = tables.numbering
        output_PHd, lse_PH = _pair_partials(self, inputs, tables)
        whole = _merge(output_PHd, lse_PH, token_P, count.sum(), start)
        mass_P = jnp.exp(lse_PH - finite(whole.lse).at[token_P].get(mode="clip")).mean(1)
        return whole, tables_lib.to_slots(mass_P, tables.numbering, self.problem.slots)

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """The context's tiles with the rotated queries, then the experts' with the others."""
        _, _, key, value, _, _ = inputs

        def step(query, group: _Group, state):
            d_query, d_key, d_value, d_bias_P = state
            k, v = _take(key, group.resource), _take(value, group.resource)
            q, do, lse, delta = (_take(x, group.token) for x in (query, *cotangents))
            dq, dk, dv, db = partial_gradients(q, k, v, do, group.bias - lse, delta, group.seen, self.problem.scale)
            return (
                d_query.at[group.token].add(head_major(dq), mode="drop"),
                d_key.at[group.resource].add(head_major(dk)),
                d_value.at[group.resource].add(head_major(dv)),
                d_bias_P.at[group.pair].set(db, mode="drop", unique_indices=True),
            )

        loop = functools.partial(_for_groups, path=self, pairs=inputs.pairs, tables=tables)
        experts, end = tables.begin[self.problem.num_context], tables.begin[-1]
        shared = start.key, start.value, jnp.zeros_like(tables.numbering.token, jnp.float32)
        d_query, *shared = loop(functools.partial(step, inputs.query), (start.query, *shared), 0, experts)
        state = start.query_expert, *shared
        d_query_expert, *shared, d_bias_P = loop(functools.partial(step, inputs.query_expert), state, experts, end)
        d_bias = start.bias + tables_lib.to_slots(d_bias_P, tables.numbering, self.problem.slots)
        return Gradients(d_query, d_query_expert, *shared, d_bias)


def plan(problem: Problem) -> Path:
    """Rows a tile and tiles a step, from static shapes: measured on a CPU, where padding costs as much as work."""
    rows = problem.max_pairs / problem.resources
    tile = max(8, min(64, 2 ** math.ceil(math.log2(rows / 2)))) if rows > 2 else 8
    tiles = -(-problem.max_pairs // tile) + min(problem.resources, problem.max_pairs)
    return Path(problem, tile, max(1, min(tiles, STEP_SCORES // (problem.heads * tile * problem.m))))


attend = functools.partial(operation.attend, plan)


class _Group(NamedTuple):
    """The rows of one step's tiles. Padding rows: pair and token out of range, bias -inf, nothing visible."""

    pair: Int[Array, "N t"]
    token: Int[Array, "N t"]
    bias: Float[Array, "N 1 t"]
    seen: Bool[Array, "N 1 t m"]
    resource: Int[Array, "N"]


def _for_groups(step: Callable, state, first_tile, last_tile, *, path: Path, pairs: Pairs, tables: Tables):
    """Fold step(group, state) -> state over the tiles from `first_tile` to `last_tile`, several at once."""
    bias_P = tables_lib.from_slots(pairs.bias.astype(jnp.float32), tables.numbering, fill=-jnp.inf)
    visible_P = tables_lib.from_slots(pairs.visible, tables.numbering, fill=0)

    def body(i, state):
        first = first_tile + i * path.group
        pair = jax.lax.dynamic_slice_in_dim(tables.pair, first, path.group)
        past = first + jnp.arange(path.group) >= last_tile  # the last group reaches beyond the range
        pair = jnp.where(past[:, None], len(bias_P), pair)
        group = _Group(
            pair=pair,
            token=tables.numbering.token.at[pair].get(mode="fill", fill_value=len(pairs.count)),
            bias=bias_P.at[pair].get(mode="fill", fill_value=-jnp.inf)[:, None],
            seen=jnp.arange(path.problem.m) < visible_P.at[pair].get(mode="fill", fill_value=0)[:, None, :, None],
            resource=jax.lax.dynamic_slice_in_dim(tables.resource, first, path.group),
        )
        # Without the barrier XLA computes these indices anew for every element of the gathers they feed.
        return step(jax.lax.optimization_barrier(group), state)

    return jax.lax.fori_loop(0, -(-(last_tile - first_tile) // path.group), body, state)


def _take(x: Shaped[Array, "S *U"], index: Int[Array, "*I"]) -> Shaped[Array, "..."]:
    """Rows of x, head-major; an index out of range gives some row."""
    return head_major(x.at[index].get(mode="clip", wrap_negative_indices=False))


def _pair_partials(path: Path, inputs: Inputs, tables: Tables) -> tuple[Float[Array, "P H d"], Float[Array, "P H"]]:
    """Output and log-sum-exp of every pair over the keys of its own resource alone."""
    query, query_expert, key, value, pairs, _ = inputs

    def step(query, group: _Group, state):
        output_PHd, lse_PH = state
        k, v = _take(key, group.resource), _take(value, group.resource)
        output, lse = partial_attention(_take(query, group.token), k, v, group.seen, path.problem.scale)
        return (
            output_PHd.at[group.pair].set(head_major(output), mode="drop", unique_indices=True),
            lse_PH.at[group.pair].set(head_major(lse + group.bias), mode="drop", unique_indices=True),
        )

    (heads, d), zeros = key.shape[2:], functools.partial(jnp.zeros_like, key, jnp.float32)
    state = (
        zeros(shape=(len(tables.numbering.token), heads, d)),
        zeros(shape=(len(tables.numbering.token), heads)) - jnp.inf,
    )
    loop = functools.partial(_for_groups, path=path, pairs=pairs, tables=tables)
    experts, end = tables.begin[path.problem.num_context], tables.begin[-1]
    state = loop(functools.partial(step, query), state, 0, experts)
    return loop(functools.partial(step, query_expert), state, experts, end)


def _merge(output_PHd, lse_PH, token_P, pairs: Int[Array, ""], start: Partial) -> Partial:
    """One distribution per token from the partial ones: log-sum-exp, adding in the order of the token's pairs."""
    output, lse = start
    top = finite(lse.at[token_P].max(lse_PH, mode="drop"))
    weight = jnp.exp(lse - top)

    def step(i, state):
        output, total = state
        rows = i * MERGE_ROWS + jnp.arange(MERGE_ROWS)
        token = token_P.at[rows].get(mode="fill", fill_value=len(lse))
        weight = jnp.exp(lse_PH.at[rows].get(mode="clip") - top.at[token].get(mode="clip"))
        weighted = output_PHd.at[rows].get(mode="clip") * weight[..., None]
        return output.at[token].add(weighted, mode="drop"), total.at[token].add(weight, mode="drop")

    output, total = jax.lax.fori_loop(0, -(-pairs // MERGE_ROWS), step, (output * weight[..., None], weight))
    return Partial(output / jnp.where(total > 0, total, 1.0)[..., None], jnp.log(total) + top)
