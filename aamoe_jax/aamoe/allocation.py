"""Which resources a token gets, and the log-probability that carries the gradient (eq 8, 10-15; decisions 14-16, 26).

Shapes: b rows, L tokens per row, A resources to choose from (l chunks, then E experts), K slots per token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from aamoe_jax.aamoe.budget import UNBOUNDED, Budget, index_in_document, over_documents
from aamoe_jax.aamoe.resources import LOCAL
from aamoe_jax.aamoe.router import Scores
from aamoe_jax.config import AAMoEConfig
from aamoe_jax.mixers.base import Context
from pallas_kernels.selection import select

Signal = Literal["joint", "context_stopped", "experts_stopped", "separate"]


class Allocation(NamedTuple):
    """What every token was given. Slot k - 1 holds rank k; slots at or past `count` mean nothing."""

    resource: Int[Array, "b L K"]
    """Row's index of the resource: chunks 0..l-1, experts l..l+E-1. The local resource stands as the token's own
    chunk."""
    log_prob: Float[Array, "b L K"]
    """log P(i, j_k) (eq 15), up to a constant of the token unless the scores are normalised; 0 in unused slots."""
    count: Int[Array, "b L"]  # type: ignore[assignment]  # nothing counts the entries of this tuple
    """Resources given."""


class Candidates(NamedTuple):
    """What every token can choose from, before it is known how many it can pay for."""

    scores: Float[Array, "b L A"]
    """r_ij (eq 4)."""
    available: Bool[Array, "b L A"]
    local: Float[Array, "b L"] | None
    """Score of the local resource, where that is bought before any other (decision 03)."""
    own: Int[Array, "b L"]
    """The token's own chunk."""
    most: Int[Array, "b L"]
    """How many a token can be given at all: those that are available, and at most K_max."""
    num_chunks: int
    """l: resources past it are experts."""
    slots: int
    """K: no token can use more slots than there are resources."""
    max_resources: Int[Array, ""] | int
    """K_max, times the budget scale where that is above 1."""
    adds_up: bool
    """Whether exp(r) of all that is available adds up to 1 as it is."""
    load: Float[Array, "b L E"] | None = None
    """What the tokens before wanted of every expert, where that has a price: see `load_of_rows`."""

    def kinds(self) -> tuple[list[Float[Array, "b L _"]], list[Bool[Array, "b L _"]]]:
        """(scores of chunks, of experts), (availability of chunks, of experts)."""
        return jnp.split(self.scores, [self.num_chunks], axis=-1), jnp.split(self.available, [self.num_chunks], axis=-1)

    def wanted(self) -> Float[Array, "b L E"]:
        """The softmax over experts alone."""
        return jax.nn.softmax(self.kinds()[0][1], axis=-1)

    def normalized(self) -> Candidates:
        """r - log sum_l exp(r_il), which is log P(choose) of eq 14."""
        if self.adds_up:
            return self
        partition = log_partition(self.scores, self.available, self.local)
        local = None if self.local is None else self.local - partition
        return self._replace(scores=self.scores - partition[..., None], local=local, adds_up=True)

    def learning_from(self, signal: Signal) -> Candidates:
        """With the gradient, or the softmax, that `AAMoEConfig.signal` leaves to chunks and experts (AA-23)."""
        (chunks, experts), (open_chunks, open_experts), local = *self.kinds(), self.local
        if signal == "context_stopped":
            chunks = jax.lax.stop_gradient(chunks)
            local = None if local is None else jax.lax.stop_gradient(local)
        elif signal == "experts_stopped":
            experts = jax.lax.stop_gradient(experts)
        else:
            of_context = log_partition(chunks, open_chunks, local)[..., None]
            chunks, experts = chunks - of_context, experts - log_partition(experts, open_experts, None)[..., None]
            local = None if local is None else local - of_context[..., 0]
        return self._replace(scores=jnp.concatenate([chunks, experts], axis=-1), local=local)


