"""What an AA-MoE layer remembers of the tokens so far: pages of one chunk, and how much was spent (AA-40).

Shapes: b rows, l pages per row, m tokens per page, d width, H heads, G = b H, k = d / H.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from aamoe_jax.aamoe.router import HIGHEST
from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import split_heads
from aamoe_jax.mixers.cache import flat_heads


class Cache(NamedTuple):
    """Page p of a row holds its tokens p m .. p m + m - 1. What has not been written yet is never read."""

    key: Float[Array, "b l m d"]
    """Rotated, in the model's type; so are the values."""
    value: Float[Array, "b l m d"]
    router_key: Float[Array, "G l k"]
    """Float32, in heads (`flat_heads`). Of a page that is being filled: the key that it would have if it ended with
    the newest token."""
    log_mean: Float[Array, "b 2"]
    """Log of the running mean of exp(importance), the normaliser of prefix budgets, and what rounding cut off it."""
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
        router_key = self._heads(router_key)
        at = jnp.arange(router_key.shape[0]), jnp.repeat(page, router_key.shape[0] // row.shape[0])
        return self._replace(
            key=self.key.at[row, page, offset].set(key[:, 0]),
            value=self.value.at[row, page, offset].set(value[:, 0]),
            router_key=self.router_key.at[at].set(router_key[:, 0]),
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
            router_key=self.router_key.at[:, :count].set(self._heads(router_key)),
        )

    def chunk_scores(self, query: Float[Array, "b 1 d"]) -> Float[Array, "b 1 l"]:
        """Dot products with the router keys of all pages, head by head for the compiler's sake alone."""
        by_head = jnp.einsum("gk,glk->gl", self._heads(query)[:, 0], self.router_key, precision=HIGHEST)
        return by_head.reshape(query.shape[0], -1, by_head.shape[1]).sum(1)[:, None]

    def _heads(self, x: Float[Array, "b L d"]) -> Float[Array, "G L k"]:
        return flat_heads(split_heads(x, self.router_key.shape[-1]))


def empty_cache(config: ModelConfig, rows: int, length: int) -> Cache:
    """Room for `length` tokens, rounded up to whole pages."""
    chunk_size, width = config.aamoe.chunk_size, config.d_model
    pages = (rows, -(-length // chunk_size), chunk_size, width)
    return Cache(
        jnp.zeros(pages, config.dtype),
        jnp.zeros(pages, config.dtype),
        jnp.zeros((rows * config.num_heads, pages[1], config.head_dim)),
        jnp.zeros((rows, 2)),
        jnp.zeros(rows, jnp.int32),
    )
