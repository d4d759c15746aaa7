"""Feed-forwards: a sum over hidden units, the same for every token (eq 1, AA-02)."""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, residual_gain
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.costs import FLOAT, Costs, Setting
from aamoe_jax.mixers.parts import Part
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import register


@register("feed_forward", "two matrices with ReLU between them", neurons=True)
class FeedForward(Part):
    """FF(x) = V ReLU(x K) with K, V of d x d_ff and no bias."""

    label = "feed_forward"
    weighted_sums = (WeightedSum("hidden units", "x . k", "those with x . k > 0", "ReLU", "rows of V"),)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.key = Projection(config.d_model, config.ff_width, axes=("storage", "heads"), rngs=rngs)
        self.value = Projection(
            config.ff_width, config.d_model, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config)
        )

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Two matrices, 4 d n; which units are on, and both sides of the choice."""
        n = at.config.ff_width
        return at.per_token(4 * at.width * n, n * (1 + 2 * at.size))

    @staticmethod
    def decode_bytes(at: Setting) -> int:
        """Both matrices."""
        return FLOAT * 2 * at.width * at.config.ff_width

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        return self.value(jax.nn.relu(self.key(h))), {}


@register("swiglu", "a feed-forward whose hidden units are gated", neurons=True)
class SwiGLU(Part):
    """(silu(x W^gate) (x W^in)) W^out: every hidden unit has a gate of its own (PM-02)."""

    label = "feed_forward"
    weighted_sums = (WeightedSum("hidden units", "x . k and x . g", "all", "silu(x . g) (x . k)", "rows of W^out"),)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, width = config.d_model, config.swiglu_width
        self.gate = Projection(d, width, axes=("storage", "heads"), rngs=rngs)
        self.key = Projection(d, width, axes=("storage", "heads"), rngs=rngs)
        self.value = Projection(width, d, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config))

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Three matrices, 6 d n; gate, key, their product, and what SiLU keeps."""
        n = at.config.swiglu_width
        return at.per_token(6 * at.width * n, 6 * at.size * n)

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        return self.value(jax.nn.silu(self.gate(h)) * self.key(h)), {}
