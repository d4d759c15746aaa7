"""Evaluation: sums over every target once, and what row budgets read from the future (AA-28)."""

import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.evaluation.perplexity import causal_budget, evaluate, flip_rate, leakage_gap
from aamoe_jax.model import structure
from tests.aamoe.helpers import M, model_config
from tests.test_model import params_of, run, tokens_of

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
    params = params_of(config)
    batches = [batch_of(1), batch_of(2, padding_rows=2)]
    found = evaluate(structure(config), params, config, batches, BYTES, budget="prefix")
    nll = np.zeros(LENGTH)
    for batch, rows in zip(batches, (3, 1), strict=True):
        logits, _ = run(config, params, jnp.asarray(batch["tokens"]), segment_ids=jnp.asarray(batch["segment_ids"]))
        logits = np.asarray(logits, np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll -= np.take_along_axis(log_p, batch["targets"][..., None], -1)[:rows, :, 0].sum(0)
    assert (found.tokens, found.bytes) == (4 * LENGTH, 4 * LENGTH)
    assert found.nll == pytest.approx(nll.sum(), rel=1e-5)
    np.testing.assert_allclose(found.nll_by_position, nll / 4, rtol=1e-4)
    assert found.bits_per_byte == pytest.approx(nll.sum() / np.log(2) / (4 * LENGTH), rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(nll.mean() / 4), rel=1e-5)


def test_a_row_model_is_judged_by_its_predictor():
    config = model_config(normalizer="row")
    params = params_of(config)
    assert causal_budget(config) == "predictor"
    causal, row = (
        evaluate(structure(config), params, config, [batch_of(1)], BYTES, budget=budget)
        for budget in ("predictor", "row")
    )
    assert leakage_gap(causal, row) == pytest.approx(causal.bits_per_byte - row.bits_per_byte)
    # The untrained predictor says beta for every token, and w_B is random: it is wrong about most.
    assert 0.3 < flip_rate(row) <= 1.0


def test_nothing_to_predict_is_refused():
    config = model_config()
    with pytest.raises(ConfigError, match="nothing to predict"):
        evaluate(structure(config), params_of(config), config, [batch_of(1, 3)], BYTES, budget="prefix")
