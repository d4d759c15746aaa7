"""Block-sparse attention in plain XLA: tiles of pairs sorted by resource, as batched matrix products.

A step of the loop takes a group of tiles, so that the scores of one step stay in cache and memory grows with T alone.
Every pair leaves a partial result (output and log-sum-exp over its own keys), which are merged per token in the fixed
order of its pairs: the result of a token is bit for bit independent of what later tokens hold.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, P pairs, N tiles a step, t rows a tile,
J keys a tile, Q = 2T rows of both queries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.tables import Tables
from pallas_kernels.block_sparse_attention.tile import finite, head_major, partial_attention, partial_gradients
from pallas_kernels.block_sparse_attention.types import Attention, Pairs, Window
from pallas_kernels.block_sparse_attention.window import window_attention, window_gradients


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
    inputs = _equally_varying((query, query_expert, key, value, pairs, window))
    tile, group = _tiling(max_pairs, *key.shape[:3])
    tables = tables_lib.build(
        inputs[4].resource, inputs[4].count, num_resources=len(key), max_pairs=max_pairs, tile=tile, group=group
    )
    output, lse, mass = _attend(_Static(num_context, scale, tile, group), *inputs, tables)
    return Attention(output, lse, jax.lax.stop_gradient(mass[:, :slots]))


def _tiling(max_pairs: int, resources: int, m: int, heads: int) -> tuple[int, int]:
    """Rows a tile and tiles a step."""
    tile = 128
    group = 8
    return tile, group


def _equally_varying(tree):
    """Inside shard_map: let every array vary over the mesh axes that any of them varies over.

    Loops want carries of one type. Done outside the custom VJP, so that autodiff adds the sums over those axes.
    """
    zero = sum(jnp.zeros_like(x, jnp.int32, shape=()) for x in jax.tree.leaves(tree))
    return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)


class _Rows(NamedTuple):
    """What a row of a tile has to know; padding rows have bias -inf and indices out of range."""

    query: Int[Array, "N t"]  # row of the two queries, one after the other
    token: Int[Array, "N t"]
    pair: Int[Array, "N t"]
    bias: Float[Array, "N t"]
    visible: Int[Array, "N t"]
    resource: Int[Array, "N"]


def _rows(static: _Static, pairs: Pairs, tables: Tables) -> _Rows:
    tokens, of_slot = len(pairs.count), lambda x, fill: tables_lib.from_slots(x, tables, fill)
    of_pair = lambda x_P, fill: x_P.at[tables.pair].get(mode="fill", fill_value=fill)
    token = of_pair(tables.token, tokens)
    is_expert = tables.resource[:, None] >= static.num_context
    return _Rows(
        query=jnp.where(token < tokens, token + jnp.where(is_expert, tokens, 0), 2 * tokens),
        token=token,
        pair=tables.pair,
        bias=of_pair(of_slot(pairs.bias.astype(jnp.float32), -jnp.inf), -jnp.inf),
        visible=of_pair(of_slot(pairs.visible, 0), 0),
        resource=tables.resource,
    )


def _for_groups(step, state, rows: _Rows, tables: Tables, group: int):
    """Run step(rows of one group, state) -> state over the groups that hold a pair."""

    def body(i, state):
        take = lambda x: jax.lax.dynamic_slice_in_dim(x, i * group, group)
        return step(jax.tree.map(take, rows), state)

    return jax.lax.fori_loop(0, -(-tables.tiles // group), body, state)


def _gather(x: Float[Array, "S H d"], index: Int[Array, "N t"]) -> Float[Array, "N H t d"]:
    return head_major(x.at[index].get(mode="clip"))


def _seen(visible: Int[Array, "N t"], m: int):
    return jnp.arange(m) < visible[:, None, :, None]


def _pair_partials(
    static: _Static, queries, key, value, rows: _Rows, tables: Tables
) -> tuple[Float[Array, "P H d"], Float[Array, "P H"]]:
    """Output and log-sum-exp of every pair over the keys of its own resource alone."""
    pairs, (m, heads, d) = len(tables.token), key.shape[1:]

    def step(row: _Rows, state):
        output_PHd, lse_PH = state
        output, lse = partial_attention(
            _gather(queries, row.query),
            head_major(key[row.resource]),
            head_major(value[row.resource]),
            _seen(row.visible, m),
            static.scale,
        )
        lse = lse.swapaxes(1, 2) + row.bias[:, :, None]
        return (
            output_PHd.at[row.pair].set(head_major(output), mode="drop", unique_indices=True),
            lse_PH.at[row.pair].set(lse, mode="drop", unique_indices=True),
        )

    zeros = functools.partial(jnp.zeros_like, key, jnp.float32)
    state = zeros(shape=(pairs, heads, d)), zeros(shape=(pairs, heads)) - jnp.inf
    return _for_groups(step, state, rows, tables, static.group)


def _merge(output_PHd, lse_PH, token_P, tokens: int, window_part):
    """One distribution per token from the partial ones, by log-sum-exp in the order of the token's pairs."""
    segment = functools.partial(jax.ops.segment_sum, segment_ids=token_P, num_segments=tokens, indices_are_sorted=True)
    top = jax.ops.segment_max(lse_PH, token_P, tokens, indices_are_sorted=True)
    if window_part is not None:
        top = jnp.maximum(top, window_part[1])
    top = finite(top)
    weight_PH = jnp.exp(lse_PH - top.at[token_P].get(mode="clip"))
    output, total = segment(output_PHd * weight_PH[..., None]), segment(weight_PH)
    if window_part is not None:
        weight = jnp.exp(window_part[1] - top)
        output, total = output + window_part[0] * weight[..., None], total + weight
    return output / jnp.where(total > 0, total, 1.0)[..., None], jnp.log(total) + top


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, query_expert, key, value, pairs, window, tables):
    return _forward(static, query, query_expert, key, value, pairs, window, tables)[0]


