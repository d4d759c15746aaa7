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

from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.tables import Tables
from pallas_kernels.block_sparse_attention.tile import finite, head_major, partial_attention, partial_gradients
from pallas_kernels.block_sparse_attention.types import Attention, Pairs, Window
from pallas_kernels.block_sparse_attention.window import window_attention, window_gradients

STEP_SCORES = 2**18  # scores of one step: in cache, and enough of them for every core
MERGE_ROWS = 1024  # pairs merged a step: weighted outputs in cache, never all of them at once


class _Static(NamedTuple):
    num_context: int
    scale: float
    tile: int  # rows of a tile
    group: int  # tiles a step


def attend(
    query: Float[Array, "T H d"],
    query_expert: Float[Array, "T H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    pairs: Pairs,
    window: Window | None,
    *,
    num_context: int,
    max_pairs: int,
    scale: float,
) -> Attention:
    """See `interface.block_sparse_attention`."""
    slots = pairs.resource.shape[1]
    if slots == 0:  # one slot that nobody uses, so that no shape below is zero
        pairs = Pairs(*(jnp.zeros_like(x, shape=(len(query), 1)) for x in pairs[:3]), jnp.zeros_like(pairs.count))
    max_pairs = max(1, min(max_pairs, pairs.resource.size))
    inputs = equally_varying((query, query_expert, key, value, pairs, window))
    tile, group = _tiling(max_pairs, *key.shape[:3])
    tables = tables_lib.build(
        inputs[4].resource, inputs[4].count, num_resources=len(key), max_pairs=max_pairs, tile=tile, slack=group - 1
    )
    output, lse, mass = _attend(_Static(num_context, scale, tile, group), *inputs, tables)
    return Attention(output, lse, jax.lax.stop_gradient(mass[:, :slots]))


def _tiling(max_pairs: int, resources: int, m: int, heads: int) -> tuple[int, int]:
    """Rows a tile and tiles a step, from static shapes: measured on a CPU, where padding costs as much as work."""
    rows = max_pairs / resources
    tile = max(8, min(64, 2 ** math.ceil(math.log2(rows / 2)))) if rows > 2 else 8
    tiles = -(-max_pairs // tile) + min(resources, max_pairs)
    return tile, max(1, min(tiles, STEP_SCORES // (heads * tile * m)))


def equally_varying(tree):
    """Inside shard_map: let every array vary over the mesh axes that any of them varies over.

    Loops want carries of one type. Done outside the custom VJP, so that autodiff adds the sums over those axes.
    """
    zero = sum(jnp.zeros_like(x, jnp.int32, shape=()) for x in jax.tree.leaves(tree))
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


class _Group(NamedTuple):
    """The rows of one step's tiles. Padding rows: pair and token out of range, bias -inf, nothing visible."""

    pair: Int[Array, "N t"]
    token: Int[Array, "N t"]
    bias: Float[Array, "N 1 t"]
    seen: Bool[Array, "N 1 t m"]
    resource: Int[Array, "N"]


def _for_groups(step: Callable, state, first_tile, last_tile, *, static: _Static, pairs: Pairs, tables: Tables, m: int):
    """Fold step(group, state) -> state over the tiles from `first_tile` to `last_tile`, several at once."""
    bias_P = tables_lib.from_slots(pairs.bias.astype(jnp.float32), tables.numbering, fill=-jnp.inf)
    visible_P = tables_lib.from_slots(pairs.visible, tables.numbering, fill=0)

    def body(i, state):
        first = first_tile + i * static.group
        pair = jax.lax.dynamic_slice_in_dim(tables.pair, first, static.group)
        past = first + jnp.arange(static.group) >= last_tile  # the last group reaches beyond the range
        pair = jnp.where(past[:, None], len(bias_P), pair)
        group = _Group(
            pair=pair,
            token=tables.numbering.token.at[pair].get(mode="fill", fill_value=len(pairs.count)),
            bias=bias_P.at[pair].get(mode="fill", fill_value=-jnp.inf)[:, None],
            seen=jnp.arange(m) < visible_P.at[pair].get(mode="fill", fill_value=0)[:, None, :, None],
            resource=jax.lax.dynamic_slice_in_dim(tables.resource, first, static.group),
        )
        # Without the barrier XLA computes these indices anew for every element of the gathers they feed.
        return step(jax.lax.optimization_barrier(group), state)

    return jax.lax.fori_loop(0, -(-(last_tile - first_tile) // static.group), body, state)


def _take(x: Shaped[Array, "S *U"], index: Int[Array, "*I"]) -> Shaped[Array, "..."]:
    """Rows of x, head-major; an index out of range gives some row."""
    return head_major(x.at[index].get(mode="clip", wrap_negative_indices=False))


def _pair_partials(
    static: _Static, query, query_expert, key, value, pairs: Pairs, tables: Tables
) -> tuple[Float[Array, "P H d"], Float[Array, "P H"]]:
    """Output and log-sum-exp of every pair over the keys of its own resource alone."""

    def step(query, group: _Group, state):
        output_PHd, lse_PH = state
        k, v = _take(key, group.resource), _take(value, group.resource)
        output, lse = partial_attention(_take(query, group.token), k, v, group.seen, static.scale)
        return (
            output_PHd.at[group.pair].set(head_major(output), mode="drop", unique_indices=True),
            lse_PH.at[group.pair].set(head_major(lse + group.bias), mode="drop", unique_indices=True),
        )

    (m, heads, d), zeros = key.shape[1:], functools.partial(jnp.zeros_like, key, jnp.float32)
    state = (
        zeros(shape=(len(tables.numbering.token), heads, d)),
        zeros(shape=(len(tables.numbering.token), heads)) - jnp.inf,
    )
    loop = functools.partial(_for_groups, static=static, pairs=pairs, tables=tables, m=m)
    experts, end = tables.begin[static.num_context], tables.begin[-1]
    state = loop(functools.partial(step, query), state, 0, experts)
    return loop(functools.partial(step, query_expert), state, experts, end)


def _merge(output_PHd, lse_PH, token_P, pairs: Int[Array, ""], window_part) -> tuple[Array, Array]:
    """One distribution per token from the partial ones: log-sum-exp, adding in the order of the token's pairs."""
    output, lse = window_part
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
    return output / jnp.where(total > 0, total, 1.0)[..., None], jnp.log(total) + top


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, query_expert, key, value, pairs, window, tables):
    return _forward(static, query, query_expert, key, value, pairs, window, tables)[0]


def _forward(static, query, query_expert, key, value, pairs, window, tables):
    """Output, log-sum-exp and mass; what the backward pass needs of them."""
    output_PHd, lse_PH = _pair_partials(static, query, query_expert, key, value, pairs, tables)
    if window is None:
        window_part = jnp.zeros_like(query, jnp.float32), jnp.full_like(query[..., 0], -jnp.inf, jnp.float32)
    else:
        window_part = window_attention(query, key, value, window, static.scale)
    output, lse = _merge(output_PHd, lse_PH, tables.numbering.token, tables.numbering.count.sum(), window_part)
    mass_P = jnp.exp(lse_PH - finite(lse).at[tables.numbering.token].get(mode="clip")).mean(1)
    mass = tables_lib.to_slots(mass_P, tables.numbering, pairs.resource.shape[1])
    # The float32 output is kept: from a rounded one the gradient of every bias would be off by the rounding.
    residuals = query, query_expert, key, value, pairs, window, tables, output, lse
    return (output.astype(query.dtype), lse, mass), residuals


def _backward(static, residuals, cotangents):
    """Gradients from the saved global log-sum-exp: scores are recomputed, nothing of size P x m was kept."""
    query, query_expert, key, value, pairs, window, tables, output, lse = residuals
    d_output, d_lse, _ = cotangents
    some = lse > -jnp.inf  # a token that attends to nothing: every gradient exactly 0, whatever its cotangents
    d_output = jnp.where(some[..., None], d_output, 0)
    delta = jnp.einsum("thd,thd->th", output, d_output, preferred_element_type=jnp.float32)
    delta = jnp.where(some, delta - d_lse, 0.0)
    lse = finite(lse)

    d_query, d_key, d_value, d_window = (jnp.zeros_like(x, jnp.float32) for x in (query, key, value, pairs.count))
    if window is not None:
        state = d_query, d_key, d_value, d_window
        d_query, d_key, d_value, d_window = window_gradients(
            query, key, value, window, d_output, lse, delta, state, static.scale
        )

    def step(query, group: _Group, state):
        d_query, d_key, d_value, d_bias_P = state
        k, v, q, do = (
            *(_take(x, group.resource) for x in (key, value)),
            *(_take(x, group.token) for x in (query, d_output)),
        )
        shift = group.bias - _take(lse, group.token)
        dq, dk, dv, db = partial_gradients(q, k, v, do, shift, _take(delta, group.token), group.seen, static.scale)
        return (
            d_query.at[group.token].add(head_major(dq), mode="drop"),
            d_key.at[group.resource].add(head_major(dk)),
            d_value.at[group.resource].add(head_major(dv)),
            d_bias_P.at[group.pair].set(db, mode="drop", unique_indices=True),
        )

    loop = functools.partial(_for_groups, static=static, pairs=pairs, tables=tables, m=key.shape[1])
    experts, end = tables.begin[static.num_context], tables.begin[-1]
    shared = d_key, d_value, jnp.zeros_like(tables.numbering.token, jnp.float32)
    d_query, *shared = loop(functools.partial(step, query), (d_query, *shared), 0, experts)
    state = jnp.zeros_like(d_query), *shared
    d_query_expert, d_key, d_value, d_bias_P = loop(functools.partial(step, query_expert), state, experts, end)

    d_bias = tables_lib.to_slots(d_bias_P, tables.numbering, pairs.bias.shape[1])
    d_pairs = Pairs(None, d_bias.astype(pairs.bias.dtype), None, None)
    d_window = None if window is None else Window(d_window.astype(window.bias.dtype), None)
    d_query, d_query_expert, d_key = (static.scale * x for x in (d_query, d_query_expert, d_key))
    gradients = (d.astype(query.dtype) for d in (d_query, d_query_expert, d_key, d_value))
    return *gradients, d_pairs, d_window, None


_attend.defvjp(_forward, _backward)
