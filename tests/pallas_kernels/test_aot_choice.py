"""The kernels of the pooled router, as the real TPU compilers schedule them: `make test-aot`."""

import importlib.util

import pytest

from aamoe_jax.preflight.closed_form import CHOICE_RATE
from pallas_kernels import aot, chips, schedule
from pallas_kernels.choice import tpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-aot"
)
CASE = "tests.pallas_kernels.choice_cases:choice"
LAYER = {"length": 2048, "chunks": 64, "experts": 64, "heads": 8, "d": 128, "pooled": 4, "implementation": "pallas_tpu"}
PASSES = {"choice_forward": 2, "choice_backward": 2 + 2}
"""Of bfloat16: two parts of the keys, and the gradients of queries and of keys."""


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_every_chip_compiles_it_and_every_core_has_heads(chip, tmp_path):
    """The matrix units bind, not what is done with the scores, and reach what preflight takes for granted."""
    limits, reached = chips.TPUS[chip], []
    aot.compile_apart(chip, CASE, LAYER, dump_to=tmp_path)
    for kernel, passes in PASSES.items():
        read = schedule.read(tmp_path, kernel)
        assert schedule.on_all_cores(tmp_path, kernel) == (limits.device_cores > 1)
        assert read.binding[0] == "MXU"
        flops = 2 * passes * tpu.TILE * 4 * (64 + 64) * 1024 / limits.device_cores  # each core has half of the heads
        reached.append(flops * limits.clock / (read.cycles_a_step * limits.flops))
    assert CHOICE_RATE[chip] < min(reached) < 1.1 * CHOICE_RATE[chip]


@pytest.mark.parametrize(
    "shape",
    [
        {"length": 300, "chunks": 3, "experts": 13, "rows": 2},  # ragged
        {"heads": 4, "d": 256, "precision": "highest"},
        {"dtype": "float32"},
        {"length": 32768, "chunks": 256, "heads": 16},  # long rows, two groups of heads
    ],
)
def test_other_shapes_compile(shape, tmp_path):
    compiled = aot.compile_apart("v5p", CASE, LAYER | shape, dump_to=tmp_path)
    scores = 4 * 8 * 4 * (64 + 64) * 2048
    if set(shape) <= {"heads", "d", "precision", "dtype"}:
        assert compiled.temporary_bytes < scores  # which XLA would write, and keep
    for kernel in PASSES:
        assert schedule.read(tmp_path, kernel).cycles_a_step > 0
