"""Heads as networks that every token adds a neuron to: other activations, and neurons that are left out.

A token's key holds a neuron's input weights, its value the output weights, and softmax is what normalises activations
(McCormick, Patterns and Messages, part 4). Here the sum is divided by the root of the number of neurons instead
(PM-13), neurons have gates (PM-12), or tokens that have little to say add none (PM-10).

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
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ModelConfig, refuse, require_choice
from aamoe_jax.layers import Projection, apply_rotary, merge_heads, split_heads
from aamoe_jax.mixers.attention import WeightedAttention
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.cache import KeyValueCache, empty_cache, flat_heads
from aamoe_jax.mixers.costs import (
    FLOAT,
    Costs,
    Setting,
    key_value_cache,
    projections,
    rotated,
    saved_norm,
    saved_rotation,
    squares,
)
from aamoe_jax.mixers.statistics import shares
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores, root_normalized, softmax_selected
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE

KEPT_AT_START = 2.0
"""The logit of the learned filter before training: 0.88 of certainty, so that most tokens are kept and learn."""


@register("sqrt_attention", "scores over the root of their number in place of a softmax", heads="root")
class SquareRootAttention(WeightedAttention):
    """(q K^T / sqrt(k)) V / sqrt(n) over the n tokens so far, and W^O over all heads (PM-13).

    The root keeps the size of a sum of independent terms; what tokens have in common still grows with sqrt(n).
    """

    weighted_sums = (WeightedSum("earlier tokens", "q . k / sqrt(k)", "all", "scores / sqrt(n)", "x W^V, then W^O"),)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Of scores nothing is kept but the weights that they become."""
        return projections(at) + rotated(at) + squares(at, float_maps=1) + key_value_cache(at)

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        query, key, value = self._rotated(h, context)
        key, value = (context.shards.gather(x, RESOURCE) for x in (key, value))
        seen = context.shards.part(self._visible(context), RESOURCE)[:, None]
        return root_normalized(head_scores(query, key), seen), value, {}

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: KeyValueCache
    ) -> tuple[Float[Array, "b 1 d"], KeyValueCache]:
        query, key, value = self._rotated(h, context)
        cache = cache.write(context.positions, key, value)
        scores = cache.scores(query, context.positions)
        return self.output(merge_heads(cache.mix(root_normalized(scores, jnp.isfinite(scores))))), cache


class GatedCache(NamedTuple):
    """Keys and values, and the gate of every key."""

    neurons: KeyValueCache
    gate: Float[Array, "B N k"]

    def write(
        self,
        positions: Int[Array, "b 1"],
        key: Float[Array, "b 1 G k"],
        gate: Float[Array, "b 1 G k"],
        value: Float[Array, "b 1 G k"],
    ) -> GatedCache:
        """With one more token in every row, at its own position."""
        row, place = jnp.arange(self.gate.shape[0]), jnp.repeat(positions[:, 0], gate.shape[2])
        written = self.gate.at[row, place].set(flat_heads(gate)[:, 0])
        return GatedCache(self.neurons.write(positions, key, value), written)


