"""Attention to the tokens that a filter keeps: does every token need to be added to every head? (PM-10)

Shapes: b rows, L tokens per row, d width, H heads, G heads of keys and values, k = d / H, N neurons that a cache has
capacity for, B = b G.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig, refuse, require_choice
from aamoe_jax.layers import Projection, merge_heads, split_heads
from aamoe_jax.mixers import routed
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context, Statistics, document_starts
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache, flat_heads
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Setting, blocks, projections, rotated
from aamoe_jax.mixers.statistics import shares
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores, softmax_selected
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE

KEPT_AT_START = 2.0
"""The logit of the learned filter before training: 0.88 of certainty, so that most tokens are kept and learn."""
HEADROOM = 1.25
"""Room of a cache over the share that the filter aims at, for rows that keep more than others."""


@dataclasses.dataclass(frozen=True)
class FilteredAttentionConfig:
    """Which tokens `filtered_attention` keeps (PM-10)."""

    filter: Literal["none", "message_norm", "learned"] = "learned"
    """Which tokens add a key and value to a head. All; those whose message, value times W^O, is long enough; those of
    which a learned logit is certain enough."""
    threshold: float = 0.5
    """The least certainty (`learned`), or length as a multiple of a random input's (`message_norm`). 0 keeps all."""
    capacity: float | None = None
    """Keys that fit into the cache of a head while decoding, as a fraction of all. Where more are kept, the least
    certain are evicted, and counted. None: 1.25 times `target_share` where that is aimed at, else 1."""
    target_share: float | None = 0.5
    """Of `learned`: the share of the tokens of a row that a loss makes every head keep. None: no such loss."""
    target_weight: float = 0.1
    """Of that loss."""

    def __post_init__(self) -> None:
        require_choice(self, "filter", ("none", "message_norm", "learned"))
        for field in ("threshold", "target_weight"):
            value = getattr(self, field)
            if not (value >= 0 and math.isfinite(value)):
                refuse(self, field, "must be a number of at least 0")
        for field in ("capacity", "target_share"):
            value = getattr(self, field)
            if value is not None and not 0 < value <= 1:
                refuse(self, field, "must be in (0, 1], or None")

    @property
    def target(self) -> float | None:
        """The share of tokens that a head is made to keep; None: whatever the filter lets through."""
        return self.target_share if self.filter == "learned" and self.threshold > 0 else None

    @property
    def share(self) -> float:
        """The share of tokens that a head keeps, as far as is known before training."""
        return 1.0 if self.target is None else self.target

    def places(self, length: int) -> int:
        """N, for `length` tokens of a row."""
        share = self.capacity
        if share is None:
            share = min(1.0, HEADROOM * self.share)
        return max(1, math.ceil(share * length))