def candidates(
    config: AAMoEConfig,
    scores: Scores,
    own: Int[Array, "b L"],
    chunks: Bool[Array, "b L l"],
    context: Context,
    load: Float[Array, "b L E"] | None = None,
) -> Candidates:
    """The resources that every token can choose from.

    Args:
      own: the chunk that each token is in.
      chunks: which of the completed chunks it may choose.
      load: of experts, where the tokens before are in a cache; else it is that of whole rows.
    """
    (of_chunks, of_experts, of_local), local = scores, LOCAL[config.local]
    every = jnp.concatenate([of_chunks, of_experts], axis=-1)
    experts = jnp.broadcast_to(context.real[..., None], of_experts.shape)
    available = jnp.concatenate([chunks, experts], axis=-1)
    if local.routed:
        is_own = jnp.arange(every.shape[-1]) == own[..., None]
        every = jnp.where(is_own, of_local[..., None], every)
        available |= is_own & context.real[..., None]
    slots = every.shape[-1] + local.first
    max_resources: Int[Array, ""] | int = UNBOUNDED
    if config.max_resources is not None:  # it grows with a budget scale above 1
        max_scale = max(context.max_scale, 1.0)
        slots = min(slots, math.floor(config.max_resources * max_scale))
        scaled = config.max_resources * jnp.clip(context.scale, 1.0, max_scale)
        max_resources = jnp.floor(scaled + 1e-4).astype(jnp.int32)
    if load is None and config.budget.load_price:
        wanted = jax.lax.stop_gradient(of_experts) if config.signal == "experts_stopped" else of_experts
        load = load_of_rows(wanted, context)
    found = Candidates(
        scores=every,
        available=available,
        local=of_local if local.first else None,
        own=own,
        most=jnp.minimum(available.sum(-1) + local.first, jnp.minimum(max_resources, slots)),
        num_chunks=of_chunks.shape[-1],
        slots=slots,
        max_resources=max_resources,
        adds_up=config.router == "pooled" or config.signal == "separate",
        load=load,
    )
    if config.signal != "joint":
        found = found.learning_from(config.signal)
    # Only a key without bias beside the resources makes the partition of eq 14 matter (decision 15).
    return found.normalized() if config.null_slot == "learned" else found


def load_of_rows(scores: Float[Array, "b n E"], context: Context) -> Float[Array, "b n E"]:
    """The mean share of every expert in the softmax over experts, over the tokens before one in its document; 0 for the
    first. It is what was wanted, not what was bought: that depends on prices, so on all choices before (decision 39).

    Args:
      scores: r_il of the tokens here.
    """
    wanted, segment_ids = context.move(jax.nn.softmax(scores, axis=-1), "here", "rows"), context.segment_ids
    (so_far,) = over_documents(lambda x, y: (x[0] + y[0],), (wanted,), segment_ids)
    tokens_before = jnp.maximum(index_in_document(segment_ids) - 1, 1)
    return context.move((so_far - wanted) / tokens_before[..., None], "rows", "here")


class Allocator:
    """How a budget is spent on candidates."""

    def limit(self, candidates: Candidates) -> Int[Array, "b L"]:
        """The largest budget that can be of use: what lies above it is not spent, and left to later tokens."""
        raise NotImplementedError

    def __call__(self, candidates: Candidates, budget: Budget) -> Allocation:
        """The best candidates that every budget affords."""
        raise NotImplementedError


def allocator(config: AAMoEConfig) -> Allocator:
    """The one that a config asks for."""
    if config.budget.expert_share is not None:
        return Shares(config.budget.expert_share)
    price = Price(config.budget.expert_price, config.budget.distance_price, config.budget.load_price)
    return OneBudget() if price == Price() else Prices(price)


@dataclasses.dataclass(frozen=True)
class OneBudget(Allocator):
    """Chunks and experts compete for one budget, at price 1 each: R_i = argtop-B_i r_i (eq 8)."""

    def limit(self, candidates: Candidates) -> Int[Array, "b L"]:
        return candidates.most

    def __call__(self, candidates: Candidates, budget: Budget) -> Allocation:
        count = jnp.minimum(budget.granted, candidates.most)
        best = rank(candidates, count)
        return afford(best, count, budget.real[..., None], jnp.arange(1, best.scores.shape[-1] + 1))


@dataclasses.dataclass(frozen=True)
class Price:
    """What a resource costs (AA-39), at least 1: an expert `expert`, and `load` times its load over the mean of 1 / E;
    the local resource and the chunk before 1, and a chunk that is n chunks back 1 + `distance` * log2(n)."""

    expert: float = 1.0
    distance: float = 0.0
    load: float = 0.0

    def __call__(self, resource: Int[Array, "b L K"], candidates: Candidates) -> Float[Array, "b L K"]:
        """Of resources, by the row's index."""
        back = jnp.maximum(candidates.own[..., None] - resource, 1)
        chunk = 1.0 + self.distance * jnp.log2(back.astype(jnp.float32))
        expert: Float[Array, "b L K"] | float = self.expert
        if candidates.load is not None:
            experts = candidates.load.shape[-1]
            index = jnp.clip(resource - candidates.num_chunks, 0, experts - 1)
            expert += self.load * experts * jnp.take_along_axis(candidates.load, index, axis=-1)
        return jnp.where(resource >= candidates.num_chunks, expert, chunk)


