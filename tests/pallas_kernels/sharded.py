"""Heads over the two devices of a mesh, tables replicated: the same numbers as on one device. Run as a program."""

import contextlib
import functools
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from pallas_kernels import chips
from tests.pallas_kernels.cases import SHARDED, evaluate, over_heads, random_inputs


def main(implementation: str) -> None:
    devices = jax.devices()
    assert len(devices) == 2, devices
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    inputs, static = random_inputs(SHARDED)
    with chips.assume("h200") if implementation == "pallas_gpu" else contextlib.nullcontext():
        actual = jax.jit(over_heads(mesh, static, implementation))(inputs)
        expected = evaluate(inputs, static, implementation)
    assert len(actual[0].output.sharding.device_set) == 2
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)
    print(len(devices), "devices agree")


if __name__ == "__main__":
    main(sys.argv[1])
