"""What the kernels compute, in XLA, tile after tile: for machines without such a GPU, and to hold the kernels to.

Shapes: see `kernels`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.gpu.common import Plan, Queries, Rows, Tiles
from pallas_kernels.block_sparse_attention.tile import partial_attention, partial_gradients


def forward(
    query: Float[Array, "N t H d"] | Queries,
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """See `kernels.forward` and `blackwell.forward`."""
    resource, seen = _resource_and_seen(rows, key.shape[1])
    if isinstance(query, Queries):
        query = query.gathered((resource >= plan.num_context)[:, None])

    def attend(tile):
        query, resource, seen = tile
        q, k, v = (x[None].swapaxes(1, 2) for x in (query, key[resource], value[resource]))
        parts = [
            partial_attention(q, k[:, :, here], v[:, :, here], seen[None, ..., here], plan.scale)
            for here in _parts(key.shape[1], plan)
        ]
        return [(output.swapaxes(1, 2)[0], lse[0]) for output, lse in parts]

    parts = jax.lax.map(attend, (query, resource, seen))
    output, lse = (jnp.stack(x) for x in zip(*parts, strict=True))
    return output, lse


def query_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """See `kernels.query_gradients`. The gradient of the bias stands in the first head: only its sum is wanted."""
    tiles = _gathered(tiles, plan)

    def differentiate(tile):
        parts = [_gradients(tile, tiles, here, plan) for here in _parts(tiles.key.shape[1], plan)]
        return [(d_query.swapaxes(1, 2)[0].astype(tiles.key.dtype), d_bias[0]) for d_query, _, _, d_bias in parts]

    parts = jax.lax.map(differentiate, _by_tile(tiles))
    d_query, d_bias = (jnp.stack(x) for x in zip(*parts, strict=True))
    return d_query, jnp.pad(d_bias[:, :, None], ((0, 0), (0, 0), (0, tiles.key.shape[2] - 1), (0, 0)))


def key_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "R m H d"], Float[Array, "R m H d"]]:
    """See `kernels.key_gradients`."""
    tiles = _gathered(tiles, plan)

    def add(sums, tile):
        _, *d_tables, _ = _gradients(tile, tiles, slice(None), plan)
        return tuple(x.at[tile[4]].add(d.swapaxes(1, 2)[0]) for x, d in zip(sums, d_tables, strict=True)), None

    zeros = tuple(jnp.zeros_like(x, jnp.float32) for x in (tiles.key, tiles.value))
    (d_key, d_value), _ = jax.lax.scan(add, zeros, _by_tile(tiles))
    return d_key, d_value


def _gradients(tile, tiles: Tiles, here: slice, plan: Plan):
    query, d_output, shift, delta, resource, seen = tile
    q, do, k, v = (x[None].swapaxes(1, 2) for x in (query, d_output, tiles.key[resource], tiles.value[resource]))
    of_rows = shift[None], delta[None], seen[None, ..., here]
    return partial_gradients(q, k[:, :, here], v[:, :, here], do, *of_rows, plan.scale)


def _gathered(tiles: Tiles, plan: Plan) -> Tiles:
    """With queries and gradients of outputs in the order of the rows."""
    if not isinstance(tiles.query, Queries):
        return tiles
    expert = _resource_and_seen(tiles.rows, 0)[0] >= plan.num_context
    d_output = tiles.d_output.at[tiles.query.token].get(mode="clip")
    return tiles._replace(query=tiles.query.gathered(expert[:, None]), d_output=d_output)


def _by_tile(tiles: Tiles) -> tuple:
    given = tiles.query, tiles.d_output, tiles.shift, tiles.delta
    return *given, *_resource_and_seen(tiles.rows, tiles.key.shape[1])


def _parts(m: int, plan: Plan) -> list[slice]:
    return [slice(first, first + plan.part) for first in range(0, m, plan.part)]


def _resource_and_seen(rows: Rows, m: int) -> tuple[Array, Array]:
    """Of every tile [N], and which of its keys every row sees [N, 1, t, m]."""
    tile = jnp.arange(len(rows.visible))
    resource = jnp.searchsorted(rows.begin[1:], tile, side="right").clip(max=len(rows.begin) - 2)
    return resource, jnp.arange(m) < rows.visible[:, None, :, None]
