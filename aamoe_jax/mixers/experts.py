"""Mixtures of experts in place of a feed-forward (eq 3-7; UNI-03, UNI-04, UNI-11).

Every expert is a small feed-forward without bias. Its hidden units are divided over `tensor` like those of a large one,
and its parameters over `fsdp` at rest; each shard of `resource` has all experts for its own tokens, so that no token
travels. The work is that of the experts that were chosen (`expert_sum.py`).

Shapes: b rows, L tokens of them here, N of whole rows, d width, E experts, w hidden units of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig, MoEConfig
from aamoe_jax.layers import flatten_tokens, residual_gain
from aamoe_jax.mixers.base import Cache, Context, Statistics
from aamoe_jax.mixers.convolution import TOKENS_BEFORE, convolution_costs
from aamoe_jax.mixers.costs import FLOAT, Costs, Setting
from aamoe_jax.mixers.expert_sum import expert_sum
from aamoe_jax.mixers.family import Form, softmax_selected, top_selected
from aamoe_jax.mixers.parts import Part
from aamoe_jax.mixers.routers import ExpertRouter
from aamoe_jax.mixers.statistics import expert_use
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE, TENSOR


class Mixture(NamedTuple):
    """Which experts compute a token, and what each of them counts."""

    coefficients: Float[Array, "b L E"]
    """0 for those that are not chosen."""
    chosen: Bool[Array, "b L E"]


class Experts(Part):
    """sum_l p_l(x) V_l ReLU(K_l x): what all mixtures share. Subclasses say how scores become coefficients."""

    label = "experts"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        count, width, hidden = config.moe.num_experts, config.d_model, config.expert_width
        gain = residual_gain(config)
        self.router = ExpertRouter(config, rngs=rngs)
        keys = width**-0.5 * jax.random.normal(rngs.params(), (count, width, hidden))
        values = gain * hidden**-0.5 * jax.random.normal(rngs.params(), (count, hidden, width))
        self.keys = nnx.Param(keys, axes=(None, "storage", "heads"))
        self.values = nnx.Param(values, axes=(None, "heads", "storage"))
        self.config = config

    @property
    def moe(self) -> MoEConfig:
        """The room of the config that is about experts."""
        return self.config.moe

    def mix(self, h: Float[Array, "b L d"], mixture: Mixture) -> Float[Array, "b L d"]:
        """The experts' outputs, weighted and summed."""
        found = expert_sum(flatten_tokens(h), self.keys[...], self.values[...], *map(flatten_tokens, mixture))
        return found.reshape(h.shape)

    @classmethod
    def costs(cls, at: Setting) -> Costs:
        """A router, 2 d E or 6 d E + 4 E^2 (and 6 d of model FLOPs for a convolution), and the experts that a token is
        meant to have, 4 d w each. Blocks of tokens are full; hidden units are computed again in the backward pass."""
        config, d, count = at.config, at.width, at.config.moe.num_experts
        router = 2 * d * count if config.moe.router == "linear" else 6 * d * count + 4 * count**2
        flops = router + cls.experts_per_token(config) * flops_per_expert(config)
        saved = FLOAT * d + count * (3 * FLOAT + 2)  # the router's input; scores, coefficients, choices
        if config.moe.router == "attention":
            saved += FLOAT * count * (2 * count + 5)
        if config.moe.router_input != "causal_conv":
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
        return config.moe.top_k

    @staticmethod
    def extra_flops(at: Setting, members: Sequence[type[Experts]], statistics: Statistics) -> float:
        """Experts that really computed a token, less those that were meant to."""
        if "moe_load" not in statistics:
            return 0.0
        meant = at.config.periods * sum(mixture.experts_per_token(at.config) for mixture in members)
        return (float(np.sum(statistics["moe_load"])) - at.tokens * meant) * flops_per_expert(at.config)

    def empty_cache(self, rows: int, length: int) -> Cache:
        return self.router.empty_cache(rows)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        return self.router.fill(h, context, cache)


