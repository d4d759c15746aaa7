"""What the GPU compiler is given: a small kernel, those of block-sparse attention, and the whole of it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_sparse_attention import Pairs, block_sparse_attention
from pallas_kernels.block_sparse_attention.gpu import kernels, path
from pallas_kernels.block_sparse_attention.operation import Problem

INT, F32 = jnp.int32, jnp.float32


def squares(blocks: int):
    """A kernel that copies a block into shared memory, multiplies it with itself there, and copies the product back."""

    def kernel(x, y, block, arrived):
        i = jax.lax.axis_index("i")
        plgpu.copy_gmem_to_smem(x.at[i], block, arrived)
        plgpu.barrier_wait(arrived)

        def multiply(sums):
            plgpu.wgmma(sums, block, plgpu.transpose_ref(block, (1, 0)))
            return sums[...]

        block[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32)).astype(block.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(block, y.at[i])
        plgpu.wait_smem_to_gmem(0)

    x = jax.ShapeDtypeStruct((blocks, 64, 64), jnp.bfloat16)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    call = plgpu.kernel(
        kernel,
        out_type=x,
        grid=(blocks,),
        grid_names=("i",),
        scratch_types=[plgpu.SMEM((64, 64), x.dtype, transforms=swizzled), plgpu.Barrier()],
        kernel_name="squares",
    )
    return call, (x,)


def kernel(name: str, *, heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16"):
    """The kernel alone, cut as it is for 64 context chunks and 64 experts, and its arguments."""
    shape, tiles, resources = jax.ShapeDtypeStruct, 1024, 128
    problem = Problem(64 * m, heads, d, resources, m, 16, jnp.dtype(dtype), 64, 512 * m, d**-0.5)
    planned = path.plan(problem)
    queries, table = shape((tiles, kernels.ROWS, heads, d), dtype), shape((resources, m, heads, d), dtype)
    statistics = shape((tiles, heads, kernels.ROWS), F32)
    rows = kernels.Rows(shape((resources + 1,), INT), shape((tiles, kernels.ROWS), INT))
    gradients = kernels.Tiles(queries, table, table, queries, statistics, statistics, rows)
    run, plan, arguments = {
        "forward": (kernels.forward, planned.forward_plan, (queries, table, table, rows)),
        "d_query": (kernels.query_gradients, planned.query_plan, (gradients,)),
        "d_key": (kernels.key_gradients, planned.key_plan, (gradients,)),
    }[name]
    return functools.partial(run, plan=plan), arguments


def attention(*, tokens: int, heads: int, d: int, m: int, experts: int, pairs: int, dtype: str = "bfloat16"):
    """The whole of it with its gradients, tables included; `pairs` a token, on average, in 16 slots."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    query, table = shape((tokens, heads, d)), shape((tokens // m + experts, m, heads, d))
    slots = [jax.ShapeDtypeStruct((tokens, 16), kind) for kind in (INT, F32, INT)]
    static = {"num_context": tokens // m, "max_pairs": pairs * tokens, "implementation": "pallas_gpu"}

    def loss(query, query_expert, key, value, bias, pairs):
        result = block_sparse_attention(query, query_expert, key, value, pairs._replace(bias=bias), **static)
        return jnp.sum(result.output.astype(F32) ** 2), result

    def both(query, query_expert, key, value, pairs):
        return jax.grad(loss, argnums=range(5), has_aux=True)(query, query_expert, key, value, pairs.bias, pairs)

    return both, (query, query, table, table, Pairs(*slots, jax.ShapeDtypeStruct((tokens,), INT)))
