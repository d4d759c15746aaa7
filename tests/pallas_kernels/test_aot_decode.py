"""The decode kernel, as the real TPU compilers schedule it: `make test-aot`."""

import importlib.util

import pytest

from pallas_kernels import aot, schedule

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-aot"
)
CASE = "tests.pallas_kernels.decode_cases:decode"
BYTES_A_CYCLE = {"v5e": 820 / 1.5, "v5p": 2460 / 1.75, "v6e": 1640 / 1.755, "tpu7x": 3700 / 2.2}
"""Of main memory, for the one core that runs the kernel: a chip's on v5p, half a chip's on tpu7x."""


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_every_chip_waits_for_memory_and_copies_no_cache(chip, tmp_path):
    """Modelled: the bundles of a page are fewer than the cycles in which its 512 KiB arrive."""
    compiled = aot.compile_apart(chip, CASE, {"experts": 0}, dump_to=tmp_path)
    assert compiled.temporary_bytes < 2**20
    page = max(loop.bundles for loop in schedule.read(tmp_path, "paged_attention").loops if loop.depth == 2)
    assert 150 < page < 2 * 128 * 1024 * 2 / BYTES_A_CYCLE[chip]


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 16},
        {"heads": 3, "d": 64, "m": 64},
        {"heads": 4, "d": 256, "m": 512, "rows": 1},
        {"dtype": "float32", "slots": 5},
        {"expert_dtype": "bfloat16", "slots": 1},
    ],
    ids=str,
)
def test_other_shapes_compile(shape, tmp_path):
    compiled = aot.compile_apart("v5e", CASE, shape, dump_to=tmp_path)
    assert compiled.temporary_bytes < 2**20  # the cache is not copied
    assert schedule.read(tmp_path, "paged_attention").cycles_a_step > 0


@pytest.mark.parametrize(("chip", "copies"), [("v5e", 1), ("tpu7x", 2)])
def test_norming_experts_takes_about_as_long_as_their_copy(chip, copies, tmp_path):
    """Modelled, experts in float32, 1 MiB each; all bundles of the kernel are more than a step of any kind. Where one
    core has much memory bandwidth, the reciprocal roots of the norm take longer than the copy."""
    aot.compile_apart(chip, CASE, {}, dump_to=tmp_path)
    read = schedule.read(tmp_path, "paged_attention")
    assert read.bundles < copies * 2 * 128 * 1024 * 4 / BYTES_A_CYCLE[chip]
