"""What the AA-MoE layer costs in closed form (AA-37).

Model FLOPs leave the (token, resource) pairs out: those that were given come on top, by `extra_flops` (decision 35).
All other figures are of layers that spend their whole budget.

Pairs come in tiles, which are computed whole: the empty rows of tiles are left out.

Notation: d width, m keys per resource, l chunks per row, E experts, g pooled keys per resource, s bytes of an
activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from aamoe_jax.aamoe.budget import PREDICTOR_WIDTH
from aamoe_jax.aamoe.statistics import summarize
from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Mixer, Statistics
from aamoe_jax.mixers.convolution import convolution_costs
from aamoe_jax.mixers.costs import FLOAT, Costs, Number, Setting, projections, rotated, saved_norm, saved_rotation
from aamoe_jax.mixers.weighted_sum import WeightedSum

PAIRS = ("pairs_local", "pairs_context", "pairs_expert")
"""The statistics that count pairs."""


class AAMoECosts(Mixer):
    """What an AA-MoE layer costs, and what it is beside other mixers."""

    weighted_sums = (
        WeightedSum(
            "chunks of earlier tokens, and experts",
            "q . k / sqrt(k) + log P(i, j)",
            "the best that the budget buys",
            "softmax over the kept",
            "x W^V and experts' rows, then W^O",
        ),
    )

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Router, budget, the local window, and the pairs that the budget buys (decision 35; AA-37)."""
        config, d, s, given = at.config, at.width, at.size, attended(at)
        m, experts, chunks = config.aamoe.chunk_size, config.aamoe.num_experts, chunks_of_row(at)
        pooled = config.aamoe.router == "pooled"
        groups = config.aamoe.pooled_keys if pooled else 1
        scores = router_flops(config, chunks) + 2 * d  # and w_B
        if config.aamoe.budget.normalizer == "row":
            scores += 2 * PREDICTOR_WIDTH * (d + 1)
        keys = given.window_keys + given.pairs * m
        # Of a learned router h in float32, its query, and that rotated; of pooled keys themselves, their means and
        # lengths, queries and keys in float32, and of every head products and weights. Queries before rotation, keys
        # and values as resources, the sum in float32. Ten numbers for every slot: candidates, scores, log P and masks.
        maps = FLOAT * config.num_heads * (chunks + experts) * (groups + 3)
        scored = FLOAT * d * (3 + 2 * groups / m) + maps if pooled else 3 * FLOAT * d + saved_rotation(d)
        if config.aamoe.expert_router == "attention":
            scored += FLOAT * experts * (2 * experts + 5)
        if config.aamoe.expert_gate:
            scores += 2 * d * experts
            scored += FLOAT * (experts + 2 * given.slots)
        if config.aamoe.budget.load_price:
            scored += FLOAT * (3 * experts + 2 * given.slots)
        saved = scored + 3 * s * d + FLOAT * d + 10 * FLOAT * given.slots
        table = Costs(activation_bytes=experts * m * (saved_norm(config, d) + 2 * s * d))
        # Pages, the vectors that score each, and what the budget has spent; pooled keys of experts once for all rows.
        loads = experts if config.aamoe.budget.load_price else 0
        cached = at.rows * (chunks * (2 * m * d * s + FLOAT * groups * d) + (3 + loads) * FLOAT)
        cached += FLOAT * d * experts * groups if pooled else 0
        return (
            projections(at)
            + rotated(at)
            + at.per_token(scores + 4 * d * keys, saved, model_flops=scores)
            + table
            + Costs(cache_bytes=cached)
            + convolutions(at)
        )

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """What the layers spent, and on what: see `aamoe.statistics.summarize`."""
        return summarize(statistics) if "capacity" in statistics else {}

    @staticmethod
    def extra_flops(at: Setting, members: Sequence[type[Mixer]], statistics: Statistics) -> float:
        """The pairs that were given; none without statistics."""
        pairs = sum((float(np.sum(statistics[kind])) for kind in PAIRS if kind in statistics), 0.0)
        return pairs * flops_per_pair(at.config)

    @staticmethod
    def decode_bytes(at: Setting) -> Number:
        """W^Q, W^K, W^V, W^O, router and budget predictor; the scores read the vectors of every expert and chunk. The
        pairs that were given come on top (`bytes_per_pair`)."""
        layer, d = at.config.aamoe, at.width
        resources = layer.num_experts + chunks_of_row(at)
        if layer.expert_router == "attention":
            resources += 2 * layer.num_experts
        scored = d * layer.pooled_keys * resources if layer.router == "pooled" else d**2 + d * resources
        scored += d * layer.num_experts if layer.expert_gate else 0
        predictor = 4 * PREDICTOR_WIDTH * (d + 2) if layer.budget.normalizer == "row" else 0
        return FLOAT * (2 * d * (d + at.kv_width) + scored) + predictor


class KeysPerToken(NamedTuple):
    """What a token attends to at full budget."""

    window_keys: int
    """Keys that are computed for its window: two chunks, or two pages in decoding."""
    pairs: Number
    """Resources beside the window."""
    slots: int
    """Most of them that one token could be given."""


def attended(at: Setting) -> KeysPerToken:
    """At full budget: beta resources, the local one included; less where experts have a price above 1."""
    layer = at.config.aamoe
    resources = chunks_of_row(at) + layer.num_experts
    local = layer.local in ("window", "chunk")
    most = min(resources + local, layer.max_resources or resources + local)
    if layer.local != "window":
        return KeysPerToken(0, min(at.config.betas[0], most), most)
    return KeysPerToken(2 * layer.chunk_size, max(min(at.config.betas[0], most) - 1, 0), most - 1)


def chunks_of_row(at: Setting) -> int:
    """l."""
    return -(-at.length // at.config.aamoe.chunk_size)


def router_flops(config: ModelConfig, chunks: int) -> int:
    """Scores of E + l resources for one token, unavailable ones too: 2 d g (E + l) of g pooled keys of each;
    2 d^2 + 2 d (E + l + 1) of a learned router, W_c and the local resource included; 4 d E + 4 E^2 more where experts
    attend to each other."""
    layer, d = config.aamoe, config.d_model
    if layer.router == "pooled":
        return 2 * d * layer.pooled_keys * (layer.num_experts + chunks)
    among = 4 * layer.num_experts * (d + layer.num_experts) if layer.expert_router == "attention" else 0
    return 2 * d**2 + 2 * d * (layer.num_experts + chunks + 1) + among


def convolutions(at: Setting) -> Costs:
    """Those of keys and of the router, which look back at the same tokens of one cache."""
    layer, one = at.config.aamoe, convolution_costs(at)
    if not layer.looks_back:
        return Costs()
    both = layer.key_convolution and layer.router_input == "causal_conv"
    return one + (dataclasses.replace(one, cache_bytes=0) if both else Costs())


def flops_per_pair(config: ModelConfig) -> int:
    """Scores and values of one token against the m keys of one resource: 4 m d."""
    return 4 * config.aamoe.chunk_size * config.d_model


def bytes_per_pair(config: ModelConfig) -> int:
    """Keys and values of one resource: 2 m d s. Experts, which lie in float32, count as pages do."""
    return 2 * config.aamoe.chunk_size * config.d_model * jnp.dtype(config.dtype).itemsize