class FilteredCache(NamedTuple):
    """The neurons that a filter let through: of all so far the N most certain, the latest among equals.

    Which these are does not depend on how many came at a time.
    """

    neurons: KeyValueCache
    log_gate: Float[Array, "B N"]
    """What the filter adds to their scores; -inf where there is none."""
    position: Int[Array, "B N"]
    """Of their tokens."""
    evicted: Int[Array, "B"]
    """Neurons that found no room, or lost it."""

    def add(
        self,
        key: Float[Array, "b 1 G k"],
        value: Float[Array, "b 1 G k"],
        log_gate: Float[Array, "b 1 G"],
        positions: Int[Array, "b 1"],
    ) -> FilteredCache:
        """With that of one more token, in an empty place or that of the least certain."""
        heads, places = self.log_gate.shape
        gate, position = log_gate.reshape(heads), jnp.repeat(positions[:, 0], heads // len(positions))
        least = self.log_gate.min(-1)
        oldest = jnp.where(self.log_gate == least[:, None], self.position, jnp.iinfo(jnp.int32).max).argmin(-1)
        kept = jnp.isfinite(gate)
        place = jnp.where(kept & (gate >= least), oldest, places)  # past the end is nowhere: `mode="drop"`
        row, size = jnp.arange(heads), jnp.arange(value.shape[-1])
        return FilteredCache(
            KeyValueCache(
                self.neurons.key.at[row, place].set(flat_heads(key)[:, 0], mode="drop"),
                self.neurons.value.at[row[:, None], size, place[:, None]].set(flat_heads(value)[:, 0], mode="drop"),
            ),
            self.log_gate.at[row, place].set(gate, mode="drop"),
            self.position.at[row, place].set(position, mode="drop"),
            self.evicted + (kept & jnp.isfinite(least)),
        )

    def fill(
        self, key: Float[Array, "b L G k"], value: Float[Array, "b L G k"], log_gate: Float[Array, "b L G"]
    ) -> FilteredCache:
        """With those of the first L tokens, while it is empty."""
        gate = log_gate.swapaxes(1, 2).reshape(-1, log_gate.shape[1])
        position = jnp.broadcast_to(jnp.arange(gate.shape[1]), gate.shape)
        best = jnp.lexsort((position, gate), axis=-1)[:, : -self.log_gate.shape[1] - 1 : -1]
        count = best.shape[1]

        def chosen(x: Array) -> Array:
            return jnp.take_along_axis(x, best.reshape(*best.shape, *[1] * (x.ndim - 2)), axis=1)

        values = self.neurons.value.at[:, :, :count].set(chosen(flat_heads(value)).swapaxes(1, 2))
        return FilteredCache(
            KeyValueCache(self.neurons.key.at[:, :count].set(chosen(flat_heads(key))), values),
            self.log_gate.at[:, :count].set(chosen(gate)),
            self.position.at[:, :count].set(best),
            jnp.maximum(jnp.isfinite(gate).sum(-1) - count, 0),
        )

    def scores(self, query: Float[Array, "b 1 H k"]) -> Float[Array, "b H N"]:
        """q . k / sqrt(k), and what the filter adds; -inf where there is no neuron."""
        rows, _, heads, _ = query.shape
        places = self.log_gate.shape[1]
        scores = self.neurons.scores(query, jnp.full((rows, 1), places))
        grouped = scores.reshape(self.log_gate.shape[0], -1, places) + self.log_gate[:, None]
        return grouped.reshape(rows, heads, places)


@register(
    "filtered_attention",
    "attention to the tokens that a filter keeps",
    heads="softmax",
    config=FilteredAttentionConfig,
)
class FilteredAttention(CausalAttention):
    """Softmax attention in which a token adds its neuron to a head only where its message is worth it (PM-10).

    What is kept depends on the token alone, so later tokens change nothing. A head without any neuron gives 0. Heads
    that have keys and values in common have their neurons in common too. A learned filter is trained towards a share
    of tokens. In a row the kept neurons alone are computed, forward and backward. The cache has those alone, and room
    for about that share of all: while it has room, decoding is the forward pass; then the least certain are evicted.
    """

    losses = ("filter_loss",)
    weighted_sums = (
        WeightedSum(
            "earlier tokens", "q . k / sqrt(k) + log gate", "those that the filter keeps", "softmax", "x W^V, then W^O"
        ),
    )

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.filtering = config.of(FilteredAttentionConfig)
        if self.filtering.filter == "learned":
            axes = ("storage_float32", "heads")
            self.filter = Projection(config.d_model, config.kv_heads, axes=axes, rngs=rngs, gain=0.0)
            self.filter_bias = nnx.Param(jnp.full(config.kv_heads, KEPT_AT_START), axes=("heads",))

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Attention to the share of keys that the filter aims at, or to all; in decoding to as many as its cache holds.

        The filter takes 2 d, or 2 k^2 + 2 k, a head and token.
        """
        config, d, heads, size = at.config, at.width, at.config.kv_heads, at.config.head_dim
        filtering = config.of(FilteredAttentionConfig)
        places = filtering.places(at.length)
        once = per_token = saved = 0
        match filtering.filter:
            case "message_norm":  # both maps of every head, once; and one number per token
                once, per_token = 2 * d * size * d + heads * 2 * d * (size**2 + size), heads * 2 * (size**2 + size)
            case "learned":
                per_token, saved = 2 * d * heads, FLOAT * d if at.size < FLOAT else 0
        visible = filtering.share * (at.length + 1) / 2
        attended = blocks(at, FilteredAttention.loops(at), decoded=places, visible=visible)
        extra = at.per_token(per_token, saved) + Costs(prefill_flops=once, decode_flops=once)
        # Keys, values, what the filter adds to their scores, positions; and how many did not fit.
        cached = at.rows * (2 * places * at.kv_width * at.size + heads * (2 * FLOAT * places + FLOAT))
        return projections(at) + rotated(at) + attended + extra + Costs(cache_bytes=cached)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Heads are computed one after the other: a compiler counts one turn of one of them."""
        block = min(routed.BLOCK, at.length)
        scores = routed.loop(at.length, share=at.config.of(FilteredAttentionConfig).share)
        return (Loop(scores, block**2 / (at.rows * at.config.num_heads)),)

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """`neurons_kept`, the share of tokens that added a neuron to a head."""
        return shares(statistics, {"neurons_kept": ("neurons_added", "neurons_offered")})

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        query, key, value, here, log_gate = self._neurons(h, context)
        kept, start = jnp.isfinite(log_gate), context.shards.part(document_starts(context.segment_ids), RESOURCE)
        output, _ = routed.routed_attention(
            query,
            key,
            value,
            cluster=jnp.where(kept, 0, 1),  # what is kept is the one cluster, which all queries read
            read=jnp.zeros((*query.shape[:3], 1), jnp.int32),
            start=start,
            clusters=1,
            bias=jnp.where(kept, log_gate, 0),
            first=context.attending_from,
        )
        statistics = self._statistics(here, context) | self._loss(h, log_gate, context)
        return self.output(merge_heads(output)), statistics

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        """The attention weights of every token here, head by head, in whole squares."""
        query, key, _, _, log_gate = self._neurons(h, context)
        gates = jnp.repeat(log_gate, self.qkv.group, axis=2).swapaxes(1, 2)[:, :, None]
        visible = context.shards.part(self._visible(context), RESOURCE)[:, None] & jnp.isfinite(gates)
        return softmax_selected(head_scores(query, key) + gates, visible)

    def _neurons(self, h: Float[Array, "b L d"], context: Context) -> tuple[Array, ...]:
        """Queries of the tokens here; keys, values of all tokens of the row; what the filter adds, here and of all."""
        query, key, value = self._rotated(h, context)
        here = self.log_gate(h, value)
        key, value, log_gate = (context.shards.gather(x, RESOURCE) for x in (key, value, here))
        return query, key, value, here, log_gate

    def log_gate(self, h: Float[Array, "b L d"], value: Float[Array, "b L G k"]) -> Float[Array, "b L G"]:
        """What is added to the scores of every token's neuron in every head: -inf where it is left out.

        `message_norm` keeps a message that is at least the threshold times as long as a random input's would be;
        `learned` keeps what has at least so much certainty, whose logarithm carries the gradient (as eq 15 has it).
        """
        threshold = self.filtering.threshold
        match self.filtering.filter:
            case "none":
                return jnp.zeros(value.shape[:-1], jnp.float32)
            case "message_norm":
                return jnp.where(self._message_norm(value) >= threshold, 0.0, -jnp.inf)
            case "learned":
                logit = self._logit(h)
                return jnp.where(jax.nn.sigmoid(logit) >= threshold, jax.nn.log_sigmoid(logit), -jnp.inf)

    def empty_cache(self, rows: int, length: int) -> FilteredCache:
        """An empty cache for the neurons that heads are expected to keep of `length` tokens in every row."""
        places = self.filtering.places(length)
        neurons, none = empty_cache(self.config, rows, places), jnp.zeros(rows * self.config.kv_heads, jnp.int32)
        shape = none.size, places
        return FilteredCache(neurons, jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32), none)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: FilteredCache) -> FilteredCache:
        """The cache after a prompt."""
        _, key, value = self._rotated(h, context)
        return cache.fill(key, value, jnp.where(context.real[..., None], self.log_gate(h, value), -jnp.inf))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: FilteredCache
    ) -> tuple[Float[Array, "b 1 d"], FilteredCache]:
        """One more token in every row."""
        query, key, value = self._rotated(h, context)
        cache = cache.add(key, value, self.log_gate(h, value), context.positions)
        scores = cache.scores(query)
        return self.output(merge_heads(cache.neurons.mix(softmax_selected(scores, jnp.isfinite(scores))))), cache

    def _logit(self, h: Float[Array, "b L d"]) -> Float[Array, "b L G"]:
        return self.filter(h.astype(jnp.float32)) + self.filter_bias[...]

    def _message_norm(self, value: Float[Array, "b L G k"]) -> Float[Array, "b L G"]:
        """|x W^M_i| over |W^M_i|, W^M_i = W^V_i W^O_i: about 1 for random x of mean square 1. Of a group of heads, the
        norm of all their messages together."""
        count, size = value.shape[2:]
        # As they are multiplied elsewhere, whatever the type in which a mesh hands them out.
        kernels = (part.kernel[...].astype(value.dtype) for part in (self.qkv.value, self.output))
        value, value_map, output = (x.astype(jnp.float32) for x in (value, *kernels))
        value_map, output = split_heads(value_map, size), output.reshape(count, -1, size, self.config.d_model)
        gram = jnp.einsum("grkd,grld->gkl", output, output)
        square = jnp.einsum("blgk,gkm,blgm->blg", value, gram, value)
        usual = jnp.einsum("dgk,gkm,dgm->g", value_map, gram, value_map)
        return jax.lax.stop_gradient(jnp.sqrt(square / usual))

    def _statistics(self, log_gate: Float[Array, "b L G"], context: Context) -> Statistics:
        """Neurons that real tokens could have added to heads, and those that they did."""
        real = self._real(context)
        added = (jnp.isfinite(log_gate) & real).sum().astype(jnp.float32)
        offered = (real.sum() * log_gate.shape[-1]).astype(jnp.float32)
        return {"neurons_added": added, "neurons_offered": offered}

    def _loss(self, h: Float[Array, "b L d"], log_gate: Float[Array, "b S G"], context: Context) -> Statistics:
        """sum_i (share - target) logit_i over real tokens, a mean over heads; share is that which the head keeps of
        the row, without gradient.

        So all logits of a row fall while its head keeps too many, and rise while it keeps too few: which tokens are
        kept is left to the other losses. Shares are of rows, not of the batch: losses of micro-batches add up.
        """
        target = self.filtering.target
        if target is None:
            return {}
        real = context.segment_ids[..., None] > 0
        share = (jnp.isfinite(log_gate) & real).sum(1) / jnp.maximum(real.sum(1), 1)
        excess = jnp.where(self._real(context), (share - target)[:, None] * self._logit(h), 0)
        return {"filter_loss": excess.sum() / self.config.kv_heads}

    @staticmethod
    def _real(context: Context) -> Bool[Array, "b L 1"]:
        return context.shards.part(context.segment_ids, RESOURCE)[..., None] > 0
