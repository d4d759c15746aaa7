"""The All-Attention layer (eq 2-3, AA-06): persistent key/value vectors beside those of the context, one softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, apply_rotary, merge_heads, residual_gain, split_heads
from aamoe_jax.mixers.base import Context, Statistics, causal_mask
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache
from aamoe_jax.mixers.costs import FLOAT, Costs, Setting, key_value_cache, projections, rotated, saved_norm
from aamoe_jax.mixers.parts import Part
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE

Heads = Float[Array, "b _ H k"]
Groups = Float[Array, "b _ G k"]


def joint_weights(
    query: Float[Array, "b L H k"],
    key: Float[Array, "b S H k"],
    query_memory: Float[Array, "b L H k"],
    memory_key: Float[Array, "n H k"],
    mask: Bool[Array, "b L S"],
) -> Float[Array, "b H L S+n"]:
    """softmax([q K^T, q_m M_k^T] / sqrt(k)): one softmax over context and memory, in float32."""
    scale = query.shape[-1] ** -0.5
    context_scores = jnp.einsum("bihk,bjhk->bhij", query, key, preferred_element_type=jnp.float32)
    context_scores = jnp.where(mask[:, None], context_scores, -jnp.inf)
    memory_scores = jnp.einsum("bihk,nhk->bhin", query_memory, memory_key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(scale * jnp.concatenate([context_scores, memory_scores], -1), axis=-1)


def joint_attention(
    query: Float[Array, "b L H k"],
    key: Float[Array, "b S H k"],
    value: Float[Array, "b S H k"],
    query_memory: Float[Array, "b L H k"],
    memory_key: Float[Array, "n H k"],
    memory_value: Float[Array, "n H k"],
    mask: Bool[Array, "b L S"],
) -> Float[Array, "b L H k"]:
    """`joint_weights` of [V; M_v]."""
    weights = joint_weights(query, key, query_memory, memory_key, mask).astype(value.dtype)
    length = key.shape[1]
    from_context = jnp.einsum("bhij,bjhk->bihk", weights[..., :length], value)
    return from_context + jnp.einsum("bhin,nhk->bihk", weights[..., length:], memory_value)


@register(
    "all_attention",
    "one softmax over tokens and `d_ff` learned vectors (eq 2-3)",
    heads="softmax",
    neurons=True,
)
class AllAttention(Part):
    """MHA over the context and `ff_width` persistent vectors; it replaces the feed-forward.

    Queries meet the memory un-rotated, so that its scores do not depend on the absolute position (decision 10).
    """

    label = "attention"
    has_map = True
    weighted_sums = (
        WeightedSum(
            "earlier tokens and `d_ff` rows", "q . k / sqrt(k)", "all", "one softmax", "x W^V and rows, then W^O"
        ),
    )

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(
            config.d_model, config.d_model, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config)
        )
        # Standard deviation 1 is that of W^K h and W^V h: both compete under one softmax from the start.
        shape, axes = (config.ff_width, config.d_model), ("storage", "heads")
        self.memory_keys = nnx.Param(jax.random.normal(rngs.params(), shape), axes=axes)
        self.memory_values = nnx.Param(jax.random.normal(rngs.params(), shape), axes=axes)
        self.config = config

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Attention over tokens and memory under one softmax; n persistent vectors cost 4 d n."""
        config, d, n, s = at.config, at.width, at.config.ff_width, at.size
        # Of tokens mask, scores and weights; of both float32 weights; of the memory weights again.
        maps = config.num_heads * (at.length * (1 + FLOAT + s) + (at.length + n) * FLOAT + n * s)
        model = 2 * d * (at.length + 1) + 4 * d * n
        both = at.per_token(4 * d * (at.length + n), maps + s * (at.kv_width + d), model_flops=model)
        memory = Costs(activation_bytes=n * (saved_norm(config, d) + 2 * s * d))
        return projections(at) + rotated(at) + both + memory + key_value_cache(at)

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        shards = context.shards
        query, rotated, key, value = self._rotated(h, context)
        key, value = (jnp.repeat(shards.gather(x, RESOURCE), self.qkv.group, axis=-2) for x in (key, value))
        mask = shards.part(causal_mask(context.segment_ids), RESOURCE)
        heads = joint_attention(rotated, key, value, query, *self._memory(h.dtype), mask)
        return self.output(merge_heads(heads)), {}

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        """The attention of every token here to tokens; what is missing to 1 goes to the memory."""
        query, rotated, key, _ = self._rotated(h, context)
        key = jnp.repeat(context.shards.gather(key, RESOURCE), self.qkv.group, axis=-2)
        mask = context.shards.part(causal_mask(context.segment_ids), RESOURCE)
        weights = joint_weights(rotated, key, query, self._memory(h.dtype)[0], mask)
        return weights[..., : key.shape[1]]

    def empty_cache(self, rows: int, length: int) -> KeyValueCache:
        # The memory takes no space in the cache.
        return empty_cache(self.config, rows, length)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: KeyValueCache) -> KeyValueCache:
        """The cache after a prompt."""
        _, _, key, value = self._rotated(h, context)
        return cache.fill(key, value)

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: KeyValueCache
    ) -> tuple[Float[Array, "b 1 d"], KeyValueCache]:
        """One more token in every row."""
        query, rotated, key, value = self._rotated(h, context)
        cache = cache.write(context.positions, key, value)
        memory_keys, memory_values = self._memory(h.dtype)
        memory = jnp.einsum("bhk,nhk->bhn", query[:, 0], memory_keys, preferred_element_type=jnp.float32)
        memory = query.shape[-1] ** -0.5 * memory
        scores = jnp.concatenate([cache.scores(rotated, context.positions), memory], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)
        capacity = cache.key.shape[1]
        from_memory = jnp.einsum("bhn,nhk->bhk", weights[..., capacity:].astype(h.dtype), memory_values)
        return self.output(merge_heads(cache.mix(weights[..., :capacity]) + from_memory[:, None])), cache

    def _memory(self, dtype: jnp.dtype) -> tuple[Float[Array, "n H k"], Float[Array, "n H k"]]:
        """The persistent keys (normed as those of tokens are) and values, head by head."""
        keys, values = (
            split_heads(x[...].astype(dtype), self.config.head_dim) for x in (self.memory_keys, self.memory_values)
        )
        return self.qkv.norm_key(keys), values

    def _rotated(self, h: Float[Array, "b L d"], context: Context) -> tuple[Heads, Heads, Groups, Groups]:
        """Queries, queries and keys with their rotary embedding, values; keys and values once for a group of heads."""
        query, key, value = self.qkv(h)
        rotary = context.rotary(self.config).attending
        return query, apply_rotary(query, rotary), apply_rotary(key, rotary), value
