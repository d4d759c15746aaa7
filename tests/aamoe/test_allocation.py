"""Allocation: eq 8 and eq 10-15 (AA-07, AA-14, AA-18, AA-19, AA-20, AA-21)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.aamoe.allocation import Candidates, OneBudget, Ranking, afford, log_partition, rank
from aamoe_jax.aamoe.budget import UNBOUNDED, Budget
from aamoe_jax.aamoe.resources import available_chunks
from aamoe_jax.config import AAMoEConfig
from aamoe_jax.mixers.base import Context


def candidates_of(scores, available) -> Candidates:
    """Two chunks, then experts; without a local resource."""
    scores, available = jnp.asarray(scores), jnp.asarray(available)
    own, slots = jnp.zeros(scores.shape[:2], jnp.int32), scores.shape[-1]
    return Candidates(scores, available, None, own, available.sum(-1), 2, slots, UNBOUNDED, False)


def log_affordability(budget, k):
    """log P of the k-th resources, of score 0."""
    ranking = Ranking(jnp.zeros((1, 1, len(k))), jnp.zeros((1, 1, len(k)), jnp.int32))
    return afford(ranking, jnp.full((1, 1), len(k)), budget * jnp.ones((1, 1, 1)), k).log_prob[0, 0]


def test_affordability_reproduces_the_sanity_check_of_the_paper():
    """Budget 2.5 (eq 12-13): sigma(1.5) and sigma(0.5), and the second item feels the budget more."""
    k = jnp.array([1, 2])
    np.testing.assert_allclose(jnp.exp(log_affordability(2.5, k)), [0.8176, 0.6225], atol=5e-5)
    probability = jax.jacobian(lambda budget: jax.nn.sigmoid(budget - k))(2.5)
    np.testing.assert_allclose(probability, [0.1491, 0.2350], atol=5e-5)
    log_probability = jax.jacobian(lambda budget: log_affordability(budget, k))(2.5)
    np.testing.assert_allclose(log_probability, [0.1824, 0.3775], atol=5e-5)


def test_affordability_is_finite_far_below_the_price():
    value, slope = jax.value_and_grad(lambda budget: log_affordability(budget, jnp.array([300]))[0])(jnp.float32(0.0))
    assert value == pytest.approx(-300.0)
    assert slope == pytest.approx(1.0)


def available_of_row(segments, chunk_size):
    context = Context(segments, jnp.zeros_like(segments), "prefix", 1.0)
    _, available = available_chunks(AAMoEConfig(chunk_size=chunk_size), context)
    return np.asarray(available)[0]


@pytest.mark.parametrize(("length", "chunk_size"), [(24, 8), (16, 16), (40, 4)])
def test_available_chunks_are_the_completed_ones(length, chunk_size):
    segments = jnp.ones((1, length), jnp.int32)
    available = available_of_row(segments, chunk_size)
    for i in range(length):
        for j in range(length // chunk_size):
            assert available[i, j] == ((j + 1) * chunk_size <= (i // chunk_size) * chunk_size)


def test_available_chunks_stay_within_the_document_and_are_complete():
    # Chunks of 4: document 1 fills two, document 2 one and a half, then padding.
    segments = jnp.array([[1] * 8 + [2] * 6 + [0] * 2])
    available = available_of_row(segments, 4)
    assert available[7].tolist() == [True, False, False, False]
    assert not available[8:12].any()
    assert available[12].tolist() == [False, False, True, False]
    assert not available[14:].any()


def test_ranks_match_brute_force_and_break_ties_by_index():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (2, 50, 9)).astype(np.float32)  # few values: many ties
    available = rng.random((2, 50, 9)) < 0.7
    best, index = rank(candidates_of(scores, available), jnp.full((2, 50), 9))
    for row in range(2):
        for i in range(50):
            order = sorted(np.flatnonzero(available[row, i]), key=lambda j: (-scores[row, i, j], j))
            assert np.asarray(index)[row, i, : len(order)].tolist() == order
            assert np.isneginf(np.asarray(best)[row, i, len(order) :]).all()


def test_no_more_is_ranked_than_is_counted():
    rng = np.random.default_rng(2)
    scores, available = jnp.asarray(rng.normal(size=(2, 50, 9)), jnp.float32), jnp.asarray(rng.random((2, 50, 9)) < 0.7)
    count = jnp.minimum(jnp.asarray(rng.integers(-1, 6, (2, 50)), jnp.int32), available.sum(-1))
    (all_best, all_index), (best, index) = (rank(candidates_of(scores, available), few) for few in (count + 9, count))
    used = jnp.arange(9) < count[..., None]
    np.testing.assert_array_equal(index, jnp.where(used, all_index, 0))
    np.testing.assert_array_equal(best, jnp.where(used, all_best, -jnp.inf))


def test_log_prob_is_eq_15_and_probabilities_sum_to_at_most_one():
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.normal(size=(1, 20, 7)), jnp.float32)
    available = jnp.asarray(rng.random((1, 20, 7)) < 0.8).at[..., 0].set(True)
    budget = jnp.asarray(rng.uniform(0, 5, (1, 20)), jnp.float32)
    count = jnp.minimum(jnp.floor(budget).astype(jnp.int32), available.sum(-1))
    plain = candidates_of(scores, available)
    spending = Budget(budget, count, count)
    result, log_prob = (OneBudget()(found, spending) for found in (plain, plain.normalized()))
    index, log_prob = result.resource, log_prob.log_prob
    for i in range(20):
        r = np.asarray(scores[0, i], np.float64)
        partition = np.log(np.exp(r[np.asarray(available[0, i])]).sum())
        for slot in range(int(count[0, i])):
            j = int(index[0, i, slot])
            wanted = -np.log1p(np.exp(-(float(budget[0, i]) - (slot + 1)))) + r[j] - partition
            assert float(log_prob[0, i, slot]) == pytest.approx(wanted, abs=1e-5)
        assert np.exp(np.asarray(log_prob[0, i, : int(count[0, i])])).sum() <= 1 + 1e-6
        assert (np.asarray(result.log_prob[0, i, int(count[0, i]) :]) == 0).all()


def test_partition_of_nothing_has_no_gradient_and_no_nan():
    value, slope = jax.value_and_grad(lambda scores: log_partition(scores, jnp.zeros((1, 1, 3), bool), None).sum())(
        jnp.ones((1, 1, 3))
    )
    assert value == 0
    assert not slope.any()
