"""What all oracles share: the rows they look at, heads, norms and rotary positions, in NumPy and float64."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.fixed_maps import FixedStreams


class Rows(NamedTuple):
    """The batch around the activations."""

    segment_ids: np.ndarray
    positions: np.ndarray

    def seen(self, row: int, i: int) -> list[int]:
        """Tokens of the row that are not later than the i-th and of its document."""
        return [j for j in range(i + 1) if self.segment_ids[row, j] == self.segment_ids[row, i]]

    def embedded(self, config: ModelConfig) -> np.ndarray:
        """What the tokens were before the first block."""
        return np.random.default_rng(11).normal(size=(*self.positions.shape, config.d_model)).astype(np.float32)

    def fixed(self, name: str, config: ModelConfig) -> np.ndarray:
        """A sequence as long as the rows, the same for all."""
        random = np.random.default_rng({"random_qk": 12, "fixed_qk": 13}[name])
        return random.normal(size=(1, self.positions.shape[1], config.d_model)).astype(np.float32)

    def padded(self, multiple: int) -> "Rows":
        """With padding behind them, so that they are whole chunks."""
        extra = ((0, 0), (0, -self.positions.shape[1] % multiple))
        return Rows(*(np.pad(x, extra) for x in self))

    def context(self, config: ModelConfig) -> Context:
        """For the mixers of the library."""
        streams = {name: jnp.asarray(self.fixed(name, config)) for name in ("random_qk", "fixed_qk")}
        return Context(
            jnp.asarray(self.segment_ids),
            jnp.asarray(self.positions),
            "prefix",
            config.betas[0],
            embedded=jnp.asarray(self.embedded(config)),
            fixed=FixedStreams(streams, streams),
        )


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
    """The rotary embedding of one vector, pair by pair, as complex numbers."""
    half = len(x) // 2
    angle = position * config.rope_base ** (-np.arange(half) / half)
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag])


def softmax(scores: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
