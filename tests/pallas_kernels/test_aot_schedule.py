"""The kernels' schedules against the golden file, where libtpu is installed: `make test-aot`.

Here they are also shown to compile: for every chip, and for one chip or another at other shapes than the headline. The
rest, which takes many minutes, is `python -m benchmarks.tpu_schedule --shapes=...`.
"""

import importlib.metadata
import importlib.util
import json

import pytest

from benchmarks import tpu_schedule
from pallas_kernels import chips, tune
from pallas_kernels.block_sparse_attention import BlockSizes

GOLDEN = json.loads(tpu_schedule.GOLDEN.read_text())
PATHS = [name for name in dict.fromkeys(kernel.name for kernel in tpu_schedule.KERNELS) if name != "splash"]
CASES = [
    *((chip, path, "headline") for chip in ("v5e", "tpu7x") for path in PATHS if path != "resident"),
    *((chip, path, "headline") for chip in ("v5p", "v6e") for path in ("resident_running", "paged")),
    ("v5e", "resident", "headline"),
    ("v5p", "resident", "shortest"),
    ("v6e", "resident", "small"),
    ("tpu7x", "resident", "shortest"),
    ("v6e", "gathered", "headline"),
    ("v6e", "dense", "double"),
]
"""The resident kernels take longest to compile at the headline shape: they do for one chip."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-aot"
)


@pytest.mark.parametrize(("chip", "path", "shape"), CASES)
def test_no_kernel_takes_more_bundles_than_it_did(chip, path, shape):
    """They compile, whatever the compiler's version; their bundles are compared with the same version's."""
    kernels = [kernel for kernel in tpu_schedule.KERNELS if kernel.name == path]
    rows, refused = tpu_schedule.measured(chip, kernels, tpu_schedule.SHAPES[shape])
    assert refused == []
    assert [row["direction"] for row in rows] == [kernel.direction for kernel in kernels]
    version = importlib.metadata.version("libtpu")
    if version != GOLDEN["libtpu"]:
        pytest.skip(f"the golden file is libtpu {GOLDEN['libtpu']}'s, this is {version}: {tpu_schedule.GOLDEN_COMMAND}")
    assert tpu_schedule.regressions(rows, GOLDEN["bundles_a_pair"]) == []


def test_the_tuner_counts_the_bundles_that_are_tabled():
    """The kernels out of the whole operation are those that the table has compiled alone."""
    if importlib.metadata.version("libtpu") != GOLDEN["libtpu"]:
        pytest.skip(f"the golden file is libtpu {GOLDEN['libtpu']}'s")
    rows = [f"v5e resident {direction}: m 128, d 128, heads 8, tile 128" for direction in tpu_schedule.DIRECTIONS]
    wanted = sum(GOLDEN["bundles_a_pair"][row] for row in rows)
    found = tune.nanoseconds_a_pair("v5e", "pallas_tpu_resident", tune.Shape(), BlockSizes(pairs=128), 128.0)
    assert found * chips.TPUS["v5e"].clock / 1e9 == pytest.approx(wanted, rel=tpu_schedule.TOLERANCE)
