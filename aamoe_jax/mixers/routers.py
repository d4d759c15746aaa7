"""Scores of experts: how well each suits a token (eq 3, UNI-09, UNI-10). Everything here is float32 (decision 38).

Shapes: b rows, L tokens of each, d width, E experts, t tokens before that a convolution looks at.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import HIGHEST
from aamoe_jax.mixers.base import Cache, Context
from aamoe_jax.shards import RESOURCE

TOKENS_BEFORE = 3
"""t: with the token itself a convolution of width 4."""


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


class CausalConvolution(nnx.Module):
    """x_i + sum_{1 <= s <= t} w_s * x_{i-s} over earlier tokens of the document, channel by channel (UNI-10).

    It starts as the token alone: w = 0.
    """

    def __init__(self, width: int):
        self.kernel = nnx.Param(jnp.zeros((TOKENS_BEFORE, width)), axes=(None, "storage_float32"))

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L d"]:
        length, document = h.shape[1], context.segment_ids
        window = jnp.concatenate([context.shards.end_of_part_before(h, TOKENS_BEFORE), h], axis=1).astype(jnp.float32)
        result = h.astype(jnp.float32)
        for s in range(1, TOKENS_BEFORE + 1):
            same = document == jnp.pad(document, ((0, 0), (s, 0)))[:, : document.shape[1]]
            same = context.shards.part(same, RESOURCE)[..., None]
            earlier = window[:, TOKENS_BEFORE - s : TOKENS_BEFORE - s + length]
            result += jnp.where(same, self.kernel[...][s - 1] * earlier, 0)
        return result

    def decode(
        self, h: Float[Array, "b 1 d"], before: Float[Array, "b t d"]
    ) -> tuple[Float[Array, "b 1 d"], Float[Array, "b t d"]]:
        """One more token in every row, and the tokens before the next."""
        earlier = jnp.einsum("btd,td->bd", before.astype(jnp.float32), self.kernel[...][::-1], precision=HIGHEST)
        return h.astype(jnp.float32) + earlier[:, None], jnp.concatenate([before, h], axis=1)[:, 1:]


def last_tokens(h: Float[Array, "b L d"], context: Context) -> Float[Array, "b t d"]:
    """The last t tokens of prompts that are padded at their ends; zeros where a prompt is shorter."""
    padded = jnp.pad(h, ((0, 0), (TOKENS_BEFORE, 0), (0, 0)))
    index = context.real.sum(1)[:, None] + jnp.arange(TOKENS_BEFORE)
    return jnp.take_along_axis(padded, index[..., None], axis=1)


def _kernel(width: int, experts: int, rngs: nnx.Rngs) -> nnx.Param:
    kernel = width**-0.5 * jax.random.normal(rngs.params(), (width, experts))
    return nnx.Param(kernel, axes=("storage_float32", None))
