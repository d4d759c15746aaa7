"""Drawing the next token: greedy, temperature, top-k and top-p against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.generation.sampling import Sampling, draw, truncate

PROBABILITY = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = jnp.asarray(np.log(PROBABILITY), jnp.float32)[None]


def kept(**options) -> list[int]:
    return np.flatnonzero(np.isfinite(truncate(LOGITS, Sampling(**options))[0])).tolist()


def frequencies(sampling: Sampling, draws: int = 20_000) -> np.ndarray:
    keys = jax.random.split(jax.random.key(0), draws)
    logits = jnp.broadcast_to(LOGITS, (draws, LOGITS.shape[1]))
    drawn = jax.jit(draw, static_argnums=2)(logits, keys, sampling)
    return np.bincount(np.asarray(drawn), minlength=LOGITS.shape[1]) / draws


def test_top_k_keeps_the_k_most_probable():
    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=1) == [1]
    assert kept(top_k=3) == [1, 2, 3]
    assert kept(top_k=99) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_fewest_that_reach_p():
    assert kept(top_p=0.01) == [1]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.69) == [1, 3]
    assert kept(top_p=0.71) == [1, 2, 3]
    assert kept(top_p=0.96) == [0, 1, 2, 3, 4]


def test_top_p_counts_within_what_top_k_leaves():
    # Of {0.4, 0.3} alone the first has 0.57 of the probability.
    assert kept(top_k=2, top_p=0.55) == [1]
    assert kept(top_k=2, top_p=0.6) == [1, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_temperature(temperature):
    wanted = PROBABILITY ** (1 / temperature)
    # Four standard deviations of a frequency over 20,000 draws.
    np.testing.assert_allclose(frequencies(Sampling(temperature)), wanted / wanted.sum(), atol=4 * 0.5 / 20_000**0.5)


def test_truncated_draws_are_renormalised():
    found = frequencies(Sampling(top_k=2))
    np.testing.assert_allclose(found[[1, 3]], np.array([0.4, 0.3]) / 0.7, atol=0.015)
    assert found[[0, 2, 4]].sum() == 0


def test_ids_beyond_the_vocabulary_are_never_drawn():
    keys = jax.random.split(jax.random.key(0), 200)
    logits = jnp.broadcast_to(LOGITS, (200, 5))
    assert int(draw(logits, keys, Sampling(vocab_size=3)).max()) <= 2
    assert int(draw(logits, keys, Sampling(0.0, vocab_size=1)).max()) == 0


def test_a_temperature_near_0_is_greedy():
    for temperature in (1e-4, 1e-39, 1e-300):
        assert frequencies(Sampling(temperature), 100)[1] == 1.0


def test_greedy_takes_the_first_of_the_best():
    keys = jax.random.split(jax.random.key(0), 2)
    logits = jnp.array([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])
    assert draw(logits, keys, Sampling(0.0)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0: must be at least 0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_k": 0}, "top_k = 0: must be at least 1"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)
