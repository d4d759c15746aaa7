"""The kernels' schedules against the golden file, where libtpu is installed: `make test-aot`."""

import importlib.metadata
import importlib.util
import json

import pytest

from benchmarks import tpu_schedule

GOLDEN = json.loads(tpu_schedule.GOLDEN.read_text())


def reason() -> str | None:
    """Why the golden file says nothing here."""
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: make test-aot"
    version = importlib.metadata.version("libtpu")
    if version != GOLDEN["libtpu"]:
        return f"the golden file is libtpu {GOLDEN['libtpu']}'s, this is {version}: {tpu_schedule.GOLDEN_COMMAND}"
    return None


@pytest.mark.skipif(reason() is not None, reason=str(reason()))
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_no_kernel_takes_more_bundles_than_it_did(chip):
    """The headline shape of the kernels that training runs, on the oldest and the newest chip."""
    kernels = [kernel for kernel in tpu_schedule.KERNELS if kernel.name == "resident"]
    rows, refused = tpu_schedule.measured(chip, kernels, tpu_schedule.HEADLINE)
    assert refused == []
    assert len(rows) == 2
    assert tpu_schedule.regressions(rows, GOLDEN["bundles_a_pair"]) == []
