"""Mixture of Depths: a layer that a share of the tokens goes through (AA-32; Raposo et al. 2024).

A router weighs every token; the best of the row go through a parallel transformer layer, among themselves, and what
it gives them is scaled by their weight. To be the best of a row is to know the future: a predictor, trained beside,
guesses from the token alone whether it will be, and chooses wherever budgets have to be causal. Of the first n tokens
of a document it lets capacity * n through and no more. So a row never has more than its share, whoever chooses: those
that go through are gathered, nothing is computed for the others, and the cache has room for the share alone.

Shapes: b rows, L tokens per row, n of them here, C tokens of a row that go through, d width.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    """The share of a row's tokens that goes through the layer, where BudgetConfig.normalizer is `row`. Wherever the
    predictor chooses, as it does with `prefix` in training too, at most this share of the first n tokens of a document
    goes through, for every n."""

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
        """A parallel layer over the share of the tokens that goes through. Decoding: of a token that does."""
        d, hidden, through = at.width, PREDICTOR_WIDTH, _through(at)
        inside = Parallel.costs(through)
        share = through.length / at.length
        layer = dataclasses.replace(
            inside, cache_bytes=inside.cache_bytes + at.rows * FLOAT, model_flops=share * inside.model_flops
        )
        # What goes in and comes out of it, and h in float32 for the router. The predictor's loss is apart.
        taken = Costs(activation_bytes=through.tokens * at.size * d) + at.per_token(0, (at.size + FLOAT) * d)
        return layer + taken + at.per_token(2 * d + 2 * d * hidden + 2 * hidden, 0)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Of the attention among those that go through."""
        return Parallel.loops(_through(at))

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """`depth_chosen`, the share of tokens that went through; `depth_predicted`, those that the predictor knew."""
        parts = {"depth_chosen": "depth_through", "depth_predicted": "depth_agree"}
        return shares(statistics, {name: (part, "depth_tokens") for name, part in parts.items()})

    def __call__(self, h: Float[Array, "b n d"], context: Context) -> tuple[Float[Array, "b n d"], Statistics]:
        shards = context.shards
        weight, guess = self._weights(h), self.predictor(h)
        weight_of_row = shards.gather(weight, TOKENS)
        best = self._best(weight_of_row, context.segment_ids > 0)
        chosen = best if context.budget == "row" else self._predicted(shards.gather(guess, TOKENS), context)
        through = self._through(shards.gather(h, TOKENS), chosen, context)
        output = shards.scatter_sum(shards.part(through, RESOURCE), TENSOR)
        statistics = self._statistics(guess, shards.part(best, TOKENS), shards.part(chosen, TOKENS), context.real)
        return output * weight[..., None].astype(h.dtype), statistics

    def empty_cache(self, rows: int, length: int) -> DepthCache:
        """An empty cache for the share of `length` tokens in every row."""
        return DepthCache(self.attention.empty_cache(rows, self._capacity(length)), jnp.zeros(rows, jnp.int32))

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: DepthCache) -> DepthCache:
        """The cache after a prompt: of the tokens that the predictor chooses."""
        chosen = self._predicted(self.predictor(h), context)
        taken, inner, _ = self._take(h, chosen, context)
        return DepthCache(self.attention.fill(taken, inner, cache.attention), chosen.sum(-1).astype(jnp.int32))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: DepthCache
    ) -> tuple[Float[Array, "b 1 d"], DepthCache]:
        """One more token in every row; it is written where the last that went through left off. A step in which no row
        has a token that goes through computes router and predictor alone."""
        allowed = self._allowed(context.positions[:, 0])
        chosen = (self.predictor(h)[:, 0] > 0) & (cache.count < allowed)

        def through() -> tuple[Array, KeyValueCache]:
            tables = self._rotary(context.positions)
            inner = dataclasses.replace(context, positions=cache.count[:, None], rotary_tables=tables)
            attended, after = self.attention.decode(h, inner, cache.attention)
            output = (attended + self.feed_forward(h, inner)[0]) * self._weights(h)[..., None].astype(h.dtype)
            of_heads = jnp.repeat(chosen, self.config.kv_heads)[:, None, None]
            kept = jax.tree.map(lambda new, old: jnp.where(of_heads, new, old), after, cache.attention)
            return jnp.where(chosen[:, None, None], output, 0), kept

        output, kept = jax.lax.cond(chosen.any(), through, lambda: (jnp.zeros_like(h), cache.attention))
        return output, DepthCache(kept, cache.count + chosen)

    def _predicted(self, guess: Float[Array, "b L"], context: Context) -> Bool[Array, "b L"]:
        """The tokens of whole rows that the predictor lets through, as long as their document has not had its share.

        It wished for n_i tokens of the row up to i, of which c_i of the document may go through: count_i =
        min(count_{i-1} + wish_i, c_i), from 0 where a document begins. So count_i = n_i - max_j (n_j - c_j), j <= i in
        the document, or n before the document if that is more, which no j of an earlier document exceeds.
        """
        segments = context.segment_ids
        wish = (guess > 0) & (segments > 0)
        wished = jnp.cumsum(wish, axis=1)
        over = wished - self._allowed(context.positions)
        begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        before = jnp.where(begins, wished - wish, jnp.pad(over, ((0, 0), (1, 0)))[:, :-1])
        return wish & (over <= jax.lax.cummax(before, axis=1))

    def _allowed(self, positions: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """How many tokens of a document may go through up to this position."""
        return (self.config.of(MixtureOfDepthsConfig).capacity * (positions + 1)).astype(jnp.int32)

    def _through(self, h: Float[Array, "b L d"], chosen: Bool[Array, "b L"], context: Context) -> Float[Array, "b L d"]:
        """What the layer gives the chosen tokens of whole rows; of divided heads, their part of it."""
        taken, inner, place = self._take(h, chosen, context)
        output = self.attention(taken, inner)[0] + self.feed_forward(taken, inner)[0]
        output = jnp.where((inner.segment_ids > 0)[..., None], output, 0)
        rows = jnp.arange(h.shape[0])[:, None]
        return jnp.zeros(h.shape, output.dtype).at[rows, place].add(output)

    def _take(
        self, h: Float[Array, "b L d"], chosen: Bool[Array, "b L"], context: Context
    ) -> tuple[Float[Array, "b C d"], Context, Int[Array, "b C"]]:
        """The chosen tokens in order, padded; the rows around them; and where they stood."""
        place = jnp.argsort(~chosen, axis=1, stable=True)[:, : self._capacity(h.shape[1])]
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
        return _capacity(self.config, length)

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
    """The rows of those that go through."""
    return dataclasses.replace(at, length=_capacity(at.config, at.length))


def _capacity(config: ModelConfig, length: int) -> int:
    return max(1, math.ceil(config.of(MixtureOfDepthsConfig).capacity * length))
