"""Path B for the real TPU compilers, where libtpu is installed: `make test-aot`."""

import importlib.util

import pytest

from pallas_kernels import aot, schedule

here = importlib.util.find_spec("libtpu") is not None
pytestmark = pytest.mark.skipif(not here, reason="libtpu is not installed: make test-aot")

CASES = "tests.pallas_kernels.gathered_cases"


@pytest.mark.parametrize("name", ["forward", "backward", "merge", "add"])
@pytest.mark.parametrize(
    "shape",
    [{"d": 256, "heads": 9, "tile": 128}, {"dtype": "float32", "tile": 128}],  # two groups; one number in a word
    ids=str,
)
def test_kernels_compile_for_other_shapes(shape, name, tmp_path):
    """Others of bfloat16 are in `test_aot_schedule`."""
    compiled = aot.compile_apart("v5p", f"{CASES}:kernel", {"name": name, **shape}, dump_to=tmp_path)
    assert compiled.temporary_bytes < compiled.argument_bytes / 8  # statistics may be copied first; rows never are
    assert schedule.read(tmp_path, f"gathered_{name}").cycles_a_step > 0


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_the_whole_of_it_compiles_tables_and_gradients_included(chip):
    shape = {"tokens": 2048, "heads": 8, "d": 128, "m": 128, "experts": 16, "rows": 256}
    compiled = aot.compile_apart(chip, f"{CASES}:attention", shape)
    outputs = 32 * (256 + 128) * 8 * 128 * 4  # of the pairs, and of as much as a tile more a resource
    # By resource, by token, and what else there is: 1.6 on v5e, 2.8 where another core gathers meanwhile (tpu7x).
    assert compiled.temporary_bytes < 3 * outputs
