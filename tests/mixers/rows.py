"""What all oracles share: the rows they look at, heads, norms and rotary positions, in NumPy and float64."""

from typing import NamedTuple

import numpy as np

from aamoe_jax.config import ModelConfig


class Rows(NamedTuple):
    """The batch around the activations."""

    segment_ids: np.ndarray
    positions: np.ndarray

    def seen(self, row: int, i: int) -> list[int]:
        """Tokens of the row that are not later than the i-th and of its document."""
        return [j for j in range(i + 1) if self.segment_ids[row, j] == self.segment_ids[row, i]]


def two_rows(length: int) -> Rows:
    """One document; and two documents with padding behind them."""
    segments, positions = np.ones((2, length), int), np.tile(np.arange(length), (2, 1))
    segments[1, length // 3 :] = 2
    segments[1, -2:] = 0
    positions[1, length // 3 :] -= length // 3
    return Rows(segments, positions)


def heads_of(x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """[..., d] -> [..., H, k]."""
    return x.reshape(*x.shape[:-1], -1, config.head_dim)


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """RMSNorm."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def turned(x: np.ndarray, position: int, config: ModelConfig) -> np.ndarray:
    """The rotary turn of one vector, pair by pair, as complex numbers."""
    half = len(x) // 2
    angle = position * config.rope_base ** (-np.arange(half) / half)
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag])


def softmax(scores: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
