"""Path B for the real TPU compilers, where libtpu is installed: `make test-aot`."""

import importlib.util

import pytest

from pallas_kernels import aot, schedule
from pallas_kernels.block_sparse_attention.tpu.gathered_kernels import CHUNK

here = importlib.util.find_spec("libtpu") is not None
pytestmark = pytest.mark.skipif(not here, reason="libtpu is not installed: make test-aot")

MOST_BUNDLES = {"forward": 6.2, "backward": 12.0, "merge": 6.4, "add": 4.7}
"""A pair, D = 8 x 128, m = 128: what v5e takes, the slowest, and 5 % more."""


@pytest.mark.parametrize("name", MOST_BUNDLES)
@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_kernels_compile_for_every_chip(chip, name, tmp_path):
    aot.compile_apart(chip, "tests.pallas_kernels.gathered_cases:kernel", {"name": name}, dump_to=tmp_path)
    pairs = 512 if name in ("forward", "backward") else CHUNK
    bundles_a_pair = schedule.read(tmp_path, f"gathered_{name}").cycles_a_step / pairs
    assert MOST_BUNDLES[name] / 4 < bundles_a_pair < MOST_BUNDLES[name]


@pytest.mark.parametrize("name", MOST_BUNDLES)
@pytest.mark.parametrize(
    "shape",
    [
        {"d": 64, "heads": 12, "m": 64, "tile": 128},
        {"d": 256, "heads": 9, "tile": 128},  # two groups
        {"d": 128, "heads": 8, "tile": 128, "dtype": "float32"},
    ],
    ids=str,
)
def test_kernels_compile_for_other_shapes(shape, name):
    aot.compile_apart("v5p", "tests.pallas_kernels.gathered_cases:kernel", {"name": name, **shape})


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_the_whole_of_it_compiles_tables_and_gradients_included(chip):
    shape = {"tokens": 2048, "heads": 8, "d": 128, "m": 128, "experts": 16, "rows": 256}
    compiled = aot.compile_apart(chip, "tests.pallas_kernels.gathered_cases:attention", shape)
    outputs = 32 * (256 + 128) * 8 * 128 * 4  # of the pairs, and of as much as a tile more a resource
    # By resource, by token, and what else there is: 1.6 on v5e, 2.8 where another core gathers meanwhile (tpu7x).
    assert compiled.temporary_bytes < 3 * outputs
