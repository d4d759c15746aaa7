"""Multi-head attention over earlier tokens (eq 1; UNI-02). `sparse_attention.py` has it over some of them."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, apply_rotary, merge_heads, residual_gain
from aamoe_jax.mixers.base import Cache, Context, Statistics
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Number, Setting, blocks, key_value_cache, projections, rotated
from aamoe_jax.mixers.fastest import fastest_attention
from aamoe_jax.mixers.flash import loop
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
        query, key, value = self.qkv(h)
        rotary = context.rotary(self.config).attending
        return apply_rotary(query, rotary), apply_rotary(key, rotary), value


def sampled_logits(at: Setting, most: int = SAMPLED) -> Costs:
    """The scores of some tokens of every row once more, for the largest."""
    return Costs(prefill_flops=at.rows * 2 * at.width * at.length * min(most, at.length))


def attend_cached(
    query: Float[Array, "b 1 H k"], cache: KeyValueCache, positions: Int[Array, "b 1"]
) -> Float[Array, "b 1 H k"]:
    """Softmax attention of one token to the places up to `positions`."""
    return cache.mix(jax.nn.softmax(cache.scores(query, positions), axis=-1))


class WeightedAttention(CausalAttention):
    """Attention whose coefficients are no plain softmax, and so are laid out: a subclass has them in `_weigh`."""

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        return ()

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        """What every token here weighs every token by, the values of all tokens, statistics."""
        raise NotImplementedError

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        weights, value, statistics = self._weigh(h, context)
        return self.output(merge_heads(head_mix(weights, value))), statistics

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        return self._weigh(h, context)[0]
