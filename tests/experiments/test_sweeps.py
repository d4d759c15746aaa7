"""Other budgets and lengths than in training: figures are of an evaluation apart, planted differences found."""

import dataclasses
import json
import re

import numpy as np
import pytest
from PIL import Image

from aamoe_jax.config import ConfigError, from_dict
from aamoe_jax.data import evaluation_batches, load_tokenizer
from aamoe_jax.evaluation.perplexity import Evaluator
from aamoe_jax.evaluation.sweeps import UnfitLengthError
from aamoe_jax.model import structure
from aamoe_jax.training.checkpoints import load_checkpoint
from experiments import runs, sweeps
from experiments.studies import Study, Variant
from tests.experiments.test_local_context import tiny_experiment

POINTS = {"budget": (0.5, 1.0, 4.0), "length": (0.5, 1.0, 2.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sweeps")


@pytest.fixture(scope="module")
def experiments(folder):
    config = tiny_experiment(folder / "data")
    # A layer that affords much more than it gets: budgets count.
    layer = dataclasses.replace(config.model.aamoe, budget=dataclasses.replace(config.model.aamoe.budget, beta=1.5))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, aamoe=layer))
    dense = dataclasses.replace(config, model=dataclasses.replace(config.model, pattern=("parallel",)))
    return {"routed": config, "dense": dense}


@pytest.fixture(scope="module", params=[pytest.param(sweep, marks=pytest.mark.slow) for sweep in POINTS])
def swept(request, folder, experiments):
    study = Study("Title", {"routed": Variant(), "dense": Variant()}, [])
    points = POINTS[request.param]
    found = sweeps.conduct(study, experiments, request.param, points, [0], folder / "runs", 0)
    return request.param, found


def test_every_point_is_that_of_a_plain_evaluation(swept, folder, experiments):
    sweep, found = swept
    config = experiments["routed"]
    checkpoint = load_checkpoint(folder / f"runs/routed-{config.optimizer.learning_rate:g}-0")
    byte_lengths = load_tokenizer(config.data.tokenizer).byte_lengths
    for at, point in zip(POINTS[sweep], found["routed"][0]["points"], strict=True):
        scale, factor = (at, 1) if sweep == "budget" else (1.0, at)
        data = dataclasses.replace(config.data, seq_len=int(factor * config.data.seq_len))
        batches = evaluation_batches(data, "tiny", split="test", batch_size=1)
        evaluate = Evaluator(structure(config.model), config.model, budget="prefix", max_budget_scale=max(scale, 1.0))
        plain = evaluate(checkpoint.params, batches, byte_lengths, budget_scale=scale)
        assert point["point"] == at
        assert point["bits_per_byte"] == pytest.approx(plain.bits_per_byte, abs=1e-5)
        assert point["spent"] == pytest.approx(plain.spent, rel=0.05)  # rows that fill the last batch spend nothing
        nats, size = np.transpose(point["documents"])
        assert nats.sum() == pytest.approx(plain.nll, rel=1e-5)
        assert size.sum() == plain.bytes


def test_documents_are_the_same_at_every_point_of_every_stack(swept):
    _, found = swept
    sizes = {
        tuple(size for _, size in point["documents"])
        for runs in found.values()
        for run in runs
        for point in run["points"]
    }
    assert len(sizes) == 1
    assert found["routed"][0]["documents"] == len(sizes.pop()) == 6


def test_more_budget_is_spent_and_costs_more_and_a_dense_stack_has_one_point(swept):
    sweep, found = swept
    spent, flops = ([point[name] for point in found["routed"][0]["points"]] for name in ("spent", "flops_per_token"))
    if sweep == "budget":
        assert spent[0] < spent[1] < spent[2]
        assert flops[0] < flops[1] < flops[2]
    assert [point["point"] for point in found["dense"][0]["points"]] == ([1.0] if sweep == "budget" else [0.5, 1, 2])
    assert found["dense"][0]["points"][0]["spent"] is None


