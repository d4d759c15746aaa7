"""What an AA-MoE layer remembers of the tokens so far: pages of one chunk, and how much was spent (AA-40).

Shapes: b rows, l pages per row, m tokens per page, d width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ModelConfig


class Cache(NamedTuple):
    """Page p of a row holds its tokens p m .. p m + m - 1. What has not been written yet is never read."""

    key: Float[Array, "b l m d"]
    """Rotated, in the model's type; so are the values."""
    value: Float[Array, "b l m d"]
    router_key: Float[Array, "b l d"]
    """Float32. Of a page that is being filled: the key that it would have if it ended with the newest token."""
    log_sum: Float[Array, "b"]
    """Log of the running sum of exp(importance): the normaliser of prefix budgets."""
    spent: Int[Array, "b"]
    """Resources given so far: what the cap counts."""

    def write(
        self,
        positions: Int[Array, "b 1"],
        key: Float[Array, "b 1 d"],
        value: Float[Array, "b 1 d"],
        router_key: Float[Array, "b 1 d"],
    ) -> Cache:
        """With one more token in every row, at its own position."""
        row = jnp.arange(positions.shape[0])
        page, offset = jnp.divmod(positions[:, 0], self.key.shape[2])
        return self._replace(
            key=self.key.at[row, page, offset].set(key[:, 0]),
            value=self.value.at[row, page, offset].set(value[:, 0]),
            router_key=self.router_key.at[row, page].set(router_key[:, 0]),
        )

    def fill(
        self, key: Float[Array, "b L d"], value: Float[Array, "b L d"], router_key: Float[Array, "b n d"]
    ) -> Cache:
        """With the first n pages of every row, L = n m. Past a row's last token they hold what later tokens replace."""
        pages = (key.shape[0], -1, *self.key.shape[2:])
        count = router_key.shape[1]
        return self._replace(
            key=self.key.at[:, :count].set(key.reshape(pages)),
            value=self.value.at[:, :count].set(value.reshape(pages)),
            router_key=self.router_key.at[:, :count].set(router_key),
        )


def empty_cache(config: ModelConfig, rows: int, length: int) -> Cache:
    """Room for `length` tokens, rounded up to whole pages."""
    chunk_size, width = config.aamoe.chunk_size, config.d_model
    pages = (rows, -(-length // chunk_size), chunk_size, width)
    return Cache(
        jnp.zeros(pages, config.dtype),
        jnp.zeros(pages, config.dtype),
        jnp.zeros((rows, pages[1], width)),
        jnp.full(rows, -jnp.inf),
        jnp.zeros(rows, jnp.int32),
    )
