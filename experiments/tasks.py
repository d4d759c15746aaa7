"""Generated tasks that can only be solved by reading a place in the context: which places is known.

Every task gives rows of `seq_len` tokens with their targets. A target is scored where earlier tokens of the row
determine it; loss and accuracy are those of scored targets alone. Tokens that hold the same answer share a label.

`copy`: random tokens with a random period of L/4 to L/2; scored from the second period on. `mqar`: multi-query
associative recall (Arora et al., "Zoology"): 4, 8, 16, 32 or 64 pairs of key and value, then their keys at random.
`needle`: four needles, each a key and four digits, in real code; then every key again. `selective_copy`: sixteen tokens
among noise, to be repeated in their order at the end (Gu and Dao, "Mamba").

Shapes: b rows, L tokens per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Int

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.data import documents_of

Task = Literal["copy", "mqar", "needle", "selective_copy"]
TASKS = get_args(Task)
VOCAB_SIZE = 448
"""Bytes as the tokenizer numbers them, then 64 marks that are in no text."""
MARKS = 384
MIN_LENGTH = 64

NEEDLES, DIGITS = 4, 4
NEEDLE = 2 + DIGITS
"""Tokens of a needle: a mark that says it is one, its key, and its digits."""
COPIED = 16
"""Tokens to be copied out of noise."""


class Row(NamedTuple):
    """One row and the token after it, and what its tokens answer."""

    tokens: Int[np.ndarray, "L+1"]
    label: Int[np.ndarray, "L+1"]
    """Tokens with the same label hold the same answer; 0: none."""
    scored: Bool[np.ndarray, "L"]


class Examples(NamedTuple):
    """Rows of a task."""

    tokens: Int[np.ndarray, "b L"]
    targets: Int[np.ndarray, "b L"]
    label: Int[np.ndarray, "b L"]
    """Of the tokens."""
    wanted: Int[np.ndarray, "b L"]
    """Of the targets; 0 where they are not scored."""

    @property
    def scored(self) -> Bool[np.ndarray, "b L"]:
        return self.wanted > 0

    def batch(self) -> dict[str, Int[np.ndarray, "b L"]]:
        """As a training step takes it: every row is one document."""
        rows, length = self.tokens.shape
        return {
            "tokens": self.tokens,
            "targets": self.targets,
            "loss_mask": self.scored.astype(np.int32),
            "segment_ids": np.ones((rows, length), np.int32),
            "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
        }


Generator = Callable[[np.random.Generator, int], Row]
"""(random, L) -> a row."""


def generator(task: Task, data: DataConfig, split: str) -> Generator:
    """What makes the rows of a task.

    Args:
      split: of the text that needles are hidden in.

    Raises:
      ConfigError: the rows are too short.
    """
    if data.seq_len < MIN_LENGTH:
        raise ConfigError(f"DataConfig.seq_len = {data.seq_len}: these tasks need at least {MIN_LENGTH}")
    if task != "needle":
        return {"copy": copy, "mqar": mqar, "selective_copy": selective_copy}[task]
    name = data.mixture[0][0]
    text = np.frombuffer(b"".join(documents_of(data, name, split)), np.uint8).astype(np.int32) + 3  # ByT5's ids
    return lambda random, length: needle(random, length, text)


def examples(generate: Generator, random: np.random.Generator, rows: int, length: int) -> Examples:
    """So many rows."""
    tokens, label, scored = (np.stack(x) for x in zip(*(generate(random, length) for _ in range(rows)), strict=True))
    tokens, label = tokens.astype(np.int32), label.astype(np.int32)
    return Examples(tokens[:, :-1], tokens[:, 1:], label[:, :-1], np.where(scored, label[:, 1:], 0))


def copy(random: np.random.Generator, length: int) -> Row:
    """A period P of L/4 to L/2 random tokens, over and over."""
    period = int(random.integers(length // 4, length // 2 + 1))
    label = 1 + np.arange(length + 1) % period
    return Row(random.integers(0, 64, period)[label - 1], label, np.arange(length) >= period)


def mqar(random: np.random.Generator, length: int) -> Row:
    """Pairs, then their keys at random, each with its value after it."""
    pairs = 2 ** int(random.integers(2, int(np.log2(min(64, length // 4))) + 1))
    keys, values = random.permutation(64)[:pairs], 64 + random.integers(0, 64, pairs)
    asked = np.concatenate([np.arange(pairs), random.integers(0, pairs, length // 2 + 1 - pairs)])
    tokens = np.stack([keys[asked], values[asked]], axis=1).reshape(-1)[: length + 1]
    label = np.stack([np.zeros_like(asked), asked + 1], axis=1).reshape(-1)[: length + 1]
    return Row(tokens, label, (label[1:] > 0) & (np.arange(length) >= 2 * pairs))


def needle(random: np.random.Generator, length: int, text: Int[np.ndarray, "n"]) -> Row:
    """Needles at random places of a random piece of text, then all of them again in another order."""
    start = int(random.integers(0, len(text) - length))
    tokens, label = text[start : start + length + 1].copy(), np.zeros(length + 1, int)
    keys = MARKS + 1 + random.permutation(32)[:NEEDLES]
    digits = 3 + ord("0") + random.integers(0, 10, (NEEDLES, DIGITS))
    needles = np.concatenate([np.full((NEEDLES, 1), MARKS), keys[:, None], digits], axis=1)
    end = length + 1 - NEEDLES * NEEDLE
    hidden = NEEDLE * np.sort(random.permutation(end // NEEDLE)[:NEEDLES])
    asked = end + NEEDLE * random.permutation(NEEDLES)
    for number, (at, again) in enumerate(zip(hidden, asked, strict=True)):
        for begin in (at, again):
            tokens[begin : begin + NEEDLE] = needles[number]
            label[begin + 2 : begin + NEEDLE] = 1 + number * DIGITS + np.arange(DIGITS)
    return Row(tokens, label, (label[1:] > 0) & (np.arange(length) >= end))


def selective_copy(random: np.random.Generator, length: int) -> Row:
    """Tokens at random places among noise; after a mark, the same tokens."""
    tokens, label = np.full(length + 1, MARKS + 1), np.zeros(length + 1, int)
    end = length - COPIED  # where the mark stands
    at = np.sort(random.permutation(end)[:COPIED])
    tokens[at] = random.integers(0, 64, COPIED)
    tokens[end], tokens[end + 1 :] = MARKS, tokens[at]
    label[at] = label[end + 1 :] = 1 + np.arange(COPIED)
    return Row(tokens, label, np.arange(length) >= end)
