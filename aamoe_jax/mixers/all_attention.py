"""The All-Attention layer (eq 2-3): persistent key/value vectors beside those of the context, under one softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, merge_heads, residual_gain, rotate_heads, split_heads
from aamoe_jax.mixers.base import Context, Statistics, causal_mask


def joint_attention(
    query: Float[Array, "b L H k"],
    key: Float[Array, "b L H k"],
    value: Float[Array, "b L H k"],
    query_memory: Float[Array, "b L H k"],
    memory_key: Float[Array, "n H k"],
    memory_value: Float[Array, "n H k"],
    mask: Bool[Array, "b L L"],
) -> Float[Array, "b L H k"]:
    """softmax([q K^T, q_m M_k^T] / sqrt(k)) [V; M_v]: one softmax over context and memory, in float32."""
    scale = query.shape[-1] ** -0.5
    context_scores = jnp.einsum("bihk,bjhk->bhij", query, key, preferred_element_type=jnp.float32)
    context_scores = jnp.where(mask[:, None], context_scores, -jnp.inf)
    memory_scores = jnp.einsum("bihk,nhk->bhin", query_memory, memory_key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scale * jnp.concatenate([context_scores, memory_scores], -1), axis=-1).astype(value.dtype)
    length = key.shape[1]
    from_context = jnp.einsum("bhij,bjhk->bihk", weights[..., :length], value)
    return from_context + jnp.einsum("bhin,nhk->bihk", weights[..., length:], memory_value)


class AllAttentionLayer(nnx.Module):
    """MHA over the context and `ff_width` persistent vectors; it replaces the feed-forward.

    Queries meet the memory un-rotated, so that its scores do not depend on the absolute position (decision 10).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(config.d_model, config.d_model, rngs=rngs, gain=residual_gain(config))
        # Standard deviation 1 is that of W^K h and W^V h: both compete under one softmax from the start.
        self.memory_keys = nnx.Param(jax.random.normal(rngs.params(), (config.ff_width, config.d_model)))
        self.memory_values = nnx.Param(jax.random.normal(rngs.params(), (config.ff_width, config.d_model)))
        self.config = config

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        query, key, value = self.qkv(h)
        turn = context.rotation(self.config, self.config.head_dim)
        heads = joint_attention(
            rotate_heads(query, turn),
            rotate_heads(key, turn),
            value,
            query,
            self.qkv.norm_key(split_heads(self.memory_keys[...].astype(h.dtype), self.config.num_heads)),
            split_heads(self.memory_values[...].astype(h.dtype), self.config.num_heads),
            causal_mask(context.segment_ids),
        )
        return self.output(merge_heads(heads)), {}
