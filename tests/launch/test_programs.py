"""What follows a training run, as people call it: draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aamoe_jax.training.loop import train
from tests.training.helpers import experiment, model_config, tiny_data

KERNEL = {"num_layers": 1, "kernel": "reference"}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", f"launch.{program}", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on row budgets."""
    folder = tmp_path_factory.mktemp("runs")
    train(experiment(tiny_data(folder / "data"), model_config("aamoe", "row", **KERNEL)), folder / "row")
    return folder / "row"


def test_draw_draws_what_the_stack_has(trained):
    drawn = run("draw", f"--run_dir={trained}")
    assert drawn.returncode == 0, drawn.stderr
    for name in ("loss.png", "shares.png", "budget_map.png"):
        assert (trained / name).read_bytes().startswith(b"\x89PNG"), name
    refused = run("draw", f"--run_dir={trained}", "--window=9999")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: --window=9999: the split has")
    nothing = run("draw", f"--run_dir={trained.parent}")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (1, 1)
