"""Mixtures of experts in place of a feed-forward (eq 3-7; UNI-03, UNI-04, UNI-11).

Every expert is a small feed-forward without bias. Its hidden units are divided over `tensor` like those of a large one,
and its parameters over `fsdp` at rest. Experts are divided over `resource`: tokens travel to those that they chose, and
back. The work is that of the experts that were chosen (`expert_sum.py`).

Shapes: b rows, L tokens of them here, N of whole rows, d width, E experts, w hidden units of an expert.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.lax import collapse
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig, refuse, require_choice, require_positive
from aamoe_jax.layers import HIGHEST, residual_gain, rounded
from aamoe_jax.mixers.base import Cache, Context, Statistics
from aamoe_jax.mixers.convolution import TOKENS_BEFORE, CausalConvolution, convolution_costs, last_tokens
from aamoe_jax.mixers.costs import FLOAT, Costs, Setting
from aamoe_jax.mixers.expert_sum import Copies, expert_sum
from aamoe_jax.mixers.parts import Part
from aamoe_jax.mixers.statistics import expert_use
from aamoe_jax.mixers.weighted_sum import WeightedSum, softmax_selected, top_selected
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE, TENSOR, Shards


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixtures of experts in place of a feed-forward: `moe`, `switch` and `relu_moe` (UNI-03, UNI-04, UNI-11)."""

    num_experts: int = 8
    top_k: int = 2
    """Of `moe`: experts of a token. `switch` has one."""
    mean_experts: int | None = None
    """Of `relu_moe`: how many experts of a token, on average, its sparsity loss aims at. None: top_k."""
    expert_width: int | None = None
    """Hidden width of an expert. None: d_ff / top_k, so that top_k experts cost what the feed-forward does."""
    coefficients: Literal["softmax_selected", "softmax_then_topk"] = "softmax_selected"
    """Of `moe`: a softmax over the chosen experts, or over all of them, of which the chosen keep their share."""
    router: Literal["linear", "attention"] = "linear"
    """Scores of the experts: x W, or attention among the experts of one token (UNI-09)."""
    router_input: Literal["token", "causal_conv"] = "token"
    """What the router sees: the token, or a short causal convolution over it and the tokens before (UNI-10)."""
    capacity_factor: float = 1.25
    """Of `switch`: an expert takes so many times its even share of a group of tokens; the others pass the layer by."""
    capacity_tokens: int = 256
    """Of `switch`: tokens of a document that make a group. Shares are taken in their order."""
    balance_weight: float = 0.01
    """Weight of the balancing loss of `moe` and `switch`."""
    shard_capacity: float | None = None
    """Most (token, expert) pairs that one shard of the mesh axis `resource` takes from each, as a multiple of the even
    share; pairs past it are left out, those of the last tokens first, and counted (`moe_dropped`). Evaluation and
    decoding leave out none. None: room for as many as there can be."""

    def __post_init__(self) -> None:
        require_positive(self, "num_experts", "top_k", "capacity_factor", "capacity_tokens")
        if self.top_k > self.num_experts:
            refuse(self, "top_k", f"must be at most num_experts = {self.num_experts}")
        if not 0 < self.sparsity_target <= self.num_experts:
            refuse(self, "mean_experts", f"must be above 0 and at most num_experts = {self.num_experts}")
        if self.expert_width is not None and self.expert_width < 1:
            refuse(self, "expert_width", "must be at least 1, or None for d_ff / top_k")
        require_choice(self, "coefficients", ("softmax_selected", "softmax_then_topk"))
        require_choice(self, "router", ("linear", "attention"))
        require_choice(self, "router_input", ("token", "causal_conv"))
        if self.balance_weight < 0:
            refuse(self, "balance_weight", "must be at least 0")
        if self.shard_capacity is not None and self.shard_capacity < 1:
            refuse(self, "shard_capacity", "must be at least 1 (the even share), or None for no bound")

    @property
    def sparsity_target(self) -> int:
        """Experts of a token that `relu_moe` aims at."""
        return self.top_k if self.mean_experts is None else self.mean_experts


