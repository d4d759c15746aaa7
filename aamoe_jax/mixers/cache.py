"""Keys and values of all tokens so far: what dense attention remembers.

Shapes: b rows, N tokens that there is room for, L tokens, H heads, k = d / H.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig


class KeyValueCache(NamedTuple):
    """Keys (rotated) and values in the model's type. What has not been written yet is never seen."""

    key: Float[Array, "b N H k"]
    value: Float[Array, "b N H k"]

    def write(
        self, positions: Int[Array, "b 1"], key: Float[Array, "b 1 H k"], value: Float[Array, "b 1 H k"]
    ) -> KeyValueCache:
        """With one more token in every row, at its own position."""
        row = jnp.arange(positions.shape[0])
        return KeyValueCache(
            self.key.at[row, positions[:, 0]].set(key[:, 0]), self.value.at[row, positions[:, 0]].set(value[:, 0])
        )

    def fill(self, key: Float[Array, "b L H k"], value: Float[Array, "b L H k"]) -> KeyValueCache:
        """With the first L tokens of every row."""
        length = key.shape[1]
        return KeyValueCache(self.key.at[:, :length].set(key), self.value.at[:, :length].set(value))

    def visible(self, positions: Int[Array, "b 1"]) -> Bool[Array, "b 1 N"]:
        """The tokens that one at `positions` may see."""
        return jnp.arange(self.key.shape[1]) <= positions[..., None]


def empty_cache(config: ModelConfig, rows: int, length: int) -> KeyValueCache:
    """Room for `length` tokens in every row."""
    shape = (rows, length, config.num_heads, config.head_dim)
    return KeyValueCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
