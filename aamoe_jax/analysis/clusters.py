"""Which clusters do a trained layer's keys form, and how much attention does routing to a few of them keep? (PM-11)

Shapes: n points or tokens, k their width, C clusters, G heads of keys.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.clustered import ClusteredAttention
from aamoe_jax.mixers.weighted_sum import softmax_selected
from aamoe_jax.shards import RESOURCE

Points = Float[np.ndarray, "n k"]
Centroids = Float[np.ndarray, "C k"]


def nearest(points: Points, centroids: Centroids) -> Int[np.ndarray, "n"]:
    """The centroid that every point is nearest to."""
    return np.argmax(points @ centroids.T - 0.5 * np.square(centroids).sum(1), axis=1)


def spread_points(points: Points, clusters: int, random: np.random.Generator) -> Centroids:
    """Points to start from, each drawn by its squared distance to those before (k-means++, Arthur & Vassilvitskii)."""
    chosen = [points[random.integers(len(points))]]
    for _ in range(clusters - 1):
        distance = np.min([np.square(points - centroid).sum(1) for centroid in chosen], axis=0)
        # Fewer different points than clusters: any will do.
        share = distance / distance.sum() if distance.sum() > 0 else None
        chosen.append(points[random.choice(len(points), p=share)])
    return np.stack(chosen)


def lloyd(points: Points, centroids: Centroids, steps: int) -> Centroids:
    """Lloyd's iteration: every centroid moves to the mean of its points, or stays where it has none."""
    for _ in range(steps):
        cluster = nearest(points, centroids)
        sizes = np.bincount(cluster, minlength=len(centroids))[:, None]
        sums = np.zeros_like(centroids)
        np.add.at(sums, cluster, points)
        centroids = np.where(sizes > 0, sums / np.maximum(sizes, 1), centroids)
    return centroids


def centroids_of_keys(
    keys: Float[np.ndarray, "n G k"], clusters: int, *, steps: int = 20, seed: int = 0
) -> Float[np.ndarray, "C Gk"]:
    """k-means of every head's keys (normed, un-rotated), laid out as `ClusteredAttention.centroids`."""
    random = np.random.default_rng(seed)
    heads = [keys[:, head].astype(np.float64) for head in range(keys.shape[1])]
    found = [lloyd(points, spread_points(points, clusters, random), steps) for points in heads]
    return np.concatenate(found, axis=1).astype(np.float32)


def attention_recall(part: ClusteredAttention, h: Float[Array, "b L d"], context: Context) -> Float[Array, "C"]:
    """The share of exact attention that lies in the best c clusters or on the token itself, for c = 1 ... C.

    The mean over heads and tokens that are not padding.
    """
    scores, _, rank, visible = part.ranked(h, context)
    weights = softmax_selected(scores, visible)
    real = context.shards.part(context.segment_ids, RESOURCE)[:, None, :, None] > 0
    clusters = part.clustering.clusters
    kept = jnp.stack([jnp.where((rank < count) & real, weights, 0).sum() for count in range(1, clusters + 1)])
    return kept / (real.sum() * scores.shape[1])
