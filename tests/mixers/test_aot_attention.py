"""Dense and windowed attention through the real TPU compilers, where libtpu is installed: `make test-aot`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from aamoe_jax.mixers.fastest import fastest_attention
from pallas_kernels import aot
from tests.pallas_kernels.test_aot import needs_libtpu

LENGTH = 32768


def both_passes(reach: int | None):
    """Forward and backward pass of one row: d = 2048, H = 16, bfloat16."""

    def run(query, key, value, d_output, segment_ids):
        attend = lambda *x: fastest_attention(*x, segment_ids, reach=reach)  # noqa: E731
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, *pull_back(d_output)

    shape = jax.ShapeDtypeStruct((1, LENGTH, 16, 128), jnp.bfloat16)
    return run, ((shape,) * 4 + (jax.ShapeDtypeStruct((1, LENGTH), jnp.int32),))


@needs_libtpu
@pytest.mark.parametrize(("chip", "reach"), [("v5e", None), ("v5p", 128), ("v6e", None), ("tpu7x", 128)])
def test_a_row_of_32k_compiles_in_linear_memory(chip, reach):
    compiled = aot.compile_apart(chip, "tests.mixers.test_aot_attention:both_passes", {"reach": reach})
    one = LENGTH * 2048 * 2  # bytes of the queries; a square of scores would be 1024 times as many
    assert compiled.temporary_bytes < 8 * one
