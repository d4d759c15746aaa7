"""The All-Attention layer (eq 2-3, AA-06): persistent key/value vectors beside those of the context, one softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, merge_heads, residual_gain, split_heads
from aamoe_jax.mixers.base import Context, Statistics, causal_mask
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache
from aamoe_jax.mixers.costs import (
    FLOAT,
    Costs,
    Loop,
    Setting,
    blocks,
    key_value_cache,
    projections,
    rotated,
    saved_norm,
)
from aamoe_jax.mixers.flash import Attended, Place, block_size, flash_attention, loop, merged, token_blocks
from aamoe_jax.mixers.parts import Part
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE

Heads = Float[Array, "b _ H k"]
Groups = Float[Array, "b _ G k"]


def joint_attention(
    rotated_query: Float[Array, "b L H k"],
    key: Float[Array, "b S G k"],
    value: Float[Array, "b S G k"],
    query: Float[Array, "b L H k"],
    memory_key: Float[Array, "n H k"],
    memory_value: Float[Array, "n H k"],
    segment_ids: Int[Array, "b S"],
    first: Place = 0,
) -> Float[Array, "b L H k"]:
    """softmax([q K^T, q_m M_k^T] / sqrt(k)) [V; M_v]: one softmax over context and memory.

    Args:
      first: the place in the row of the first query.
    """
    tokens = flash_attention(rotated_query, key, value, segment_ids, first=first)
    return merged([tokens, memory_attention(query, memory_key, memory_value)])


def memory_attention(
    query: Float[Array, "b L H k"], key: Float[Array, "n H k"], value: Float[Array, "n H k"]
) -> Attended:
    """softmax(q M_k^T / sqrt(k)) M_v. The scores of one block of tokens are all that is ever held: the backward pass
    computes them again."""

    @jax.checkpoint
    def of_block(query: Float[Array, "b t H k"]) -> tuple[Float[Array, "b t H k"], Float[Array, "b t H"]]:
        scores = memory_scores(query, key)
        lse = jax.nn.logsumexp(scores, axis=-1)
        weights = jnp.exp(scores - lse[..., None]).astype(value.dtype)
        return jnp.einsum("bhin,nhk->bihk", weights, value), lse.swapaxes(1, 2)

    rows, length = query.shape[:2]
    found = jax.lax.map(of_block, token_blocks(query, block_size(length)))
    output, lse = (x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :length] for x in found)
    return Attended(output, lse)


def memory_scores(query: Float[Array, "b t H k"], key: Float[Array, "n H k"]) -> Float[Array, "b H t n"]:
    """q M_k^T / sqrt(k) in float32."""
    return query.shape[-1] ** -0.5 * jnp.einsum("bihk,nhk->bhin", query, key, preferred_element_type=jnp.float32)


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
        of_tokens, of_memory = AllAttention.loops(at)
        tokens = blocks(at, [of_tokens], decoded=at.length, visible=(at.length + 1) / 2)
        # Queries as they meet the memory, what was read there, and its log-sum-exp.
        saved = at.tokens * (2 * s * d + FLOAT * config.num_heads) + n * (saved_norm(config, d) + 2 * s * d)
        flops = 4 * d * at.rows
        memory = Costs(flops * of_memory.scores, flops * n, saved, 0, 4 * d * n)
        return projections(at) + rotated(at) + tokens + memory + key_value_cache(at)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Blocks of tokens that meet tokens, and that meet the memory."""
        turn, memory = block_size(at.length), at.config.ff_width
        return loop(at.length, at.length), Loop(-(-at.length // turn) * turn * memory, turn * memory)

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        query, rotated, key, value = self._rotated(h, context)
        key, value = (context.shards.gather(x, RESOURCE) for x in (key, value))
        memory = self._memory(h.dtype)
        heads = joint_attention(rotated, key, value, query, *memory, context.segment_ids, context.attending_from)
        return self.output(merge_heads(heads)), {}

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        """The attention of every token here to tokens; what is missing to 1 goes to the memory."""
        query, rotated, key, _ = self._rotated(h, context)
        key = jnp.repeat(context.shards.gather(key, RESOURCE), self.qkv.group, axis=-2)
        mask = context.shards.part(causal_mask(context.segment_ids), RESOURCE)
        tokens = jnp.where(mask[:, None], head_scores(rotated, key), -jnp.inf)
        scores = jnp.concatenate([tokens, memory_scores(query, self._memory(h.dtype)[0])], axis=-1)
        return jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]]

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
        memory = memory_scores(query, memory_keys)[:, :, 0]
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
        query, rotated, key, value = self.qkv.rotated(h, context.rotary(self.config).attending, keep_normed=True)
        return query, rotated, key, value
