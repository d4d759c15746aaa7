"""Scores of experts: how well each suits a token (eq 3, UNI-09, UNI-10). Everything here is float32 (decision 38).

Shapes: b rows, L tokens of each, d width, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import HIGHEST
from aamoe_jax.mixers.base import Cache, Context
from aamoe_jax.mixers.convolution import TOKENS_BEFORE, CausalConvolution, last_tokens


class ExpertRouter(nnx.Module):
    """Scores [b, L, E] of all experts for every token, by a scorer that sees what the config says."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        scorer = {"linear": LinearScores, "attention": AttentionScores}[config.moe.router]
        self.scores = scorer(config.d_model, config.moe.num_experts, rngs=rngs)
        if config.moe.router_input == "causal_conv":
            self.convolution = CausalConvolution(config.d_model)
        self.config = config

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L E"]:
        x = self.convolution(h, context) if self._convolves else h
        return self.scores(x.astype(jnp.float32))

    def empty_cache(self, rows: int) -> Cache:
        """Room for the tokens before."""
        shape = (rows, TOKENS_BEFORE, self.config.d_model)
        return jnp.zeros(shape, self.config.dtype) if self._convolves else ()

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt."""
        return last_tokens(h, context) if self._convolves else cache

    def decode(self, h: Float[Array, "b 1 d"], cache: Cache) -> tuple[Float[Array, "b 1 E"], Cache]:
        """The scores for one more token in every row."""
        if not self._convolves:
            return self.scores(h.astype(jnp.float32)), cache
        x, cache = self.convolution.decode(h, cache)
        return self.scores(x), cache

    @property
    def _convolves(self) -> bool:
        return self.config.moe.router_input == "causal_conv"


class LinearScores(nnx.Module):
    """r = x W (eq 3)."""

    def __init__(self, width: int, experts: int, *, rngs: nnx.Rngs):
        self.kernel = _kernel(width, experts, rngs)

    def __call__(self, x: Float[Array, "b L d"]) -> Float[Array, "b L E"]:
        return jnp.matmul(x, self.kernel[...], precision=HIGHEST)


class AttentionScores(nnx.Module):
    """Experts attend to each other before they are scored (Yuan 2.0-M32; UNI-09).

    Q = x W, K = x W', V = x W'' hold one number per expert, and r = softmax(Q K^T) V is of one token alone: E x E
    products of numbers.
    """

    def __init__(self, width: int, experts: int, *, rngs: nnx.Rngs):
        self.query, self.key, self.value = (_kernel(width, experts, rngs) for _ in range(3))

    def __call__(self, x: Float[Array, "b L d"]) -> Float[Array, "b L E"]:
        query, key, value = (jnp.matmul(x, w[...], precision=HIGHEST) for w in (self.query, self.key, self.value))
        weights = jax.nn.softmax(query[..., :, None] * key[..., None, :], axis=-1)
        return jnp.einsum("...ij,...j->...i", weights, value, precision=HIGHEST)


def _kernel(width: int, experts: int, rngs: nnx.Rngs) -> nnx.Param:
    kernel = width**-0.5 * jax.random.normal(rngs.params(), (width, experts))
    return nnx.Param(kernel, axes=("storage_float32", None))
