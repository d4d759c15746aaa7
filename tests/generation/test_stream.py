"""Text that grows: greedy text is the argmax of the forward pass, seeds, stops, and long runs that stay as they are."""

import jax
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.generation.stream import stream
from tests.aamoe.helpers import M, model_config
from tests.generation.helpers import count_compilations, generate, teacher_forced
from tests.test_model import params_of, tokens_of

PROMPTS = [np.asarray(tokens_of(1, length, seed=length))[0] for length in (M + 3, 2, 2 * M)]
GREEDY = Sampling(temperature=0.0)


def continued(config, prompts=PROMPTS, *, new_tokens=2 * M + 3, **options):
    length = max(map(len, prompts)) + new_tokens
    decoder = Decoder(config, params_of(config), length=length)
    return generate(decoder, prompts, new_tokens=new_tokens, **({"sampling": GREEDY} | options))


@pytest.mark.parametrize("changes", [{}, {"normalizer": "row"}, {"pattern": ("parallel",)}], ids=str)
def test_greedy_text_is_the_argmax_of_the_causal_forward(changes):
    """Three chunks of new text, prompts of three lengths: the window grows across pages."""
    config = model_config(num_layers=1, **changes)
    budget = "predictor" if changes.get("normalizer") == "row" else "prefix"
    for prompt, new in zip(PROMPTS, continued(config), strict=True):
        text = np.concatenate([prompt, new])
        logits = teacher_forced(config, params_of(config), text[None], budget=budget)[0]
        np.testing.assert_array_equal(logits[len(prompt) - 1 : -1].argmax(-1), new)


def test_a_row_is_drawn_alike_alone_and_in_company():
    config = model_config(num_layers=1)
    together = continued(config, sampling=Sampling(1.0, top_p=0.9), seed=3)
    (alone,) = continued(config, PROMPTS[:1], sampling=Sampling(1.0, top_p=0.9), seed=3)
    np.testing.assert_array_equal(together[0], alone)


def test_seeds_and_stops_do_what_they_say():
    config = model_config(num_layers=1)
    first, again, other = (continued(config, sampling=Sampling(), seed=seed) for seed in (0, 0, 1))
    for row in range(3):
        np.testing.assert_array_equal(first[row], again[row])
        assert (first[row] != other[row]).any()
    # The first row ends with its third and fourth token; the others go on.
    stop = tuple(first[0][2:4].tolist())
    stopped = continued(config, sampling=Sampling(), stop=[stop, (10**6,)])
    np.testing.assert_array_equal(stopped[0], first[0][:4])
    np.testing.assert_array_equal(stopped[1], first[1])


def test_a_stream_gives_tokens_as_they_come_and_none_for_rows_that_ended():
    config = model_config(num_layers=1)
    decoder = Decoder(config, params_of(config), length=4 * M)
    new = generate(decoder, PROMPTS, new_tokens=M, sampling=GREEDY)
    steps = list(stream(decoder, PROMPTS, new_tokens=M, sampling=GREEDY, stop=[(int(new[1][0]),)]))
    ended = [int(np.flatnonzero(row == new[1][0])[0]) if (row == new[1][0]).any() else M for row in new]
    assert ended[1] == 0
    for index, tokens in enumerate(steps):
        assert tokens == [int(row[index]) if index <= end else None for row, end in zip(new, ended, strict=True)]


def test_what_does_not_fit_is_refused_before_anything_runs():
    config = model_config(num_layers=1)
    decoder = Decoder(config, params_of(config), length=3 * M)
    with pytest.raises(ConfigError, match=f"{2 * M} tokens and {M + 1} new ones do not fit into a cache for {3 * M}"):
        stream(decoder, PROMPTS, new_tokens=M + 1, sampling=GREEDY)
    with pytest.raises(ConfigError, match="at least one token to continue"):
        stream(decoder, [PROMPTS[0], PROMPTS[0][:0]], new_tokens=1, sampling=GREEDY)
    with pytest.raises(ConfigError, match=r"stop = \(\)"):
        stream(decoder, PROMPTS, new_tokens=1, sampling=GREEDY, stop=[()])
    assert len(generate(decoder, PROMPTS, new_tokens=M, sampling=GREEDY)[2]) == M


def test_ten_thousand_tokens_take_no_more_memory_and_no_compilation():
    config = model_config(num_layers=1, d_model=16, num_heads=2, max_resources=8)
    decoder = Decoder(config, params_of(config), length=10_100)
    steps = stream(decoder, PROMPTS[:1], new_tokens=10_000, sampling=Sampling())
    for _ in range(50):
        next(steps)
    held = live_bytes()
    with count_compilations() as compiled:
        count = 50 + sum(1 for _ in steps_with_check(steps, held))
    assert count == 10_000
    assert compiled == []


def steps_with_check(steps, held):
    """The steps; at every thousandth, what the device holds must be what it held."""
    for index, tokens in enumerate(steps):
        if index % 1000 == 0:
            assert live_bytes() <= held + 1024
        yield tokens


def live_bytes() -> int:
    """Bytes of all arrays on the device."""
    return sum(array.nbytes for array in jax.live_arrays())
