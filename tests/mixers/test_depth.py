"""Mixture of Depths where the row chooses: who goes through, and who is told (AA-29, AA-32)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.cost import forward_flops
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.depth import MixtureOfDepths, MixtureOfDepthsConfig, through_flops
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.training.optimizer import predictor_mask
from tests.mixers.oracle_depth import through
from tests.mixers.rows import two_rows

LENGTH = 16
ROWS = two_rows(LENGTH)
CONFIG = ModelConfig(d_model=16, num_heads=4, num_layers=2, d_ff=24, own=(MixtureOfDepthsConfig(0.25),))


def row_mode():
    """(apply, parameters, h) with the best of the row chosen."""
    graphdef, state = nnx.split(MixtureOfDepths(CONFIG, rngs=nnx.Rngs(0)))
    context = Context(jnp.asarray(ROWS.segment_ids), jnp.asarray(ROWS.positions), "row", 1.0)
    apply = jax.jit(lambda params, h: nnx.merge(graphdef, nnx.State(params))(h, context))
    return apply, nnx.to_pure_dict(state), jax.random.normal(jax.random.key(1), (2, LENGTH, 16))


def test_the_best_of_the_row_go_through_among_themselves():
    apply, params, h = row_mode()
    output, about = apply(params, h)
    float64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    weight = np.where(ROWS.segment_ids > 0, np.asarray(h, np.float64) @ float64["router"], -np.inf)
    chosen = np.zeros((2, LENGTH), bool)
    for row in range(2):
        chosen[row, np.argsort(-weight[row])[:4]] = True
    np.testing.assert_allclose(output, through(float64, np.asarray(h, np.float64), ROWS, CONFIG, chosen), atol=1e-5)
    assert not np.asarray(output)[~chosen].any()
    assert float(about["depth_through"]) == 8
    assert float(about["depth_tokens"]) == (ROWS.segment_ids > 0).sum()


def test_router_and_layer_learn_from_what_goes_through_and_the_predictor_from_the_choice_alone():
    apply, params, h = row_mode()
    from_output = jax.grad(lambda params: (apply(params, h)[0] ** 2).sum())(params)
    from_guess = jax.grad(lambda params: apply(params, h)[1]["predictor_loss"])(params)
    size = lambda tree: float(sum(jnp.abs(leaf).sum() for leaf in jax.tree.leaves(tree)))  # noqa: E731
    for name, gradient in from_output.items():
        assert (size(gradient) > 0) == (name != "predictor"), name
    for name, gradient in from_guess.items():
        assert (size(gradient) > 0) == (name == "predictor"), name


def test_what_the_predictor_lets_through_is_counted_and_paid_for():
    graphdef, state = nnx.split(MixtureOfDepths(CONFIG, rngs=nnx.Rngs(0)))
    context, h = Context.of_rows(CONFIG, 2, LENGTH), jax.random.normal(jax.random.key(1), (2, LENGTH, 16))
    output, about = jax.jit(lambda h: nnx.merge(graphdef, state)(h, context))(h)
    through = float((jnp.abs(output).sum(-1) > 0).sum())
    assert float(about["depth_through"]) == through != 8
    assert summarize({name: value[None] for name, value in about.items()})["depth_chosen"] == [through / 32]
    meant, spent = (
        forward_flops(dataclasses.replace(CONFIG, num_layers=1, pattern=("mixture_of_depths",)), 2, LENGTH, statistics)
        for statistics in ({}, {name: np.asarray(value)[None] for name, value in about.items()})
    )
    wanted = through_flops(CONFIG, LENGTH, through / 32) - through_flops(CONFIG, LENGTH, 0.25)
    assert spent - meant == pytest.approx(2 * LENGTH * wanted)


def test_the_predictor_is_clipped_apart():
    params = nnx.to_pure_dict(nnx.state(MixtureOfDepths(CONFIG, rngs=nnx.Rngs(0))))
    apart = {name: set(jax.tree.leaves(mask)) for name, mask in predictor_mask(params).items()}
    assert apart == {name: {name == "predictor"} for name in params}


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"MixtureOfDepthsConfig.capacity = 0.0: must be in \(0, 1\]"):
        MixtureOfDepthsConfig(capacity=0.0)
