"""The parallel transformer layer (eq 1): multi-head attention and feed-forward side by side on the same input."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, merge_heads, residual_gain, rotate_heads
from aamoe_jax.mixers.base import Context, Statistics, causal_mask
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache
from aamoe_jax.shards import RESOURCE, TENSOR


class FeedForward(nnx.Module):
    """FF(x) = V ReLU(x K) with K, V of d x d_ff and no bias; of divided hidden units, their part of it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.key = Projection(config.d_model, config.ff_width, axes=("storage", "heads"), rngs=rngs)
        self.value = Projection(
            config.ff_width, config.d_model, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config)
        )

    def __call__(self, h: Float[Array, "b L d"]) -> Float[Array, "b L d"]:
        return self.value(jax.nn.relu(self.key(h)))


class CausalAttention(nnx.Module):
    """Multi-head causal attention over the token's own document: W^O [head_1; ...; head_H]; of divided heads, their
    part of it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(
            config.d_model, config.d_model, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config)
        )
        self.config = config

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L d"]:
        query, key, value = self._rotated(h, context)
        key, value = (context.shards.gather(x, RESOURCE) for x in (key, value))
        mask = context.shards.part(causal_mask(context.segment_ids), RESOURCE)
        heads = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
        return self.output(merge_heads(heads))

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: KeyValueCache) -> KeyValueCache:
        """The cache after a prompt."""
        _, key, value = self._rotated(h, context)
        return cache.fill(key, value)

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: KeyValueCache
    ) -> tuple[Float[Array, "b 1 d"], KeyValueCache]:
        """One more token in every row."""
        query, key, value = self._rotated(h, context)
        cache = cache.write(context.positions, key, value)
        weights = jax.nn.softmax(cache.scores(query, context.positions), axis=-1)
        return self.output(merge_heads(cache.mix(weights))), cache

    def _rotated(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L H k"], Float[Array, "b L H k"]]:
        query, key, value = self.qkv(h)
        turn = context.turns(self.config).heads_here(context.shards)
        return rotate_heads(query, turn), rotate_heads(key, turn), value


class ParallelLayer(nnx.Module):
    """MHA(h) + FF(h), where h is the normed input."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention = CausalAttention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.config = config

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        h = context.shards.gather(h, TENSOR)
        return context.shards.scatter_sum(self.attention(h, context) + self.feed_forward(h), TENSOR), {}

    def empty_cache(self, rows: int, length: int) -> KeyValueCache:
        """Room for `length` tokens in every row."""
        return empty_cache(self.config, rows, length)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: KeyValueCache) -> KeyValueCache:
        """The cache after a prompt."""
        return self.attention.fill(h, context, cache)

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: KeyValueCache
    ) -> tuple[Float[Array, "b 1 d"], KeyValueCache]:
        """One more token in every row."""
        attended, cache = self.attention.decode(h, context, cache)
        return attended + self.feed_forward(h), cache
