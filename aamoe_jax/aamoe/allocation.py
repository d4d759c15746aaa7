"""Which resources a token gets, and the log-probability that carries the gradient (eq 8, 10-15; decisions 14-16, 26).

Shapes: b rows, L tokens per row, A resources to choose from (l chunks, then E experts), K slots per token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.selection import select

BiasScale = Literal["unnormalized", "normalized"]


class Allocation(NamedTuple):
    """What every token was given. Slot k - 1 holds rank k; slots at or past `count` mean nothing."""

    resource: Int[Array, "b L K"]
    """Row's index of the resource: chunks 0..l-1, experts l..l+E-1. A local window stands as the token's own chunk."""
    log_prob: Float[Array, "b L K"]
    """log P(i, j_k) up to a constant of the token; 0 in unused slots."""
    count: Int[Array, "b L"]
    """Resources given."""


class Choices(NamedTuple):
    """What every token can choose from, before it is known how many it can pay for."""

    scores: Float[Array, "b L A"]
    available: Bool[Array, "b L A"]
    local: Float[Array, "b L"] | None
    """Score of the local resource where that is bought before any other."""
    most: Int[Array, "b L"]
    """How many a token can be given at all: those that are available, and at most K_max."""


class Ranking(NamedTuple):
    """The best available resources of every token, best first; what a budget buys is a prefix of it."""

    scores: Float[Array, "b L K"]
    resource: Int[Array, "b L K"]
    log_partition: Float[Array, "b L"] | None
    """Of eq 14, where something depends on it."""


def log_affordability(budget: Float[Array, "..."], rank: Int[Array, "..."]) -> Float[Array, "..."]:
    """log P(i can afford its k-th item) = log sigma(B_i - k), every item at price 1 (eq 11)."""
    return jax.nn.log_sigmoid(budget - rank)


def top_resources(
    scores: Float[Array, "b L A"],
    available: Bool[Array, "b L A"],
    slots: int,
    count: Int[Array, "b L"] | None = None,
) -> tuple[Float[Array, "b L K"], Int[Array, "b L K"]]:
    """Scores and indices of the best available resources, best first, ties to the lower index (decision 14).

    Unavailable resources come last, with score -inf. Given how many every token will read, no more need be ranked:
    slots past `count` hold index 0 and score -inf.
    """
    index, best = select(jnp.where(available, scores, -jnp.inf), slots, count)
    return best, index


def log_partition(
    scores: Float[Array, "b L A"], available: Bool[Array, "b L A"], local: Float[Array, "b L"] | None
) -> Float[Array, "b L"]:
    """log sum_l exp(r_il) over all that is available (eq 14). A token's constant: it cancels in the attention
    softmax."""
    scores = jnp.where(available, scores, -jnp.inf)
    if local is not None:
        scores = jnp.concatenate([scores, local[..., None]], axis=-1)
    # A token with nothing available has no distribution; 0 keeps it out of gradients.
    exists = jnp.isfinite(scores).any(-1)
    scores = jnp.where(exists[..., None], scores, 0.0)
    return jnp.where(exists, jax.nn.logsumexp(scores, axis=-1), 0.0)


def allocate(
    ranking: Ranking,
    budget: Float[Array, "b L"],
    count: Int[Array, "b L"],
    scale: BiasScale = "unnormalized",
) -> Allocation:
    """The first `count` of the ranked resources, with log P = log sigma(B_i - k) + r (eq 15).

    `normalized` subtracts the partition, which the ranking must then have.
    """
    rank = jnp.arange(1, ranking.scores.shape[-1] + 1)
    used = rank <= count[..., None]
    # Unused slots may hold -inf: replaced before use, so that no gradient meets it.
    score = jnp.where(used, ranking.scores, 0.0)
    if scale == "normalized":
        score = score - ranking.log_partition[..., None]
    log_prob = jnp.where(used, log_affordability(budget[..., None], rank) + score, 0.0)
    return Allocation(ranking.resource, log_prob, count)
