"""What the kernels compute, in XLA, tile after tile: for machines without such a GPU, and to hold the kernels to.

Shapes: see `kernels`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.block_sparse_attention.gpu.kernels import Plan, Rows
from pallas_kernels.block_sparse_attention.tile import head_major, partial_attention, partial_gradients


def forward(
    query: Float[Array, "N t H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """See `kernels.forward`."""

    def attend(tile):
        query, resource, seen = tile
        k, v = (head_major(x[resource][None]) for x in (key, value))
        parts = [
            partial_attention(head_major(query[None]), k[:, :, here], v[:, :, here], seen[None, ..., here], plan.scale)
            for here in _parts(key.shape[1], plan)
        ]
        return [(head_major(output)[0], lse[0]) for output, lse in parts]

    parts = jax.lax.map(attend, (query, _resource(rows), _seen(rows, key.shape[1])))
    return tuple(jnp.stack(x) for x in zip(*parts, strict=True))


def query_gradients(
    query: Float[Array, "N t H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    d_output: Float[Array, "N t H d"],
    shift: Float[Array, "N H t"],
    delta: Float[Array, "N H t"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """See `kernels.query_gradients`. The gradient of the bias stands in the first head: only its sum is wanted."""

    def differentiate(tile):
        parts = [_gradients(tile, key, value, here, plan) for here in _parts(key.shape[1], plan)]
        return [(head_major(d_query)[0].astype(query.dtype), d_bias[0]) for d_query, _, _, d_bias in parts]

    tiles = query, d_output, shift, delta, _resource(rows), _seen(rows, key.shape[1])
    d_query, d_bias = (jnp.stack(x) for x in zip(*jax.lax.map(differentiate, tiles), strict=True))
    return d_query, jnp.pad(d_bias[:, :, None], ((0, 0), (0, 0), (0, query.shape[2] - 1), (0, 0)))


def key_gradients(
    query: Float[Array, "N t H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    d_output: Float[Array, "N t H d"],
    shift: Float[Array, "N H t"],
    delta: Float[Array, "N H t"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "R m H d"], Float[Array, "R m H d"]]:
    """See `kernels.key_gradients`."""

    def add(sums, tile):
        _, d_key, d_value, _ = _gradients(tile, key, value, slice(None), plan)
        d_key, d_value = (x.at[tile[4]].add(head_major(d)[0]) for x, d in zip(sums, (d_key, d_value), strict=True))
        return (d_key, d_value), None

    tiles = query, d_output, shift, delta, _resource(rows), _seen(rows, key.shape[1])
    return jax.lax.scan(add, tuple(jnp.zeros_like(x, jnp.float32) for x in (key, value)), tiles)[0]


def _gradients(tile, key, value, here: slice, plan: Plan):
    query, d_output, shift, delta, resource, seen = tile
    q, do = (head_major(x[None]) for x in (query, d_output))
    k, v = (head_major(x[resource][None])[:, :, here] for x in (key, value))
    return partial_gradients(q, k, v, do, shift[None], delta[None], seen[None, ..., here], plan.scale)


def _parts(m: int, plan: Plan) -> list[slice]:
    return [slice(first, first + plan.part) for first in range(0, m, plan.part)]


def _resource(rows: Rows) -> Int[Array, "N"]:
    tile = jnp.arange(len(rows.visible))
    return jnp.searchsorted(rows.begin[1:], tile, side="right").clip(max=len(rows.begin) - 2)


def _seen(rows: Rows, m: int) -> Bool[Array, "N 1 t m"]:
    return jnp.arange(m) < rows.visible[:, None, :, None]
