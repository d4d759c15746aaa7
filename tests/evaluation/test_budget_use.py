"""Which tokens get large budgets, held to counts and correlations made by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.evaluation.budget_use import budget_use, correlation
from aamoe_jax.model import merge, structure
from tests.aamoe.helpers import model_config
from tests.evaluation.helpers import random_params
from tests.evaluation.test_perplexity import batch_of


def test_budgets_are_set_beside_what_their_tokens_predict():
    config = model_config(pattern=("aamoe", "aamoe"), num_layers=2)
    params, batches = random_params(config), [batch_of(1), batch_of(2, padding_rows=1)]
    found = budget_use(structure(config), params, batches, budget="prefix")
    model = merge(structure(config), jax.tree.map(jnp.asarray, params))
    run = jax.jit(lambda *inputs: model(*inputs, budget="prefix", detail="tokens"))
    columns = {"spent": [], "loss": [], "surprisal": [], "entropy": []}
    for batch in batches:
        inputs = [jnp.asarray(batch[name]) for name in ("tokens", "segment_ids", "positions")]
        logits, about = run(*inputs)
        p = np.asarray(jax.nn.softmax(logits), np.float64)
        for row, token in np.argwhere(batch["loss_mask"]):
            if token:  # the surprisal of a first token is not known
                columns["spent"].append(np.asarray(about["spent"])[:, row, token])
                columns["loss"].append(-np.log(p[row, token, batch["targets"][row, token]]))
                columns["surprisal"].append(-np.log(p[row, token - 1, batch["tokens"][row, token]]))
                columns["entropy"].append(-(p[row, token] * np.log(p[row, token])).sum())
    spent = np.array(columns["spent"], np.float64).T
    for name in ("loss", "surprisal", "entropy"):
        wanted = [np.corrcoef(layer, columns[name])[0, 1] for layer in spent]
        np.testing.assert_allclose(found[name], wanted, atol=1e-5)
    uneven = [np.mean([not 0.75 * layer.mean() <= one <= 1.25 * layer.mean() for one in layer]) for layer in spent]
    assert found["uneven"] == pytest.approx(uneven)
    assert max(uneven) > 0.1


def test_equal_budgets_correlate_with_nothing():
    assert correlation(np.full(5, 4.0), np.arange(5.0)) is None
    assert correlation(np.arange(5.0), -np.arange(5.0)) == pytest.approx(-1)
