"""What the kernels compute, in XLA, tile after tile: for machines without such a GPU, and to hold the kernels to.

Shapes: see `kernels`.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.gpu.common import Partials, Plan, Queries, Rows, Tiles, packed, size_of_rows
from pallas_kernels.block_sparse_attention.tile import partial_attention, partial_gradients


def forward(
    query: Queries,
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    rows: Rows,
    plan: Plan,
) -> Partials:
    """See `kernels.forward` and `blackwell.forward`."""
    resource, seen = _resource_and_seen(rows, key.shape[1])
    gathered = query.gathered((resource >= plan.num_context)[:, None])

    def attend(tile):
        query, resource, seen = tile
        q, k, v = (x[None].swapaxes(1, 2) for x in (query, key[resource], value[resource]))
        parts = [
            partial_attention(q, k[:, :, here], v[:, :, here], seen[None, ..., here], plan.scale)
            for here in _parts(key.shape[1], plan)
        ]
        return [_partials(output[0], lse[0], key.dtype) for output, lse in parts]

    parts = jax.lax.map(attend, (gathered, resource, seen))
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


def query_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """See `kernels.query_gradients`. The gradient of the bias stands in the first head: only its sum is wanted."""

    def differentiate(tile):
        parts = [_gradients(tile, tiles, here, plan) for here in _parts(tiles.key.shape[1], plan)]
        return [(d_query.swapaxes(1, 2)[0].astype(tiles.key.dtype), d_bias[0]) for d_query, _, _, d_bias in parts]

    parts = jax.lax.map(differentiate, _by_tile(tiles, plan))
    d_query, d_bias = (jnp.stack(x) for x in zip(*parts, strict=True))
    return d_query, jnp.pad(d_bias[:, :, None], ((0, 0), (0, 0), (0, tiles.key.shape[2] - 1), (0, 0)))


def key_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "R m H d"], Float[Array, "R m H d"]]:
    """See `kernels.key_gradients`."""

    def add(sums, tile):
        _, *d_tables, _ = _gradients(tile, tiles, slice(None), plan)
        return tuple(x.at[tile[4]].add(d.swapaxes(1, 2)[0]) for x, d in zip(sums, d_tables, strict=True)), None

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (tiles.key, tiles.value))
    (d_key, d_value), _ = jax.lax.scan(add, zeros, _by_tile(tiles, plan))
    return (plan.scale * d_key).astype(tiles.key.dtype), d_value.astype(tiles.key.dtype)


def _partials(output: Float[Array, "H t d"], lse: Float[Array, "H t"], dtype: DTypeLike) -> Partials:
    """Of one tile and part."""
    size = size_of_rows(output)
    return Partials(packed(output / size[..., None], dtype).swapaxes(0, 1), size, lse)


def _gradients(tile, tiles: Tiles, here: slice, plan: Plan):
    query, d_output, shift, delta, resource, seen = tile
    q, do, k, v = (x[None].swapaxes(1, 2) for x in (query, d_output, tiles.key[resource], tiles.value[resource]))
    of_rows = shift[None], delta[None], seen[None, ..., here]
    return partial_gradients(q, k[:, :, here], v[:, :, here], do, *of_rows, plan.scale)


def _by_tile(tiles: Tiles, plan: Plan) -> tuple:
    """What `_gradients` takes, in the order of the rows."""
    resource, seen = _resource_and_seen(tiles.rows, tiles.key.shape[1])
    query = tiles.query.gathered((resource >= plan.num_context)[:, None])
    d_output = tiles.d_output.at[tiles.query.token].get(mode="clip")
    return query, d_output, tiles.shift, tiles.delta, resource, seen


def _parts(m: int, plan: Plan) -> list[slice]:
    return [slice(first, first + plan.part) for first in range(0, m, plan.part)]


def _resource_and_seen(rows: Rows, m: int) -> tuple[Array, Array]:
    """Of every tile [N], and which of its keys every row sees [N, 1, t, m]."""
    tile = jnp.arange(len(rows.visible))
    resource = jnp.searchsorted(rows.begin[1:], tile, side="right").clip(max=len(rows.begin) - 2)
    return resource, jnp.arange(m) < rows.visible[:, None, :, None]
