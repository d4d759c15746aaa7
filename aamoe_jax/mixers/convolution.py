"""A short causal convolution: what a token is, and a little of the few before it.

Shapes: b rows, L tokens of each, d width, t tokens before that it looks at. It computes in float32.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.layers import HIGHEST
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.costs import FLOAT, Costs, Setting
from aamoe_jax.shards import RESOURCE

TOKENS_BEFORE = 3
"""t: with the token itself a convolution of width 4."""


class CausalConvolution(nnx.Module):
    """x_i + sum_{1 <= s <= t} w_s * x_{i-s} over earlier tokens of the document, channel by channel (UNI-10).

    It starts as the token alone: w = 0.
    """

    def __init__(self, width: int):
        self.kernel = nnx.Param(jnp.zeros((TOKENS_BEFORE, width)), axes=(None, "storage_float32"))

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L d"]:
        document, before = context.segment_ids, context.shards.end_of_part_before(h, TOKENS_BEFORE)
        result = h.astype(jnp.float32)
        for s in range(1, TOKENS_BEFORE + 1):
            same = document == jnp.pad(document, ((0, 0), (s, 0)))[:, : document.shape[1]]
            same = context.shards.part(same, RESOURCE)[..., None]
            earlier = jnp.concatenate([before[:, -s:], h], axis=1)[:, : h.shape[1]]
            result += jnp.where(same, self.kernel[...][s - 1] * earlier.astype(jnp.float32), 0)
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


def convolution_costs(at: Setting) -> Costs:
    """A few tokens before, of which a cache keeps as many; elementwise work alone."""
    saved = TOKENS_BEFORE * (2 * FLOAT + 1) * at.width  # every one, weighted, and whether it is of the document
    return at.per_token(0, saved) + Costs(cache_bytes=at.rows * TOKENS_BEFORE * at.width * at.size)
