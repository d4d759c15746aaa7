"""What the TPU kernels of this package share: registers, products, and where a kernel is compiled or interpreted."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels import chips
from pallas_kernels.varying import varying

F32 = jnp.float32
ROWS, LANES = 8, 128  # one vector register of 32-bit numbers
LOG2_E = math.log2(math.e)  # the hardware has powers of two: the factor goes where one is needed anyway
LOWEST = -1e30  # the maximum of nothing, the score of what is not seen: finite, so that differences are numbers


BOUNDS_CHECKS = "PALLAS_KERNELS_BOUNDS_CHECKS"
"""Environment variable: "1" has every kernel that is traced from then on check the bounds of its addresses on a TPU."""


def round_up(x: int, multiple: int) -> int:
    """The least multiple that is no less."""
    return -(-x // multiple) * multiple


def dot(a, b, dimensions: tuple[int, int]):
    """The matrix product that contracts one dimension of each, in float32; for use in a kernel."""
    # Products of bfloat16 are exact in float32; float32 asks for all its passes.
    precision = jax.lax.Precision.HIGHEST if a.dtype == F32 else None
    contract = ((dimensions[:1], dimensions[1:]), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=F32)


def row_major(x: Array) -> Array:
    """x with its last dimension along a TPU's lanes, as kernels take arrays: XLA may choose another, and copies what
    enters and leaves every kernel. Where TPU kernels are not the default nothing changes."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if chips.kernels_by_default() else x


def unwritten(like: Array, dtype: Any = None) -> Array:
    """An array of this shape that a kernel writes: nothing is filled in before."""
    x = jax.lax.empty(like.shape, like.dtype if dtype is None else dtype)
    return varying(x, jax.typeof(like).manual_axis_type.varying)


def compiled_or_interpreted(kernel: Callable, *arrays: Any, **options: Any):
    """kernel(*arrays, **options, interpret=...): compiled where the program is for a TPU, interpreted elsewhere."""
    tpu, elsewhere = (functools.partial(kernel, **options, interpret=interpret) for interpret in (False, True))
    return jax.lax.platform_dependent(*arrays, tpu=tpu, default=elsewhere)


def call(
    kernel: Callable,
    name: str,
    grid: tuple,
    scalars: Sequence,
    arrays: Sequence[tuple[Any, Any]],
    results: Sequence[tuple[Any, tuple[int, ...], Any]],
    *,
    vmem_bytes: int,
    interpret: Any,
    scratch: Sequence = (),
    semantics: Any = ("parallel", "arbitrary"),
    aliases: Mapping[int, int] | None = None,
    bounds_checks: bool = True,
    cost: pl.CostEstimate | None = None,
) -> tuple:
    """A `pallas_call`: scalars go to scalar memory ahead of the grid; the others have the blocks that a step sees.

    Args:
      arrays: (blocks, array). results: (blocks, shape, dtype).
      bounds_checks: whether addresses are checked on a TPU; BOUNDS_CHECKS turns them on whatever this says.
      aliases: arrays by their number, and the result that is written in place of each.
    """
    blocks, given = zip(*arrays, strict=True)
    checked = bounds_checks or os.environ.get(BOUNDS_CHECKS) == "1"
    # Inside shard_map a kernel must say over which axes of the mesh its results vary: over those of its arguments.
    varying = jax.typeof(jax.tree.leaves(given)[0]).manual_axis_type
    run = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=blocks,
            out_specs=[block for block, _, _ in results],
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for _, shape, dtype in results],
        input_output_aliases={len(scalars) + i: to for i, to in (aliases or {}).items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, disable_bounds_checks=not checked, vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )
    return tuple(run(*scalars, *given))
