"""What the chips' compilers are given: the kernels of block-sparse attention, and the whole of it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import Pairs, Window, block_sparse_attention
from pallas_kernels.block_sparse_attention.tpu import compaction, phases, resident, resident_kernels
from pallas_kernels.block_sparse_attention.tpu import layout as layout_lib
from pallas_kernels.tpu import LANES, ROWS

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
    vmem: int | None = None,
    cores: int = 1,
):
    """The kernel alone, `forward`, `forward_running` or `backward`, and its arguments.

    It may have `vmem` bytes of fast memory; None: what `resident` counts on.
    """
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    layout = layout_lib.choose(
        tokens, heads, d, rows=0.0, most_tokens=tokens, cores=cores, matrix=chips.current_chip().matrix
    )._replace(tile=tile)
    by_tile = functools.partial(shape, dtype=F32)
    scalars = [shape((TILES + more, 1, tile), kind) for more, kind in ((2, INT), (0, F32), (0, INT))]
    tiles, bounds = (
        resident_kernels.Tiles(shape((TILES,), INT), *scalars),
        phases.Bounds(*[shape((layout.cores,), INT)] * 4),
    )
    table = shape((RESOURCES, m, layout.groups * layout.lanes), dtype)
    rows, stats = by_tile((tokens, layout.groups * ROWS, LANES)), by_tile((layout.groups, tokens, LANES))
    vmem = resident.vmem_bytes(layout, m, dtype.itemsize) if vmem is None else vmem
    options = {"layout": layout, "scale": d**-0.5, "vmem_bytes": vmem, "met": 1.0, "interpret": False}
    words, kinds = (F32, 2) if dtype == F32 else (jnp.uint32, 1)
    if name == "backward":
        packed, d_table = (
            shape((tokens, kinds * layout.groups * ROWS, LANES), words),
            by_tile((layout.cores, *table.shape)),
        )
        d_query = shape((tokens, layout.groups * layout_lib.GROUP), dtype)
        changed = (d_query, d_query), by_tile((layout.groups, TILES, 1, tile)), d_table, d_table
        arrays = *changed, rows, (packed, packed), stats, table, table, tiles, bounds
        return functools.partial(resident_kernels.backward, **options), arrays
    maximum = {"forward": "bounded", "forward_running": "running"}[name]
    arrays = rows, stats, rows, (shape(rows.shape, words),) * kinds, table, table, tiles, bounds
    return functools.partial(resident_kernels.forward, maximum=maximum, **options), arrays


def tables(*, tokens: int, heads: int, tile: int, d: int = 128, slots: int = 16, resources: int = 160):
    """Tiles of two windows of `tokens` each, and a value of every pair back to its slot."""
    layout = layout_lib.choose(2 * tokens, heads, d, rows=0.0, most_tokens=tokens)._replace(tile=tile)

    def there_and_back(resource, count, bias, visible):
        places = compaction.build(resource, count, resources, 2 * tokens * slots, layout)
        row, bias, visible = compaction.to_tiles(bias, visible, places, resources, layout)
        return row, visible, compaction.from_tiles(bias, row, places, resources, layout)

    shape = functools.partial(jax.ShapeDtypeStruct, (2 * tokens, slots))
    return there_and_back, (shape(INT), jax.ShapeDtypeStruct((2 * tokens,), INT), shape(F32), shape(INT))


def attention(
    *,
    tokens: int,
    heads: int,
    d: int,
    m: int,
    experts: int,
    rows: int,
    dtype: str = "bfloat16",
    implementation: str = "pallas_tpu_resident",
    window: bool = False,
):
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
            implementation=implementation,
            window=Window(jnp.zeros(tokens), jnp.zeros(tokens, INT)) if window else None,
        )
        return jnp.sum(result.output.astype(F32) ** 2), result

    def both(query, query_expert, key, value, pairs):
        return jax.grad(loss, argnums=range(5), has_aux=True)(query, query_expert, key, value, pairs.bias, pairs)

    return both, (query, query, table, table, pairs)
