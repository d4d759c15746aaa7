"""What the GPU compiler is given: small kernels, and the whole of block-sparse attention."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.block_sparse_attention import Pairs, block_sparse_attention

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


def product_in_tensor_memory():
    """The square of a block by a B200's tensor cores, whose sums are in a memory of their own."""

    def kernel(x, y, left, right, sums, arrived, done):
        for block in (left, right):
            plgpu.copy_gmem_to_smem(x, block, arrived)
            plgpu.barrier_wait(arrived)
        plgpu.tcgen05_mma(sums, left, right, done, accumulate=False)
        plgpu.barrier_wait(done)
        left[...] = plgpu.async_load_tmem(sums).astype(left.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(left, y)
        plgpu.wait_smem_to_gmem(0)

    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    block = plgpu.SMEM(x.shape, x.dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
    barriers = plgpu.Barrier(), plgpu.Barrier(orders_tensor_core=True)
    scratch = [block, block, plgpu.TMEM(x.shape, F32), *barriers]
    call = plgpu.kernel(kernel, out_type=x, grid=(1,), grid_names=("i",), scratch_types=scratch, kernel_name="product")
    return call, (x,)


def attention(
    *,
    tokens: int,
    heads: int,
    d: int,
    m: int,
    experts: int,
    pairs: int,
    dtype: str = "bfloat16",
    implementation: str | None = "pallas_gpu",
):
    """The whole of it with its gradients, tables included; `pairs` a token, on average, in 16 slots."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    query, table = shape((tokens, heads, d)), shape((tokens // m + experts, m, heads, d))
    slots = [jax.ShapeDtypeStruct((tokens, 16), kind) for kind in (INT, F32, INT)]
    static = {"num_context": tokens // m, "max_pairs": pairs * tokens, "implementation": implementation}

    def loss(query, query_expert, key, value, bias, pairs):
        result = block_sparse_attention(query, query_expert, key, value, pairs._replace(bias=bias), **static)
        return jnp.sum(result.output.astype(F32) ** 2), result

    def both(query, query_expert, key, value, pairs):
        return jax.grad(loss, argnums=range(5), has_aux=True)(query, query_expert, key, value, pairs.bias, pairs)

    return both, (query, query, table, table, Pairs(*slots, jax.ShapeDtypeStruct((tokens,), INT)))