def test_nothing_is_evaluated_twice_and_other_text_is_refused(swept, folder, experiments, monkeypatch):
    sweep, found = swept
    config = from_dict(type(experiments["routed"]), found["routed"][0]["config"])
    run = folder / f"runs/routed-{config.optimizer.learning_rate:g}-0"
    monkeypatch.setattr(runs, "load_checkpoint", None)
    assert sweeps.measure(config, run, sweep, POINTS[sweep], 0) == found["routed"][0]
    with pytest.raises(ConfigError, match=r"is of another experiment \(--eval_batches: 0 -> 3\)"):
        sweeps.measure(config, run, sweep, POINTS[sweep], 3)


@pytest.mark.slow
def test_rows_that_cannot_be_cut_are_refused(folder, experiments):
    config = experiments["routed"]
    run = folder / f"runs/routed-{config.optimizer.learning_rate:g}-0"
    with pytest.raises(UnfitLengthError, match="not a multiple of document_align"):
        sweeps.measure(config, run, "length", (1.01,), 0)


def test_points_are_numbers_and_training_is_among_them():
    assert sweeps.points_of("budget", ["4", "0.5"]) == [0.5, 1.0, 4.0]
    assert sweeps.points_of("length", []) == [0.5, 1.0, 2.0, 4.0, 8.0]
    with pytest.raises(ConfigError, match=r"--sweep_points=1,-2: must be positive numbers"):
        sweeps.points_of("budget", ["1", "-2"])


def planted(*more: float, at=(1.0, 2.0), spent: float | None = 2.0) -> list[dict]:
    """Three runs with 2 bits per byte as trained, and with so many more at every point, in all documents."""
    sizes = np.random.default_rng(0).integers(1_000, 20_000, size=30)
    return [
        {
            "seed": seed,
            "documents": 30,
            "points": [
                {
                    "point": point,
                    "bits_per_byte": 2 + 0.1 * seed + extra,
                    "flops_per_token": 1e6 * point,
                    "spent": spent,
                    "tokens": int(sizes.sum()),
                    "documents": np.stack([(2 + 0.1 * seed + extra) * sizes * np.log(2), sizes], axis=1).tolist(),
                }
                for point, extra in zip(at, more, strict=True)
            ],
            "corpus_digest": "0" * 20,
            "versions": {"jax": "0"},
            "device": "cpu",
            "config": {"data": {"seq_len": 64}},
        }
        for seed in range(3)
    ]


def test_planted_differences_are_in_the_report():
    found = {"a": planted(0.0, -0.25), "b": planted(0.5, 0.125), "c": planted(0.75, at=(1.0,), spent=None)}
    text = sweeps.report(found, "budget", "the command", "a.png")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")][2:]
    assert [row[:2] for row in rows] == [["a", "1"], ["a", "2"], ["b", "1"], ["b", "2"], ["c", "1"]]
    assert [row[-2][:7] for row in rows] == ["", "-0.2500", "", "-0.3750", ""]
    assert [row[-1][:7] for row in rows] == ["", "", "+0.5000", "+0.3750", "+0.7500"]
    assert rows[1][-2] == "-0.2500 (-0.2500 to -0.2500)", "nothing is uncertain: all runs and documents have it"
    assert [row[2] for row in rows] == ["2.00"] * 4 + [""]
    assert rows[1][3:8] == ["2,000,000", "1.8500", "1.7500", "1.8500", "1.9500"]
    lengths = sweeps.report(found, "length", "the command", "a.png")
    assert "| b | 128 |" in re.sub(" +", " ", lengths)


@pytest.mark.parametrize("sweep", POINTS)
def test_a_picture_is_drawn(sweep, tmp_path):
    found = {"a": planted(0.0, -0.25), "c": planted(0.75, at=(1.0,), spent=None)}
    figure = sweeps.draw(found, sweep, tmp_path / "a.png")
    assert Image.open(tmp_path / "a.png").size[0] > 500
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "c"]
    (line,) = [line for line in axes.lines if line.get_label() == "a"]
    assert line.get_xdata().tolist() == ([1, 2] if sweep == "budget" else [64, 128])
    assert line.get_ydata() == pytest.approx([2.1, 1.85])


def test_results_are_kept_as_json(swept, folder, experiments):
    sweep, found = swept
    rate = experiments["routed"].optimizer.learning_rate
    (path,) = (folder / f"runs/routed-{rate:g}-0").glob(f"{sweep}_sweep_*.json")
    assert json.loads(path.read_text()) == found["routed"][0]
