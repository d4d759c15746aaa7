"""Decoding over a mesh, with the TPU compiler itself, where libtpu is installed: `make test-aot`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import aot

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-aot"
)


@pytest.mark.parametrize("mesh", ["1x8x1x1", "1x2x2x2"])
def test_a_step_of_decoding_is_divided_with_its_parameters(mesh):
    """The partitioner has no Pallas kernel to divide, and leaves the parameters where they lie."""
    command = [sys.executable, "-m", "tests.generation.divided_step", "v5e:2x4", mesh]
    done = subprocess.run(command, env=os.environ | aot.ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    parts = 8 if mesh == "1x8x1x1" else 2  # what is divided least: over fsdp alone
    assert found["arguments"] < 1.1 * found["parameters"] / parts
    assert found["collectives"]
