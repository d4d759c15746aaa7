"""Selection, as the real TPU compilers schedule it beside their own sort: `make test-aot`."""

import importlib.util
import re

import pytest

from pallas_kernels import aot, schedule
from pallas_kernels.selection.tpu import BLOCK, GROUP, ROWS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-aot"
)
CASES = "tests.pallas_kernels.selection_cases"
LAYER = {"rows": 4, "length": 2048, "resources": 128, "slots": 16}
UNROLLED = 2  # registers of scores that one iteration turns
PIPELINE = 2  # iterations of a grid's loop that only fill and drain


def bundles_a_token(read: schedule.Schedule, resources: int, ranks: int, slots: int) -> float:
    """Modelled: every loop times its trips, of which the schedule knows neither the ranks' nor an unrolled loop's."""
    grid, to_keys, rank, compete, write = (loop.bundles for loop in read.loops)
    registers = -(-resources // ROWS) / UNROLLED
    passes = ranks * (rank + compete * -(-resources // GROUP))
    return (grid + to_keys * registers + passes + write * -(-slots // ROWS)) / BLOCK


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_every_chip_compiles_it_without_spills(chip, tmp_path):
    """A rank costs 5 vector operations a resource (mask, compare, two selections, mask's own comparison), 4 of them in
    a bundle: 1.25 bundles times 128 for 1024 tokens would be 0.16 a token."""
    aot.compile_apart(chip, f"{CASES}:selection", LAYER | {"implementation": "pallas_tpu"}, dump_to=tmp_path)
    read = schedule.read(tmp_path, "selection")
    assert read.spills == 0
    one, two = (bundles_a_token(read, 128, ranks, 16) for ranks in (1, 2))
    assert 0.16 < two - one < 0.23
    assert one < 1.1


def test_it_is_far_below_the_compiler_s_sort(tmp_path):
    """Modelled, 16 of 128 resources: the kernel's bundles against those of the sort alone, without what prepares and
    cuts it."""
    for implementation in ("pallas_tpu", "xla"):
        case = LAYER | {"implementation": implementation}
        aot.compile_apart("v5e", f"{CASES}:selection", case, dump_to=tmp_path / implementation)
    kernel = bundles_a_token(schedule.read(tmp_path / "pallas_tpu", "selection"), 128, 16, 16)
    (grid,) = schedule.read(tmp_path / "xla", "sort").loops
    sort = grid.bundles * (grid.trips - PIPELINE) / (LAYER["rows"] * LAYER["length"])
    assert 4 * kernel < sort


@pytest.mark.parametrize(
    "shape",
    [
        {"rows": 3, "length": 5, "resources": 37, "slots": 9},
        {"rows": 1, "length": 2048, "resources": 1088, "slots": 17},
        {"rows": 1, "length": 1024, "resources": 24, "slots": 24},
    ],
    ids=str,
)
def test_other_shapes_compile(shape, tmp_path):
    aot.compile_apart("v5e", f"{CASES}:selection", shape | {"implementation": "pallas_tpu"}, dump_to=tmp_path)
    assert schedule.read(tmp_path, "selection").spills == 0


def test_neither_scores_are_copied_nor_gradients_scattered(tmp_path):
    """The router's product writes what the kernel reads, and the gradient is a sum over slots."""
    routing = {"rows": 2, "length": 1024, "chunks": 32, "experts": 32, "width": 256, "slots": 8}
    aot.compile_apart("v5e", f"{CASES}:routing", routing | {"implementation": "pallas_tpu"}, dump_to=tmp_path / "there")
    aot.compile_apart("v5e", f"{CASES}:gradient", LAYER | {"implementation": "pallas_tpu"}, dump_to=tmp_path / "back")
    there, back = (program(tmp_path / name) for name in ("there", "back"))
    assert "selection" in there
    assert "selection" in back
    assert not re.search(r"= f32\[\S+ copy\(", there)
    assert not re.search(r"\b(scatter|sort)\(", back)


def program(folder) -> str:
    """The compiler's last version of the whole."""
    (path,) = folder.glob("*-TLP-hlo.txt")
    return path.read_text(encoding="utf-8")