@dataclasses.dataclass(frozen=True)
class Prices(Allocator):
    """The longest prefix of the ranked resources that a budget pays for."""

    price: Price

    def limit(self, candidates: Candidates) -> Int[Array, "b L"]:
        return jnp.full_like(candidates.own, UNBOUNDED)  # it pays for prices, not for a number of resources

    def __call__(self, candidates: Candidates, budget: Budget) -> Allocation:
        best = rank(candidates, jnp.minimum(budget.granted, candidates.most))
        count, cost = pay(self.price(best.resource, candidates), budget.granted, candidates.most)
        return afford(best, count, budget.real[..., None], cost)


@dataclasses.dataclass(frozen=True)
class Shares(Allocator):
    """A fixed share of every budget buys experts alone, and the rest context alone (AA-32). What one kind leaves over,
    the other does not get. The local resource is bought before any other, so a token with a budget of 1 gets no expert.
    """

    expert_share: float

    def limit(self, candidates: Candidates) -> Int[Array, "b L"]:
        # Each kind has its share, whatever there is of the other.
        return jnp.full_like(candidates.own, candidates.max_resources)

    def __call__(self, candidates: Candidates, budget: Budget) -> Allocation:
        (chunks, experts), (open_chunks, open_experts) = candidates.kinds()
        local = candidates.local is not None
        for_experts = jnp.floor(self.expert_share * budget.granted + 1e-4).astype(jnp.int32)
        for_experts = jnp.clip(for_experts, 0, jnp.maximum(budget.granted - local, 0))
        num_context = jnp.minimum(budget.granted - for_experts, open_chunks.sum(-1) + local)
        num_experts = jnp.minimum(for_experts, open_experts.sum(-1))
        context = rank(candidates._replace(scores=chunks, available=open_chunks), num_context)
        other = rank(candidates._replace(scores=experts, available=open_experts, local=None), num_experts)
        # The chunks of every token, then its experts.
        slot = jnp.arange(candidates.slots)
        is_context = slot < num_context[..., None]
        place = jnp.where(is_context, slot, slot - num_context[..., None])

        def join(x: Num[Array, "b L c"], y: Num[Array, "b L e"]) -> Num[Array, "b L K"]:
            both = jnp.concatenate([x, y], axis=-1)
            index = jnp.where(is_context, place, jnp.minimum(x.shape[-1] + place, both.shape[-1] - 1))
            return jnp.take_along_axis(both, index, axis=-1)

        resource = join(context.resource, candidates.num_chunks + other.resource)
        paid_from = jnp.where(is_context, 1 - self.expert_share, self.expert_share) * budget.real[..., None]
        best = Ranking(join(context.scores, other.scores), resource)
        return afford(best, num_context + num_experts, paid_from, place + 1)


class Ranking(NamedTuple):
    """The best available resources of every token, best first; what a budget affords is a prefix of it."""

    scores: Float[Array, "b L K"]
    resource: Int[Array, "b L K"]


def rank(candidates: Candidates, count: Int[Array, "b L"]) -> Ranking:
    """The `count` best of every token: its local resource first where there is one, then by score, ties to the lower
    index (AA-14, decision 14). Slots past `count` hold index 0 and score -inf."""
    local_first = candidates.local is not None
    slots = min(candidates.slots, candidates.scores.shape[-1] + local_first)
    scores = jnp.where(candidates.available, candidates.scores, -jnp.inf)
    index, best = select(scores, slots - local_first, count - local_first)
    if candidates.local is not None:
        best = jnp.concatenate([candidates.local[..., None], best], axis=-1)
        index = jnp.concatenate([candidates.own[..., None], index], axis=-1)
    return Ranking(best, index)


def pay(
    prices: Float[Array, "b L K"], budget: Int[Array, "b L"], most: Int[Array, "b L"]
) -> tuple[Int[Array, "b L"], Float[Array, "b L K"]]:
    """How many of the ranked a budget pays for, at most `most`; and what each costs together with those before it."""
    cost = jnp.cumsum(prices, axis=-1)
    slots = jnp.arange(1, prices.shape[-1] + 1)
    return ((cost <= budget[..., None] + 1e-4) & (slots <= most[..., None])).sum(-1), cost


def afford(
    ranking: Ranking, count: Int[Array, "b L"], budget: Float[Array, "b L #K"], cost: Num[Array, "*#b K"]
) -> Allocation:
    """The first `count` of the ranked resources, with log P = log sigma(B_i - k) + r.

    That is eq 11 (AA-18, AA-19) times eq 14 (AA-20, AA-21).

    Args:
      budget: the real budget that each is paid from.
      cost: of each together with those before it that are paid from the same: k, where every price is 1.
    """
    used = jnp.arange(1, ranking.scores.shape[-1] + 1) <= count[..., None]
    # Unused slots may hold -inf: replaced before use, so that no gradient meets it.
    score = jnp.where(used, ranking.scores, 0.0)
    log_affordability = jax.nn.log_sigmoid(budget - cost)  # of the k-th
    return Allocation(ranking.resource, jnp.where(used, log_affordability + score, 0.0), count)


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
