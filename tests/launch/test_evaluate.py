"""`python -m launch.evaluate` as people call it. All calls share one process: to start one takes longer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import experiment, model_config, tiny_data

pytestmark = pytest.mark.slow

MODELS = {
    "row": model_config("aamoe", "row", num_layers=2, kernel="reference"),
    "prefix": model_config("aamoe", "prefix", num_layers=1, kernel="reference"),
    "half": model_config("aamoe", "prefix", num_layers=1, kernel="reference", dtype="bfloat16"),
    "dense": model_config("parallel", num_layers=1),
}
CALLS = {
    "causal": ("row",),
    "all": ("row", "--budget=all", "--max_batches=1"),
    "row": ("prefix", "--budget=row", "--max_batches=1"),
    "all_of_prefix": ("prefix", "--budget=all", "--max_batches=1", "--budget_scale=0.5"),
    "one_device": ("row", "--budget=predictor", "--max_batches=1"),
    "mesh": ("row", "--mesh=1x1x2x2", "--max_batches=1"),
    "half": ("half", "--max_batches=1"),
    "dense": ("dense",),
    "skipped": ("dense", "--skip_layers=0", "--max_batches=1"),
    "skipped_by_name": ("dense", "--skip_layers=parallel", "--max_batches=1"),
    "budget_sweep": ("prefix", "--sweep=budget", "--sweep_points=0.5,1,2", "--max_batches=1"),
    "length_sweep": ("prefix", "--sweep=length", "--sweep_points=1,2,500", "--max_batches=1"),
    "dense_length": ("dense", "--sweep=length", "--sweep_points=1,0.3", "--max_batches=1"),
}
REFUSED = {
    ("dense", "--budget=row"): "--budget=row: this model has no AA-MoE layer, so it has no budgets",
    ("dense", "--budget=all"): "--budget=all: this model has no AA-MoE layer, so it has no budgets",
    ("dense", "--budget_scale=2"): "--budget_scale=2.0: this model has no AA-MoE layer, so it has no budgets",
    ("dense", "--sweep=budget"): "--sweep=budget: this model has no AA-MoE layer, so it has no budgets",
    ("prefix", "--budget=predictor"): (
        "--budget=predictor: this model was trained on prefix budgets and has no budget predictor"
    ),
    ("prefix", "--sweep=budget", "--budget=predictor_uncapped"): (
        "--budget=predictor_uncapped: this model was trained on prefix budgets and has no budget predictor"
    ),
    ("prefix", "--budget_scale=0"): "budget_scale = 0.0: must be a positive number",
    ("prefix", "--budget_scale=-1"): "budget_scale = -1.0: must be a positive number",
    ("prefix", "--budget_scale=nan"): "budget_scale = nan: must be a positive number",
    ("prefix", "--sweep=budget", "--budget=all"): "--budget=all: --sweep=budget takes one kind of budget",
    ("prefix", "--sweep=length", "--budget_scale=2"): (
        "--budget_scale=2.0: --sweep=length sets the budget scale itself"
    ),
    ("prefix", "--sweep=budget", "--sweep_points=1,x"): (
        "--sweep_points=1,x: must be positive numbers, such as 0.5,1,2"
    ),
    ("prefix", "--sweep=length", "--sweep_points=1,-2"): (
        "--sweep_points=1,-2: must be positive numbers, such as 0.5,1,2"
    ),
    ("prefix", "--mesh=2x2"): (
        "--mesh=2x2: wanted four sizes, data x fsdp x resource x tensor, such as 1x4x2x1 or 1x-1x1x1"
    ),
    ("prefix", "--mesh=-1x-1x1x1"): (
        "--mesh=-1x-1x1x1: wanted four sizes, data x fsdp x resource x tensor, such as 1x4x2x1 or 1x-1x1x1"
    ),
    ("prefix", "--mesh=1x1x2x1"): (
        "MeshConfig: data 1 x fsdp 1 x resource 2 x tensor 1 = 2 does not make 4 devices: change an axis, or let one "
        "take the rest, such as MeshConfig.fsdp = -1"
    ),
    ("dense", "--skip_layers=0,mlp"): (
        "--skip_layers=0,mlp: there is no 'mlp'; there are layers 0 to 0, and the mixers parallel"
    ),
    ("dense", "--skip_layers=1"): ("--skip_layers=1: there is no 1; there are layers 0 to 0, and the mixers parallel"),
    ("prefix", "--sweep_points=1,2"): "--sweep_points=1,2: give --sweep=budget or --sweep=length with it",
}


class Outcome(NamedTuple):
    """What one call left."""

    code: int
    stdout: str
    stderr: str
    run: Path

    def record(self) -> dict[str, Any]:
        """The JSON that it says it wrote."""
        (line,) = (line for line in self.stdout.splitlines() if line.startswith("written to "))
        return json.loads(Path(line.removeprefix("written to ")).read_text())

    def pictures(self) -> list[Path]:
        """The pictures that it says it drew."""
        return [Path(line.removeprefix("picture ")) for line in self.stdout.splitlines() if line.startswith("picture ")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[Any, Outcome]:
    """Every call above, by its name or its arguments."""
    folder = tmp_path_factory.mktemp("runs")
    data = tiny_data(folder / "data")
    for name, model in MODELS.items():
        save_run(folder / name, experiment(data, model))
    calls = CALLS | {arguments: arguments for arguments in REFUSED}
    arguments = [[f"--checkpoint={folder / run}", *rest] for run, *rest in calls.values()]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    several = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    ended = session.calls("evaluate", arguments, XLA_FLAGS=several, **cache)
    return {
        name: Outcome(*outcome, folder / run) for (name, (run, *_)), outcome in zip(calls.items(), ended, strict=True)
    }


@pytest.mark.parametrize("name", CALLS)
def test_every_call_ends_well_and_tells_nothing_on_stderr_but_notes(outcomes, name):
    outcome = outcomes[name]
    assert outcome.code == 0, outcome.stderr
    assert all(line.startswith("note: ") for line in outcome.stderr.splitlines()), outcome.stderr


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_cannot_be_is_refused_in_one_line(outcomes, arguments):
    refused = outcomes[arguments]
    assert (refused.code, refused.stdout, refused.stderr) == (1, "", f"error: {REFUSED[arguments]}\n")


def test_row_figures_are_shown_by_name_alone_and_what_they_leak_always(outcomes):
    causal = outcomes["causal"]
    assert "predictor (causal)" in causal.stdout
    assert "to row: the leakage gap" in causal.stdout
    assert "flip rate" in causal.stdout
    assert "row (sees the future)" not in causal.stdout
    assert (causal.run / "evaluation-test-causal-step8.json").is_file()
    (result,) = causal.record()["results"]
    assert set(result["budgets"]) == {"predictor"}
    assert result["budgets"]["predictor"]["gap_to_row"] != 0
    assert set(result["baselines"]) == {"unigram", "xz"}
    assert "row (sees the future)" in outcomes["row"].stdout
    assert list(outcomes["row"].record()["results"][0]["budgets"]) == ["prefix", "row"]


def test_all_budgets_stand_side_by_side(outcomes):
    found = outcomes["all"]
    assert "the first 1 batches alone: a part" in found.stdout
    assert (found.run / "evaluation-test-all-first1-step8.json").is_file()
    record = found.record()
    (result,) = record["results"]
    budgets = result["budgets"]
    assert list(budgets) == ["row", "predictor_uncapped", "predictor", "prefix"]
    assert record["max_batches"] == 1
    assert record["versions"]["jax"] == jax.__version__
    assert record["config"]["model"]["d_model"] == 32
    for name, figures in budgets.items():
        assert figures["budget"] == name
        assert figures["gap_to_row"] == pytest.approx(figures["bits_per_byte"] - budgets["row"]["bits_per_byte"])
        assert (figures["causality"]["largest"] == 0) == (name != "row")
    assert len(result["predictor"]["exact"]) == 2
    assert result["flip_rate"] == pytest.approx(1 - sum(result["predictor"]["exact"]) / 2)
    assert list(outcomes["all_of_prefix"].record()["results"][0]["budgets"]) == ["row", "prefix"]


def test_the_dial_scales_what_is_spent(outcomes):
    half, whole = (outcomes[name].record()["results"][0]["budgets"]["prefix"] for name in ("all_of_prefix", "row"))
    assert "every budget times 1/2" in outcomes["all_of_prefix"].stdout
    assert (outcomes["all_of_prefix"].run / "evaluation-test-all-scale0.5-first1-step8.json").is_file()
    assert half["budget_scale"] == 0.5
    assert half["spent"] < 0.7 * whole["spent"]


def test_over_a_mesh_the_figures_are_those_of_one_device(outcomes):
    one, mesh = (outcomes[name].record()["results"][0]["budgets"]["predictor"] for name in ("one_device", "mesh"))
    for name in ("bits_per_byte", "perplexity", "spent", "flops_per_token"):
        assert mesh[name] == pytest.approx(one[name], rel=1e-5), name
    assert mesh["nll_by_position"] == pytest.approx(one["nll_by_position"], abs=2e-5)
    assert mesh["causality"]["largest"] == 0
    for name in ("budget_loss", "budget_surprisal", "budget_entropy"):
        assert mesh["statistics"][name] == pytest.approx(one["statistics"][name], abs=1e-4), name


def test_a_model_without_budgets_has_none_in_its_table(outcomes):
    (result,) = outcomes["dense"].record()["results"]
    (figures,) = result["budgets"].values()
    assert (figures["budget"], figures["spent"], figures["causality"]["largest"]) == (None, None, 0.0)
    assert "(causal)" not in outcomes["dense"].stdout


def test_dec_11_layers_are_left_out_by_number_and_by_name(outcomes):
    """Of a stack of one layer nothing is left. That the rest is as it was: tests/mixers/test_deconstructed.py."""
    numbered, named = (outcomes[name] for name in ("skipped", "skipped_by_name"))
    assert ", without 0\n" in numbered.stdout
    assert (named.run / "evaluation-test-causal-without_parallel-first1-step8.json").is_file()
    assert named.record()["skip_layers"] == ["parallel"]
    one, other, whole = (
        next(iter(outcome.record()["results"][0]["budgets"].values()))["nll_by_position"][0]
        for outcome in (numbered, named, outcomes["dense"])
    )
    assert one == other
    assert abs(one - whole) > 1e-3


def test_a_budget_sweep_tells_whether_bits_fall(outcomes):
    swept = outcomes["budget_sweep"]
    assert (swept.run / "budget_sweep-test-causal-at0.5_1_2-first1-step8.json").is_file()
    assert "fall monotonically with the budget" in swept.stdout
    points = swept.record()["results"][0]["points"]
    assert [point["budget_scale"] for point in points] == [0.5, 1.0, 2.0]
    plain = outcomes["row"].record()["results"][0]["budgets"]["prefix"]
    assert points[1]["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-5)
    (picture,) = swept.pictures()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_length_sweep_skips_what_the_text_cannot_fill_and_says_so(outcomes):
    swept = outcomes["length_sweep"]
    points = swept.record()["results"][0]["points"]
    assert [point["length"] for point in points] == [64, 128, 32000]
    assert [list(point["fixed"]) for point in points] == [["beta", "B"]] * 2 + [[]]
    assert "tokens, less than one row of 32000" in points[2]["skipped"]
    assert f"skipped: {points[2]['skipped']}" in swept.stdout
    assert swept.pictures()[0].is_file()
    dense = outcomes["dense_length"].record()["results"][0]["points"]
    assert [list(point["fixed"]) for point in dense] == [[], ["none"]]
