"""Evaluation: sums over every target once, and what row budgets read from the future (AA-28)."""

import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.evaluation.perplexity import (
    Evaluator,
    budget_modes,
    causal_budget,
    flip_rate,
    leakage_gap,
    predictor_figures,
    require_budget_scale,
)
from aamoe_jax.model import structure
from tests.aamoe.helpers import M, model_config
from tests.evaluation.helpers import random_params
from tests.test_model import run, tokens_of

LENGTH = 3 * M
BYTES = np.ones(384, np.int32)


def batch_of(seed: int, padding_rows: int = 0) -> dict[str, np.ndarray]:
    tokens = np.array(tokens_of(3, LENGTH + 1, seed))
    real = np.ones((3, LENGTH), np.int32)
    real[3 - padding_rows :] = 0
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (3, LENGTH)).copy()
    return {
        "tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": real, "positions": positions,
        "loss_mask": real,
    }  # fmt: skip


def test_every_target_counts_once_and_padding_never():
    config = model_config()
    params = random_params(config)
    batches = [batch_of(1), batch_of(2, padding_rows=2)]
    found = Evaluator(structure(config), config, budget="prefix")(params, batches, BYTES)
    rows = [np.concatenate([batch[name] for batch in batches])[:4] for name in ("tokens", "targets")]
    logits = np.asarray(run(config, params, jnp.asarray(rows[0]))[0], np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    by_target = -np.take_along_axis(log_p, rows[1][..., None], -1)[..., 0]
    np.testing.assert_allclose(found.nll_by_target, np.pad(by_target, ((0, 2), (0, 0))), rtol=1e-4)
    nll = by_target.sum(0)
    assert (found.tokens, found.bytes) == (4 * LENGTH, 4 * LENGTH)
    assert found.nll == pytest.approx(nll.sum(), rel=1e-5)
    np.testing.assert_allclose(found.nll_by_position, nll / 4, rtol=1e-4)
    assert found.bits_per_byte == pytest.approx(nll.sum() / np.log(2) / (4 * LENGTH), rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(nll.mean() / 4), rel=1e-5)


@pytest.fixture(scope="module")
def row_trained() -> dict:
    """A model with a predictor, evaluated under all budgets that it has."""
    config = model_config(normalizer="row")
    params = random_params(config)
    return {
        budget: Evaluator(structure(config), config, budget=budget)(params, [batch_of(1)], BYTES)
        for budget in budget_modes(config)
    }


def test_a_row_model_is_judged_by_its_predictor(row_trained):
    assert causal_budget(model_config(normalizer="row")) == "predictor"
    causal, row = row_trained["predictor"], row_trained["row"]
    assert leakage_gap(causal, row) == pytest.approx(causal.bits_per_byte - row.bits_per_byte)
    # Both are random: the predictor is wrong about most.
    assert 0.3 < flip_rate(row) <= 1.0


def test_every_budget_that_a_model_has_is_its_own(row_trained):
    assert list(row_trained) == ["row", "predictor_uncapped", "predictor", "prefix"]
    assert budget_modes(model_config()) == ("row", "prefix")
    assert budget_modes(model_config(pattern=("parallel",))) == ()
    assert row_trained["row"].nll != row_trained["prefix"].nll != row_trained["predictor"].nll
    capped, free = row_trained["predictor"], row_trained["predictor_uncapped"]
    assert capped.spent <= 3.0 + 8 / LENGTH
    assert capped.spent < free.spent
    assert capped.clip_rate > free.clip_rate


def test_predictor_figures_reach_to_the_last_rank_that_anybody_gets_wrong(row_trained):
    figures = predictor_figures(row_trained["row"])
    assert set(figures) == {"exact", "within_one", "error", "total", "affords"}
    assert [len(values) for values in figures.values()] == [2] * 5
    whole = np.array(row_trained["row"].statistics["predictor_affords"])
    shown = np.array(figures["affords"])
    np.testing.assert_array_equal(shown, whole[:, : shown.shape[1]])
    assert shown[:, -1].min() < 1.0
    assert (whole[:, shown.shape[1] :] == 1.0).all()
    # A guess errs about [B_i >= k] for the ranks between it and B_i, and about no other: they add up to its error.
    # Only ranks that a token can be given are told.
    wrong = (1 - whole).sum(-1)
    assert (wrong <= np.array(figures["error"]) + 1e-6).all()
    assert (wrong > 0.5 * np.array(figures["error"])).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_dial_that_is_no_positive_number_is_refused(scale):
    with pytest.raises(ConfigError, match=r"budget_scale = \S+: must be a positive number"):
        require_budget_scale(scale)
    assert require_budget_scale(0.5) == 0.5


def test_a_dial_past_what_work_is_laid_out_for_is_refused():
    config = model_config()
    evaluator = Evaluator(structure(config), config, budget="prefix", max_budget_scale=2.0)
    with pytest.raises(ConfigError, match=r"must be at most max_budget_scale = 2\.0"):
        evaluator({}, [], BYTES, budget_scale=3.0)


def test_a_model_without_budgets_has_no_figures_of_them():
    config = model_config(pattern=("parallel",), num_layers=1)
    evaluator = Evaluator(structure(config), config, budget="prefix")
    found = evaluator(random_params(config), [batch_of(1)], BYTES)
    assert (found.budget, found.spent, found.clip_rate) == (None, None, None)
    assert found.bits_per_byte > 0
    with pytest.raises(ConfigError, match="nothing to predict"):
        evaluator(random_params(config), [batch_of(1, 3)], BYTES)
