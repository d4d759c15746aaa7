"""The ledger in `exact` mode: what this code does for one mixer in one layer, in closed form.

FLOPs are those of matrix products, two for a multiply-add: all of what is computed, also what a mask then hides (dense
attention computes whole squares, and in decoding all that its cache has room for). Norms, softmaxes, rotary turns,
sorting and sums are left out. Activation bytes are what the forward pass leaves for the backward pass, as automatic
differentiation chooses it without recomputation, parameters apart. Cache bytes are those of the arrays of
`empty_cache`.

AA-MoE spends its whole budget. Pairs come in tiles, which are computed whole: the empty rows of tiles are left out.

Notation: d width, k size of a head, H heads, L tokens per row, s bytes of an activation, m keys per resource,
E experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from aamoe_jax.aamoe.budget import PREDICTOR_WIDTH
from aamoe_jax.config import MixerName, ModelConfig
from aamoe_jax.mixers.convolution import TOKENS_BEFORE

Number = int | float

FLOAT = 4
"""Bytes of float32: norms, scores and softmax statistics whatever the type of activations."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one mixer in one layer."""

    prefill_flops: Number = 0
    """Forward pass over all rows."""
    decode_flops: Number = 0
    """One more token in every row, with caches that have room for a row."""
    activation_bytes: Number = 0
    cache_bytes: int = 0

    def __add__(self, other: Costs) -> Costs:
        """Both side by side."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Costs(*(one + two for one, two in pairs))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A config, and so many rows of so many tokens."""

    config: ModelConfig
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def chunks(self) -> int:
        """Of a row."""
        return -(-self.length // self.config.aamoe.chunk_size)

    @property
    def width(self) -> int:
        return self.config.d_model

    @property
    def kv_width(self) -> int:
        """Of all keys of a token, and of all its values."""
        return self.config.kv_heads * self.config.head_dim

    @property
    def size(self) -> int:
        """s."""
        return jnp.dtype(self.config.dtype).itemsize

    def per_token(self, flops: Number, saved: Number, cached: int = 0) -> Costs:
        """Of what every token costs alike, in a row or after it."""
        return Costs(self.tokens * flops, self.rows * flops, self.tokens * saved, self.tokens * cached)


Part = Callable[[Setting], Costs]


def saved_norm(config: ModelConfig, width: int) -> int:
    """Bytes of a QK-norm's backward pass: the vector twice, and normed, in float32."""
    return 3 * FLOAT * width if config.qk_norm == "rms" else 0


def saved_turn(width: int) -> int:
    """Cosines and sines of a rotary turn of vectors of this width."""
    return FLOAT * width


def projections(at: Setting) -> Costs:
    """W^Q, W^K, W^V and W^O; saved are normed queries and keys, and the heads that W^O takes."""
    config, d, kv = at.config, at.width, at.kv_width
    saved = saved_norm(config, d) + saved_norm(config, kv) + at.size * d
    return at.per_token(4 * d * (d + kv), saved)


def keys_and_values(at: Setting) -> Costs:
    """A cache of all tokens."""
    return Costs(cache_bytes=2 * at.tokens * at.kv_width * at.size)


def rotated(at: Setting) -> Costs:
    """Queries and keys, turned."""
    return at.per_token(0, at.size * (at.width + at.kv_width) + 2 * saved_turn(at.config.head_dim))


def squares(at: Setting, float_maps: int = 2) -> Costs:
    """Scores and weighted values over all tokens of a row, whatever a mask hides.

    Args:
      float_maps: maps in float32 that are saved, beside the mask and the weights as they are multiplied; such as
        exp(scores) and softmax.
    """
    maps = at.config.num_heads * at.length * (1 + FLOAT * float_maps + at.size)
    return at.per_token(4 * at.width * at.length, maps + at.size * at.kv_width)


def attention(at: Setting) -> Costs:
    """softmax(q K^T) V: a static selection is a mask too."""
    return projections(at) + rotated(at) + squares(at) + keys_and_values(at)


def square_root_attention(at: Setting) -> Costs:
    """Of scores nothing is kept but the weights that they become."""
    return projections(at) + rotated(at) + squares(at, float_maps=1) + keys_and_values(at)


def gated_attention(at: Setting) -> Costs:
    """A gate beside every key: projected, normed, turned, scored, cached."""
    config, d, kv = at.config, at.width, at.kv_width
    saved = saved_norm(config, kv) + at.size * kv + saved_turn(config.head_dim)
    gates = at.per_token(2 * d * kv + 2 * d * at.length, saved, kv * at.size)
    return projections(at) + rotated(at) + squares(at, float_maps=6) + gates + keys_and_values(at)


def filtered_attention(at: Setting) -> Costs:
    """Whole squares in a row; in decoding the room that the filter's cache has."""
    config, d, heads, size = at.config, at.width, at.config.kv_heads, at.config.head_dim
    room = max(1, math.ceil(config.attention.filter_room * at.length))
    once = per_token = saved = 0
    match config.attention.filter:
        case "message_norm":  # both maps of every head, once; and one number per token
            once, per_token = 2 * d * size * d + heads * 2 * d * (size**2 + size), heads * 2 * (size**2 + size)
        case "learned":
            per_token, saved = 2 * d * heads, FLOAT * d if at.size < FLOAT else 0
    squared = squares(at)
    short = dataclasses.replace(squared, decode_flops=at.rows * 4 * d * room)
    filtering = at.per_token(per_token, saved) + Costs(prefill_flops=once, decode_flops=once)
    # Keys, values, what the filter adds to their scores; how many there are, and for how many there was no room.
    cached = at.rows * (2 * room * at.kv_width * at.size + heads * (FLOAT * room + 2 * FLOAT))
    return projections(at) + rotated(at) + short + filtering + Costs(cache_bytes=cached)


def clustered_attention(at: Setting) -> Costs:
    """Queries and keys meet every centroid; other clusters are masked."""
    routing = at.per_token(2 * at.config.attention.clusters * (at.width + at.kv_width), 0, FLOAT * at.config.kv_heads)
    return attention(at) + routing


def mlp(at: Setting) -> Costs:
    """Four d x d maps: three hidden vectors with what SiLU keeps, and the input of W^O."""
    return at.per_token(8 * at.width**2, 7 * at.size * at.width)


def approximate(at: Setting) -> Costs:
    """In its parallel form the scores of squares on top; in its recurrent form two k x k sums per head."""
    d, kv, size = at.width, at.kv_width, at.config.head_dim
    # Queries and keys in float32, as they are, doubled and squared.
    row = at.per_token(6 * d * at.length, 3 * FLOAT * (d + kv) + at.size * kv)
    maps = at.tokens * at.config.num_heads * at.length * (1 + 2 * FLOAT + at.size)
    step = at.rows * (4 * kv * size + 4 * d * size)
    sums = at.rows * FLOAT * (3 * kv + 2 * kv * size)
    parallel = dataclasses.replace(row, decode_flops=step, activation_bytes=row.activation_bytes + maps)
    return projections(at) + parallel + Costs(cache_bytes=sums)


def non_approximate(at: Setting) -> Costs:
    """Beyond the projections nothing but elementwise work."""
    d, heads = at.width, at.config.num_heads
    return (
        projections(at)
        + at.per_token(0, 4 * FLOAT * d + 2 * at.size * d)
        + Costs(cache_bytes=at.rows * FLOAT * (d + 2 * heads))
    )


def fixed_map(at: Setting) -> Costs:
    """The map of one row for all; values and W^O of every row. Decoding reads its row of the map."""
    config, d, kv, length, s = at.config, at.width, at.kv_width, at.length, at.size
    of_rows = at.per_token(2 * d * (kv + d) + 2 * d * length, s * (d + kv), s * kv)
    masked = at.tokens * config.num_heads * length * (1 + 2 * FLOAT + s)
    queries_and_keys = length * (saved_norm(config, d) + saved_norm(config, kv) + s * (2 * d + kv))
    return of_rows + Costs(
        prefill_flops=length * 2 * d * (d + kv) + 2 * d * length**2,
        activation_bytes=masked + queries_and_keys + length * 2 * saved_turn(config.head_dim),
        cache_bytes=config.num_heads * length**2 * s,
    )


def static_map(at: Setting) -> Costs:
    """Attention whose queries and keys are made of embeddings, which are saved beside the input."""
    return attention(at) + at.per_token(0, at.size * at.width)


def feed_forward(at: Setting) -> Costs:
    """Two matrices; which units are on, and both sides of the choice."""
    n = at.config.ff_width
    return at.per_token(4 * at.width * n, n * (1 + 2 * at.size))


def swiglu(at: Setting) -> Costs:
    """Three matrices; gate, key, their product, and what SiLU keeps."""
    n = at.config.swiglu_width
    return at.per_token(6 * at.width * n, 6 * at.size * n)


def experts(at: Setting, chosen: int) -> Costs:
    """A router, and so many experts per token, in blocks of tokens that are full; hidden units are computed again."""
    config, d, count = at.config, at.width, at.config.moe.num_experts
    router = 2 * d * count if config.moe.router == "linear" else 6 * d * count + 4 * count**2
    saved = FLOAT * d + count * (3 * FLOAT + 2)  # the router's input; scores, coefficients, choices
    if config.moe.router == "attention":
        saved += FLOAT * count * (2 * count + 5)
    looks_back = convolution(at) if config.moe.router_input == "causal_conv" else Costs()
    return at.per_token(router + 4 * chosen * d * config.expert_width, saved) + looks_back


def convolution(at: Setting) -> Costs:
    """A few tokens before, of which a cache keeps as many."""
    saved = TOKENS_BEFORE * (2 * FLOAT + 1) * at.width  # every one, weighted, and whether it is of the document
    return at.per_token(0, saved) + Costs(cache_bytes=at.rows * TOKENS_BEFORE * at.width * at.size)


def top_k_experts(at: Setting) -> Costs:
    """`relu_moe` has as many as its sparsity loss aims at."""
    return experts(at, at.config.moe.top_k)


def switch(at: Setting) -> Costs:
    """One expert per token, all of them with room; in decoding, how many were taken."""
    return experts(at, 1) + Costs(cache_bytes=at.rows * at.config.moe.num_experts * FLOAT)


def all_attention(at: Setting) -> Costs:
    """Attention over tokens and memory under one softmax."""
    config, d, n, s = at.config, at.width, at.config.ff_width, at.size
    # Of tokens mask, scores and weights; of both float32 weights; of the memory weights again.
    maps = config.num_heads * (at.length * (1 + FLOAT + s) + (at.length + n) * FLOAT + n * s)
    both = at.per_token(4 * d * (at.length + n), maps + s * (at.kv_width + d))
    memory = Costs(activation_bytes=n * (saved_norm(config, d) + 2 * s * d))
    return projections(at) + rotated(at) + both + memory + keys_and_values(at)


class Attended(NamedTuple):
    """What a token of an AA-MoE layer attends to at full budget."""

    window_keys: int
    """Keys that are computed for its window: two chunks, or two pages in decoding."""
    pairs: Number
    """Resources beside the window."""
    slots: int
    """Most of them that one token could be given."""


def attended(at: Setting) -> Attended:
    """At full budget: beta resources, the local one included; less where experts have a price above 1."""
    layer = at.config.aamoe
    resources = at.chunks + layer.num_experts
    local = layer.local in ("window", "chunk")
    most = min(resources + local, layer.max_resources or resources + local)
    if layer.local != "window":
        return Attended(0, min(at.config.betas[0], most), most)
    return Attended(2 * layer.chunk_size, max(min(at.config.betas[0], most) - 1, 0), most - 1)


def aamoe(at: Setting) -> Costs:
    """Router, budget, the local window, and the pairs that the budget buys (decision 35; AA-37)."""
    config, d, s, given = at.config, at.width, at.size, attended(at)
    m, experts = config.aamoe.chunk_size, config.aamoe.num_experts
    pooled = config.aamoe.router == "pooled"
    groups = config.aamoe.pooled_keys if pooled else 1
    # The scores of all resources, w_B; W_c and the score of the own neighbourhood; and keys.
    router = 2 * d * groups * (at.chunks + experts) + 2 * d
    if not pooled:
        router += 2 * d**2 + 2 * d
    if config.aamoe.budget.normalizer == "row":
        router += 2 * PREDICTOR_WIDTH * (d + 1)
    keys = given.window_keys + given.pairs * m
    # Of a learned router h in float32, its query, and that turned; of pooled keys themselves, their means and lengths,
    # queries and keys in float32, and of every head products and weights. Queries un-rotated, keys and values as
    # resources, the sum in float32. Ten numbers for every slot: choices, scores, log P and their masks.
    maps = FLOAT * config.num_heads * (at.chunks + experts) * (groups + 3)
    scored = FLOAT * d * (3 + 2 * groups / m) + maps if pooled else 3 * FLOAT * d + saved_turn(d)
    saved = scored + 3 * s * d + FLOAT * d + 10 * FLOAT * given.slots
    table = Costs(activation_bytes=experts * m * (saved_norm(config, d) + 2 * s * d))
    # Pages, the vectors that each is scored by, and what the budget counts; pooled keys of experts once for all rows.
    cached = at.rows * (at.chunks * (2 * m * d * s + FLOAT * groups * d) + 3 * FLOAT)
    cached += FLOAT * d * experts * groups if pooled else 0
    return (
        projections(at)
        + rotated(at)
        + at.per_token(router + 4 * d * keys, saved)
        + table
        + Costs(cache_bytes=cached)
        + (convolution(at) if config.aamoe.key_convolution else Costs())
    )


def mixture_of_depths(at: Setting) -> Costs:
    """A parallel layer over the share of the tokens that goes through: under causal budgets that could be all of them,
    and in decoding every token is computed, and most are dropped."""
    config, d, hidden = at.config, at.width, PREDICTOR_WIDTH
    room = max(1, math.ceil(config.depth_capacity * at.length))
    through = dataclasses.replace(at, length=room if config.aamoe.budget.normalizer == "row" else at.length)
    inside, after = attention(through) + feed_forward(through), attention(at) + feed_forward(at)
    # What goes in and comes out of it, and h in float32 for router and predictor.
    taken = Costs(activation_bytes=through.tokens * at.size * d) + at.per_token(0, 2 * FLOAT * d + FLOAT * hidden)
    layer = dataclasses.replace(
        inside, decode_flops=after.decode_flops, cache_bytes=after.cache_bytes + at.rows * FLOAT
    )
    return layer + taken + at.per_token(2 * d + 2 * d * hidden + 2 * hidden, 0)


EXACT: dict[MixerName, tuple[Part, ...]] = {
    "aamoe": (aamoe,),
    "mixture_of_depths": (mixture_of_depths,),
    "parallel": (attention, feed_forward),
    "all_attention": (all_attention,),
    "attention": (attention,),
    "local_attention": (attention,),
    "strided_attention": (attention,),
    "sink_attention": (attention,),
    "sqrt_attention": (square_root_attention,),
    "gated_attention": (gated_attention,),
    "filtered_attention": (filtered_attention,),
    "clustered_attention": (clustered_attention,),
    "mlp": (mlp,),
    "approximate": (approximate,),
    "non_approximate": (non_approximate,),
    "random_qk": (fixed_map,),
    "fixed_qk": (fixed_map,),
    "static_qk": (static_map,),
    "feed_forward": (feed_forward,),
    "swiglu": (swiglu,),
    "moe": (top_k_experts,),
    "switch": (switch,),
    "relu_moe": (top_k_experts,),
}
"""The parts of every mixer."""


def exact(name: MixerName, config: ModelConfig, rows: int, length: int) -> Costs:
    """What the mixer costs for rows of that many tokens.

    Raises:
      KeyError: for a mixer that has no row.
    """
    at = Setting(config, rows, length)
    # Parts that stand side by side have their input in common.
    shared = at.per_token(0, at.size * at.width)
    return sum((part(at) for part in EXACT[name]), shared)
