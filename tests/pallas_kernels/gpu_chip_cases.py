"""What the GPU compiler is given."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


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
