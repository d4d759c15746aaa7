"""Attention whose queries and keys know a few tokens before their own: dense attention with AA-MoE's convolution.

Shapes: b rows, L tokens per row, d width, H heads, G heads of keys and values, k = d / H, t tokens before.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import merge_heads
from aamoe_jax.mixers.attention import CausalAttention, attend_cached
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache
from aamoe_jax.mixers.convolution import TOKENS_BEFORE, CausalConvolution, convolution_costs, last_tokens
from aamoe_jax.mixers.costs import Costs, Number, Setting
from aamoe_jax.registry import register


class ConvolvedCache(NamedTuple):
    """Keys and values, and the tokens before the next one."""

    neurons: KeyValueCache
    before: Float[Array, "b t d"]


@register(
    "convolved_attention",
    "causal attention whose queries and keys know the three tokens before theirs",
    heads="softmax",
)
class ConvolvedAttention(CausalAttention):
    """softmax(q K^T / sqrt(k)) V, with q and k projected from a convolution of h and v from h itself, as in AA-MoE.

    It begins as `attention`. What AA-MoE gains beyond its convolution is its difference to this.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.convolution = CausalConvolution(config.d_model)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Of attention, and of the convolution."""
        return CausalAttention.costs(at) + convolution_costs(at)

    @staticmethod
    def decode_bytes(at: Setting) -> Number:
        """Of attention, and the tokens before the next one."""
        return CausalAttention.decode_bytes(at) + convolution_costs(at).cache_bytes

    def empty_cache(self, rows: int, length: int) -> ConvolvedCache:
        """An empty cache for `length` tokens in every row."""
        before = jnp.zeros((rows, TOKENS_BEFORE, self.config.d_model), self.config.dtype)
        return ConvolvedCache(empty_cache(self.config, rows, length), before)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: ConvolvedCache) -> ConvolvedCache:
        """The cache after a prompt."""
        _, key, value = self._rotated(h, context)
        return ConvolvedCache(cache.neurons.fill(key, value), last_tokens(h, context))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: ConvolvedCache
    ) -> tuple[Float[Array, "b 1 d"], ConvolvedCache]:
        """One more token in every row."""
        convolved, before = self.convolution.decode(h, cache.before)
        query, key, value = self._projected(h, convolved, context)
        neurons = cache.neurons.write(context.positions, key, value)
        heads = attend_cached(query, neurons, context.positions)
        return self.output(merge_heads(heads)), ConvolvedCache(neurons, before)

    def _rotated(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L G k"], Float[Array, "b L G k"]]:
        return self._projected(h, self.convolution(h, context), context)

    def _projected(
        self, h: Float[Array, "b L d"], convolved: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L G k"], Float[Array, "b L G k"]]:
        convolved = convolved.astype(h.dtype)
        table = context.rotary(self.config).attending
        query, key, value = self.qkv.rotated(h, table, convolved, convolved)
        return query, key, value
