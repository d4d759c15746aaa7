"""Heads as networks that every token adds a neuron to, with other activations than a softmax.

A token's key holds a neuron's input weights, its value the output weights, and softmax is what normalises activations
(McCormick, Patterns and Messages, part 4). Here the sum is divided by the root of the number of neurons instead
(PM-13), or neurons have gates (PM-12). `filtered.py` has heads that tokens with little to say add none to (PM-10).

Shapes: b rows, L tokens per row, d width, H heads, G heads of keys and values, k = d / H, N tokens that a cache can
hold, B = b G.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, apply_rotary, merge_heads, split_heads
from aamoe_jax.mixers.attention import WeightedAttention
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache, flat_heads
from aamoe_jax.mixers.costs import (
    Costs,
    Setting,
    key_value_cache,
    projections,
    rotated,
    saved_norm,
    saved_rotation,
    squares,
)
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores, root_normalized
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE


@register("sqrt_attention", "scores over the root of their number in place of a softmax", heads="root")
class SquareRootAttention(WeightedAttention):
    """(q K^T / sqrt(k)) V / sqrt(n) over the n tokens so far, and W^O over all heads (PM-13).

    The root keeps the size of a sum of independent terms; what tokens have in common still grows with sqrt(n).
    """

    weighted_sums = (WeightedSum("earlier tokens", "q . k / sqrt(k)", "all", "scores / sqrt(n)", "x W^V, then W^O"),)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Of scores nothing is kept but the weights that they become."""
        return projections(at) + rotated(at) + squares(at, float_maps=1) + key_value_cache(at)

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        query, key, value = self._rotated(h, context)
        key, value = (context.shards.gather(x, RESOURCE) for x in (key, value))
        seen = context.shards.part(self._visible(context), RESOURCE)[:, None]
        return root_normalized(head_scores(query, key), seen), value, {}

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: KeyValueCache
    ) -> tuple[Float[Array, "b 1 d"], KeyValueCache]:
        query, key, value = self._rotated(h, context)
        cache = cache.write(context.positions, key, value)
        scores = cache.scores(query, context.positions)
        return self.output(merge_heads(cache.mix(root_normalized(scores, jnp.isfinite(scores))))), cache


class GatedCache(NamedTuple):
    """Keys and values, and the gate of every key."""

    neurons: KeyValueCache
    gate: Float[Array, "B N k"]

    def write(
        self,
        positions: Int[Array, "b 1"],
        key: Float[Array, "b 1 G k"],
        gate: Float[Array, "b 1 G k"],
        value: Float[Array, "b 1 G k"],
    ) -> GatedCache:
        """With one more token in every row, at its own position."""
        row, place = jnp.arange(self.gate.shape[0]), jnp.repeat(positions[:, 0], gate.shape[2])
        written = self.gate.at[row, place].set(flat_heads(gate)[:, 0])
        return GatedCache(self.neurons.write(positions, key, value), written)


@register("gated_attention", "SwiGLU whose neurons are the earlier tokens", heads="gated_root")
class GatedAttention(WeightedAttention):
    """silu(q . g) (q . k) v, summed over the n tokens so far and divided by sqrt(n): SwiGLU whose neurons are tokens.

    Gates g are a second projection of tokens, normed and rotated like keys; both scores are over sqrt(k) (PM-12).
    """

    weighted_sums = (
        WeightedSum("earlier tokens", "q . k and q . g", "all", "silu(q . g) (q . k) / sqrt(n)", "x W^V, then W^O"),
    )

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.gate = Projection(config.d_model, config.kv_heads * config.head_dim, axes=("storage", "heads"), rngs=rngs)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """A gate beside every key: projected, normed, rotated, scored, cached."""
        config, d, kv = at.config, at.width, at.kv_width
        saved = saved_norm(config, kv) + at.size * kv + saved_rotation(config.head_dim)
        model = 2 * d * kv + d * (at.length + 1)
        gates = at.per_token(2 * d * kv + 2 * d * at.length, saved, kv * at.size, model_flops=model)
        return projections(at) + rotated(at) + squares(at, float_maps=6) + gates + key_value_cache(at)

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        query, key, gate, value = self._gated(h, context)
        key, gate, value = (context.shards.gather(x, RESOURCE) for x in (key, gate, value))
        seen = context.shards.part(self._visible(context), RESOURCE)[:, None]
        activations = jax.nn.silu(head_scores(query, gate)) * head_scores(query, key)
        return root_normalized(activations, seen), value, {}

    def empty_cache(self, rows: int, length: int) -> GatedCache:
        """An empty cache for `length` tokens in every row."""
        neurons = empty_cache(self.config, rows, length)
        return GatedCache(neurons, jnp.zeros_like(neurons.key))

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: GatedCache) -> GatedCache:
        """The cache after a prompt."""
        _, key, gate, value = self._gated(h, context)
        return GatedCache(cache.neurons.fill(key, value), cache.gate.at[:, : h.shape[1]].set(flat_heads(gate)))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: GatedCache
    ) -> tuple[Float[Array, "b 1 d"], GatedCache]:
        """One more token in every row."""
        query, key, gate, value = self._gated(h, context)
        cache = cache.write(context.positions, key, gate, value)
        scores = cache.neurons.scores(query, context.positions)
        gates = cache.neurons._replace(key=cache.gate).scores(query, context.positions)
        weights = root_normalized(jax.nn.silu(gates) * scores, jnp.isfinite(scores))
        return self.output(merge_heads(cache.neurons.mix(weights))), cache

    def _gated(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L G k"], Float[Array, "b L G k"], Float[Array, "b L G k"]]:
        """Queries, keys, gates, values."""
        query, key, value = self._rotated(h, context)
        rotary = context.rotary(self.config).attending
        gate = apply_rotary(self.qkv.norm_key(split_heads(self.gate(h), self.config.head_dim)), rotary)
        return query, key, gate, value
