"""The probe finds what leaks, and nothing in any mixer under any causal budget does (AA-28)."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.evaluation.causality import Causality, default_cuts, other_tokens, probe
from aamoe_jax.evaluation.perplexity import Evaluator
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import structure
from tests.aamoe.helpers import M, model_config
from tests.evaluation.helpers import random_params
from tests.mixers.layers import LAYERS
from tests.test_model import tokens_of

VOCABULARY = 384
LENGTH = 4 * M + 3
CAUSAL = [mode for mode in get_args(BudgetMode) if mode != "row"]
MIXED = ("aamoe", "all_attention", "attention+feed_forward")


def batch_of(length: int = LENGTH) -> dict[str, np.ndarray]:
    """Two rows: one document, and two documents with padding behind them."""
    segments = np.ones((2, length), np.int32)
    segments[1, 2 * M :] = 2
    segments[1, -3:] = 0
    positions = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    positions[1, 2 * M :] -= 2 * M
    return {"tokens": np.array(tokens_of(2, length)), "segment_ids": segments, "positions": positions}


def probed(config, budget: str, **options) -> Causality:
    evaluator = Evaluator(structure(config), config, budget=budget, **options)
    return evaluator.probe(random_params(config), batch_of(), budget_scale=options.get("max_budget_scale", 1.0))


@pytest.mark.parametrize("layer", LAYERS)
def test_no_mixer_sees_the_future(layer):
    """Every registered mixer, with the kernel of the device."""
    found = probed(model_config(pattern=(layer,), kernel=None), "prefix")
    assert found.cuts == (1, 2 * M, 2 * M + M // 2, LENGTH - 1)
    assert found.before == (0.0,) * 4
    assert min(found.after) > 0


@pytest.mark.parametrize("pattern", [("aamoe",), MIXED], ids=["aamoe", "mixed"])
@pytest.mark.parametrize("budget", CAUSAL)
def test_no_causal_budget_sees_the_future(pattern, budget):
    """Every kind of budget but the row's, in a model that has them all."""
    found = probed(model_config(normalizer="row", pattern=pattern, num_layers=len(pattern)), budget)
    assert found.largest == 0.0
    assert min(found.after) > 0


def test_a_predictor_of_a_model_without_one_is_refused():
    with pytest.raises(ConfigError, match="has no budget predictor"):
        probed(model_config(), "predictor")


@pytest.mark.parametrize("local", ["chunk", "routed", "none"])
def test_no_reading_of_the_neighbourhood_sees_the_future(local):
    """With a larger budget scale, and a cap so tight that it bites."""
    config = model_config(local=local, slack=0, num_layers=1)
    assert probed(config, "prefix", max_budget_scale=2.0).largest == 0.0


def test_row_budgets_do_and_the_probe_says_so():
    """Which shows that the probe can fail."""
    assert probed(model_config(normalizer="row"), "row").largest > 1e-3


class TestLeaks:
    """Toy models whose leaks are known."""

    tokens = np.array(tokens_of(2, 12))

    def probe(self, logits_of, cuts=(1, 4, 6, 11)) -> Causality:
        return probe(jax.jit(logits_of), self.tokens, cuts, vocab_size=VOCABULARY)

    @staticmethod
    def embedded(tokens):
        return jax.nn.one_hot(tokens, VOCABULARY)

    def test_a_running_sum_does_not_leak(self):
        found = self.probe(lambda tokens: jnp.cumsum(self.embedded(tokens), axis=1))
        assert found.before == (0.0,) * 4
        assert min(found.after) > 0

    def test_a_glimpse_of_the_next_token_is_seen_at_every_cut(self):
        found = self.probe(lambda tokens: self.embedded(jnp.roll(tokens, -1, axis=1)))
        assert found.before == (1.0,) * 4

    def test_a_small_leak_far_ahead_is_seen(self):
        """One millionth of the last token, at the first."""
        found = self.probe(lambda tokens: self.embedded(tokens).at[:, 0].add(1e-6 * tokens[:, -1:].astype(jnp.float32)))
        assert found.largest > 0
        assert all(change > 0 for change in found.before)

    def test_a_leak_inside_a_chunk_alone_is_seen_by_the_cut_inside_it(self):
        """A mean over whole chunks of 4: blind to what follows the chunk, not to its own end."""
        mean = lambda tokens: jnp.repeat(self.embedded(tokens).reshape(2, 3, 4, -1).mean(2), 4, axis=1)  # noqa: E731
        before = dict(zip((1, 4, 6, 11), self.probe(mean).before, strict=True))
        assert before[4] == 0.0
        assert before[6] > 0

    def test_a_leak_from_row_to_row_is_seen(self):
        assert self.probe(lambda tokens: self.embedded(tokens) + jnp.flip(self.embedded(tokens), (0, 1))).largest > 0

    def test_no_number_is_no_zero(self):
        found = self.probe(lambda tokens: self.embedded(tokens) * jnp.nan)
        assert np.isnan(found.largest)

    @pytest.mark.parametrize("cuts", [(), (0,), (12,), (3, 40)])
    def test_a_cut_with_nothing_on_one_side_is_refused(self, cuts):
        with pytest.raises(ValueError, match="must be positions from 1 to 11"):
            self.probe(self.embedded, cuts)


def test_every_token_is_replaced_by_another_of_the_vocabulary():
    for vocab_size in (2, VOCABULARY):
        tokens = np.random.default_rng(1).integers(0, vocab_size, (3, 50)).astype(np.int32)
        other = other_tokens(tokens, vocab_size)
        assert (other != tokens).all()
        assert other.min() >= 0
        assert other.max() < vocab_size


@pytest.mark.parametrize(
    ("length", "chunk_size", "cuts"),
    [
        (512, 32, (1, 256, 272, 511)),
        (100, 32, (1, 32, 48, 99)),
        (10, 32, (1, 9)),
        (8, 1, (1, 4, 5, 7)),
        (3, 1, (1, 2)),
        (2, 8, (1,)),
    ],
)
def test_cuts_are_where_leaks_would_begin(length, chunk_size, cuts):
    assert default_cuts(length, chunk_size) == cuts


def test_a_row_of_one_token_cannot_be_cut():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        default_cuts(1, 8)
