"""The comparison of readings of the own neighbourhood: folding, resuming, reporting."""

import dataclasses
import json
import signal
from itertools import chain

import numpy as np
import pytest

from aamoe_jax import data
from aamoe_jax.config import (
    AAMoEConfig,
    BudgetConfig,
    ConfigError,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    TrainingConfig,
    to_dict,
)
from aamoe_jax.training.loop import Result
from experiments import local_context, runs, studies
from experiments.studies import Study
from tests.data.helpers import memory_corpus, random_documents

CHUNK, LENGTH, STEPS = 16, 64, 4


def tiny_experiment(folder) -> ExperimentConfig:
    corpus = memory_corpus(random_documents(train=60, held_out=6))
    data.prepare(corpus, data_dir=str(folder), tokenizer=data.ByteTokenizer(), document_align=CHUNK)
    layer = AAMoEConfig(chunk_size=CHUNK, num_experts=4, budget=BudgetConfig(beta=2.0))
    return ExperimentConfig(
        # The reference compiles fast.
        model=ModelConfig(d_model=32, num_heads=2, num_layers=1, kernel="reference", aamoe=layer),
        data=DataConfig(mixture=(("tiny", 1.0),), data_dir=str(folder), seq_len=LENGTH, document_align=CHUNK),
        training=TrainingConfig(steps=STEPS, batch_size=4, log_every=1, eval_every=0),
    )


def synthetic(mode: str, seed: int, config: ExperimentConfig) -> dict:
    """A result as a run would leave it."""
    generator = np.random.default_rng([seed, len(mode)])
    excess = {"window": 0.05, "chunk": 0.4, "routed": 0.45, "none": 0.2}[mode]
    curve = 1.6 + excess * np.exp(-np.arange(64) / 6) + generator.normal(0, 0.01, 64)
    return {
        "mode": mode,
        "seed": seed,
        "steps": 600,
        "bits_per_byte": float(curve.mean() / np.log(2)),
        "nats_per_token": float(curve.mean()),
        "nll_by_position_in_chunk": curve.tolist(),
        "first_position_excess": float(curve[0] - curve.mean()),
        "utilisation": 0.8,
        "tokens_per_second": 5000.0,
        "evaluation": {"tokens": 100_000, "budget": "prefix"},
        "corpus_digest": "0123456789abcdef0123",
        "versions": {"jax": "0.0"},
        "device": "cpu",
        "config": to_dict(config),
    }


def all_synthetic() -> dict[str, list[dict]]:
    """Two seeds of every reading."""
    return {mode: [synthetic(mode, seed, ExperimentConfig()) for seed in (0, 1)] for mode in local_context.MEANINGS}


def reading(config: ExperimentConfig, mode: str, **training: int) -> ExperimentConfig:
    layer = dataclasses.replace(config.model.aamoe, local=mode)
    model = dataclasses.replace(config.model, aamoe=layer)
    return runs.with_training(dataclasses.replace(config, model=model), **training)


class TestFold:
    def test_weighs_every_target_alike(self):
        nll = np.array([1.0, 2.0, 4.0, np.nan])
        counts = np.array([3, 1, 1, 0])
        np.testing.assert_allclose(local_context.fold(nll, counts, 2), [(3 * 1.0 + 4.0) / 4, 2.0])

    def test_a_position_that_nothing_stands_at_has_no_loss(self):
        assert np.isnan(local_context.fold(np.array([1.0, np.nan]), np.array([1, 0]), 2)[1])


@pytest.mark.slow
class TestComparison:
    def test_trains_once_and_reports(self, tmp_path, monkeypatch):
        config = tiny_experiment(tmp_path / "data")

        def conduct(eval_batches: int = 0, **training):
            experiments = {mode: reading(config, mode, **training) for mode in ("window", "none")}
            study = Study("", {mode: local_context.VARIANTS[mode] for mode in experiments}, ())
            runs_dir = tmp_path / "runs"
            return studies.conduct(study, experiments, [0], runs_dir, eval_batches, local_context.about_positions)

        found = conduct()
        results = [result for runs in found.values() for result in runs]
        assert [(result["mode"], result["seed"], result["steps"]) for result in results] == [
            ("window", 0, STEPS),
            ("none", 0, STEPS),
        ]
        for result in results:
            curve = np.array(result["nll_by_position_in_chunk"])
            assert curve.shape == (CHUNK,)
            # Untrained bytes cost about log 384 nats, and a fold of the loss has the loss as its mean.
            assert 4 < curve.min() <= result["nats_per_token"] <= curve.max() < 8
            assert 0 < result["utilisation"] <= 1
            assert result["tokens_per_second"] > 0
        assert results[0]["bits_per_byte"] != results[1]["bits_per_byte"]
        assert results[0]["corpus_digest"] == results[1]["corpus_digest"]

        def refuse(*_, **__):
            raise AssertionError("trained again")

        monkeypatch.setattr(runs, "train", refuse)
        assert conduct() == found
        with pytest.raises(ConfigError, match=r"TrainingConfig.steps: 4 -> 8"):
            conduct(steps=2 * STEPS)
        with pytest.raises(ConfigError, match="eval_batches"):
            conduct(eval_batches=1)

        local_context.write(found, tmp_path / "report", "the command")
        assert json.loads((tmp_path / "report.json").read_text()) == {"command": "the command", "results": results}
        assert (tmp_path / "report.png").stat().st_size > 0

    def test_a_run_that_a_signal_stopped_has_no_result(self, tmp_path, monkeypatch):
        def stopped(config, run_dir, **_):
            return Result(1, signal.SIGTERM, None)

        monkeypatch.setattr(runs, "train", stopped)
        with pytest.raises(runs.StoppedError) as error:
            runs.run(ExperimentConfig(), tmp_path / "run", 0)
        assert error.value.exit_code == 143
        assert not (tmp_path / "run" / "result.json").exists()

    def test_refuses_a_mixture(self):
        study = Study("", local_context.VARIANTS, ())
        with pytest.raises(ConfigError, match=r"DataConfig.mixture"):
            studies.configs(study, [], ["DataConfig.mixture = (('code', 1.0), ('books', 1.0))"], None)


class TestReport:
    def test_means_and_differences(self):
        results = all_synthetic()
        for result, bits in zip(
            chain.from_iterable(results.values()), (2.0, 2.2, 2.3, 2.5, 2.4, 2.4, 3.0, 3.2), strict=True
        ):
            result["bits_per_byte"] = bits
        text = local_context.report(results, "python -m x", "x.png")
        rows = {line.split(":")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
        assert "| 2.1000 | 2.0000 | 2.2000 | +0.0000 |" in rows["window"]
        assert "| 3.1000 | 3.0000 | 3.2000 | +1.0000 |" in rows["none"]

    def test_draws_a_dot_per_seed_and_a_curve_per_reading(self, tmp_path):
        left, right = local_context.draw(all_synthetic(), tmp_path / "x.png").axes
        assert [len(line.get_ydata()) for line in left.get_lines()] == [2, 2, 2, 2]
        assert [text.get_text() for text in right.get_legend().get_texts()] == list(local_context.MEANINGS)