def expert_width(config: ModelConfig) -> int:
    """w: hidden units of an expert."""
    moe = config.of(MoEConfig)
    return max(config.ff_width // moe.top_k, 1) if moe.expert_width is None else moe.expert_width


class Mixture(NamedTuple):
    """Which experts compute a token, and what each of them counts."""

    coefficients: Float[Array, "b L E"]
    """0 for those that are not chosen."""
    chosen: Bool[Array, "b L E"]


class ExpertRouter(nnx.Module):
    """Scores [b, L, E] of all experts for every token (eq 3), of the token or of a convolution over it and those before
    (UNI-10). In float32 (decision 38)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        moe = config.of(MoEConfig)
        scorer = {"linear": LinearScores, "attention": AttentionScores}[moe.router]
        self.scores = scorer(config.d_model, moe.num_experts, rngs=rngs)
        self.convolution = CausalConvolution(config.d_model) if moe.router_input == "causal_conv" else None
        self.config = config

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L E"]:
        x = rounded(h, h.dtype)
        return self.scores(self.convolution(x, context) if self.convolution else x)

    def empty_cache(self, rows: int) -> Cache:
        """An empty cache for the tokens before."""
        shape = (rows, TOKENS_BEFORE, self.config.d_model)
        return jnp.zeros(shape, self.config.dtype) if self.convolution else ()

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt."""
        return last_tokens(h, context) if self.convolution else cache

    def decode(self, h: Float[Array, "b 1 d"], cache: Cache) -> tuple[Float[Array, "b 1 E"], Cache]:
        """The scores for one more token in every row."""
        if self.convolution is None:
            return self.scores(rounded(h, h.dtype)), cache
        x, cache = self.convolution.decode(h, cache)
        return self.scores(x), cache


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

    def __call__(self, x: Float[Array, "b L d"], precision: jax.lax.PrecisionLike = HIGHEST) -> Float[Array, "b L E"]:
        multiply = functools.partial(jnp.matmul, precision=precision)
        query, key, value = (multiply(x, w[...]) for w in (self.query, self.key, self.value))
        weights = jax.nn.softmax(query[..., :, None] * key[..., None, :], axis=-1)
        return jnp.einsum("...ij,...j->...i", weights, value, precision=precision)


def _kernel(width: int, experts: int, rngs: nnx.Rngs) -> nnx.Param:
    kernel = width**-0.5 * jax.random.normal(rngs.params(), (width, experts))
    return nnx.Param(kernel, axes=("storage_float32", None))


class Experts(Part):
    """sum_l p_l(x) V_l ReLU(K_l x): what all mixtures share. Subclasses say how scores become coefficients."""

    label = "experts"
    recomputed: ClassVar[bool] = False
    """Whether the backward pass computes hidden units again: they have room for far more than they are meant to be."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.moe = config.of(MoEConfig)
        count, width, hidden = self.moe.num_experts, config.d_model, expert_width(config)
        gain = residual_gain(config)
        self.router = ExpertRouter(config, rngs=rngs)
        keys = width**-0.5 * jax.random.normal(rngs.params(), (count, width, hidden))
        values = gain * hidden**-0.5 * jax.random.normal(rngs.params(), (count, hidden, width))
        self.keys = nnx.Param(keys, axes=("resources", "storage", "heads"))
        self.values = nnx.Param(values, axes=("resources", "heads", "storage"))
        self.config = config

    def mix(
        self, h: Float[Array, "b L d"], mixture: Mixture, shards: Shards
    ) -> tuple[Float[Array, "b L d"], Bool[Array, "b L E"]]:
        """The experts' outputs, weighted and summed, in float32; and which of the chosen there was room for."""
        tokens, coefficients, chosen = (collapse(x, 0, 2) for x in (h, *mixture))  # all rows share the experts' work
        room, most = self._room(len(tokens), shards), self.most_experts(self.config)
        if self.moe.shard_capacity is not None and not shards.exact:
            chosen = within_room(chosen, shards.resource, room)
        add_up = jax.checkpoint(expert_sum, static_argnums=(4, 5)) if self.recomputed else expert_sum
        copies = Copies.of(coefficients, chosen, most)
        found = add_up(tokens, self.keys[...], self.values[...], copies, shards, room)
        return found.reshape(h.shape), chosen.reshape(mixture.chosen.shape)

    def _room(self, tokens: int, shards: Shards) -> int:
        """How many pairs of the tokens here any one shard has room for."""
        most = tokens * min(self.most_experts(self.config), self.moe.num_experts // shards.resource)
        if self.moe.shard_capacity is None or shards.exact:
            return most
        even = tokens * self.experts_per_token(self.config) / shards.resource
        return min(most, math.ceil(self.moe.shard_capacity * even))

    @classmethod
    def costs(cls, at: Setting) -> Costs:
        """A router, 2 d E or 6 d E + 4 E^2 (and 6 d of model FLOPs for a convolution), and the experts that a token is
        meant to have, 4 d w each. Blocks of tokens are full. Of every copy of a token the backward pass is left its
        input and its hidden units, where they are not computed again."""
        moe, d = at.config.of(MoEConfig), at.width
        count = moe.num_experts
        router = 2 * d * count if moe.router == "linear" else 6 * d * count + 4 * count**2
        flops = router + cls.experts_per_token(at.config) * flops_per_expert(at.config)
        saved = count * (3 * FLOAT + 2)  # scores, coefficients, choices
        if at.size < FLOAT or moe.router_input == "causal_conv" or cls.recomputed:  # an input apart from the experts'
            saved += FLOAT * d
        copy = 2 * FLOAT  # its expert and its weight
        if not cls.recomputed:
            copy += at.size * (d + expert_width(at.config)) + FLOAT + count  # and its place
        saved += cls.most_experts(at.config) * copy
        if moe.router == "attention":
            saved += FLOAT * count * (2 * count + 5)
        if moe.router_input != "causal_conv":
            return at.per_token(flops, saved)
        return at.per_token(flops, saved, model_flops=flops + 2 * d * TOKENS_BEFORE) + convolution_costs(at)

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """`moe_active` experts per token; `moe_sparsity`, the share of experts that a token does without;
        `moe_dropped`, the share of choices beyond capacity; `moe_entropy` of the load over its maximum log E (1: all
        experts equally used); `moe_dead`, the share of experts that no token had."""
        if "moe_load" not in statistics:
            return {}
        load, tokens, dropped = (statistics[name] for name in ("moe_load", "moe_tokens", "moe_dropped"))
        tokens, pairs = np.maximum(tokens, 1), load.sum(-1)
        entropy, dead = expert_use(load)
        figures = {
            "moe_active": pairs / tokens,
            "moe_sparsity": 1 - pairs / tokens / load.shape[-1],
            "moe_dropped": dropped / np.maximum(pairs + dropped, 1),
            "moe_entropy": entropy,
            "moe_dead": dead,
        }
        return {name: value.tolist() for name, value in figures.items()}

    @staticmethod
    def experts_per_token(config: ModelConfig) -> int:
        """Experts that a token is meant to have."""
        return config.of(MoEConfig).top_k

    @classmethod
    def most_experts(cls, config: ModelConfig) -> int:
        """Experts that a token has at most."""
        return cls.experts_per_token(config)

    @staticmethod
    def extra_flops(at: Setting, members: Sequence[Any], statistics: Statistics) -> float:
        """Experts that really computed a token, less those that were meant to."""
        if "moe_load" not in statistics:
            return 0.0
        meant = at.config.periods * sum(mixture.experts_per_token(at.config) for mixture in members)
        return (float(np.sum(statistics["moe_load"])) - at.tokens * meant) * flops_per_expert(at.config)

    def empty_cache(self, rows: int, length: int) -> Cache:
        return self.router.empty_cache(rows)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        return self.router.fill(h, context, cache)


@register("moe", "the `top_k` experts of the highest scores", neurons=True, config=MoEConfig)
class TopKExperts(Experts):
    """The k experts of the highest scores (UNI-03), and Switch's loss to balance them."""

    losses = ("balance_loss",)
    weighted_sums = (
        WeightedSum("experts", "x W", "the k highest", "softmax over the kept, or over all", "V_l ReLU(K_l x)"),
    )

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        scores, real = self.router(h, context), real_tokens(context)
        mixture = self._mixture(scores, real)
        output, computed = self.mix(h, mixture, context.shards)
        statistics = load(computed, mixture.chosen, real, context)
        share = jax.nn.softmax(scores, axis=-1)
        statistics["balance_loss"] = weighed_by_load(share, mixture.chosen, self.moe.top_k, context)
        return output, statistics

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        scores, cache = self.router.decode(h, cache)
        return self.mix(h, self._mixture(scores, context.real), context.shards)[0], cache

    def _mixture(self, scores: Float[Array, "b L E"], real: Bool[Array, "b L"]) -> Mixture:
        chosen = top_selected(scores, self.moe.top_k) & real[..., None]
        if self.moe.coefficients == "softmax_selected":
            return Mixture(softmax_selected(scores, chosen), chosen)
        return Mixture(jnp.where(chosen, jax.nn.softmax(scores, axis=-1), 0), chosen)


@register("relu_moe", "all experts whose score is positive (ReMoE)", neurons=True, config=MoEConfig)
class ReLUExperts(Experts):
    """p = ReLU(r): as many experts as have a positive score (ReMoE; eq 6, UNI-04).

    Nothing is chosen apart from the coefficients, so that the output is continuous in the scores. How many there are is
    left to a sparsity loss, whose weight `training.auxiliary` adapts (UNI-05).
    """

    losses = ("sparsity_loss",)
    recomputed = True
    weighted_sums = (WeightedSum("experts", "x W", "those with x W > 0", "ReLU", "V_l ReLU(K_l x)"),)

    @staticmethod
    def experts_per_token(config: ModelConfig) -> int:
        """What the sparsity loss aims at."""
        return config.of(MoEConfig).sparsity_target

    @classmethod
    def most_experts(cls, config: ModelConfig) -> int:
        """All."""
        return config.of(MoEConfig).num_experts

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        real = real_tokens(context)
        mixture = self._mixture(self.router(h, context), real)
        output, computed = self.mix(h, mixture, context.shards)
        statistics = load(computed, mixture.chosen, real, context)
        statistics["relu_pairs"] = statistics["moe_load"].sum() + statistics["moe_dropped"]
        target = self.moe.sparsity_target
        statistics["sparsity_loss"] = weighed_by_load(mixture.coefficients, mixture.chosen, target, context)
        return output, statistics

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        scores, cache = self.router.decode(h, cache)
        return self.mix(h, self._mixture(scores, context.real), context.shards)[0], cache

    def _mixture(self, scores: Float[Array, "b L E"], real: Bool[Array, "b L"]) -> Mixture:
        coefficients = jnp.where(real[..., None], jax.nn.relu(scores), 0)
        return Mixture(coefficients, coefficients > 0)


class SwitchCache(NamedTuple):
    """What a Switch layer remembers of a row."""

    router: Any
    taken: Int[Array, "b E"]
    """How many tokens of the group that the last one is in chose each expert."""


@register("switch", "the best expert, while it has capacity", neurons=True, config=MoEConfig)
class SwitchExperts(Experts):
    """One expert per token, while it has capacity (Fedus et al. 2022; UNI-11).

    Capacity is that of groups of `capacity_tokens` tokens of a document, filled in their order: neither later tokens
    nor other documents take a token's place. A token that found none passes the layer by.
    """

    losses = ("balance_loss",)
    weighted_sums = (
        WeightedSum("experts", "x W", "the highest, if it has capacity", "softmax over all", "V_l ReLU(K_l x)"),
    )

    @classmethod
    def costs(cls, at: Setting) -> Costs:
        """One expert per token; a cache counts how many tokens each has taken."""
        return super().costs(at) + Costs(cache_bytes=at.rows * at.config.of(MoEConfig).num_experts * FLOAT)

    @staticmethod
    def experts_per_token(config: ModelConfig) -> int:
        """One, while it has capacity."""
        return 1

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        scores, real = self.router(h, context), real_tokens(context)
        wanted = top_selected(scores, 1) & real[..., None]
        whole = context.shards.gather(wanted.argmax(-1), RESOURCE)  # one number per token of the rows
        place = context.shards.part(self._places(whole, context), RESOURCE)
        mixture = self._mixture(scores, wanted & (place <= self._capacity))
        output, computed = self.mix(h, mixture, context.shards)
        statistics = load(computed, wanted, real, context)
        statistics["balance_loss"] = weighed_by_load(jax.nn.softmax(scores, axis=-1), wanted, 1, context)
        return output, statistics

    def empty_cache(self, rows: int, length: int) -> SwitchCache:
        return SwitchCache(self.router.empty_cache(rows), jnp.zeros((rows, self.moe.num_experts), jnp.int32))

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: SwitchCache) -> SwitchCache:
        """The cache after a prompt."""
        wanted = top_selected(self.router(h, context), 1).argmax(-1)
        last = context.real.sum(1)[:, None, None] - 1
        taken = jnp.take_along_axis(self._places(wanted, context), last, axis=1)[:, 0]
        return SwitchCache(self.router.fill(h, context, cache.router), taken)

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: SwitchCache
    ) -> tuple[Float[Array, "b 1 d"], SwitchCache]:
        """One more token in every row."""
        scores, router = self.router.decode(h, cache.router)
        wanted = top_selected(scores, 1)
        begins = context.positions % self.moe.capacity_tokens == 0
        taken = jnp.where(begins, 0, cache.taken) + wanted[:, 0]
        mixture = self._mixture(scores, wanted & (taken[:, None] <= self._capacity))
        return self.mix(h, mixture, context.shards)[0], SwitchCache(router, taken)

    @property
    def _capacity(self) -> int:
        """Tokens of a group that one expert takes."""
        return math.ceil(self.moe.capacity_factor * self.moe.capacity_tokens / self.moe.num_experts)

    def _places(self, wanted: Int[Array, "b N"], context: Context) -> Int[Array, "b N E"]:
        """How many tokens of its group up to each token, itself included, want each expert."""
        document = context.segment_ids
        choice = jax.nn.one_hot(wanted, self.moe.num_experts, dtype=jnp.int32) * (document > 0)[..., None]
        begins = (context.positions % self.moe.capacity_tokens == 0).at[:, 1:].max(document[:, 1:] != document[:, :-1])
        so_far = jnp.cumsum(choice, axis=1)
        return so_far - jax.lax.cummax(jnp.where(begins[..., None], so_far - choice, 0), axis=1)

    def _mixture(self, scores: Float[Array, "b L E"], chosen: Bool[Array, "b L E"]) -> Mixture:
        return Mixture(jnp.where(chosen, jax.nn.softmax(scores, axis=-1), 0), chosen)


