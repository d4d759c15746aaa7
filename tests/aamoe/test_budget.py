"""Budgets: shares of B, their floors, the cap, the predictor (AA-11, AA-12, AA-28, AA-29)."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from aamoe_jax.aamoe.budget import (
    BudgetPredictor,
    bounded,
    cap_spending,
    floor_causal_budgets,
    floor_row_budgets,
    next_prefix_budget,
    predictor_loss,
    prefix_budgets,
    row_budgets,
)
from aamoe_jax.model import merge, structure
from tests.aamoe.helpers import M, model_config
from tests.evaluation.helpers import random_params


@jax.jit
def row_counts(importance, segment_ids, beta):
    """B_i of row budgets."""
    return floor_row_budgets(row_budgets(importance, segment_ids, beta), segment_ids)


def test_aa_27_one_token_can_take_the_whole_budget():
    """B_i = B for one token of the row, and nothing for the others."""
    importance, beta, length = jnp.zeros((1, 64)).at[0, 17].set(100.0), 3.0, 64
    given = row_counts(importance, jnp.ones((1, length), jnp.int32), beta)
    assert given[0, 17] == beta * length
    assert given.sum() == beta * length


@pytest.mark.parametrize("length", [41, 47, 55, 61, 1000, 1536])
@pytest.mark.parametrize("beta", [1.0, 3.0, 4.0])
def test_uniform_importance_gives_every_token_beta(length, beta):
    """Decision 16: without epsilon, float32 loses one unit per token at these lengths."""
    importance = jnp.zeros((1, length))
    assert (row_counts(importance, jnp.ones((1, length), jnp.int32), beta) == beta).all()
    prefix = jax.jit(prefix_budgets)(importance, jnp.ones((1, length), jnp.int32), beta)
    assert (floor_causal_budgets(prefix) == beta).all()


def test_epsilon_buys_no_more_than_there_is_in_a_long_row():
    """B = 19,999 of 20,000 tokens that want one each: bounded by 1 / 2L it rounds nobody up."""
    budget = jnp.full((1, 20_000), 0.99995)
    assert jax.jit(floor_row_budgets)(budget, jnp.ones((1, 20_000), jnp.int32)).sum() <= 19_999


@pytest.mark.parametrize("beta", [4.0, 64.0])
def test_uniform_importance_gives_every_token_of_a_long_row_beta(beta):
    length = 32768
    budget = jax.jit(prefix_budgets)(jnp.zeros((1, length)), jnp.ones((1, length), jnp.int32), beta)
    assert (floor_causal_budgets(budget) == beta).all()


@pytest.mark.parametrize("length", [1000, 1536])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_row_budgets_never_sum_past_the_total(length, scale):
    importance = scale * jax.random.normal(jax.random.key(0), (16, length))
    real = jnp.arange(length) < jnp.linspace(1, length, 16).astype(jnp.int32)[:, None]
    budget = jax.jit(row_budgets)(importance, real.astype(jnp.int32), 2.5)
    count = row_counts(importance, real.astype(jnp.int32), 2.5)
    total = 2.5 * real.sum(-1)
    assert (count >= 0).all()
    assert (count.sum(-1) <= total).all()
    assert not count[~real].any()
    np.testing.assert_allclose(budget.sum(-1), total, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
def test_row_budgets_are_a_softmax_over_every_document(scale):
    """Whatever another document holds: an importance far above takes nothing away, and does not underflow."""
    importance = scale * np.random.default_rng(0).normal(size=(2, 30))
    importance[:, :12] += 300
    segments = np.array([[1] * 12 + [2] * 13 + [0] * 5, [1] * 12 + [0] * 2 + [2] * 15 + [3]])
    budget = np.asarray(jax.jit(row_budgets)(jnp.asarray(importance, jnp.float32), jnp.asarray(segments), 2.0))
    wanted = np.zeros((2, 30))
    for row in range(2):
        for document in set(segments[row]) - {0}:
            there = segments[row] == document
            weight = np.exp(importance[row, there] - importance[row, there].max())
            wanted[row, there] = 2.0 * there.sum() * weight / weight.sum()
    np.testing.assert_allclose(budget, wanted, rtol=2e-4, atol=1e-5)


def test_one_token_can_use_the_entire_budget():
    importance = jnp.zeros((1, 64)).at[0, 10].set(100.0)
    assert int(row_counts(importance, jnp.ones((1, 64), jnp.int32), 4.0)[0, 10]) == 256


@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
def test_bounded_budgets_stay_within_4_times_the_mean(scale):
    row = scale * jax.random.normal(jax.random.key(0), (3, 200))
    for budgets in (
        jax.jit(row_budgets)(bounded(row), jnp.ones(row.shape, jnp.int32), 4.0),
        jax.jit(prefix_budgets)(bounded(row), jnp.ones(row.shape, jnp.int32), 4.0),
    ):
        assert 1.0 <= float(budgets.min()) < 4.0 < float(budgets.max()) <= 16.0 + 1e-4
    assert (jnp.diff(bounded(jnp.sort(row))) >= 0).all()


def test_small_importance_is_hardly_bounded():
    np.testing.assert_allclose(bounded(jnp.array([-0.01, 0.0, 0.01])), [-0.01, 0.0, 0.01], atol=1e-6)
    assert float(jax.grad(lambda x: bounded(x))(0.0)) == 1.0


def test_a_row_of_padding_has_no_budget_and_no_nan():
    loss = jax.value_and_grad(lambda s: row_budgets(s, jnp.zeros((1, 8), int), 4.0).sum())
    budget, slope = jax.jit(loss)(jnp.ones((1, 8)))
    assert budget == 0
    assert not slope.any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_prefix_budgets_one_by_one_are_those_of_the_row_however_long(spread):
    """Carried from token to token, rounding must not add up: 64k tokens, uniform, normal and wild."""
    length = 2**16
    importance = jnp.asarray(spread * np.random.default_rng(0).normal(size=(1, length)), jnp.float32)
    whole = jax.jit(prefix_budgets)(importance, jnp.ones((1, length), jnp.int32), 4.0)

    def step(log_mean, inputs):
        budget, log_mean = next_prefix_budget(inputs[0][None, None], log_mean, inputs[1][None, None], jnp.float32(4.0))
        return log_mean, budget[0, 0]

    _, stepped = jax.jit(lambda x: jax.lax.scan(step, jnp.zeros((1, 2)), (x[0], jnp.arange(length))))(importance)
    np.testing.assert_allclose(stepped, whole[0], rtol=2e-5, atol=1e-6)
    different = floor_causal_budgets(stepped[None]) != floor_causal_budgets(whole)
    assert int(different.sum()) <= (0 if spread == 0 else 2)


def test_prefix_budgets_are_a_running_mean_that_restarts_with_each_document():
    importance = 3 * np.random.default_rng(0).normal(size=(1, 30))
    segments = np.array([[1] * 12 + [2] * 13 + [0] * 5])
    budget = jax.jit(prefix_budgets)(jnp.asarray(importance, jnp.float32), jnp.asarray(segments), 2.0)
    for i in range(25):
        start = 0 if i < 12 else 12
        weights = np.exp(importance[0, start : i + 1])
        assert float(budget[0, i]) == pytest.approx(2.0 * weights[-1] / weights.mean(), rel=1e-5)
    assert not budget[0, 25:].any()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    wanted=st.lists(st.integers(0, 50), min_size=24, max_size=24),
    beta=st.sampled_from([0.3, 1.0, 2.5, 4.0]),
    slack=st.integers(0, 20),
    data=st.data(),
)
def test_the_cap_is_the_sequential_rule_and_holds_at_every_token(wanted, beta, slack, data):
    """Decision 23, whatever a predictor asks for: running spend <= beta * i + slack for every i of every document."""
    ends = data.draw(st.lists(st.booleans(), min_size=len(wanted), max_size=len(wanted)))
    padding = data.draw(st.integers(0, len(wanted)))
    segments = 1 + np.cumsum(ends) - ends
    segments[len(wanted) - padding :] = 0
    capped = np.asarray(
        jax.jit(cap_spending, static_argnums=(2, 3))(jnp.array([wanted]), jnp.array([segments]), beta, slack)
    )[0]
    for document in set(segments):
        spent = 0
        for index, i in enumerate(np.flatnonzero(segments == document), start=1):
            expected = min(wanted[i], int(np.floor(beta * index + 1e-4)) + slack - spent) if document else 0
            assert capped[i] == expected
            spent += expected
            assert spent <= beta * index + slack + 1e-3


def test_the_cap_holds_where_sums_pass_what_an_integer_holds():
    """Where prices are paid a budget is bounded by nothing else."""
    wanted, segments = jnp.full((1, 24), 2**31 - 1), jnp.array([[1] * 10 + [2] * 14])
    capped = np.asarray(cap_spending(wanted, segments, 3.0, 5))[0]
    assert capped.tolist() == [8, *[3] * 9, 8, *[3] * 13]
    everything = cap_spending(wanted, segments, jnp.float32(1e30), 5)
    assert np.asarray(everything)[0, [0, 1, 10, 11]].tolist() == [2**29, 0, 2**29, 0]


def test_the_cap_is_blind_to_the_future():
    wanted = jax.random.randint(jax.random.key(0), (1, 50), 0, 20)
    changed = wanted.at[0, 30:].set(0)
    before, after = (cap_spending(w, jnp.ones((1, 50), jnp.int32), 3.0, 5) for w in (wanted, changed))
    assert (before[0, :30] == after[0, :30]).all()


BETAS, SLACK, LENGTH, MAX_SCALE = (1.5, 4.0), 5, 4 * M + 3, 3.0


@functools.cache
def spender(budget: str) -> tuple[Callable, dict[str, Any]]:
    """(params, tokens, segment_ids, scale) -> what two whole layers gave to every token; and parameters for it."""
    config = model_config(beta=BETAS, normalizer="row", slack=SLACK)

    @jax.jit
    def spent(params, tokens, segment_ids, scale):
        options = {"budget": budget, "detail": "tokens", "budget_scale": scale, "max_budget_scale": MAX_SCALE}
        return merge(structure(config), params)(tokens, segment_ids, **options)[1]["spent"]

    return spent, random_params(config)


def absurd(params: dict[str, Any], weight: float, bias: float) -> dict[str, Any]:
    """The same with a predictor and an importance of any size."""

    def change(path, leaf):
        name = path[-1].key
        if name in ("importance", "hidden_kernel", "output_kernel"):
            return np.float32(weight) * leaf
        return np.full_like(leaf, bias) if name == "output_bias" else leaf

    return jax.tree_util.tree_map_with_path(change, params)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    budget=st.sampled_from(["predictor", "prefix"]),
    weight=st.sampled_from([0.0, 1.0, 30.0, 1e4, 1e15]),
    bias=st.sampled_from([-1e30, -3.0, 0.0, 50.0, 1e9, 1e30]),
    scale=st.floats(0.0625, MAX_SCALE, width=32),
    lengths=st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)),
    seed=st.integers(0, 99),
    cut=st.integers(1, LENGTH - 1),
)
def test_no_layer_spends_past_the_cap_whatever_is_predicted(budget, weight, bias, scale, lengths, seed, cut):
    """Decision 23 of whole layers: at every token the running spend is within beta * i + slack, and no later token
    changes it."""
    spent_of, params = spender(budget)
    params = absurd(params, weight, bias)
    generator = np.random.default_rng(seed)
    tokens, other = generator.integers(0, 384, (2, 2, LENGTH)).astype(np.int32)
    segments = (np.arange(LENGTH) < np.array(lengths)[:, None]) * (1 + (np.arange(LENGTH) >= 2 * M))
    segments = segments.astype(np.int32)
    spent = np.asarray(spent_of(params, tokens, segments, np.float32(scale)))
    assert not spent[:, segments == 0].any()
    assert (spent >= 0).all()
    for document in (1, 2):
        there = segments == document
        allowed = np.multiply.outer(np.array(BETAS) * scale, np.cumsum(there, axis=1)) + SLACK
        assert (np.cumsum(spent * there, axis=-1) <= allowed + 1e-3).all()
    changed = np.where(np.arange(LENGTH) < cut, tokens, other)
    later = np.asarray(spent_of(params, changed, segments, np.float32(scale)))
    np.testing.assert_array_equal(later[..., :cut], spent[..., :cut])


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5])
def test_a_greedy_predictor_gets_all_of_the_cap_and_no_more(scale):
    """So that the bound above is not kept by spending nothing."""
    spent_of, params = spender("predictor")
    tokens = np.random.default_rng(0).integers(0, 384, (2, LENGTH)).astype(np.int32)
    spent = np.asarray(spent_of(absurd(params, 0.0, 1e9), tokens, np.ones_like(tokens), np.float32(scale)))
    for layer, beta in enumerate(BETAS):
        allowance = np.floor(beta * scale * np.arange(1, LENGTH + 1) + 1e-4) + SLACK
        running = np.cumsum(spent[layer], axis=-1)
        assert (running[:, LENGTH // 2 :] == allowance[LENGTH // 2 :]).all()


def test_the_predictor_starts_at_beta_and_leaves_its_input_alone():
    predictor = BudgetPredictor(16, rngs=nnx.Rngs(0))
    h = jax.random.normal(jax.random.key(1), (2, 10, 16))
    np.testing.assert_allclose(predictor(h, 3.0), 3.0, rtol=1e-6)
    predictor.output_kernel[...] = jnp.ones_like(predictor.output_kernel[...])
    assert not jax.grad(lambda h: predictor(h, 3.0).sum())(h).any()


def test_predictor_loss_is_the_sum_of_binary_cross_entropies():
    rng = np.random.default_rng(0)
    predicted, budget = rng.uniform(0, 6, (1, 9)), rng.integers(0, 6, (1, 9))
    real = np.array([[True] * 7 + [False] * 2])
    expected = 0.0
    for i in range(7):
        for k in range(1, 8):
            p = 1 / (1 + np.exp(-(predicted[0, i] - k)))
            expected -= np.log(p) if budget[0, i] >= k else np.log(1 - p)
    got = predictor_loss(jnp.asarray(predicted, jnp.float32), jnp.asarray(budget), jnp.asarray(real), 7)
    assert float(got) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("budget", range(9))
def test_the_best_prediction_has_the_right_floor(budget):
    """Whatever the loss pulls a predictor to must be the budget once it is rounded down."""
    predicted = jnp.arange(0, 12, 0.01)[None]
    loss = jax.jit(
        jax.vmap(lambda x: predictor_loss(x[None, None], jnp.full((1, 1), budget), jnp.ones((1, 1), bool), 12))
    )(predicted[0])
    best = predicted[:, jnp.argmin(loss)][None]
    assert int(floor_causal_budgets(best)[0, 0]) == budget
