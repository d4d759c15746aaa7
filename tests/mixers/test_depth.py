"""Mixture of Depths where the row chooses: who goes through, and who is told (AA-29, AA-32)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.ledger.compiled import beyond_one_turn
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.costs import Setting
from aamoe_jax.mixers.depth import MixtureOfDepths, MixtureOfDepthsConfig, TokenPredictor
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.training.optimizer import beside_mask
from tests.aamoe.helpers import model_config
from tests.generation.helpers import assert_parity
from tests.mixers.oracle_depth import let_through, through
from tests.mixers.rows import Rows, two_rows
from tests.test_model import params_of

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


def mixer_of(config=CONFIG):
    """(call, the module): what the predictor chooses depends on random parameters."""
    mixer = MixtureOfDepths(config, rngs=nnx.Rngs(0))
    mixer.predictor.output[...] = jax.random.normal(jax.random.key(4), mixer.predictor.output.shape)
    graphdef, state = nnx.split(mixer)
    return lambda h, context: jax.jit(lambda h: nnx.merge(graphdef, state)(h, context))(h), mixer


def test_what_the_predictor_lets_through_is_counted():
    context, h = Context.of_rows(CONFIG, 2, LENGTH), jax.random.normal(jax.random.key(1), (2, LENGTH, 16))
    output, about = mixer_of()[0](h, context)
    through = float((jnp.abs(output).sum(-1) > 0).sum())
    assert float(about["depth_through"]) == through > 2
    assert summarize({name: value[None] for name, value in about.items()})["depth_chosen"] == [through / 32]


def test_the_predictor_learns_the_best_of_the_row_whoever_goes_through():
    call, mixer = mixer_of()
    h = jax.random.normal(jax.random.key(1), (2, LENGTH, 16))
    row = Context(jnp.asarray(ROWS.segment_ids), jnp.asarray(ROWS.positions), "row", 1.0)
    causal = dataclasses.replace(row, budget="prefix")
    (_, of_row), (_, of_prefix) = call(h, row), call(h, causal)
    assert float(of_row["depth_through"]) != float(of_prefix["depth_through"])
    assert float(of_row["predictor_loss"]) == pytest.approx(float(of_prefix["predictor_loss"]), rel=1e-6)
    best = np.zeros((2, LENGTH), bool)
    weight = np.where(ROWS.segment_ids > 0, np.asarray(h @ mixer.router[...]), -np.inf)
    for at in range(2):
        best[at, np.argsort(-weight[at])[:4]] = True
    guess = np.asarray(mixer.predictor(h), np.float64)
    loss = np.where(best, np.logaddexp(0, -guess), np.logaddexp(0, guess))[ROWS.segment_ids > 0].sum()
    assert float(of_prefix["predictor_loss"]) == pytest.approx(loss, rel=1e-5)


def test_the_predictor_begins_with_weights_of_variance_1_over_fan_in():
    predictor = TokenPredictor(64, 400, rngs=nnx.Rngs(0))
    assert float(predictor.hidden[...].std()) == pytest.approx(64**-0.5, rel=0.05)
    assert float(predictor.output[...].std()) == pytest.approx(400**-0.5, rel=0.1)


@pytest.mark.parametrize("capacity", [0.125, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_predictor_lets_a_share_of_every_beginning_through(capacity, seed):
    """In packed rows: by the definition, token by token; and never more than are computed."""
    config, random = dataclasses.replace(CONFIG, own=(MixtureOfDepthsConfig(capacity),)), np.random.default_rng(seed)
    segments = np.sort(random.integers(0, 6, (2, 97)))[:, ::-1].copy()  # padding is last
    begins = np.diff(segments, axis=1, prepend=-1) != 0
    positions = np.arange(97) - np.maximum.accumulate(np.where(begins, np.arange(97), 0), axis=1)
    guess = random.normal(size=(2, 97)) + 0.5
    rows, mixer = Rows(segments, positions), mixer_of(config)[1]
    context = Context(jnp.asarray(segments), jnp.asarray(positions), "prefix", 1.0)
    found = mixer._predicted(jnp.asarray(guess), context)
    np.testing.assert_array_equal(found, let_through(guess > 0, rows, config))
    assert 0 < np.asarray(found).sum(-1).max() <= mixer._capacity(97)


def test_as_many_are_computed_as_the_share_rounded_up():
    """In training, evaluation and the cache: FLOPs grow with the capacity, and the compiler agrees with the ledger."""
    config = ModelConfig(d_model=64, num_heads=4, num_layers=1, d_ff=256, own=(MixtureOfDepthsConfig(0.3),))
    call, mixer = mixer_of(config)
    assert [mixer._capacity(length) for length in (1, 10, 11, 16)] == [1, 3, 4, 5]
    assert mixer.empty_cache(2, 16).attention.key.shape == (8, 5, 16)
    for budget in ("row", "prefix", "predictor"):
        context = dataclasses.replace(Context.of_rows(config, 2, 512), budget=budget)
        step = jax.jit(lambda h, context=context: call(h, context))
        counted = step.lower(jax.ShapeDtypeStruct((2, 512, 64), jnp.float32)).compile().cost_analysis()["flops"]
        counted += beyond_one_turn("mixture_of_depths", config, 2, 512).prefill_flops
        # Beside products, sorting and rotations count a little at this width.
        assert counted == pytest.approx(MixtureOfDepths.costs(Setting(config, 2, 512)).prefill_flops, rel=0.15), budget


def test_the_predictor_learns_who_was_among_the_best_not_who_went_through():
    call, mixer = mixer_of()
    context, h = Context.of_rows(CONFIG, 2, LENGTH), jax.random.normal(jax.random.key(1), (2, LENGTH, 16))
    weight, guess = np.asarray(mixer._weights(h)), np.asarray(mixer.predictor(h), np.float64)
    best = np.argsort(np.argsort(-weight, axis=1), axis=1) < 4
    through = np.asarray(mixer._predicted(jnp.asarray(guess), context))
    wanted, other = (np.logaddexp(0, np.where(x, -guess, guess)).sum() for x in (best, through))
    found = float(call(h, context)[1]["predictor_loss"])
    assert found == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted - other) > 1


def test_a_step_in_which_no_token_goes_through_computes_no_layer():
    """The whole layer is behind one condition, so that NaN in its parameters do no harm to a token that skips it."""
    mixer = mixer_of()[1]
    mixer.feed_forward.key.kernel[...] = jnp.full_like(mixer.feed_forward.key.kernel[...], jnp.nan)
    h, cache = jax.random.normal(jax.random.key(1), (1, 1, 16)), mixer.empty_cache(1, LENGTH)
    context = dataclasses.replace(Context.of_rows(CONFIG, 1, 1), positions=jnp.asarray([[2]]))  # 0.25 * 3 is no token
    output, after = mixer.decode(h, context, cache)
    assert not np.asarray(output).any()
    assert int(after.count[0]) == 0
    wanting = h if float(mixer.predictor(h)[0, 0]) > 0 else -h
    context = dataclasses.replace(context, positions=jnp.asarray([[3]]))
    assert np.isnan(mixer.decode(wanting, context, cache)[0]).all() == (float(mixer.predictor(wanting)[0, 0]) > 0)


@pytest.mark.parametrize("capacity", [0.125, 0.3, 1.0])
def test_it_decodes_as_it_was_trained(capacity):
    config = model_config(pattern=("mixture_of_depths",), own=(MixtureOfDepthsConfig(capacity),), num_layers=1)
    assert_parity(config, params_of(config), length=40, starts=[1, 11, 27])


def test_the_predictor_is_clipped_apart():
    params = nnx.to_pure_dict(nnx.state(MixtureOfDepths(CONFIG, rngs=nnx.Rngs(0))))
    apart = {name: set(jax.tree.leaves(mask)) for name, mask in beside_mask(params).items()}
    assert apart == {name: {name == "predictor"} for name in params}


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"MixtureOfDepthsConfig.capacity = 0.0: must be in \(0, 1\]"):
        MixtureOfDepthsConfig(capacity=0.0)
