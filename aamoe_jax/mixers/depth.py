"""Mixture of Depths: a layer that a share of the tokens goes through (AA-32; Raposo et al. 2024).

A router weighs every token; the best of the row go through a parallel transformer layer, among themselves, and what
it gives them is scaled by their weight. To be the best of a row is to know the future: a predictor, trained beside,
guesses from the token alone whether it will be, and chooses wherever budgets have to be causal.

Shapes: b rows, L tokens per row, n of them here, C tokens of a row that go through, d width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig, refuse
from aamoe_jax.layers import rotary_table
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context, Mixer, RotaryTables, Statistics
from aamoe_jax.mixers.cache import KeyValueCache
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Setting
from aamoe_jax.mixers.feed_forward import FeedForward
from aamoe_jax.mixers.parallel import Parallel
from aamoe_jax.mixers.statistics import shares
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE, TENSOR, TOKENS

PREDICTOR_WIDTH = 64
"""Hidden units of the predictor."""


class DepthCache(NamedTuple):
    """Keys and values of the tokens that went through, one after the other."""

    attention: KeyValueCache
    count: Int[Array, "b"]  # type: ignore[assignment]  # nothing counts the entries of this tuple


def through_flops(config: ModelConfig, length: int, share: float) -> float:
    """Model FLOPs per token of the row: the parallel layer for a share of its tokens, among themselves."""
    return share * Parallel.costs(Setting(config, 1, math.ceil(share * length))).model_flops


class TokenPredictor(nnx.Module):
    """The logit of being among the best of the row, from the token alone. To guess never changes what is guessed."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        axes = ("storage_float32", None)
        self.hidden = nnx.Param(width**-0.5 * jax.random.normal(rngs.params(), (width, hidden)), axes=axes)
        self.output = nnx.Param(hidden**-0.5 * jax.random.normal(rngs.params(), (hidden,)), axes=(None,))

    def __call__(self, h: Float[Array, "b n d"]) -> Float[Array, "b n"]:
        h = jax.lax.stop_gradient(h).astype(jnp.float32)
        return jax.nn.relu(h @ self.hidden[...]) @ self.output[...]


@dataclasses.dataclass(frozen=True)
class MixtureOfDepthsConfig:
    """How many tokens go through `mixture_of_depths`."""

    capacity: float = 0.125
    """The share of a row's tokens that goes through the layer, where BudgetConfig.normalizer is `row`. With `prefix`
    its predictor chooses while it trains, too, and nothing bounds the share."""

    def __post_init__(self) -> None:
        if not 0 < self.capacity <= 1:
            refuse(self, "capacity", "must be in (0, 1]")


