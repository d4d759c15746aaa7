"""The flags that jobs on TPUs are started with, through the TPU compiler itself: `make test-aot`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from launch.cluster import accelerators, xla_flags
from pallas_kernels.aot import ENVIRONMENT

INSTALLED = importlib.util.find_spec("libtpu") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="libtpu is not installed: make test-aot")

TOPOLOGIES = {"v4": "v4:2x2x1", "v5litepod": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

devices = topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1]).devices
mesh = jax.sharding.Mesh(devices, "x")
rows = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x")))
print(jax.jit(lambda x, w: x @ w).lower(rows, rows).compile().as_text())
"""
"""A matrix product whose second factor must be gathered."""


def compiled(generation: str, flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, TOPOLOGIES[generation]],
        env=os.environ | ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("generation", accelerators.GENERATIONS)
def test_the_compiler_takes_the_flags_of_the_table(generation):
    """Of several slices, which have all flags of one."""
    flags = xla_flags.by_chip(generation, slices=2)
    assert set(xla_flags.by_chip(generation, slices=1).split()) < set(flags.split())
    done = compiled(generation, flags)
    assert done.returncode == 0, done.stderr
    assert "all-gather" in done.stdout


def test_it_refuses_others():
    """So that the test above says something."""
    for flag, message in (
        ("--xla_tpu_scoped_vmem_limit_kb=98304", "Did you mean: xla_tpu_scoped_vmem_limit_kib ?"),
        ("--xla_tpu_scoped_vmem_limit_kib=much", "Illegal value 'much' specified for flag"),
    ):
        done = compiled("v6e", flag)
        assert done.returncode != 0
        assert message in done.stderr
