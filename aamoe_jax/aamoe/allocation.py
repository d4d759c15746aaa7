"""Which resources a token gets, and the log-probability that carries the gradient (eq 8, 10-15; decisions 14-16, 26).

Shapes: b rows, L tokens per row, A resources to choose from (l chunks, then E experts), K slots per token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.selection import select

BiasScale = Literal["unnormalized", "normalized"]
Signal = Literal["joint", "context_stopped", "experts_stopped", "separate"]


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

    def kinds(self, num_experts: int) -> tuple[list[Float[Array, "b L _"]], list[Bool[Array, "b L _"]]]:
        """(scores of chunks, of experts), (availability of chunks, of experts)."""
        at = [self.scores.shape[-1] - num_experts]
        return jnp.split(self.scores, at, axis=-1), jnp.split(self.available, at, axis=-1)

    def learning_from(self, signal: Signal, num_experts: int) -> Choices:
        """The same with the gradient, or the softmax, that `AAMoEConfig.signal` leaves to chunks and experts."""
        if signal == "joint":
            return self
        (chunks, rows), (open_chunks, open_rows), local = *self.kinds(num_experts), self.local
        if signal == "context_stopped":
            chunks = jax.lax.stop_gradient(chunks)
            local = None if local is None else jax.lax.stop_gradient(local)
        elif signal == "experts_stopped":
            rows = jax.lax.stop_gradient(rows)
        else:
            of_context = log_partition(chunks, open_chunks, local)[..., None]
            chunks, rows = chunks - of_context, rows - log_partition(rows, open_rows, None)[..., None]
            local = None if local is None else local - of_context[..., 0]
        return self._replace(scores=jnp.concatenate([chunks, rows], axis=-1), local=local)


class Ranking(NamedTuple):
    """The best available resources of every token, best first; what a budget buys is a prefix of it."""

    scores: Float[Array, "b L K"]
    resource: Int[Array, "b L K"]
    log_partition: Float[Array, "b L"] | None
    """Of eq 14, where something depends on it."""


class Purchase(NamedTuple):
    """How many of the ranked resources a budget buys, and at what cost."""

    count: Int[Array, "b L"]
    budget: Float[Array, "b L #K"]
    """That each is paid from."""
    cost: Num[Array, "*#b K"]
    """Of each together with those before it that are paid from the same."""


def purchase(ranking: Ranking, budget: Float[Array, "b L"], count: Int[Array, "b L"]) -> Purchase:
    """The first `count` of the ranked, every one at price 1."""
    return Purchase(count, budget[..., None], jnp.arange(1, ranking.scores.shape[-1] + 1))


def purchase_at(
    prices: Float[Array, "b L K"], budget: Float[Array, "b L"], purse: Int[Array, "b L"], most: Int[Array, "b L"]
) -> Purchase:
    """The longest prefix of the ranked whose prices add up to no more than `purse` (AA-39), of at most `most` items."""
    cost = jnp.cumsum(prices, axis=-1)
    slots = jnp.arange(1, prices.shape[-1] + 1)
    count = ((cost <= purse[..., None] + 1e-4) & (slots <= most[..., None])).sum(-1)
    return Purchase(count, budget[..., None], cost)


def rank(choices: Choices, chunk: Int[Array, "b L"], count: Int[Array, "b L"], slots: int) -> Ranking:
    """The `count` best of every token, in at most `slots` slots: its local resource, which stands as `chunk`, first
    where there is one, then by score."""
    scores, available, local, _ = choices
    local_first = local is not None
    slots = min(slots, scores.shape[-1] + local_first)
    best, index = top_resources(scores, available, slots - local_first, count - local_first)
    if local_first:
        best = jnp.concatenate([local[..., None], best], axis=-1)
        index = jnp.concatenate([chunk[..., None], index], axis=-1)
    return Ranking(best, index, None)


def shares(
    choices: Choices, purse: Int[Array, "b L"], share: float, num_experts: int
) -> list[tuple[Choices, Int[Array, "b L"]]]:
    """Chunks and experts apart, and how many of each a token gets; what one kind leaves over, the other does not get.

    The local resource is bought before any other, so a token with a budget of 1 gets no expert.
    """
    (chunks, rows), (open_chunks, open_rows) = choices.kinds(num_experts)
    local = 0 if choices.local is None else 1
    for_experts = jnp.clip(jnp.floor(share * purse + 1e-4).astype(jnp.int32), 0, jnp.maximum(purse - local, 0))
    experts = jnp.minimum(for_experts, open_rows.sum(-1))
    context = jnp.minimum(purse - for_experts, open_chunks.sum(-1) + local)
    return [
        (choices._replace(scores=chunks, available=open_chunks), context),
        (choices._replace(scores=rows, available=open_rows, local=None), experts),
    ]


class Kind(NamedTuple):
    """Chunks or experts, ranked for themselves."""

    ranking: Ranking
    count: Int[Array, "b L"]


def one_after_the_other(
    context: Kind, experts: Kind, budget: Float[Array, "b L"], share: float, slots: int, num_chunks: int
) -> tuple[Ranking, Purchase]:
    """The chunks of every token, then its experts, each kind paid from its own share of the budget."""
    slot = jnp.arange(slots)
    is_context = slot < context.count[..., None]
    place = jnp.where(is_context, slot, slot - context.count[..., None])

    def join(x: Num[Array, "b L c"], y: Num[Array, "b L e"]) -> Num[Array, "b L K"]:
        both = jnp.concatenate([x, y], axis=-1)
        index = jnp.where(is_context, place, jnp.minimum(x.shape[-1] + place, both.shape[-1] - 1))
        return jnp.take_along_axis(both, index, axis=-1)

    ranking = Ranking(
        join(context.ranking.scores, experts.ranking.scores),
        join(context.ranking.resource, num_chunks + experts.ranking.resource),
        context.ranking.log_partition,
    )
    paid_from = jnp.where(is_context, 1 - share, share) * budget[..., None]
    return ranking, Purchase(context.count + experts.count, paid_from, place + 1)


def log_affordability(budget: Float[Array, "..."], cost: Num[Array, "..."]) -> Float[Array, "..."]:
    """log P(i can afford its k-th item) = log sigma(B_i - cost), what its first k items cost together: k, where every
    item has price 1 (eq 11; AA-18, AA-19)."""
    return jax.nn.log_sigmoid(budget - cost)


def top_resources(
    scores: Float[Array, "b L A"],
    available: Bool[Array, "b L A"],
    slots: int,
    count: Int[Array, "b L"] | None = None,
) -> tuple[Float[Array, "b L K"], Int[Array, "b L K"]]:
    """Scores and indices of the best available resources, best first, ties to the lower index (AA-14, decision 14).

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
    bought: Purchase,
    scale: BiasScale = "unnormalized",
) -> Allocation:
    """What was bought of the ranked resources, with log P = log sigma(B_i - k) + r (eq 14-15; AA-20, AA-21).

    `normalized` subtracts the partition, which the ranking must then have.
    """
    used = jnp.arange(1, ranking.scores.shape[-1] + 1) <= bought.count[..., None]
    # Unused slots may hold -inf: replaced before use, so that no gradient meets it.
    score = jnp.where(used, ranking.scores, 0.0)
    if scale == "normalized":
        score = score - ranking.log_partition[..., None]
    log_prob = jnp.where(used, log_affordability(bought.budget, bought.cost) + score, 0.0)
    return Allocation(ranking.resource, log_prob, bought.count)
