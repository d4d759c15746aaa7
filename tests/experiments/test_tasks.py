"""The generated tasks: what is scored is determined by the row, and by what the labels say alone."""

import numpy as np
import pytest

from aamoe_jax.config import ConfigError, DataConfig
from experiments.recall import distances, given_answer
from experiments.tasks import MARKS, TASKS, VOCAB_SIZE, Examples, examples, generator, needle

TEXT = np.random.default_rng(5).integers(3, 259, 5000).astype(np.int32)


def rows_of(task: str, length: int, seed: int = 0) -> Examples:
    data = DataConfig(seq_len=length)
    made = generator(task, data, "train") if task != "needle" else lambda r, length: needle(r, length, TEXT)
    return examples(made, np.random.default_rng(seed), 8, length)


@pytest.mark.parametrize("length", [64, 100, 257])
@pytest.mark.parametrize("task", TASKS)
def test_every_scored_target_stands_earlier_in_the_row_and_its_label_says_where(task, length):
    batch = rows_of(task, length)
    assert batch.tokens.shape == (8, length)
    assert batch.tokens.min() >= 0
    assert batch.tokens.max() < VOCAB_SIZE
    assert batch.scored.any(1).all()
    for row, token in zip(*np.nonzero(batch.scored), strict=True):
        holds = np.flatnonzero(batch.label[row, : token + 1] == batch.wanted[row, token])
        assert len(holds)
        assert (batch.tokens[row, holds] == batch.targets[row, token]).all()
        assert token - holds[-1] == distances(batch)[row, token]


def test_what_is_not_scored_is_not_determined():
    """Of other rows of the same task, the unscored targets differ; the last token of a pair is the only answer."""
    batch = rows_of("mqar", 64)
    for row in range(8):
        first = int(np.argmax(batch.scored[row]))
        keys = batch.tokens[row, :first:2]
        assert len(set(keys.tolist())) == len(keys)  # no key has two values
        assert batch.tokens[row, first] in keys


def test_needles_leave_the_text_as_it_is():
    batch = rows_of("needle", 257)
    for row in batch.tokens:
        text = row[(row < MARKS)]
        assert len(text) > 257 - 8 * 6
        windows = np.lib.stride_tricks.sliding_window_view(TEXT, 8)
        assert (windows == text[:8]).all(1).any() or (row[:6] >= MARKS).any()


def test_a_seed_makes_the_same_rows_again():
    for task in TASKS:
        again = [rows_of(task, 64, seed) for seed in (3, 3, 4)]
        np.testing.assert_array_equal(again[0].tokens, again[1].tokens)
        assert (again[0].tokens != again[2].tokens).any()


def test_short_rows_are_refused():
    with pytest.raises(ConfigError, match=r"DataConfig.seq_len = 32: these tasks need at least 64"):
        generator("copy", DataConfig(seq_len=32), "train")


def test_a_given_chunk_counts_where_it_holds_the_answer():
    label, wanted = np.array([[1, 2, 0, 0, 1, 0, 0, 0]]), np.array([[0, 0, 0, 0, 0, 0, 1, 2]])
    batch = Examples(np.zeros((1, 8)), np.zeros((1, 8)), label, wanted)
    resource, count = np.zeros((1, 8, 2), int), np.full((1, 8), 2)
    resource[0, 6], resource[0, 7] = (9, 2), (9, 0)  # chunks of 2: the answers are in 0 and 2, and in 0
    assert given_answer(resource, count, batch, 2)[0].tolist() == [False] * 6 + [True, True]
    count[0, 7] = 1  # the chunk stands in a slot that was not paid for
    assert given_answer(resource, count, batch, 2)[0].tolist() == [False] * 6 + [True, False]
    assert distances(batch)[0, 6:].tolist() == [2, 6]
