"""Attention to clusters of keys: a query is routed to the clusters whose centroids score highest (PM-11).

Shapes: b rows, L tokens per row, d width, H heads, G heads of keys and values, k = d / H, C clusters, N tokens that a
cache can hold, B = b G.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig, refuse, require_positive
from aamoe_jax.layers import apply_rotary, merge_heads, split_heads
from aamoe_jax.mixers.attention import WeightedAttention
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.cache import KeyValueCache
from aamoe_jax.mixers.cache import empty_cache as empty_key_value_cache
from aamoe_jax.mixers.costs import FLOAT, Costs, Setting, key_value_cache, projections, rotated, squares
from aamoe_jax.mixers.statistics import shares
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores, softmax_selected
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE


class ClusteredCache(NamedTuple):
    """Keys and values, and the cluster of every key."""

    neurons: KeyValueCache
    cluster: Int[Array, "B N"]


@dataclasses.dataclass(frozen=True)
class ClusteredAttentionConfig:
    """How many clusters `clustered_attention` has, and keeps (PM-11)."""

    clusters: int = 16
    """Clusters of keys in every head."""
    clusters_kept: int = 4
    """Clusters that a query attends to, beside the token itself."""

    def __post_init__(self) -> None:
        require_positive(self, "clusters", "clusters_kept")
        if self.clusters_kept > self.clusters:
            refuse(self, "clusters_kept", f"must be at most clusters = {self.clusters}")


@register(
    "clustered_attention",
    "attention to the clusters of keys that a query scores highest",
    heads="softmax",
    config=ClusteredAttentionConfig,
)
class ClusteredAttention(WeightedAttention):
    """Softmax attention to the keys of the `clusters_kept` clusters that a query scores highest, and to itself.

    A key is of the cluster whose centroid is nearest. Keys and queries meet centroids un-rotated, so that a token's
    cluster depends on nothing but the token. Every head has centroids of its own, which the loss does not reach: they
    are random directions until `analysis.clusters` finds those of a trained layer's keys.

    Keys outside the chosen clusters are masked, not skipped: this measures what routing loses, it saves no time.
    """

    weighted_sums = (
        WeightedSum(
            "earlier tokens", "q . k / sqrt(k)", "the clusters with the best q . centroid", "softmax", "x W^V, then W^O"
        ),
    )

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.clustering = config.of(ClusteredAttentionConfig)
        shape = (self.clustering.clusters, config.kv_heads * config.head_dim)
        self.centroids = nnx.Param(jax.random.normal(rngs.params(), shape), axes=(None, "heads"))

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Attention to all keys, of which those of other clusters are masked; queries and keys meet every centroid."""
        routing = 2 * at.config.of(ClusteredAttentionConfig).clusters * (at.width + at.kv_width)
        laid_out = projections(at) + rotated(at) + squares(at) + key_value_cache(at)
        return laid_out + at.per_token(routing, 0, FLOAT * at.config.kv_heads)

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """`pairs_kept`, the share of keys that were in chosen clusters."""
        return shares(statistics, {"pairs_kept": ("pairs_compared", "pairs_offered")})

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        scores, value, rank, visible = self.ranked(h, context)
        chosen = visible & (rank < self.clustering.clusters_kept)
        real = context.shards.part(context.segment_ids, RESOURCE)[:, None, :, None] > 0
        compared, offered = ((x & real).sum().astype(jnp.float32) for x in (chosen, visible))
        return softmax_selected(scores, chosen), value, {"pairs_compared": compared, "pairs_offered": offered}

    def clusters(self, key: Float[Array, "b n G k"]) -> Int[Array, "b n G"]:
        """The nearest centroid of every key."""
        centroids = split_heads(self.centroids[...], self.config.head_dim)
        products = jnp.einsum("bngk,cgk->bngc", key.astype(jnp.float32), centroids)
        return jnp.argmax(products - 0.5 * jnp.square(centroids).sum(-1).T, axis=-1)

    def ranks(self, query: Float[Array, "b n H k"]) -> Int[Array, "b H n C"]:
        """The rank of every cluster for every query, counted from 0, by q . centroid."""
        centroids = split_heads(self.centroids[...], self.config.head_dim)
        of_rows = jnp.broadcast_to(centroids, (query.shape[0], *centroids.shape))
        order = jnp.argsort(-head_scores(query.astype(jnp.float32), of_rows), axis=-1)
        return jnp.argsort(order, axis=-1)

    def ranked(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Int[Array, "b H L S"], Bool[Array, "b H L S"]]:
        """Scores of all keys, values, ranks of the keys' clusters (0 for the token itself), and which keys are seen."""
        shards = context.shards
        query, key, value = self.qkv(h)
        rotary = context.rotary(self.config).attending
        cluster = shards.gather(self.clusters(key), RESOURCE)
        rotated, value = (shards.gather(x, RESOURCE) for x in (apply_rotary(key, rotary), value))
        rank = _of_keys(self.ranks(query), self._for_heads(cluster.swapaxes(1, 2)))
        itself = shards.part(jnp.eye(cluster.shape[1], dtype=bool)[None], RESOURCE)
        visible = shards.part(self._visible(context), RESOURCE)[:, None]
        visible = jnp.broadcast_to(visible, rank.shape)
        return head_scores(apply_rotary(query, rotary), rotated), value, jnp.where(itself, 0, rank), visible

    def empty_cache(self, rows: int, length: int) -> ClusteredCache:
        """An empty cache for `length` tokens in every row."""
        neurons = empty_key_value_cache(self.config, rows, length)
        return ClusteredCache(neurons, jnp.zeros(neurons.key.shape[:2], jnp.int32))

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: ClusteredCache) -> ClusteredCache:
        """The cache after a prompt."""
        _, key, value = self.qkv(h)
        rotary, length = context.rotary(self.config).heads, h.shape[1]
        cluster = self.clusters(key).swapaxes(1, 2).reshape(-1, length)
        return ClusteredCache(
            cache.neurons.fill(apply_rotary(key, rotary), value), cache.cluster.at[:, :length].set(cluster)
        )

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: ClusteredCache
    ) -> tuple[Float[Array, "b 1 d"], ClusteredCache]:
        """One more token in every row."""
        query, key, value = self.qkv(h)
        rotary, positions = context.rotary(self.config).heads, context.positions
        row, place = jnp.arange(cache.cluster.shape[0]), jnp.repeat(positions[:, 0], self.config.kv_heads)
        cache = ClusteredCache(
            cache.neurons.write(positions, apply_rotary(key, rotary), value),
            cache.cluster.at[row, place].set(self.clusters(key).reshape(-1)),
        )
        cluster = self._for_heads(cache.cluster.reshape(h.shape[0], -1, cache.cluster.shape[1]))
        rank = _of_keys(self.ranks(query), cluster)[:, :, 0]
        itself = jnp.arange(rank.shape[-1]) == positions[..., None]
        scores = cache.neurons.scores(apply_rotary(query, rotary), positions)
        chosen = ((rank < self.clustering.clusters_kept) | itself) & jnp.isfinite(scores)
        return self.output(merge_heads(cache.neurons.mix(softmax_selected(scores, chosen)))), cache

    def _for_heads(self, x: Int[Array, "b G n"]) -> Int[Array, "b H n"]:
        return jnp.repeat(x, self.qkv.group, axis=1)


def _of_keys(of_clusters: Int[Array, "b H q C"], cluster: Int[Array, "b H n"]) -> Int[Array, "b H q n"]:
    """What holds of a key's cluster, for every query and key."""
    return jnp.take_along_axis(of_clusters, cluster[:, :, None], axis=-1)