@register(
    "mixture_of_depths",
    "a parallel layer that some of the tokens skip",
    heads="softmax",
    neurons=True,
    config=MixtureOfDepthsConfig,
)
class MixtureOfDepths(Mixer):
    """r_i (MHA(h) + FF(h))_i for the tokens that were chosen, 0 for the others."""

    weighted_sums = (
        WeightedSum(
            "earlier tokens", "q . k / sqrt(k)", "the row's best C by w . h", "w . h times softmax", "x W^V, then W^O"
        ),
    )

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = config.d_model
        self.attention = CausalAttention(config, rngs=rngs)
        self.feed_forward = FeedForward(config, rngs=rngs)
        self.router = nnx.Param(width**-0.5 * jax.random.normal(rngs.params(), (width,)), axes=(None,))
        self.predictor = TokenPredictor(width, PREDICTOR_WIDTH, rngs=rngs)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """A parallel layer over the share of the tokens that goes through: under causal budgets that could be all of
        them, and in decoding every token is computed, and most are dropped."""
        config, d, hidden = at.config, at.width, PREDICTOR_WIDTH
        through = _through(at)
        inside, after = Parallel.costs(through), Parallel.costs(at)
        layer = dataclasses.replace(
            inside, decode_flops=after.decode_flops, cache_bytes=after.cache_bytes + at.rows * FLOAT, model_flops=0
        )
        # What goes in and comes out of it, and h in float32 for router and predictor.
        taken = Costs(activation_bytes=through.tokens * at.size * d) + at.per_token(0, 2 * FLOAT * d + FLOAT * hidden)
        model = Costs(model_flops=round(through_flops(config, at.length, config.of(MixtureOfDepthsConfig).capacity)))
        return layer + taken + at.per_token(2 * d + 2 * d * hidden + 2 * hidden, 0) + model

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Of the attention among those that go through."""
        return Parallel.loops(_through(at))

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """`depth_chosen`, the share of tokens that went through; `depth_predicted`, those that the predictor knew."""
        parts = {"depth_chosen": "depth_through", "depth_predicted": "depth_agree"}
        return shares(statistics, {name: (part, "depth_tokens") for name, part in parts.items()})

    @staticmethod
    def extra_flops(at: Setting, members: Sequence[Any], statistics: Statistics) -> float:
        """The tokens that really went through, less those that were meant to."""
        if "depth_tokens" not in statistics:
            return 0.0
        config = at.config
        meant = through_flops(config, at.length, config.of(MixtureOfDepthsConfig).capacity)
        shares = np.asarray(statistics["depth_through"]) / np.maximum(np.asarray(statistics["depth_tokens"]), 1)
        return at.tokens * sum(through_flops(config, at.length, float(share)) - meant for share in shares)

    def __call__(self, h: Float[Array, "b n d"], context: Context) -> tuple[Float[Array, "b n d"], Statistics]:
        shards = context.shards
        weight, guess = self._weights(h), self.predictor(h)
        weight_of_row = shards.gather(weight, TOKENS)
        best = self._best(weight_of_row, context.segment_ids > 0)
        chosen = best if context.budget == "row" else shards.gather(guess, TOKENS) > 0
        capacity = self._capacity(chosen.shape[1]) if context.budget == "row" else chosen.shape[1]
        chosen &= context.segment_ids > 0
        through = self._through(shards.gather(h, TOKENS), chosen, capacity, context)
        output = shards.scatter_sum(shards.part(through, RESOURCE), TENSOR)
        statistics = self._statistics(guess, shards.part(best, TOKENS), shards.part(chosen, TOKENS), context.real)
        return output * weight[..., None].astype(h.dtype), statistics

    def empty_cache(self, rows: int, length: int) -> DepthCache:
        """An empty cache for `length` tokens in every row."""
        return DepthCache(self.attention.empty_cache(rows, length), jnp.zeros(rows, jnp.int32))

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: DepthCache) -> DepthCache:
        """The cache after a prompt: of the tokens that the predictor chooses."""
        chosen = (self.predictor(h) > 0) & context.real
        taken, inner, _ = self._take(h, chosen, h.shape[1], context)
        return DepthCache(self.attention.fill(taken, inner, cache.attention), chosen.sum(-1).astype(jnp.int32))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: DepthCache
    ) -> tuple[Float[Array, "b 1 d"], DepthCache]:
        """One more token in every row; it is written where the last that went through left off."""
        chosen = self.predictor(h)[:, 0] > 0
        tables = self._rotary(context.positions)
        inner = dataclasses.replace(context, positions=cache.count[:, None], rotary_tables=tables)
        attended, after = self.attention.decode(h, inner, cache.attention)
        output = (attended + self.feed_forward(h, inner)[0]) * self._weights(h)[..., None].astype(h.dtype)
        heads = self.config.kv_heads
        kept = jax.tree.map(
            lambda new, old: jnp.where(jnp.repeat(chosen, heads)[:, None, None], new, old), after, cache.attention
        )
        return jnp.where(chosen[:, None, None], output, 0), DepthCache(kept, cache.count + chosen)

    def _through(
        self, h: Float[Array, "b L d"], chosen: Bool[Array, "b L"], capacity: int, context: Context
    ) -> Float[Array, "b L d"]:
        """What the layer gives the chosen tokens of whole rows; of divided heads, their part of it."""
        taken, inner, place = self._take(h, chosen, capacity, context)
        output = self.attention(taken, inner)[0] + self.feed_forward(taken, inner)[0]
        output = jnp.where((inner.segment_ids > 0)[..., None], output, 0)
        rows = jnp.arange(h.shape[0])[:, None]
        return jnp.zeros(h.shape, output.dtype).at[rows, place].add(output)

    def _take(
        self, h: Float[Array, "b L d"], chosen: Bool[Array, "b L"], capacity: int, context: Context
    ) -> tuple[Float[Array, "b C d"], Context, Int[Array, "b C"]]:
        """The chosen tokens in order, padded; the rows around them; and where they stood."""
        place = jnp.argsort(~chosen, axis=1, stable=True)[:, :capacity]
        segments, positions, is_chosen = (
            jnp.take_along_axis(x, place, axis=1) for x in (context.segment_ids, context.positions, chosen)
        )
        inner = dataclasses.replace(
            context,
            segment_ids=jnp.where(is_chosen, segments, 0),
            positions=positions,
            rotary_tables=self._rotary(positions),
            shards=dataclasses.replace(context.shards, resource=1),  # every shard has the whole row
        )
        return jnp.take_along_axis(h, place[..., None], axis=1), inner, place

    def _rotary(self, positions: Int[Array, "b C"]) -> RotaryTables:
        heads = rotary_table(positions, self.config.head_dim, self.config.rope_base)
        return RotaryTables(heads, heads, heads, heads)  # attention has heads alone

    def _weights(self, h: Float[Array, "b n d"]) -> Float[Array, "b n"]:
        return h.astype(jnp.float32) @ self.router[...]

    def _capacity(self, length: int) -> int:
        return max(1, math.ceil(self.config.of(MixtureOfDepthsConfig).capacity * length))

    def _best(self, weight: Float[Array, "b L"], real: Bool[Array, "b L"]) -> Bool[Array, "b L"]:
        """The C best of every row; ties to the earlier token."""
        order = jnp.argsort(jnp.where(real, -weight, jnp.inf), axis=1, stable=True)
        rank = jnp.argsort(order, axis=1)
        return (rank < self._capacity(weight.shape[1])) & real

    def _statistics(
        self,
        guess: Float[Array, "b n"],
        best: Bool[Array, "b n"],
        through: Bool[Array, "b n"],
        real: Bool[Array, "b n"],
    ) -> Statistics:
        """Sums over real tokens: the predictor's cross-entropy, how many went through, on how many it knew the best."""
        loss = jnp.where(real, jax.nn.softplus(jnp.where(best, -guess, guess)), 0).sum()
        counts = {"depth_tokens": real, "depth_through": through, "depth_agree": ((guess > 0) == best) & real}
        return {"predictor_loss": loss} | {name: x.sum().astype(jnp.float32) for name, x in counts.items()}


def _through(at: Setting) -> Setting:
    """The rows of those that go through, as long as they are computed."""
    capacity = max(1, math.ceil(at.config.of(MixtureOfDepthsConfig).capacity * at.length))
    return dataclasses.replace(at, length=capacity if at.config.aamoe.budget.normalizer == "row" else at.length)
