"""What the TPU kernels of this package share: registers, products, and where a kernel is compiled or interpreted."""

import functools
import math

import jax
import jax.numpy as jnp

F32 = jnp.float32
ROWS, LANES = 8, 128  # one vector register of 32-bit numbers
LOG2_E = math.log2(math.e)  # the hardware has powers of two: the factor goes where one is needed anyway
LOWEST = -1e30  # the maximum of nothing, the score of what is not seen: finite, so that differences are numbers


def round_up(x: int, multiple: int) -> int:
    """The least multiple that is no less."""
    return -(-x // multiple) * multiple


def dot(a, b, dimensions: tuple[int, int]):
    """The matrix product that contracts one dimension of each, in float32; for use in a kernel."""
    # Products of bfloat16 are exact in float32; float32 asks for all its passes.
    precision = jax.lax.Precision.HIGHEST if a.dtype == F32 else None
    contract = ((dimensions[:1], dimensions[1:]), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=F32)


def compiled_or_interpreted(kernel, *arrays):
    """kernel(*arrays, interpret=...): compiled where the program is for a TPU, interpreted elsewhere."""
    tpu, elsewhere = (functools.partial(kernel, interpret=interpret) for interpret in (False, True))
    return jax.lax.platform_dependent(*arrays, tpu=tpu, default=elsewhere)
