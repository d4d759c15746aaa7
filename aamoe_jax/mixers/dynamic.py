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
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, apply_rotary, merge_heads, split_heads
from aamoe_jax.mixers.attention import WeightedAttention, whole_square_costs
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache, flat_heads
from aamoe_jax.mixers.costs import (
    Costs,
    Loop,
    Setting,
    key_value_cache,
    projections,
    rotated,
    saved_norm,
    saved_rotation,
)
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores, root_normalized
from aamoe_jax.registry import register


@register("sqrt_attention", "scores over the root of their number in place of a softmax", heads="root")
class SquareRootAttention(WeightedAttention):
    """(q K^T / sqrt(k)) V / sqrt(n) over the n tokens so far, and W^O over all heads (PM-13).

    The root keeps the size of a sum of independent terms; what tokens have in common still grows with sqrt(n).
    """

    weighted_sums = (WeightedSum("earlier tokens", "q . k / sqrt(k)", "all", "scores / sqrt(n)", "x W^V, then W^O"),)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Whole squares, block by block of queries."""
        return projections(at) + rotated(at) + whole_square_costs(at) + key_value_cache(at)

    def _coefficients(
        self, query: Float[Array, "b t H k"], keys: tuple[Float[Array, "b S G k"], ...], seen: Bool[Array, "b 1 t S"]
    ) -> Float[Array, "b H t S"]:
        (key,) = keys
        return root_normalized(head_scores(query, key), seen)

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
        return projections(at) + rotated(at) + whole_square_costs(at) + gates + key_value_cache(at)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Three products where others have two."""
        return tuple(Loop(1.5 * loop.scores, 1.5 * loop.turn) for loop in WeightedAttention.loops(at))

    def _operands(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], tuple[Float[Array, "b L G k"], ...], Float[Array, "b L G k"]]:
        query, key, gate, value = self._gated(h, context)
        return query, (key, gate), value

    def _coefficients(
        self, query: Float[Array, "b t H k"], keys: tuple[Float[Array, "b S G k"], ...], seen: Bool[Array, "b 1 t S"]
    ) -> Float[Array, "b H t S"]:
        key, gate = keys
        return root_normalized(jax.nn.silu(head_scores(query, gate)) * head_scores(query, key), seen)

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
