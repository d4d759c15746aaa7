"""The parallel transformer layer (eq 1, AA-05): attention and a feed-forward on the same input, summed."""

from __future__ import annotations

from flax import nnx

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.costs import Costs, Loop, Number, Setting
from aamoe_jax.mixers.feed_forward import FeedForward
from aamoe_jax.mixers.parts import SideBySide
from aamoe_jax.registry import register


@register("parallel", "attention and a feed-forward side by side (eq 1)", heads="softmax", neurons=True)
class Parallel(SideBySide):
    """MHA(h) + FF(h)."""

    weighted_sums = (*CausalAttention.weighted_sums, *FeedForward.weighted_sums)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__({"attention": CausalAttention, "feed_forward": FeedForward}, config, rngs=rngs)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Of both."""
        return CausalAttention.costs(at) + FeedForward.costs(at)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Of its attention."""
        return CausalAttention.loops(at)

    @staticmethod
    def decode_bytes(at: Setting) -> Number:
        """Of both."""
        return CausalAttention.decode_bytes(at) + FeedForward.decode_bytes(at)
