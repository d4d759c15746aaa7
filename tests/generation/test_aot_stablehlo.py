"""Exported functions through the TPU compiler itself, where libtpu is installed: `make test-aot`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from aamoe_jax.generation.stablehlo import export_functions
from pallas_kernels.aot import ENVIRONMENT
from tests.evaluation.helpers import random_params
from tests.training.helpers import model_config

INSTALLED = importlib.util.find_spec("libtpu") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="libtpu is not installed: make test-aot")

COMPILER = """
import json, pathlib, sys
sys.modules["aamoe_jax"] = None  # cannot be imported
import jax
from jax import export
from jax.experimental import topologies

folder = pathlib.Path(sys.argv[1])
told = json.loads((folder / "functions.json").read_text())
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
on_chip = jax.sharding.SingleDeviceSharding(device)

def shapes(described):
    if "dtype" not in described:
        return {name: shapes(held) for name, held in described.items()}
    shape = [5 if size == "b" else size for size in described["shape"]]
    return jax.ShapeDtypeStruct(shape, described["dtype"], sharding=on_chip)

for name, function in told["functions"].items():
    called = export.deserialize((folder / function["file"]).read_bytes()).call
    compiled = jax.jit(called).lower(shapes(told["params"]), *map(shapes, function["takes"].values())).compile()
    print(name, compiled.memory_analysis().output_size_in_bytes)
"""


def test_they_are_for_tpus(tmp_path):
    """Of AA-MoE, with five rows: logits [5, 16, V] and what decoding gives, in bytes."""
    config = model_config(num_layers=1)
    export_functions(config, random_params(config), tmp_path, length=16)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
    compiled = subprocess.run(
        [sys.executable, "-c", COMPILER, tmp_path], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert compiled.returncode == 0, compiled.stderr
    sizes = dict(line.split() for line in compiled.stdout.splitlines())
    assert list(sizes) == ["forward", "prefill", "decode"]
    assert int(sizes["forward"]) >= 5 * 16 * config.vocab_size * 4
    assert sizes["prefill"] == sizes["decode"]
