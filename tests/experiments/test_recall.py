"""The recall program, at sizes where nothing is learned: what it writes, keeps, refuses, and measures."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from experiments.binding import load_experiment
from experiments.recall import ALL_STACKS, Measure, results_of, run
from experiments.tasks import Examples

pytestmark = pytest.mark.slow

TINY = (
    "chunk_size = 8",
    "AAMoEConfig.num_experts = 4",
    "ModelConfig.d_model = 16",
    "DataConfig.seq_len = 64",
    "TrainingConfig.batch_size = 2",
    "TrainingConfig.steps = 3",
    "TrainingConfig.eval_every = 2",
)


def experiment(stack: str, *bindings: str):
    return load_experiment(["recall.gin"], [*TINY, *bindings, *ALL_STACKS[stack].bindings])


def test_every_stack_is_an_experiment_and_the_default_is_that_of_aamoe_gin():
    found = {name: experiment(name).model for name in ALL_STACKS}
    assert all(found[name] != found["default"] for name in ALL_STACKS if name != "default")
    shipped = load_experiment(["aamoe.gin"]).model.aamoe
    default = found["default"].aamoe
    assert (default.router, default.budget.importance) == (shipped.router, shipped.budget.importance)
    literal = load_experiment(["aamoe_literal.gin"]).model
    for field in ("router", "local"):
        assert getattr(found["literal"].aamoe, field) == getattr(literal.aamoe, field)
    assert found["literal"].aamoe.budget.normalizer == literal.aamoe.budget.normalizer
    assert (found["literal"].norm, found["literal"].qk_norm) == (literal.norm, literal.qk_norm)
    assert not found["dense"].layers_of("aamoe")


def test_a_run_says_what_it_measured():
    result = run(experiment("default"), "copy")
    assert result["steps"] == 3
    assert result["solved"] is None
    assert [point["step"] for point in result["curve"]] == [2, 3]
    assert 0 <= result["accuracy"] <= 1
    assert 0 <= result["router_recall"] <= 1
    assert len(result["pairs_context"]) == 2  # layers
    assert sum(one["targets"] for one in result["by_distance"]) > 0


def test_finished_runs_are_kept_and_other_experiments_refused(tmp_path):
    experiments = {"dense": experiment("dense")}
    first = results_of(experiments, ["copy"], [0], tmp_path)
    again = results_of(experiments, ["copy"], [0], tmp_path)
    assert "router_recall" not in first[0]
    assert [one["seconds"] for one in first] == [one["seconds"] for one in again]  # nothing was run
    other = {"dense": experiment("dense", "OptimizerConfig.learning_rate = 0.5")}
    with pytest.raises(ConfigError, match=r"copy-64-dense-0.json is of another experiment: take another --work_dir"):
        results_of(other, ["copy"], [0], tmp_path)


def test_the_program_writes_a_table_a_picture_and_all_figures(tmp_path):
    program = [
        sys.executable,
        "-m",
        "experiments.recall",
        "--task=copy",
        "--stack=dense",
        "--stack=default",
        "--seeds=0",
    ]
    program += [f"--gin_param={binding}" for binding in TINY]
    command = [*program, f"--work_dir={tmp_path}/runs", f"--output={tmp_path}/out/recall"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "out" / "recall.json").read_text())["results"]
    assert [(one["task"], one["seed"], one["stack"]) for one in found] == [("copy", 0, "dense"), ("copy", 0, "default")]
    text = (tmp_path / "out" / "recall.md").read_text()
    assert text in done.stdout
    assert sum(line.startswith(("| AA-MoE", "| attention")) for line in text.splitlines()) == 2
    assert (tmp_path / "out" / "recall.png").stat().st_size > 10_000


def test_a_vocabulary_without_room_is_refused():
    config = experiment("dense")
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=100))
    with pytest.raises(ConfigError, match=r"ModelConfig.vocab_size = 100: these tasks need at least 448"):
        run(small, "copy")


def test_router_recall_counts_answers_beyond_the_window_alone():
    """Chunks of 2: one answer is 2 tokens back, in the window or not; the other 6 back, in chunk 0."""
    label, wanted = np.array([[1, 0, 0, 0, 2, 0, 0, 0]]), np.array([[0, 0, 0, 0, 0, 2, 1, 0]])
    batch = Examples(np.zeros((1, 8), int), np.arange(8)[None], label, wanted)
    resource, spent = np.full((1, 1, 8, 3), 9), np.full((1, 1, 8), 3)
    resource[0, 0, 6, 1] = 0
    about = {"resource": resource, "spent": spent}
    right = batch.targets.copy()
    right[0, 6] = -1
    measure = Measure(lambda params, batch: (right, about), 2)
    found = measure.over({}, [batch])
    assert found.accuracy == 0.5
    assert found.recall() == 1.0  # of the one answer that is 2 or more tokens back
    resource[0, 0, 6, 1] = 1
    assert Measure(lambda params, batch: (right, about), 2).over({}, [batch]).recall() == 0.0
