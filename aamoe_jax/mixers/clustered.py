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
from aamoe_jax.mixers import routed
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context, Statistics, document_starts
from aamoe_jax.mixers.cache import KeyValueCache
from aamoe_jax.mixers.cache import empty_cache as empty_key_value_cache
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Setting, blocks, key_value_cache, projections, rotated
from aamoe_jax.mixers.statistics import shares
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores, softmax_selected
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE

STRAY = 0.01
"""The share of all centroids together in the loss of a key, beside that of the nearest."""


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
    learn_centroids: bool = True
    """Whether centroids follow the keys that are nearest to them (k-means as a loss, which changes nothing else).
    False: they stay where they are."""

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
class ClusteredAttention(CausalAttention):
    """Softmax attention to the keys of the `clusters_kept` clusters that a query scores highest, and to itself.

    A key is of the cluster whose centroid is nearest. Keys and queries meet centroids un-rotated, so that a token's
    cluster depends on nothing but the token. Every head has centroids of its own, random directions at first. Which
    clusters are chosen has no gradient; centroids learn by k-means alone.

    Keys outside the chosen clusters are not computed in a row. Decoding compares all that is cached, and masks.
    """

    losses = ("centroid_loss",)
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
        """Attention to the chosen clusters, as if keys and queries were spread evenly over them; in decoding to all
        keys, of which those of other clusters are masked. Queries and keys meet every centroid."""
        config, clustering = at.config, at.config.of(ClusteredAttentionConfig)
        count, kept = clustering.clusters, clustering.clusters_kept
        routing = 2 * count * (at.width + (2 if clustering.learn_centroids else 1) * at.kv_width)
        # What a query reads, and from where to where; of a key its cluster, and a bias of 0.
        integers = FLOAT * (config.num_heads * (kept + 2) + 2 * config.kv_heads)
        # Of a query's keys on average those of chosen clusters, and itself where it is in none.
        visible = kept / count * (at.length + 1) / 2 + 1 - kept / count
        attended = blocks(at, ClusteredAttention.loops(at), decoded=at.length, visible=visible)
        laid_out = projections(at) + rotated(at) + attended + key_value_cache(at)
        return laid_out + at.per_token(routing, at.size * at.width + integers, FLOAT * config.kv_heads)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Heads are computed one after the other: a compiler counts one turn of one of them."""
        clustering, block = at.config.of(ClusteredAttentionConfig), min(routed.BLOCK, at.length)
        scores = routed.loop(at.length, clustering.clusters, clustering.clusters_kept)
        return (Loop(scores, block**2 / (at.rows * at.config.num_heads)),)

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """`pairs_kept`, the share of keys that were in chosen clusters."""
        return shares(statistics, {"pairs_kept": ("pairs_compared", "pairs_offered")})

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        shards, rotary = context.shards, context.rotary(self.config).attending
        query, key, value = self.qkv(h)
        cluster, read = self.clusters(key), self._best(query)
        loss = self._loss(key, cluster, context)
        query, key, first = apply_rotary(query, rotary), apply_rotary(key, rotary), context.attending_from
        start = shards.part(document_starts(context.segment_ids), RESOURCE)
        beside = (read != self._for_heads(cluster)[..., None]).all(-1)  # not among what it reads is the token itself
        key, value, cluster = (shards.gather(x, RESOURCE) for x in (key, value, cluster))
        output, _ = routed.routed_attention(
            query, key, value, cluster, read, start, clusters=self.clustering.clusters, beside=beside, first=first
        )
        real, index = shards.part(context.segment_ids, RESOURCE)[..., None] > 0, first + jnp.arange(h.shape[1])
        compared = _keys_between(cluster, read, start, index) + beside
        offered = jnp.broadcast_to((index - start + 1)[..., None], compared.shape)
        pairs = {"pairs_compared": compared, "pairs_offered": offered.astype(jnp.float32)}
        statistics = {name: jnp.where(real, count, 0).sum() for name, count in pairs.items()}
        return self.output(merge_heads(output)), statistics | loss

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        """The attention weights of every token here, head by head, in whole squares."""
        scores, _, rank, visible = self.ranked(h, context)
        return softmax_selected(scores, visible & (rank < self.clustering.clusters_kept))

    def clusters(self, key: Float[Array, "b n G k"]) -> Int[Array, "b n G"]:
        """The nearest centroid of every key."""
        centroids = split_heads(self.centroids[...], self.config.head_dim)
        products = jnp.einsum("bngk,cgk->bngc", key.astype(jnp.float32), centroids)
        return jnp.argmax(products - 0.5 * jnp.square(centroids).sum(-1).T, axis=-1)

    def ranks(self, query: Float[Array, "b n H k"]) -> Int[Array, "b H n C"]:
        """The rank of every cluster for every query, counted from 0, by q . centroid."""
        order = jnp.argsort(-self._affinity(query), axis=-1)
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
        rank = _of_keys(self.ranks(query), self._for_heads(cluster).swapaxes(1, 2))
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
        cluster = jnp.repeat(cache.cluster, self.qkv.group, axis=0).reshape(h.shape[0], -1, cache.cluster.shape[1])
        rank = _of_keys(self.ranks(query), cluster)[:, :, 0]
        itself = jnp.arange(rank.shape[-1]) == positions[..., None]
        scores = cache.neurons.scores(apply_rotary(query, rotary), positions)
        chosen = ((rank < self.clustering.clusters_kept) | itself) & jnp.isfinite(scores)
        return self.output(merge_heads(cache.neurons.mix(softmax_selected(scores, chosen)))), cache

    def _best(self, query: Float[Array, "b n H k"]) -> Int[Array, "b n H K"]:
        """The clusters that a query reads."""
        return jax.lax.top_k(self._affinity(query).swapaxes(1, 2), self.clustering.clusters_kept)[1]

    def _affinity(self, query: Float[Array, "b n H k"]) -> Float[Array, "b H n C"]:
        """q . centroid, over sqrt(k)."""
        centroids = split_heads(self.centroids[...], self.config.head_dim)
        of_rows = jnp.broadcast_to(centroids, (query.shape[0], *centroids.shape))
        return head_scores(query.astype(jnp.float32), of_rows)

    def _loss(self, key: Float[Array, "b L G k"], cluster: Int[Array, "b L G"], context: Context) -> Statistics:
        """sum_i |k_i - c(i)|^2 / 2 over real tokens, c(i) the nearest centroid: a mean over heads, without gradient to
        keys (k-means, whose step of gradient descent moves a centroid towards the mean of its keys).

        Beside it every centroid has a share STRAY / C in all keys: one that is nearest to none comes closer until it
        is to some.
        """
        if not self.clustering.learn_centroids:
            return {}
        real, count = context.shards.part(context.segment_ids, RESOURCE) > 0, self.clustering.clusters
        keys = jnp.where(real[..., None, None], jax.lax.stop_gradient(key.astype(jnp.float32)), 0)
        shares = (jax.nn.one_hot(cluster, count) + STRAY / count) * real[..., None, None]
        sums, sizes = jnp.einsum("blgc,blgk->cgk", shares, keys), shares.sum((0, 1)).T
        centroids = split_heads(self.centroids[...], self.config.head_dim)
        squares = (1 + STRAY) * jnp.square(keys).sum() + jnp.sum(sizes * jnp.square(centroids).sum(-1))
        return {"centroid_loss": (squares / 2 - jnp.sum(centroids * sums)) / self.config.kv_heads}

    def _for_heads(self, x: Int[Array, "b n G"]) -> Int[Array, "b n H"]:
        return jnp.repeat(x, self.qkv.group, axis=2)


def _keys_between(
    cluster: Int[Array, "b S G"], read: Int[Array, "b q H K"], first: Int[Array, "b q"], last: Int[Array, "q"]
) -> Float[Array, "b q H"]:
    """Keys of the clusters that a query reads, from `first` to `last`."""
    (rows, length, groups), (queries, heads) = cluster.shape, read.shape[1:3]
    code = jnp.sort((cluster * length + jnp.arange(length)[:, None]).swapaxes(1, 2), axis=-1)
    grouped = jnp.moveaxis(read.reshape(rows, queries, groups, -1), 2, 1) * length

    def count(code: Int[Array, "S"], low: Array, high: Array) -> Array:
        return jnp.searchsorted(code, high, side="right") - jnp.searchsorted(code, low)

    found = jax.vmap(jax.vmap(count))(code, grouped + first[:, None, :, None], grouped + last[:, None])
    return jnp.moveaxis(found, 1, 2).reshape(rows, queries, heads, -1).sum(-1).astype(jnp.float32)


def _of_keys(of_clusters: Int[Array, "b H q C"], cluster: Int[Array, "b H n"]) -> Int[Array, "b H q n"]:
    """What holds of a key's cluster, for every query and key."""
    return jnp.take_along_axis(of_clusters, cluster[:, :, None], axis=-1)
