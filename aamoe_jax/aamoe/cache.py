"""What an AA-MoE layer remembers of the tokens so far: pages of one chunk, and how much was spent (AA-40).

Shapes: b rows, l pages per row, m tokens per page, d width, H heads, G = b H, k = d / H.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ModelConfig, RouterPrecision
from aamoe_jax.mixers.cache import flat_heads
from aamoe_jax.mixers.convolution import TOKENS_BEFORE


class Cache(NamedTuple):
    """Page p of a row holds its tokens p m .. p m + m - 1. What has not been written yet is never read."""

    key: Float[Array, "b l m d"]
    """Rotated, in the model's type; so are the values."""
    value: Float[Array, "b l m d"]
    router_key: Float[Array, "G lg k"]
    """What pages are scored by, g vectors of each: float32, in heads (`flat_heads`)."""
    expert_key: Float[Array, "e g H k"]
    """Pooled keys of the experts, which no token changes; none under a learned router, which has embeddings of them."""
    before: Float[Array, "b t d"]
    """The last tokens, where keys or router look back at them; else none."""
    log_mean: Float[Array, "b 2"]
    """Log of the running mean of exp(importance), the normaliser of prefix budgets, and what rounding cut off it."""
    spent: Int[Array, "b"]
    """Resources given so far: what the cap counts."""
    load: Float[Array, "b E"]
    """What was wanted of every expert so far, summed over tokens, where load has a price; else of no experts."""

    def write(self, positions: Int[Array, "b 1"], key: Float[Array, "b 1 d"], value: Float[Array, "b 1 d"]) -> Cache:
        """With the key and value of one more token in every row, at its own position."""
        row = jnp.arange(positions.shape[0])
        page, offset = jnp.divmod(positions[:, 0], self.key.shape[2])
        return self._replace(
            key=self.key.at[row, page, offset].set(key[:, 0]), value=self.value.at[row, page, offset].set(value[:, 0])
        )

    def keys_of(self, group: Int[Array, "b 1"], size: int) -> Float[Array, "b p d"]:
        """The keys of a group of `size` tokens of every row."""
        groups = self.key.reshape(self.key.shape[0], -1, size, self.key.shape[-1])
        return jnp.take_along_axis(groups, group[..., None, None], axis=1)[:, 0]

    def write_router_key(self, group: Int[Array, "b 1"], router_key: Float[Array, "b 1 H k"]) -> Cache:
        """With another vector for one group of tokens in every row."""
        at = jnp.repeat(group[:, 0], router_key.shape[2])
        row = jnp.arange(at.shape[0])
        return self._replace(router_key=self.router_key.at[row, at].set(flat_heads(router_key)[:, 0]))

    def fill(
        self, key: Float[Array, "b L d"], value: Float[Array, "b L d"], router_key: Float[Array, "b ng H k"]
    ) -> Cache:
        """With the first n pages of every row, L = n m. Past a row's last token they hold what later tokens replace."""
        pages = (key.shape[0], -1, *self.key.shape[2:])
        key, value = key.reshape(pages), value.reshape(pages)
        return self._replace(
            key=self.key.at[:, : key.shape[1]].set(key),
            value=self.value.at[:, : key.shape[1]].set(value),
            router_key=self.router_key.at[:, : router_key.shape[1]].set(flat_heads(router_key)),
        )

    def chunk_scores(self, query: Float[Array, "b 1 H k"], precision: RouterPrecision) -> Float[Array, "b H l g"]:
        """Dot products of every head with the vectors of all pages."""
        scores = jnp.einsum("gk,glk->gl", flat_heads(query)[:, 0], self.router_key, precision=precision)
        return scores.reshape(*query.shape[:1], query.shape[2], self.key.shape[1], -1)


def new_cache(config: ModelConfig, rows: int, length: int) -> Cache:
    """An empty cache for `length` tokens, rounded up to whole pages."""
    chunk_size, width = config.aamoe.chunk_size, config.d_model
    pages = (rows, -(-length // chunk_size), chunk_size, width)
    groups = config.aamoe.pooled_keys if config.aamoe.router == "pooled" else 1
    return Cache(
        jnp.zeros(pages, config.dtype),
        jnp.zeros(pages, config.dtype),
        jnp.zeros((rows * config.num_heads, pages[1] * groups, config.head_dim)),
        jnp.zeros((0, groups, config.num_heads, config.head_dim)),
        jnp.zeros((rows, TOKENS_BEFORE if config.aamoe.looks_back else 0, width), config.dtype),
        jnp.zeros((rows, 2)),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, config.aamoe.num_experts if config.aamoe.budget.load_price else 0)),
    )
