"""What follows a training run, as people call it: evaluate, draw."""

from __future__ import annotations

import json
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
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run on row budgets, and one without budgets."""
    folder = tmp_path_factory.mktemp("runs")
    data = tiny_data(folder / "data")
    models = {"row": model_config("aamoe", "row", **KERNEL), "dense": model_config("parallel", num_layers=1)}
    for name, model in models.items():
        train(experiment(data, model), folder / name)
    return {name: folder / name for name in models}


def test_evaluate_shows_row_figures_by_name_alone_and_always_what_they_leak(runs):
    causal = run("evaluate", f"--checkpoint={runs['row']}")
    assert causal.returncode == 0, causal.stderr
    assert "predictor (causal)" in causal.stdout
    assert "leakage gap" in causal.stdout
    assert "flip rate" in causal.stdout
    assert "row (sees the future)" not in causal.stdout
    (result,) = json.loads((runs["row"] / "evaluation-test-causal-step8.json").read_text())["results"]
    assert "row" not in result
    assert set(result["baselines"]) == {"unigram", "xz"}
    assert "row (sees the future)" in run("evaluate", f"--checkpoint={runs['row']}", "--budget=row").stdout


def test_evaluate_asks_no_budgets_of_a_dense_model(runs):
    refused = run("evaluate", f"--checkpoint={runs['dense']}", "--budget=row")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "error: --budget=row: this model has no AA-MoE layer, so it has no budgets\n"


def test_draw_draws_what_the_stack_has(runs):
    drawn = run("draw", f"--run_dir={runs['row']}")
    assert drawn.returncode == 0, drawn.stderr
    for name in ("loss.png", "shares.png", "budget_map.png"):
        assert (runs["row"] / name).read_bytes().startswith(b"\x89PNG"), name
    refused = run("draw", f"--run_dir={runs['row']}", "--window=9999")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: --window=9999: the split has")
    nothing = run("draw", f"--run_dir={runs['row'].parent}")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (1, 1)
