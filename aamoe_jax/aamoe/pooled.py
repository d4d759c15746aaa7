"""A router made of the attention's own queries and keys (`AAMoEConfig.router = 'pooled'`).

What a token would attend to is what it should be given. Every group of m / g keys of a chunk or an expert is pooled to
one key. A softmax over the pooled keys of all that a token may choose estimates how a head's attention would be
divided; P(choose) of eq 14 is the mean of these estimates over heads, and r its logarithm. So every head counts for as
much as any other: of a log-sum-exp of plain scores the head with the largest would decide alone. The local resource is
not chosen but comes first, with P(choose) = 1.

Nothing here has parameters of its own. The gradient of the bias (eq 15) reaches the query, and every pooled key
through the sum of the softmax: also those that were not read.

Shapes: b rows, s tokens that attend together, n of them here, l chunks per row, E experts, m keys of each, g pooled
keys of each, H heads here, k head size. Everything here is float32 (decision 38).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from aamoe_jax.aamoe.cache import Cache
from aamoe_jax.aamoe.router import Heads, Scores
from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import split_heads
from aamoe_jax.mixers.base import Context
from aamoe_jax.shards import RESOURCE, TENSOR, WHOLE, Shards
from pallas_kernels.choice import attention_shares, attention_shares_of_scores, scores_of_experts

LEAST = 1e-30
"""The smallest P(choose), so that it has a logarithm."""


class PooledRouter(nnx.Module):
    """See `router.py` for what a router has."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.precision = config.aamoe.router_precision

    def scores(
        self, h: Float[Array, "b n d"], heads: Heads, chunks: Bool[Array, "b s l"], context: Context
    ) -> tuple[Scores, Heads]:
        """Scores of whole rows; and the heads that attention is to read: the router's backward pass adds its gradients
        of queries to attention's.

        Args:
          chunks: which chunks the tokens that attend together can be given.
        """
        layer, shards = self.config.aamoe, context.shards
        keys = pool(heads.key.reshape(len(h), -1, layer.chunk_size, *heads.key.shape[2:]), layer.pool_size)
        expert_keys = shards.gather(self.expert_keys(heads.expert_key), RESOURCE, 0)

        found, rotated_query, query = attention_shares(
            heads.rotated_query,
            heads.query,
            shards.gather(keys, RESOURCE),
            expert_keys,
            chunks,
            precision=self.precision,
        )
        if layer.bias == "log_prob":  # else no gradient comes here, and there is nothing to add
            heads = heads._replace(query=query, rotated_query=rotated_query)
        return (*log_choice(found, chunks.shape[2], shards), jnp.zeros(h.shape[:2])), heads

    def page_keys(self, heads: Heads, context: Context) -> Float[Array, "b pooled H k"]:
        """What the chunks of a prompt are scored by."""
        del context
        return pool(heads.key, self.config.aamoe.pool_size)

    def expert_keys(self, keys: Float[Array, "e m H k"]) -> Float[Array, "e g H k"]:
        """What experts are scored by."""
        return pool(keys, self.config.aamoe.pool_size)

    def next_scores(
        self, h: Float[Array, "b 1 d"], heads: Heads, chunks: Bool[Array, "b 1 l"], context: Context, cache: Cache
    ) -> tuple[Scores, Cache]:
        """Scores of one more token in every row, and the cache with the pooled key of the group that it is in: pages
        are scored once all their keys are there."""
        size = self.config.aamoe.pool_size
        group = context.positions // size
        cache = cache.write_router_key(group, pool(split_heads(cache.keys_of(group, size), self.config.head_dim), size))
        query, query_expert = (x.shape[-1] ** -0.5 * x.astype(jnp.float32) for x in (heads.rotated_query, heads.query))
        scores = cache.chunk_scores(query, self.precision).transpose(1, 0, 3, 2)  # [H, b, g, l]
        of_chunks = scores.reshape(*scores.shape[:2], 1, -1)
        of_experts = scores_of_experts(query_expert, cache.expert_key, self.precision)
        found = attention_shares_of_scores(of_chunks, of_experts, chunks, scores.shape[2])
        return (*log_choice(found, chunks.shape[2]), jnp.zeros(h.shape[:2])), cache


def pool(keys: Float[Array, "*r t H k"], size: int) -> Float[Array, "*r groups H k"]:
    """The mean of every `size` keys, as long as they are (root mean square).

    A mean of unlike keys is shorter. Left so, an expert, whose keys can learn to be alike, would be scored above a
    chunk that holds the one key that the token looks for.
    """
    *rest, count, heads, width = keys.shape
    # Heads side by side while there are many keys: a TPU would copy them for every head by itself.
    mean, square = (split_heads(x, width) for x in _moments(keys.reshape(*rest, count // size, size, heads * width)))
    ratio = (square.mean(-1) + 1e-6) / (jnp.square(mean).mean(-1) + 1e-6)
    return mean * jnp.sqrt(ratio)[..., None]


@jax.custom_vjp
def _moments(x: Float[Array, "*r n d"]) -> tuple[Float[Array, "*r d"], Float[Array, "*r d"]]:
    """Means of n numbers and of their squares, in float32. Its gradient is as large as x, and made in one pass: left to
    itself, XLA writes each of its parts."""
    again = jax.lax.optimization_barrier(x)  # else x is written in float32, for both to read
    return x.astype(jnp.float32).mean(-2), jnp.square(again.astype(jnp.float32)).mean(-2)


def _moments_backward(x, cotangents):
    d_mean, d_square = (y[..., None, :] / x.shape[-2] for y in cotangents)
    d_x = (d_mean + 2 * d_square * x.astype(jnp.float32)).astype(x.dtype)
    return (jax.lax.optimization_barrier(d_x),)


_moments.defvjp(lambda x: (_moments(x), x), _moments_backward)


def log_choice(
    share: Float[Array, "b s R"], chunks: int, shards: Shards = WHOLE
) -> tuple[Float[Array, "b n l"], Float[Array, "b n E"]]:
    """log P(choose) of chunks and of experts, from the mean over the heads here."""
    mean = shards.scatter_sum(share, TENSOR) / shards.tensor
    r = jnp.log(jnp.maximum(mean, LEAST))
    return r[..., :chunks], r[..., chunks:]