def _forward(static, query, query_expert, key, value, pairs, window, tables):
    """Output, log-sum-exp and mass; what the backward pass needs of them."""
    queries = jnp.concatenate([query, query_expert])
    output_PHd, lse_PH = _pair_partials(static, queries, key, value, _rows(static, pairs, tables), tables)
    window_part = None if window is None else window_attention(query, key, value, window, static.scale)
    output, lse = _merge(output_PHd, lse_PH, tables.token, len(query), window_part)
    output = output.astype(query.dtype)
    mass_P = jnp.exp(lse_PH - finite(lse).at[tables.token].get(mode="clip")).mean(1)
    mass = tables_lib.to_slots(mass_P, tables, pairs.resource.shape[1])
    return (output, lse, mass), (query, query_expert, key, value, pairs, window, tables, output, lse)


def _backward(static, residuals, cotangents):
    """Gradients from the saved global log-sum-exp: scores are recomputed, nothing of size P x m was kept."""
    query, query_expert, key, value, pairs, window, tables, output, lse = residuals
    d_output, d_lse, _ = cotangents
    some = lse > -jnp.inf  # a token that attends to nothing: every gradient exactly 0, whatever its cotangents
    d_output = jnp.where(some[..., None], d_output, 0)
    delta = jnp.einsum("thd,thd->th", output, d_output, preferred_element_type=jnp.float32)
    delta = jnp.where(some, delta - d_lse, 0.0)
    lse = finite(lse)

    tokens, m = len(query), key.shape[1]
    queries = jnp.concatenate([query, query_expert])
    d_query, d_key, d_value, d_window = (jnp.zeros_like(x, jnp.float32) for x in (query, key, value, pairs.count))
    if window is not None:
        state = d_query, d_key, d_value, d_window
        d_query, d_key, d_value, d_window = window_gradients(
            query, key, value, window, d_output, lse, delta, state, static.scale
        )

    def step(row: _Rows, state):
        d_queries, d_key, d_value, d_bias_P = state
        of_token = lambda x: x.at[row.token].get(mode="clip").swapaxes(1, 2)
        dq, dk, dv, db = partial_gradients(
            _gather(queries, row.query),
            head_major(key[row.resource]),
            head_major(value[row.resource]),
            _gather(d_output, row.token),
            row.bias[:, None] - of_token(lse),
            of_token(delta),
            _seen(row.visible, m),
            static.scale,
        )
        return (
            d_queries.at[row.query].add(head_major(dq), mode="drop"),
            d_key.at[row.resource].add(head_major(dk)),
            d_value.at[row.resource].add(head_major(dv)),
            d_bias_P.at[row.pair].set(db, mode="drop", unique_indices=True),
        )

    d_queries = jnp.concatenate([d_query, jnp.zeros_like(d_query)])
    state = d_queries, d_key, d_value, jnp.zeros_like(tables.token, jnp.float32)
    d_queries, d_key, d_value, d_bias_P = _for_groups(step, state, _rows(static, pairs, tables), tables, static.group)
    d_bias = tables_lib.to_slots(d_bias_P, tables, pairs.resource.shape[1]).astype(pairs.bias.dtype)
    scaled = lambda x, like: (x * static.scale).astype(like.dtype)
    return (
        scaled(d_queries[:tokens], query),
        scaled(d_queries[tokens:], query_expert),
        scaled(d_key, key),
        d_value.astype(value.dtype),
        Pairs(None, d_bias, None, None),
        None if window is None else Window(d_window.astype(window.bias.dtype), None),
        None,
    )


_attend.defvjp(_forward, _backward)