@register("moe", "the `top_k` experts of the highest scores", neurons=True)
class TopKExperts(Experts):
    """The k experts of the highest scores (UNI-03), and Switch's loss to balance them."""

    losses = ("balance_loss",)

    @staticmethod
    def form() -> Form:
        """The instance of the family."""
        return Form("experts", "x W", "the k highest", "softmax over the kept, or over all", "V_l ReLU(K_l x)")

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        scores, real = self.router(h, context), real_tokens(context)
        mixture = self._mixture(scores, real)
        about = load(mixture.chosen, mixture.chosen, real, context)
        share = jax.nn.softmax(scores, axis=-1)
        about["balance_loss"] = weighed_by_load(share, mixture.chosen, self.moe.top_k, context)
        return self.mix(h, mixture), about

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        scores, cache = self.router.decode(h, cache)
        return self.mix(h, self._mixture(scores, context.real)), cache

    def _mixture(self, scores: Float[Array, "b L E"], real: Bool[Array, "b L"]) -> Mixture:
        chosen = top_selected(scores, self.moe.top_k) & real[..., None]
        if self.moe.coefficients == "softmax_selected":
            return Mixture(softmax_selected(scores, chosen), chosen)
        return Mixture(jnp.where(chosen, jax.nn.softmax(scores, axis=-1), 0), chosen)


@register("relu_moe", "all experts whose score is positive (ReMoE)", neurons=True)
class ReLUExperts(Experts):
    """p = ReLU(r): as many experts as have a positive score (ReMoE; eq 6, UNI-04).

    Nothing is chosen apart from the coefficients, so that the output is continuous in the scores. How many there are is
    left to a sparsity loss, whose weight `training.auxiliary` adapts (UNI-05).
    """

    losses = ("sparsity_loss",)

    @staticmethod
    def form() -> Form:
        """The instance of the family."""
        return Form("experts", "x W", "those with x W > 0", "ReLU", "V_l ReLU(K_l x)")

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        real = real_tokens(context)
        mixture = self._mixture(self.router(h, context), real)
        about = load(mixture.chosen, mixture.chosen, real, context)
        about["relu_pairs"] = about["moe_load"].sum()
        about["sparsity_loss"] = weighed_by_load(mixture.coefficients, mixture.chosen, self.moe.top_k, context)
        return self.mix(h, mixture), about

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        scores, cache = self.router.decode(h, cache)
        return self.mix(h, self._mixture(scores, context.real)), cache

    def _mixture(self, scores: Float[Array, "b L E"], real: Bool[Array, "b L"]) -> Mixture:
        coefficients = jnp.where(real[..., None], jax.nn.relu(scores), 0)
        return Mixture(coefficients, coefficients > 0)


class SwitchCache(NamedTuple):
    """What a Switch layer remembers of a row."""

    router: Any
    taken: Int[Array, "b E"]
    """How many tokens of the group that the last one is in chose each expert."""


@register("switch", "the best expert, while it has capacity", neurons=True)
class SwitchExperts(Experts):
    """One expert per token, while it has room (Fedus et al. 2022; UNI-11).

    Capacity is that of groups of `capacity_tokens` tokens of a document, filled in their order: neither later tokens
    nor other documents take a token's place. A token that found none passes the layer by.
    """

    losses = ("balance_loss",)

    @staticmethod
    def form() -> Form:
        """The instance of the family."""
        return Form("experts", "x W", "the highest, if it has room", "softmax over all", "V_l ReLU(K_l x)")

    @classmethod
    def costs(cls, at: Setting) -> Costs:
        """One expert per token; a cache counts how many tokens each has taken."""
        return super().costs(at) + Costs(cache_bytes=at.rows * at.config.moe.num_experts * FLOAT)

    @staticmethod
    def experts_per_token(config: ModelConfig) -> int:
        """One, while it has room."""
        return 1

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        scores, real = self.router(h, context), real_tokens(context)
        wanted = top_selected(scores, 1) & real[..., None]
        whole = context.shards.gather(wanted.argmax(-1), RESOURCE)  # one number per token of the rows
        place = context.shards.part(self._places(whole, context), RESOURCE)
        mixture = self._mixture(scores, wanted & (place <= self._capacity))
        about = load(mixture.chosen, wanted, real, context)
        about["balance_loss"] = weighed_by_load(jax.nn.softmax(scores, axis=-1), wanted, 1, context)
        return self.mix(h, mixture), about

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
        return self.mix(h, mixture), SwitchCache(router, taken)

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
    return 4 * config.d_model * config.expert_width


def real_tokens(context: Context) -> Bool[Array, "b L"]:
    """Which tokens of the whole `tensor` group are no padding."""
    return context.shards.part(context.segment_ids, RESOURCE) > 0


def load(
    chosen: Bool[Array, "b L E"], wanted: Bool[Array, "b L E"], real: Bool[Array, "b L"], context: Context
) -> Statistics:
    """Sums over the real tokens here: their number, how many each expert computed, and how many it had no room for."""
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
