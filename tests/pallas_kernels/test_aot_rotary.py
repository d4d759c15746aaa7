"""The kernels of norm and rotary embedding, as the real TPU compilers schedule them: `make test-aot`."""

import importlib.util

import pytest

from pallas_kernels import aot, chips, rotary, schedule

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-aot"
)
CASES = "tests.pallas_kernels.rotary_cases"
LAYER = {"tokens": 2048, "number": 8, "k": 128}
KERNELS = {"norm_rotary_forward": 3, "norm_rotary_backward": 4}
"""And how many arrays of heads each reads and writes."""


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_every_chip_compiles_it_and_main_memory_is_not_far(chip, tmp_path):
    """Registers spill a little; on the chips with most bandwidth a step issues for 2.4 times as long as it moves."""
    limits = chips.TPUS[chip]
    aot.compile_apart(chip, f"{CASES}:heads", LAYER, dump_to=tmp_path)
    for kernel, arrays in KERNELS.items():
        issued = schedule.read(tmp_path, kernel).cycles_a_step / limits.clock
        moved = rotary.TILE * (arrays * 2 * 1024 + 4 * 128) / limits.bandwidth
        assert moved / 2 < issued < 2.5 * moved, (kernel, issued / moved)
        assert schedule.on_all_cores(tmp_path, kernel) == (limits.device_cores > 1)


@pytest.mark.parametrize(
    "shape",
    [
        {"tokens": 1000},  # ragged
        {"number": 32, "dtype": "float32"},  # four groups
        {"number": 3, "k": 256, "keep_normed": False},
        {"number": 64, "tokens": 512},  # the widest config
        {"number": 2, "tokens": 64, "rotate": False},
    ],
)
def test_other_shapes_compile(shape, tmp_path):
    aot.compile_apart("v5p", f"{CASES}:heads", LAYER | shape, dump_to=tmp_path)
    for kernel in KERNELS:
        assert schedule.read(tmp_path, kernel).bundles > 0


@pytest.mark.parametrize("width", [1024, 8192])
def test_words_are_written_as_fast_as_memory_takes_them(width, tmp_path):
    aot.compile_apart("v5e", f"{CASES}:pairs", {"tokens": 1024, "width": width}, dump_to=tmp_path)
    read = schedule.read(tmp_path, "token_words")
    assert read.cycles_a_step / chips.TPUS["v5e"].clock < 128 * width * 14 / chips.TPUS["v5e"].bandwidth


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
@pytest.mark.parametrize("sizes", [{"tokens": 24, "heads": 8, "d": 128}, {"tokens": 300, "heads": 8, "d": 256}])
def test_outputs_of_few_tokens_and_of_tiles_that_are_not_full_compile(chip, sizes, tmp_path):
    aot.compile_apart(chip, f"{CASES}:outputs", sizes, dump_to=tmp_path)
    for kernel in ("token_rounded", "token_dots"):
        assert schedule.read(tmp_path, kernel).bundles > 0
