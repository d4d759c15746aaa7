"""Text from a checkpoint: where it stops, and that one call and a stream give the same."""

import pytest

from aamoe_jax import Checkpoint, ConfigError, DataConfig, ExperimentConfig, generate
from aamoe_jax.generation.generate import Continuation, stream_text
from tests.aamoe.helpers import M, model_config
from tests.evaluation.helpers import random_params

NEW_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """A model that was never trained: it continues with any bytes."""
    config = model_config(num_layers=1)
    return Checkpoint(ExperimentConfig(config, DataConfig(document_align=M)), random_params(config), 0, {})


def test_a_text_is_what_a_stream_of_several_prompts_gives_for_its_prompt(checkpoint):
    text = generate(checkpoint, "abc", new_tokens=NEW_TOKENS, seed=1)
    assert text == generate(checkpoint, "abc", new_tokens=NEW_TOKENS, seed=1)
    assert text != generate(checkpoint, "abc", new_tokens=NEW_TOKENS, seed=2)
    pieces = list(stream_text(checkpoint, [b"abc", b"\xff"], new_tokens=NEW_TOKENS, seed=1))
    assert b"".join(first for first, _ in pieces).decode(errors="replace") == text


def test_a_stop_ends_the_text_and_is_part_of_it(checkpoint):
    text = generate(checkpoint, "abc", new_tokens=NEW_TOKENS, seed=1)
    stop = next(character for character in text[1:] if character.isascii())  # most bytes of this model are not
    stopped = generate(checkpoint, "abc", new_tokens=NEW_TOKENS, seed=1, stop=[stop])
    assert stopped == text[: text.index(stop) + 1] != text


def test_what_cannot_be_done_is_refused_before_the_first_token(checkpoint):
    with pytest.raises(ConfigError, match="give at least one token to continue"):
        generate(checkpoint, "")
    with pytest.raises(ConfigError, match="3 tokens and 12 new ones do not fit into a cache for 8"):
        stream_text(checkpoint, [b"abc"], new_tokens=12, cache_length=8)
    with pytest.raises(ConfigError, match="budget = 'row': row budgets see the future"):
        generate(checkpoint, "abc", budget="row")


def test_a_stop_is_text_however_it_is_spelled_in_tokens():
    """It may come in pieces, end inside one, and only the first of several counts."""
    continuation = Continuation([b"end;", b"", b"stop"])
    pieces = [continuation.add(piece) for piece in (b"the e", b"n", b"d; and more", b"lost")]
    assert pieces == [b"the e", b"n", b"d;", b""]
    assert (continuation.text, continuation.ended) == (b"the end;", True)
    both = Continuation([b"b", b"ab"])
    assert both.add(b"xabc") == b"xab"
    open_end = Continuation([b"never"])
    assert (open_end.add(b"neve"), open_end.add(b"n"), open_end.ended) == (b"neve", b"n", False)
