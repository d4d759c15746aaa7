"""Dense attention and the local window under the real TPU compilers, where libtpu is installed: `make test-aot`."""

import importlib.util

import pytest

from pallas_kernels import aot, schedule

CASES = "tests.pallas_kernels.dense_cases"
HEADS = 4  # compiled in half the time of 8; what all heads share weighs more
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-aot"
)


def bundles(folder, kernel: str, places: int) -> float:
    """Modelled bundles of 8 heads of 128 and one of the `places` that a step has."""
    return schedule.read(folder, kernel).cycles_a_step * 8 / HEADS / places


@pytest.mark.parametrize(
    ("chip", "forward", "backward"),
    [("v5e", 20.5, 29.0), ("v5p", 22.0, 31.5), ("v6e", 16.5, 27.0), ("tpu7x", 16.5, 27.0)],
)
def test_the_window_keeps_its_schedule(chip, forward, backward, tmp_path):
    aot.compile_apart(chip, f"{CASES}:window_kernels_alone", {"heads": HEADS}, dump_to=tmp_path)
    assert 4 < bundles(tmp_path, "local_window_forward", 128) < forward
    assert 8 < bundles(tmp_path, "local_window_backward", 128) < backward


KERNELS = {
    "kernels": ("dense_attention_forward", "dense_attention_backward"),
    "window_kernels_alone": ("local_window_forward", "local_window_backward"),
}


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        ("kernels", {"d": 64, "heads": 3}),
        ("kernels", {"m": 512, "heads": 2}),
        ("kernels", {"dtype": "float32", "heads": 2}),
        ("window_kernels_alone", {"d": 64, "heads": 5, "m": 64}),
        ("window_kernels_alone", {"d": 256, "heads": 8}),
        ("window_kernels_alone", {"heads": 16, "by_token": True}),
        ("window_kernels_alone", {"d": 256, "heads": 2, "by_token": True}),
        ("window_kernels_alone", {"m": 512, "heads": 2}),
        ("window_kernels_alone", {"dtype": "float32", "heads": 2}),
    ],
    ids=str,
)
def test_other_shapes_compile(case, shape, tmp_path):
    """Others of dense attention in bfloat16 are in `test_aot_schedule`."""
    compiled = aot.compile_apart("v5e", f"{CASES}:{case}", shape, dump_to=tmp_path)
    assert compiled.temporary_bytes < 2**20  # no scores, and no copies of what the kernels are given
    for kernel in KERNELS[case]:
        assert schedule.read(tmp_path, kernel).cycles_a_step > 0


def test_the_whole_of_it_compiles_at_full_width():
    """As much fast memory as it ever wants, where there is least of it: 8192 tokens of 8 heads of 128."""
    shape = {"tokens": 8192, "heads": 8, "d": 128, "m": 128, "slots": 16}
    compiled = aot.compile_apart("tpu7x", f"{CASES}:attention", shape)
    # Less than ten float32 copies of what every token has: neither scores nor one-hot slots are ever written.
    assert compiled.temporary_bytes < 10 * 8192 * 1024 * 4 * 2
