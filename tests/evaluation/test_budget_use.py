"""Which tokens get large budgets, held to counts and correlations made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.aamoe.correlations import correlations, moments
from aamoe_jax.evaluation.budget_use import budget_use
from aamoe_jax.evaluation.perplexity import Evaluator
from aamoe_jax.model import merge, structure
from tests.aamoe.helpers import M, model_config
from tests.evaluation.helpers import random_params
from tests.evaluation.test_perplexity import BYTES, LENGTH, batch_of


def test_budgets_are_set_beside_what_their_tokens_predict():
    config = model_config(pattern=("aamoe", "aamoe"), num_layers=2)
    params, batches = random_params(config), [batch_of(1), batch_of(2, padding_rows=1)]
    index = np.arange(LENGTH, dtype=np.int32)
    batches[0]["segment_ids"] = np.broadcast_to(1 + (index >= M), (3, LENGTH))
    batches[0]["positions"] = np.broadcast_to(np.where(index < M, index, index - M), (3, LENGTH))
    batches[0]["loss_mask"] = np.broadcast_to(index != M - 1, (3, LENGTH)).astype(np.int32)
    found = budget_use(structure(config), params, batches, budget="prefix")
    evaluation = Evaluator(structure(config), config, budget="prefix")(params, batches, BYTES)
    model = merge(structure(config), jax.tree.map(jnp.asarray, params))
    run = jax.jit(lambda *inputs: model(*inputs, budget="prefix", detail="tokens"))
    columns = {"spent": [], "loss": [], "surprisal": [], "entropy": []}
    for batch in batches:
        inputs = [jnp.asarray(batch[name]) for name in ("tokens", "segment_ids", "positions")]
        logits, about = run(*inputs)
        p = np.asarray(jax.nn.softmax(logits), np.float64)
        for row, token in np.argwhere(batch["loss_mask"]):
            if batch["positions"][row, token]:  # the surprisal of a first token is not known
                columns["spent"].append(np.asarray(about["spent"])[:, row, token])
                columns["loss"].append(-np.log(p[row, token, batch["targets"][row, token]]))
                columns["surprisal"].append(-np.log(p[row, token - 1, batch["tokens"][row, token]]))
                columns["entropy"].append(-(p[row, token] * np.log(p[row, token])).sum())
    spent = np.array(columns["spent"], np.float64).T
    for name in ("loss", "surprisal", "entropy"):
        wanted = [np.corrcoef(layer, columns[name])[0, 1] for layer in spent]
        np.testing.assert_allclose(found[name], wanted, atol=1e-5)
        np.testing.assert_allclose(evaluation.statistics[f"budget_{name}"], wanted, atol=1e-5)
    uneven = [np.mean([not 0.75 * layer.mean() <= one <= 1.25 * layer.mean() for one in layer]) for layer in spent]
    assert found["uneven"] == pytest.approx(uneven)
    assert max(uneven) > 0.1


def test_equal_budgets_correlate_with_nothing():
    random = np.random.default_rng(0)
    signal = random.normal(size=(3, 2, 50)) + 5
    spent = np.stack([np.full((2, 50), 6001), random.integers(0, 9, (2, 50))])  # squares of 6001 are rounded
    counts = random.random((2, 50)) < 0.7
    found = correlations(np.asarray(moments(jnp.asarray(spent), jnp.asarray(signal, jnp.float32), jnp.asarray(counts))))
    for (equal, uneven), x in zip(found.values(), signal, strict=True):
        assert equal is None
        assert uneven == pytest.approx(np.corrcoef(spent[1][counts], x[counts])[0, 1], abs=1e-4)
    assert correlations(np.zeros((1, 3, 6))) == {"loss": [None], "surprisal": [None], "entropy": [None]}
