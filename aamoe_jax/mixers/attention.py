"""Multi-head attention over earlier tokens (eq 1; UNI-02). `sparse_attention.py` has it over some of them."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, merge_heads, residual_gain
from aamoe_jax.mixers.base import Cache, Context, Statistics
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Number, Setting, blocks, key_value_cache, projections, rotated
from aamoe_jax.mixers.fastest import fastest_attention
from aamoe_jax.mixers.flash import block_size, loop, token_blocks
from aamoe_jax.mixers.parts import Part
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_mix, head_scores, largest_logit, softmax_selected
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE

SAMPLED = 8
"""Tokens of a row whose logits are looked at for the largest."""


@register("attention", "softmax attention to all earlier tokens", heads="softmax")
class CausalAttention(Part):
    """softmax(q K^T / sqrt(k)) V over the token's own document, and W^O over all heads (AA-03, AA-04, DEC-02)."""

    label = "attention"
    weighted_sums: ClassVar[tuple[WeightedSum, ...]] = (
        WeightedSum("earlier tokens", "q . k / sqrt(k)", "all", "softmax over the kept", "x W^V, then W^O"),
    )
    has_map = True

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(
            config.d_model, config.d_model, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config)
        )
        self.config = config

    @property
    def reach(self) -> int | None:
        """The last so many tokens are seen, the token itself included; None: all."""
        return None

    @staticmethod
    def costs(at: Setting) -> Costs:
        """softmax(q K^T) V, block by block, without the blocks of the future."""
        attended = blocks(at, CausalAttention.loops(at), decoded=at.length, visible=(at.length + 1) / 2)
        return projections(at) + rotated(at) + attended + sampled_logits(at) + key_value_cache(at)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        return (loop(at.length, at.length),)

    @staticmethod
    def decode_bytes(at: Setting) -> Number:
        """Four projections, and all keys and values."""
        return FLOAT * 2 * at.width * (at.width + at.kv_width) + key_value_cache(at).cache_bytes

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        query, key, value = self._rotated(h, context)
        key, value = (context.shards.gather(x, RESOURCE) for x in (key, value))
        statistics = {"logit_absmax": self._largest_logit(query, key, context)}
        return self.output(merge_heads(self._attend(query, key, value, context))), statistics

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        """The attention weights of every token here, head by head; a row of zeros has no token."""
        query, key, _ = self._rotated(h, context)
        mask = context.shards.part(self._visible(context), RESOURCE)
        return softmax_selected(head_scores(query, context.shards.gather(key, RESOURCE)), mask[:, None])

    def empty_cache(self, rows: int, length: int) -> Cache:
        return empty_cache(self.config, rows, length)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt."""
        _, key, value = self._rotated(h, context)
        return cache.fill(key, value)

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row."""
        query, key, value = self._rotated(h, context)
        cache = cache.write(context.positions, key, value)
        return self.output(merge_heads(attend_cached(query, cache, context.positions))), cache

    def _attend(
        self,
        query: Float[Array, "a L H k"],
        key: Float[Array, "a S G k"],
        value: Float[Array, "b S G k"],
        context: Context,
    ) -> Float[Array, "b L H k"]:
        first = context.attending_from
        return fastest_attention(query, key, value, context.segment_ids, first=first, reach=self.reach)

    def _keeps(self, distance: Int[Array, "*#b"], position: Int[Array, "*#b"]) -> Bool[Array, "*#b"] | bool:
        """Of earlier tokens at these distances, and at these positions of their document: by default all."""
        return True

    def _visible(self, context: Context) -> Bool[Array, "b L L"]:
        return self._seen_from(jnp.arange(context.positions.shape[1]), context)

    def _seen_from(self, place: Int[Array, "t"], context: Context) -> Bool[Array, "b t L"]:
        """Which tokens those at these places of their rows see."""
        documents, distance = context.segment_ids, place[:, None] - jnp.arange(context.positions.shape[1])
        seen = (distance >= 0) & (documents[:, place, None] == documents[:, None])
        return seen & self._keeps(distance, context.positions[:, None])

    def _largest_logit(
        self, query: Float[Array, "a L H k"], key: Float[Array, "a S G k"], context: Context, most: int = SAMPLED
    ) -> Float[Array, ""]:
        """Of at most so many of the tokens here, evenly apart; no attention to blocks has all of them at once."""
        count = query.shape[1]
        sample = jnp.asarray(np.linspace(0, count - 1, min(most, count)).round().astype(int))
        place = context.attending_from + sample
        seen = self._seen_from(place, context) & (context.segment_ids[:, place, None] > 0)
        return largest_logit(head_scores(query[:, sample], key), seen[:, None])

    def _rotated(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L G k"], Float[Array, "b L G k"]]:
        query, key, value = self.qkv.rotated(h, context.rotary(self.config).attending)
        return query, key, value


def sampled_logits(at: Setting, most: int = SAMPLED) -> Costs:
    """The scores of some tokens of every row once more, for the largest."""
    return Costs(prefill_flops=at.rows * 2 * at.width * at.length * min(most, at.length))


def attend_cached(
    query: Float[Array, "b 1 H k"], cache: KeyValueCache, positions: Int[Array, "b 1"]
) -> Float[Array, "b 1 H k"]:
    """Softmax attention of one token to the places up to `positions`."""
    return cache.mix(jax.nn.softmax(cache.scores(query, positions), axis=-1))


class WeightedAttention(CausalAttention):
    """Attention whose coefficients are no plain softmax: a subclass has them, of some queries, in `_coefficients`.

    The coefficients of one block of queries are all that is ever held, and the backward pass computes them again.
    """

    def _operands(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], tuple[Float[Array, "b L G k"], ...], Float[Array, "b L G k"]]:
        """Queries, what they are compared with, values: of the tokens here."""
        query, key, value = self._rotated(h, context)
        return query, (key,), value

    def _coefficients(
        self, query: Float[Array, "b t H k"], keys: tuple[Float[Array, "b S G k"], ...], seen: Bool[Array, "b 1 t S"]
    ) -> Float[Array, "b H t S"]:
        """What queries weigh every token by, 0 where it is not seen."""
        raise NotImplementedError

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Blocks of queries that meet whole rows."""
        turn = block_size(at.length)
        return (Loop(-(-at.length // turn) * turn * at.length, turn * at.length),)

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        query, keys, value = self._gathered(h, context)
        length = query.shape[1]
        place = context.attending_from + jnp.arange(length)

        @jax.checkpoint
        def of_block(block: tuple[Float[Array, "b t H k"], Int[Array, "1 t"]]) -> Float[Array, "b t H k"]:
            query, place = block
            return head_mix(self._coefficients(query, keys, self._seen_from(place[0], context)[:, None]), value)

        size = block_size(length)
        heads = jax.lax.map(of_block, (token_blocks(query, size), token_blocks(place[None], size, "edge")))
        heads = heads.swapaxes(0, 1).reshape(len(query), -1, *query.shape[2:])[:, :length]
        return self.output(merge_heads(heads)), {}

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        query, keys, _ = self._gathered(h, context)
        seen = context.shards.part(self._visible(context), RESOURCE)
        return self._coefficients(query, keys, seen[:, None])

    def _gathered(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], tuple[Float[Array, "b S G k"], ...], Float[Array, "b S G k"]]:
        """`_operands`, of which all but queries are of whole rows."""
        query, keys, value = self._operands(h, context)
        gather = context.shards.gather
        return query, tuple(gather(key, RESOURCE) for key in keys), gather(value, RESOURCE)


def whole_square_costs(at: Setting) -> Costs:
    """Coefficients and weighted values of `WeightedAttention`: 4 d L a token, of which it sees 4 d (L + 1) / 2. Saved
    are queries, keys and values, and the output."""
    (loop,) = WeightedAttention.loops(at)
    flops, saved = 4 * at.width, at.size * (2 * at.width + 2 * at.kv_width)
    return Costs(
        at.rows * flops * loop.scores, at.rows * flops * at.length, at.tokens * saved, 0, flops * (at.length + 1) / 2
    )
