"""Decoding with caches equals the teacher-forced causal forward, token by token (AA-40; decision 40)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import ConfigError
from aamoe_jax.generation.decoder import Decoder
from tests.aamoe.helpers import M, context_of, inputs, layer_of, model_config
from tests.generation.helpers import assert_parity, count_compilations, stepped, teacher_forced
from tests.mixers.layers import LAYERS
from tests.test_model import params_of, run, tokens_of

LENGTH = 4 * M + 3
STARTS = [1, M + 3, 3 * M]
"""Prompts of one token, of a chunk and a bit, of whole chunks: together in one batch."""


@pytest.mark.parametrize("layer", LAYERS)
def test_every_mixer_decodes_as_it_was_trained(layer):
    config = model_config(pattern=(layer,))
    assert_parity(config, params_of(config), length=LENGTH, starts=STARTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_resources": 2},
        {"local": "chunk", "null_slot": "learned"},
        {"num_experts": 0, "normalizer": "row"},
        {"bias": "none", "router": "learned_nope", "qk_norm": "none", "expert_price": 2.5, "importance": "uniform"},
        {"router": "pooled", "key_convolution": True, "query_convolution": True},
        {"router": "pooled", "pooled_keys": 1, "local": "none", "qk_norm": "none"},
        {"router": "pooled", "pooled_keys": M, "local": "chunk", "null_slot": "learned", "num_experts": 0},
        {"router": "pooled", "context": "none", "importance": "bounded"},
        {"router_input": "causal_conv", "expert_router": "attention", "slack": 0, "beta": 0.7},
        {"router_input": "causal_conv", "key_convolution": True, "distance_price": 0.5, "local": "none"},
        {"expert_share": 0.4, "signal": "separate", "slack": 2, "local": "routed"},
        {"load_price": 0.8, "beta": 6.0, "expert_gate": True},
        {"num_layers": 2, "beta": (1.0, 4.0)},
        {"pattern": ("aamoe", "parallel"), "embedding": "tied", "num_layers": 4},
    ],
    ids=str,
)
def test_every_kind_of_layer_decodes_as_it_was_trained(changes):
    config = model_config(**({"num_layers": 1} | changes))
    assert_parity(config, params_of(config), length=LENGTH, starts=STARTS)


@pytest.mark.parametrize(
    ("budget", "scale"), [("predictor_uncapped", 1.0), ("prefix", 1.0), ("predictor", 0.4), ("predictor", 2.5)]
)
def test_budgets_and_the_dial_are_those_of_the_forward_pass(budget, scale):
    config = model_config(num_layers=1, normalizer="row", max_resources=4)
    assert_parity(config, params_of(config), length=LENGTH, starts=STARTS, budget=budget, budget_scale=scale)


def test_a_prompt_and_the_same_tokens_one_by_one_leave_the_same_cache():
    config = model_config(num_layers=1)
    decoder, tokens = Decoder(config, params_of(config), length=LENGTH), np.asarray(tokens_of(1, LENGTH - 1))
    whole = decoder.prefill([tokens[0]])
    grown = decoder.prefill([tokens[0, :1]])
    for token in tokens[0, 1:]:
        grown = decoder.append(grown, np.array([token]))
    (whole_cache,), (grown_cache,) = whole.caches[0], grown.caches[0]
    complete = (LENGTH - 1) // M
    for name, pages in (("key", complete), ("value", complete), ("router_key", complete)):
        left, right = (np.asarray(getattr(cache, name))[:, :pages] for cache in (whole_cache, grown_cache))
        np.testing.assert_allclose(left, right, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(whole_cache.log_mean[:, 0], grown_cache.log_mean[:, 0], atol=1e-6)
    assert int(whole_cache.spent[0]) == int(grown_cache.spent[0]) > 0
    np.testing.assert_allclose(whole.logits, grown.logits, atol=1e-5)


def test_a_prompt_costs_what_its_forward_pass_does():
    """It routes once: the cache is made of what the layer computes for its output."""
    config = model_config(kernel=None)
    layer, h, context = layer_of(config), inputs(1, 4 * M), context_of(config, 1, 4 * M)
    graphdef, params = nnx.split(layer)

    def flops(function) -> float:
        compiled = jax.jit(lambda params, h: function(nnx.merge(graphdef, params), h)).lower(params, h).compile()
        return compiled.cost_analysis()["flops"]

    forward = flops(lambda layer, h: layer(h, context)[0])
    both = flops(lambda layer, h: layer.prefill(h, context, layer.empty_cache(1, 4 * M)))
    assert both < 1.02 * forward


def test_rows_do_not_see_each_other():
    config = model_config(num_layers=1)
    params, tokens = params_of(config), np.asarray(tokens_of(3, LENGTH))
    together = stepped(Decoder(config, params, length=2 * LENGTH), tokens, STARTS)
    for row, start in enumerate(STARTS):
        (alone,) = stepped(Decoder(config, params, length=2 * LENGTH), tokens[row : row + 1], [start])
        np.testing.assert_allclose(together[row], alone, atol=1e-5)


def test_bfloat16_decodes_near_its_forward_pass():
    config = model_config(dtype="bfloat16", kernel=None, num_layers=1)
    params, tokens = params_of(config), np.asarray(tokens_of(1, LENGTH))
    (found,) = stepped(Decoder(config, params, length=LENGTH + 1), tokens, [M])
    wanted = teacher_forced(config, params, tokens)[0, M - 1 :]
    # Rounding may flip a choice of the router here and there: nearly all tokens, not all.
    assert np.mean(np.abs(found - wanted).max(-1) < 0.05) > 0.95


def test_a_token_without_budget_passes_the_layer_by():
    """w_B so strong that most tokens get nothing: the cache goes on, the output is the residual alone."""
    config = model_config(beta=0.5, num_layers=1)
    params = params_of(config)
    params["periods"]["blocks"]["0_aamoe"]["mixer"]["importance"] *= 20.0
    spent = run(config, params, tokens_of(2, LENGTH), detail="tokens")[1]["spent"]
    assert 0.2 < float((spent == 0).mean()) < 1.0
    assert_parity(config, params, length=LENGTH, starts=[1, M])


@pytest.mark.parametrize("slack", [0, 5])
def test_the_cap_binds_while_decoding_as_it_does_in_a_row(slack):
    """A predictor that asks for far more than there is: from the first token on it is the cap that decides."""
    config = model_config(num_layers=1, normalizer="row", beta=1.7, slack=slack)
    params = params_of(config)
    params["periods"]["blocks"]["0_aamoe"]["mixer"]["predictor"]["output_bias"] += 10.0
    _, statistics = run(config, params, tokens_of(3, LENGTH), budget="predictor", detail="tokens")
    capped = statistics["spent"][0] < jnp.floor(statistics["budget"][0])
    assert capped[:, max(STARTS) :].all()
    assert_parity(config, params, length=LENGTH, starts=STARTS)


def test_a_dial_turned_down_inside_a_text_gives_nothing_until_it_is_earned_again():
    config = model_config(num_layers=1, slack=0)
    decoder = Decoder(config, params_of(config), length=6 * M, max_budget_scale=2.0)
    state = decoder.prefill([np.asarray(tokens_of(1, M))[0]], budget_scale=2.0)
    spent = [int(state.caches[0][0].spent[0])]
    for token in np.asarray(tokens_of(1, 4 * M))[0]:
        state = decoder.append(state, token[None], budget_scale=0.5)
        spent.append(int(state.caches[0][0].spent[0]))
    assert (np.diff(spent) >= 0).all()
    half = 0.5 * 3.0 * (M + np.arange(len(spent)))
    assert spent[0] > half[0]
    assert spent[-1] <= half[-1] + 1e-3
    assert spent[-1] > spent[0]


def test_a_row_without_room_has_no_logits():
    config = model_config(num_layers=1)
    decoder = Decoder(config, params_of(config), length=M)
    state = decoder.prefill([np.asarray(tokens_of(1, M - 1))[0]])
    state = decoder.append(state, np.array([5]))
    assert jnp.isfinite(state.logits).all()
    assert jnp.isnan(decoder.append(state, np.array([5])).logits).all()


def test_what_cannot_be_decoded_is_refused():
    config = model_config()
    params = params_of(config)
    decoder = Decoder(config, params, length=M)
    prompt = np.asarray(tokens_of(1, M))[0]
    for prompts in ([], [prompt[:0]], [prompt[:3], prompt[:0]]):
        with pytest.raises(ConfigError, match="at least one token"):
            decoder.prefill(prompts)
    with pytest.raises(ConfigError, match=f"prompt: {M} tokens do not fit into a cache for {M}"):
        decoder.prefill([prompt])
    for scale, message in ((0.0, "must be a positive number"), (1.5, "must be at most max_budget_scale = 1.0")):
        with pytest.raises(ConfigError, match=message):
            decoder.prefill([prompt[:3]], budget_scale=scale)
    with pytest.raises(ConfigError, match="budget = 'row': row budgets see the future"):
        Decoder(config, params, length=M, budget="row")
    with pytest.raises(ConfigError, match="budget = 'predictor': this model has no budget predictor"):
        Decoder(config, params, length=M, budget="predictor")


def test_turning_the_dial_compiles_nothing():
    config = model_config(num_layers=1, max_resources=4)
    decoder = Decoder(config, params_of(config), length=3 * M, max_budget_scale=2.0)
    prompt = [np.asarray(tokens_of(1, M))[0]]
    state = decoder.append(decoder.prefill(prompt), np.array([5]))
    first = np.asarray(
        decoder.append(decoder.prefill(prompt, budget_scale=0.5), np.array([5]), budget_scale=0.5).logits
    )
    with count_compilations() as compiled:
        other = decoder.append(decoder.prefill(prompt, budget_scale=2.0), np.array([5]), budget_scale=2.0)
    assert compiled == []
    assert not np.allclose(first, other.logits)
    assert not np.allclose(state.logits, other.logits)


def test_the_counter_of_compilations_counts():
    with count_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(7.0))
    assert compiled
