"""What the chips' compilers are given of path B: its kernels, and the whole of it with gradients."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import Pairs, block_sparse_attention
from pallas_kernels.block_sparse_attention.tpu import gathered, gathered_kernels
from pallas_kernels.block_sparse_attention.tpu.gathered_kernels import BLOCK, CHUNK, Steps, Tiles
from pallas_kernels.tpu import LANES

RESOURCES, TILES, BLOCKS, CHUNKS = 32, 64, 16, 128
INT, F32 = jnp.int32, jnp.float32


def kernel(
    name: str, *, heads: int = 8, d: int = 128, m: int = 128, tile: int = 512, dtype: str = "bfloat16"
) -> tuple[functools.partial, tuple]:
    """One of the four kernels alone, and its arguments."""
    layout = gathered.choose_layout(heads, d, jnp.dtype(dtype), rows=0.0)._replace(tile=tile)
    shape, scale = jax.ShapeDtypeStruct, {"scale": d**-0.5}
    groups, words = layout.groups, F32 if layout.halves == 1 else jnp.uint32
    rows = functools.partial(shape, (groups, TILES * tile, layout.units, LANES))
    tiles = Tiles(shape((TILES,), INT), shape((1,), INT), shape((TILES, 1, tile), INT))
    table = shape((RESOURCES, m, groups * layout.lanes), jnp.dtype(dtype))
    stats = shape((groups, TILES, 2 * layout.heads, tile), F32)
    packed = shape((groups, TILES * tile, 2 * layout.units, LANES), words)

    pairs, tokens = CHUNKS * CHUNK, BLOCKS * BLOCK
    steps = Steps(*(shape((n,), INT) for n in (BLOCKS + CHUNKS, BLOCKS + CHUNKS, 1)), shape((1, pairs), INT))
    by_token = shape((tokens, groups * layout.lanes), F32)
    outputs = shape((groups, pairs, layout.wide.units, LANES), F32)
    gradients = shape((groups, pairs, layout.units, LANES), words)
    run, arguments, options = {
        "forward": (gathered_kernels.forward, (rows(words), table, table, tiles), scale),
        "backward": (gathered_kernels.backward, (packed, stats, table, table, tiles), scale),
        "merge": (
            gathered_kernels.merge,
            (
                outputs,
                shape((groups, 2 * layout.heads, pairs), F32),
                shape((groups, layout.heads, tokens), F32),
                by_token,
                steps,
            ),
            {},
        ),
        "add": (
            gathered_kernels.add,
            (gradients, shape((1, pairs), INT), shape((2, *by_token.shape), F32), steps),
            {},
        ),
    }[name]
    return functools.partial(run, layout=layout, interpret=False, **options), arguments


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
            implementation="pallas_tpu_gathered",
        )
        return jnp.sum(result.output.astype(F32) ** 2), result

    def both(query, query_expert, key, value, pairs):
        return jax.grad(loss, argnums=range(5), has_aux=True)(query, query_expert, key, value, pairs.bias, pairs)

    return both, (query, query, table, table, pairs)