@register("gated_attention", "SwiGLU whose neurons are the earlier tokens", heads="gated_root")
class GatedAttention(WeightedAttention):
    """silu(q . g) (q . k) v, summed over the n tokens so far and divided by sqrt(n): SwiGLU whose neurons are tokens.

    Gates g are a second projection of tokens, normed and rotated like keys; both scores are over sqrt(k) (PM-12).
    """

    weighted_sums = (
        WeightedSum("earlier tokens", "q . k and q . g", "all", "silu(q . g) (q . k) / sqrt(n)", "x W^V, then W^O"),
    )

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.gate = Projection(config.d_model, config.kv_heads * config.head_dim, axes=("storage", "heads"), rngs=rngs)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """A gate beside every key: projected, normed, rotated, scored, cached."""
        config, d, kv = at.config, at.width, at.kv_width
        saved = saved_norm(config, kv) + at.size * kv + saved_rotation(config.head_dim)
        model = 2 * d * kv + d * (at.length + 1)
        gates = at.per_token(2 * d * kv + 2 * d * at.length, saved, kv * at.size, model_flops=model)
        return projections(at) + rotated(at) + squares(at, float_maps=6) + gates + key_value_cache(at)

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        query, key, gate, value = self._gated(h, context)
        key, gate, value = (context.shards.gather(x, RESOURCE) for x in (key, gate, value))
        seen = context.shards.part(self._visible(context), RESOURCE)[:, None]
        activations = jax.nn.silu(head_scores(query, gate)) * head_scores(query, key)
        return root_normalized(activations, seen), value, {}

    def empty_cache(self, rows: int, length: int) -> GatedCache:
        neurons = empty_cache(self.config, rows, length)
        return GatedCache(neurons, jnp.zeros_like(neurons.key))

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: GatedCache) -> GatedCache:
        """The cache after a prompt."""
        _, key, gate, value = self._gated(h, context)
        return GatedCache(cache.neurons.fill(key, value), cache.gate.at[:, : h.shape[1]].set(flat_heads(gate)))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: GatedCache
    ) -> tuple[Float[Array, "b 1 d"], GatedCache]:
        """One more token in every row."""
        query, key, gate, value = self._gated(h, context)
        cache = cache.write(context.positions, key, gate, value)
        scores = cache.neurons.scores(query, context.positions)
        gates = cache.neurons._replace(key=cache.gate).scores(query, context.positions)
        weights = root_normalized(jax.nn.silu(gates) * scores, jnp.isfinite(scores))
        return self.output(merge_heads(cache.neurons.mix(weights))), cache

    def _gated(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L G k"], Float[Array, "b L G k"], Float[Array, "b L G k"]]:
        """Queries, keys, gates, values."""
        query, key, value = self._rotated(h, context)
        rotary = context.rotary(self.config).attending
        gate = apply_rotary(self.qkv.norm_key(split_heads(self.gate(h), self.config.head_dim)), rotary)
        return query, key, gate, value


class FilteredCache(NamedTuple):
    """The neurons that a filter let through, one after the other whatever their places in the text."""

    neurons: KeyValueCache
    """Keys and values of those added, at the front."""
    log_gate: Float[Array, "B N"]
    """What the filter adds to their scores; -inf where there is none."""
    count: Int[Array, "B"]  # type: ignore[assignment]  # nothing counts the entries of this tuple
    overflow: Int[Array, "B"]
    """Neurons that did not fit."""

    def add(
        self, key: Float[Array, "b L G k"], value: Float[Array, "b L G k"], log_gate: Float[Array, "b L G"]
    ) -> FilteredCache:
        """With those of L more tokens that have a gate above -inf."""
        capacity = self.log_gate.shape[1]
        gate = log_gate.swapaxes(1, 2).reshape(-1, log_gate.shape[1])
        added = jnp.isfinite(gate)
        # Past the end is nowhere: `mode="drop"`.
        place = jnp.where(added, self.count[:, None] + jnp.cumsum(added, axis=1) - 1, capacity)
        row, size = jnp.arange(gate.shape[0])[:, None], jnp.arange(value.shape[-1])[:, None]
        wanted = self.count + added.sum(1)
        return FilteredCache(
            KeyValueCache(
                self.neurons.key.at[row, place].set(flat_heads(key), mode="drop"),
                self.neurons.value.at[row[:, None], size, place[:, None]].set(
                    flat_heads(value).swapaxes(1, 2), mode="drop"
                ),
            ),
            self.log_gate.at[row, place].set(gate, mode="drop"),
            jnp.minimum(wanted, capacity),
            self.overflow + jnp.maximum(wanted - capacity, 0),
        )

    def scores(self, query: Float[Array, "b 1 H k"]) -> Float[Array, "b H N"]:
        """q . k / sqrt(k), and what the filter adds; -inf where there is no neuron."""
        rows, _, heads, _ = query.shape
        capacity = self.log_gate.shape[1]
        scores = self.neurons.scores(query, jnp.full((rows, 1), capacity))
        grouped = scores.reshape(self.log_gate.shape[0], -1, capacity) + self.log_gate[:, None]
        return grouped.reshape(rows, heads, capacity)


@dataclasses.dataclass(frozen=True)
class FilteredAttentionConfig:
    """Which tokens `filtered_attention` keeps (PM-10)."""

    filter: Literal["none", "message_norm", "learned"] = "learned"
    """Which tokens add a key and value to a head. All; those whose message, value times W^O, is long enough; those of
    which a learned logit is certain enough."""
    threshold: float = 0.5
    """The least certainty (`learned`), or length as a multiple of a random input's (`message_norm`). 0 keeps all."""
    capacity: float = 1.0
    """Keys that fit into the cache of a head while decoding, as a fraction of all. What does not fit is counted, and
    the row has no further output."""

    def __post_init__(self) -> None:
        require_choice(self, "filter", ("none", "message_norm", "learned"))
        if not (self.threshold >= 0 and math.isfinite(self.threshold)):
            refuse(self, "threshold", "must be a number of at least 0")
        if not 0 < self.capacity <= 1:
            refuse(self, "capacity", "must be in (0, 1]")


@register(
    "filtered_attention",
    "attention to the tokens that a filter keeps",
    heads="softmax",
    config=FilteredAttentionConfig,
)
class FilteredAttention(WeightedAttention):
    """Softmax attention in which a token adds its neuron to a head only where its message is worth it (PM-10).

    What is kept depends on the token alone, so later tokens change nothing. A head without any neuron gives 0. Heads
    that have keys and values in common have their neurons in common too. While decoding, a cache of `capacity` times
    the usual size holds the kept neurons alone; what does not fit is counted, and the row's outputs are NaN after it.
    """

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
        """Whole squares in a row, since what the filter leaves out is masked; in decoding the capacity of its cache.

        The filter takes 2 d, or 2 k^2 + 2 k, a head and token.
        """
        config, d, heads, size = at.config, at.width, at.config.kv_heads, at.config.head_dim
        filtering = config.of(FilteredAttentionConfig)
        capacity = max(1, math.ceil(filtering.capacity * at.length))
        once = per_token = saved = 0
        match filtering.filter:
            case "message_norm":  # both maps of every head, once; and one number per token
                once, per_token = 2 * d * size * d + heads * 2 * d * (size**2 + size), heads * 2 * (size**2 + size)
            case "learned":
                per_token, saved = 2 * d * heads, FLOAT * d if at.size < FLOAT else 0
        short = dataclasses.replace(squares(at), decode_flops=at.rows * 4 * d * capacity)
        extra = at.per_token(per_token, saved) + Costs(prefill_flops=once, decode_flops=once)
        # Keys, values, what the filter adds to their scores; how many there are, and how many did not fit.
        cached = at.rows * (2 * capacity * at.kv_width * at.size + heads * (FLOAT * capacity + 2 * FLOAT))
        return projections(at) + rotated(at) + short + extra + Costs(cache_bytes=cached)

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """`neurons_kept`, the share of tokens that added a neuron to a head."""
        return shares(statistics, {"neurons_kept": ("neurons_added", "neurons_offered")})

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        shards = context.shards
        query, key, value = self._rotated(h, context)
        log_gate = self.log_gate(h, value)
        statistics = self._statistics(log_gate, context)
        key, value, log_gate = (shards.gather(x, RESOURCE) for x in (key, value, log_gate))
        gates = jnp.repeat(log_gate, self.qkv.group, axis=2).swapaxes(1, 2)[:, :, None]
        visible = shards.part(self._visible(context), RESOURCE)[:, None] & jnp.isfinite(gates)
        return softmax_selected(head_scores(query, key) + gates, visible), value, statistics

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
                logit = self.filter(h.astype(jnp.float32)) + self.filter_bias[...]
                return jnp.where(jax.nn.sigmoid(logit) >= threshold, jax.nn.log_sigmoid(logit), -jnp.inf)

    def empty_cache(self, rows: int, length: int) -> FilteredCache:
        """An empty cache for the neurons that heads are expected to keep of `length` tokens in every row."""
        capacity = max(1, math.ceil(self.filtering.capacity * length))
        none = jnp.zeros(rows * self.config.kv_heads, jnp.int32)
        return FilteredCache(
            empty_cache(self.config, rows, capacity), jnp.full((none.size, capacity), -jnp.inf), none, none
        )

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: FilteredCache) -> FilteredCache:
        """The cache after a prompt."""
        _, key, value = self._rotated(h, context)
        log_gate = jnp.where(context.real[..., None], self.log_gate(h, value), -jnp.inf)
        return cache.add(key, value, log_gate)

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: FilteredCache
    ) -> tuple[Float[Array, "b 1 d"], FilteredCache]:
        """One more token in every row."""
        query, key, value = self._rotated(h, context)
        cache = cache.add(key, value, self.log_gate(h, value))
        scores = cache.scores(query)
        output = self.output(merge_heads(cache.neurons.mix(softmax_selected(scores, jnp.isfinite(scores)))))
        lost = cache.overflow.reshape(h.shape[0], -1).any(-1)
        return jnp.where(lost[:, None, None], jnp.nan, output), cache

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
        real = context.shards.part(context.segment_ids, RESOURCE)[..., None] > 0
        added = (jnp.isfinite(log_gate) & real).sum().astype(jnp.float32)
        offered = (real.sum() * log_gate.shape[-1]).astype(jnp.float32)
        return {"neurons_added": added, "neurons_offered": offered}