def flops_per_expert(config: ModelConfig) -> int:
    """One expert of width w for one token: 4 d w."""
    return 4 * config.d_model * expert_width(config)


def real_tokens(context: Context) -> Bool[Array, "b L"]:
    """Which tokens of the whole `tensor` group are no padding."""
    return context.shards.part(context.segment_ids, RESOURCE) > 0


def within_room(chosen: Bool[Array, "T E"], shards: int, room: int) -> Bool[Array, "T E"]:
    """The first so many pairs of the experts of each shard, token after token."""
    of_shard = chosen.reshape(len(chosen), shards, -1).swapaxes(0, 1)
    count = jnp.cumsum(of_shard.reshape(shards, -1), axis=1).reshape(of_shard.shape)
    return (of_shard & (count <= room)).swapaxes(0, 1).reshape(chosen.shape)


def load(
    chosen: Bool[Array, "b L E"], wanted: Bool[Array, "b L E"], real: Bool[Array, "b L"], context: Context
) -> Statistics:
    """Sums over the real tokens here: their number, how many each expert computed, how many were past its capacity."""
    chosen, wanted, real = (context.shards.part(x, TENSOR) for x in (chosen, wanted, real))
    return {
        "moe_tokens": real.sum().astype(jnp.float32),
        "moe_load": chosen.sum((0, 1)).astype(jnp.float32),
        "moe_dropped": (wanted & ~chosen).sum().astype(jnp.float32),
    }


def weighed_by_load(
    mass: Float[Array, "b L E"], wanted: Bool[Array, "b L E"], k: int, context: Context
) -> Float[Array, ""]:
    """sum_i sum_l f_l mass_il over the real tokens here; f_l = E / (k n) times the tokens of the row that want l.

    f is about 1, more for experts that are wanted more. Divided by the tokens it is the balancing loss of Switch,
    E sum_l (share of the tokens) (mean probability), where mass is the softmax; and the load-balancing L1 of ReMoE
    (UNI-05), where it is ReLU's. f is of a row of n tokens, not of the batch: losses of micro-batches add up.
    """
    shards = context.shards
    here = wanted.sum(1, keepdims=True)
    count = shards.gather(here, RESOURCE).sum(1, keepdims=True)
    tokens = jnp.maximum((context.segment_ids > 0).sum(1)[:, None, None], 1)
    frequency = jax.lax.stop_gradient(wanted.shape[-1] / (k * tokens) * count)
    real = context.real[..., None]
    return jnp.where(real, frequency * shards.part(mass, TENSOR), 0).sum()
