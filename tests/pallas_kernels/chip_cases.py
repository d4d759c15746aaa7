"""What the chips' compilers are given: the kernels of block-sparse attention, and the whole of it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import Pairs, block_sparse_attention
from pallas_kernels.block_sparse_attention.tpu import resident, resident_kernels

RESOURCES, TILES = 32, 64
INT, F32 = jnp.int32, jnp.float32


def kernel(
    name: str,
    *,
    tokens: int = 2048,
    heads: int = 8,
    d: int = 128,
    m: int = 128,
    tile: int = 512,
    dtype: str = "bfloat16",
):
    """The kernel alone, `forward` or `backward`, and its arguments."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    layout = resident.choose_layout(tokens, heads, d, rows=0.0)._replace(tile=tile)
    scalars = [shape((TILES, 1, tile), kind) for kind in (INT, F32, INT)]
    tiles = resident_kernels.Tiles(shape((TILES,), INT), shape((2,), INT), *scalars)
    table = shape((RESOURCES, m, layout.groups * layout.lanes), dtype)
    size = resident_kernels.ROWS * (2 if name == "backward" and dtype == F32 else 1)
    word = jnp.uint32 if name == "backward" and dtype != F32 else F32
    rows = shape((2, layout.groups, layout.tokens * size, resident_kernels.LANES), word)
    stats = shape((layout.groups, layout.tokens, resident_kernels.LANES), F32)
    options = {"vmem_bytes": resident.vmem_bytes(layout, m, dtype.itemsize), "interpret": False}
    run, before = {"forward": (resident_kernels.forward, ()), "backward": (resident_kernels.backward, (stats,))}[name]
    return functools.partial(run, layout=layout, scale=d**-0.5, **options), (rows, *before, table, table, tiles)


def attention(*, tokens: int, heads: int, d: int, m: int, experts: int, rows: int, dtype: str = "bfloat16"):
    """The whole of it with its gradients, tables included; `rows` pairs a resource, on average."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    resources = tokens // m + experts
    query, table = shape((tokens, heads, d)), shape((resources, m, heads, d))
    slots = [jax.ShapeDtypeStruct((tokens, 16), kind) for kind in (INT, F32, INT)]
    pairs = Pairs(*slots, jax.ShapeDtypeStruct((tokens,), INT))

    def loss(query, query_expert, key, value, bias, pairs):
        result = block_sparse_attention(
            query,
            query_expert,
            key,
            value,
            pairs._replace(bias=bias),
            num_context=tokens // m,
            max_pairs=rows * resources,
            implementation="pallas_tpu",
        )
        return jnp.sum(result.output.astype(F32) ** 2), result

    def both(query, query_expert, key, value, pairs):
        return jax.grad(loss, argnums=range(5), has_aux=True)(query, query_expert, key, value, pairs.bias, pairs)

    return both, (query, query, table, table, pairs)
