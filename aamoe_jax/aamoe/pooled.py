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
from aamoe_jax.config import ModelConfig, RouterPrecision
from aamoe_jax.layers import split_heads
from aamoe_jax.mixers.base import Context
from aamoe_jax.shards import RESOURCE, TENSOR, WHOLE, Shards

NEVER = -1e30
"""Score of what cannot be chosen: finite, so that a softmax over nothing else has a gradient."""
LEAST = 1e-30
"""The smallest P(choose), so that it has a logarithm."""


class PooledRouter(nnx.Module):
    """See `router.py` for what a router has."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.precision = config.aamoe.router_precision

    def scores(self, h: Float[Array, "b n d"], heads: Heads, chunks: Bool[Array, "b s l"], context: Context) -> Scores:
        """Scores of whole rows.

        Args:
          chunks: which chunks the tokens that attend together can be given.
        """
        layer, shards = self.config.aamoe, context.shards
        keys = pool(heads.key.reshape(len(h), -1, layer.chunk_size, *heads.key.shape[2:]), layer.pool_size)
        expert_keys = shards.gather(self.expert_keys(heads.expert_key), RESOURCE, 0)

        of_chunks = chunk_scores(heads.rotated_query, shards.gather(keys, RESOURCE), self.precision)
        of_experts = expert_scores(heads.query, expert_keys, self.precision)
        found = log_choice(of_chunks, of_experts, chunks, layer.pooled_keys, shards)
        return *found, jnp.zeros(h.shape[:2])

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
        scores = cache.chunk_scores(_scaled(heads.rotated_query), self.precision).transpose(1, 0, 3, 2)  # [H, b, g, l]
        of_chunks = scores.reshape(*scores.shape[:2], 1, -1)
        of_experts = expert_scores(heads.query, cache.expert_key, self.precision)
        found = log_choice(of_chunks, of_experts, chunks, scores.shape[2])
        return (*found, jnp.zeros(h.shape[:2])), cache


def pool(keys: Float[Array, "*r t H k"], size: int) -> Float[Array, "*r groups H k"]:
    """The mean of every `size` keys, as long as they are (root mean square).

    A mean of unlike keys is shorter. Left so, an expert, whose keys can learn to be alike, would be scored above a
    chunk that holds the one key that the token looks for.
    """
    *rest, count, heads, width = keys.shape
    groups = keys.astype(jnp.float32).reshape(*rest, count // size, size, heads, width)
    mean = groups.mean(-3)
    square, square_of_mean = jnp.square(groups).mean((-3, -1)), jnp.square(mean).mean(-1)
    return mean * jnp.sqrt((square + 1e-6) / (square_of_mean + 1e-6))[..., None]


def chunk_scores(
    query: Float[Array, "b s H k"], keys: Float[Array, "b l g H k"], precision: RouterPrecision
) -> Float[Array, "H b s gl"]:
    """Products with the pooled keys of chunks, both sides rotated: with the first of every chunk, then the second."""
    keys = keys.swapaxes(1, 2).reshape(len(keys), -1, *keys.shape[3:])
    return jnp.einsum("bshk,bnhk->hbsn", _scaled(query), keys, precision=precision)


def expert_scores(
    query: Float[Array, "b s H k"], keys: Float[Array, "E g H k"], precision: RouterPrecision
) -> Float[Array, "H b s gE"]:
    """Products with the pooled keys of experts, neither side rotated: with the first of every expert, then the
    second."""
    keys = keys.swapaxes(0, 1).reshape(-1, *keys.shape[2:])
    return jnp.einsum("bshk,nhk->hbsn", _scaled(query), keys, precision=precision)


def _scaled(query: Float[Array, "b s H k"]) -> Float[Array, "b s H k"]:
    return query.shape[-1] ** -0.5 * query.astype(jnp.float32)


def log_choice(
    chunks: Float[Array, "H b s gl"],
    experts: Float[Array, "H b s gE"],
    available: Bool[Array, "b s l"],
    groups: int,
    shards: Shards = WHOLE,
) -> tuple[Float[Array, "b n l"], Float[Array, "b n E"]]:
    """log P(choose) of chunks and of experts: the mean over all heads of a softmax over all their pooled keys.

    Args:
      available: which chunks can be chosen; of the others the result means nothing.
      groups: g, pooled keys of each.
    """
    chunks = jnp.where(jnp.tile(available, groups), chunks, NEVER)
    tops = [jax.lax.stop_gradient(x).max(-1, initial=NEVER, keepdims=True) for x in (chunks, experts)]
    top = jnp.maximum(*tops)
    # Added slice by slice: a sum over an axis of g would not be vectorised.
    weights = [sum(jnp.split(jnp.exp(x - top), groups, axis=-1)) for x in (chunks, experts)]
    weight = jnp.concatenate(weights, axis=-1)
    share = weight / weight.sum(-1, keepdims=True)
    mean = shards.scatter_sum(share.sum(0), TENSOR) / (len(share) * shards.tensor)
    r = jnp.log(jnp.maximum(mean, LEAST))
    return r[..., : available.shape[-1]], r[..., available.shape[-1] :]
