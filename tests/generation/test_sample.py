"""Sampling without a cache equals the causal forward pass, token by token (AA-40)."""

import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.generation.sample import sample
from aamoe_jax.model import structure
from tests.aamoe.helpers import M, model_config
from tests.test_model import params_of, run, tokens_of

PROMPT = np.asarray(tokens_of(1, M + 3))[0]


def draw(config, params, **options):
    settings = {"new_tokens": M + 2, "temperature": 0.0, "seed": 0, "budget": "prefix"} | options
    return sample(structure(config), params, PROMPT, **settings)


def test_greedy_sampling_is_the_argmax_of_the_causal_forward():
    config = model_config(kernel=None)
    params = params_of(config)
    new = draw(config, params)
    text = np.concatenate([PROMPT, new])
    logits, _ = run(config, params, jnp.asarray(text)[None])
    np.testing.assert_array_equal(np.argmax(logits[0, len(PROMPT) - 1 : -1], -1), new)


def test_seeds_and_stop_tokens_do_what_they_say():
    config = model_config()
    params = params_of(config)
    first, again, other = (draw(config, params, temperature=1.0, seed=seed) for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    stop = int(first[3])
    stopped = draw(config, params, temperature=1.0, stop_id=stop)
    assert stopped.tolist() == first[: first.tolist().index(stop) + 1].tolist()


@pytest.mark.parametrize(("options", "message"), [({"temperature": -1.0}, "temperature = -1.0")])
def test_what_cannot_be_sampled_is_refused(options, message):
    config = model_config()
    with pytest.raises(ConfigError, match=message):
        draw(config, params_of(config), **options)
    with pytest.raises(ConfigError, match="at least one token"):
        sample(structure(config), {}, PROMPT[:0], new_tokens=1, temperature=0.0, seed=0, budget="prefix")
