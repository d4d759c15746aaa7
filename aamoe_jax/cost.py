"""FLOPs in closed form: what every mixer must do per token, and what AA-MoE layers really spent.

A multiply-add is two FLOPs. Counted: all projections, router scores, budgets, and the (token, resource) pairs that
were given, not the pairs that the budget allowed (decision 35). A pair counts all its m keys,
a token of a dense layer (L + 1) / 2, whatever documents and prefixes hide. Norms, softmaxes and rotary turns are left
out, as is the custom of the field.

Notation: d width, m keys per resource, l chunks per row, E experts, n hidden width, L tokens per row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from aamoe_jax.aamoe.budget import PREDICTOR_WIDTH
from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Statistics
from aamoe_jax.mixers.convolution import TOKENS_BEFORE

# Peak dense bfloat16 FLOP/s of one device as JAX counts devices (vendors' data sheets).
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def router_flops_per_token(config: ModelConfig, chunks: int) -> int:
    """Scores of E + l resources: 2 d^2 + 2 d (E + l + 1) of a learned router, 2 d g (E + l) of g pooled keys of each.

    Args:
      chunks: l; what a token may not choose yet is scored, too.
    """
    layer, d = config.aamoe, config.d_model
    if layer.router == "pooled":
        return 2 * d * layer.pooled_keys * (layer.num_experts + chunks)
    return 2 * d**2 + 2 * d * (layer.num_experts + chunks + 1)


def aamoe_flops_per_token(config: ModelConfig, length: int) -> int:
    """Projections 4 d (d + d_kv), router, budget 2 d, predictor; the pairs come on top."""
    layer, d = config.aamoe, config.d_model
    chunks = -(-length // layer.chunk_size)
    flops = 4 * d * (d + config.kv_heads * config.head_dim) + router_flops_per_token(config, chunks) + 2 * d
    if layer.budget.normalizer == "row":
        flops += 2 * PREDICTOR_WIDTH * (d + 1)
    return flops


def flops_per_pair(config: ModelConfig) -> int:
    """Scores and values of one token against the m keys of one resource: 4 m d."""
    return 4 * config.aamoe.chunk_size * config.d_model


def parallel_flops_per_token(config: ModelConfig, length: int) -> int:
    """Attention, and a feed-forward of 4 d n."""
    return attention_flops_per_token(config, length) + 4 * config.d_model * config.ff_width


def attention_flops_per_token(config: ModelConfig, length: int) -> int:
    """Projections 4 d (d + d_kv), attention 4 d per visible key, (L + 1) / 2 of them on average."""
    projections = 4 * config.d_model * (config.d_model + config.kv_heads * config.head_dim)
    return projections + 2 * config.d_model * (length + 1)


def gated_attention_flops_per_token(config: ModelConfig, length: int) -> int:
    """Attention, the projection of gates 2 d d_kv, and a second score of every visible key."""
    gates = 2 * config.d_model * config.kv_heads * config.head_dim
    return attention_flops_per_token(config, length) + gates + config.d_model * (length + 1)


def filtered_attention_flops_per_token(config: ModelConfig, length: int) -> int:
    """Attention to all keys, since what a filter leaves out is masked, and the filter: 2 d or 2 k^2 + 2 k a head."""
    size = config.head_dim
    per_head = {"none": 0, "message_norm": 2 * size**2 + 2 * size, "learned": 2 * config.d_model}
    return attention_flops_per_token(config, length) + config.kv_heads * per_head[config.attention.filter]


def clustered_attention_flops_per_token(config: ModelConfig, length: int) -> int:
    """Attention to all keys, since those of other clusters are masked; key and query meet every centroid."""
    widths = config.d_model + config.kv_heads * config.head_dim
    return attention_flops_per_token(config, length) + 2 * config.attention.clusters * widths


def approximate_flops_per_token(config: ModelConfig, length: int) -> int:
    """Attention in its parallel form, and the scores of squares: 2 d per visible key."""
    return attention_flops_per_token(config, length) + config.d_model * (length + 1)


def non_approximate_flops_per_token(config: ModelConfig, length: int) -> int:
    """Projections 4 d (d + d_kv), logits 2 d, and the running sum 2 d."""
    return 4 * config.d_model * (config.d_model + config.kv_heads * config.head_dim) + 4 * config.d_model


MIXTURES = ("moe", "switch", "relu_moe")


def experts_per_token(config: ModelConfig, name: str) -> int:
    """Experts that a token is meant to have in a mixture: all find room, and ReLU's sparsity loss has its way."""
    return 1 if name == "switch" else config.moe.top_k


def flops_per_expert(config: ModelConfig) -> int:
    """One expert of width w for one token: 4 d w."""
    return 4 * config.d_model * config.expert_width


def experts_flops_per_token(config: ModelConfig, name: str) -> int:
    """Scores of all E experts, 2 d E or 6 d E + 4 E^2 (and 6 d for a convolution), and the experts that are meant."""
    d, count = config.d_model, config.moe.num_experts
    scores = 2 * d * count if config.moe.router == "linear" else 6 * d * count + 4 * count**2
    if config.moe.router_input == "causal_conv":
        scores += 2 * d * TOKENS_BEFORE
    return scores + experts_per_token(config, name) * flops_per_expert(config)


def mixture_of_depths_flops_per_token(config: ModelConfig, length: int) -> int:
    """Router and predictor for all tokens, and the layer for those that are meant to go through."""
    width = PREDICTOR_WIDTH
    return round(through_flops(config, length, config.depth_capacity)) + 2 * config.d_model * (width + 1) + 2 * width


def through_flops(config: ModelConfig, length: int, share: float) -> float:
    """Per token of the row: the parallel layer for a share of its tokens, among themselves."""
    return share * parallel_flops_per_token(config, math.ceil(share * length))


MIXER_FLOPS: dict[str, Callable[[ModelConfig, int], int]] = {
    "aamoe": aamoe_flops_per_token,
    "mixture_of_depths": mixture_of_depths_flops_per_token,
    "parallel": parallel_flops_per_token,
    # The n persistent vectors cost what the feed-forward of width n does.
    "all_attention": parallel_flops_per_token,
    "attention": attention_flops_per_token,
    "local_attention": attention_flops_per_token,
    "strided_attention": attention_flops_per_token,
    "sink_attention": attention_flops_per_token,
    "sqrt_attention": attention_flops_per_token,
    "gated_attention": gated_attention_flops_per_token,
    "filtered_attention": filtered_attention_flops_per_token,
    "clustered_attention": clustered_attention_flops_per_token,
    "mlp": lambda config, length: 8 * config.d_model**2,
    "approximate": approximate_flops_per_token,
    "non_approximate": non_approximate_flops_per_token,
    # With the map in its row's mask; what the fixed sequence costs is that of one more row.
    "random_qk": attention_flops_per_token,
    "fixed_qk": attention_flops_per_token,
    "static_qk": attention_flops_per_token,
    "feed_forward": lambda config, length: 4 * config.d_model * config.ff_width,
    "swiglu": lambda config, length: 6 * config.d_model * config.swiglu_width,
    "moe": lambda config, length: experts_flops_per_token(config, "moe"),
    "switch": lambda config, length: experts_flops_per_token(config, "switch"),
    "relu_moe": lambda config, length: experts_flops_per_token(config, "relu_moe"),
}


def forward_flops(config: ModelConfig, rows: int, length: int, statistics: Statistics) -> float:
    """FLOPs of one forward pass over rows x length tokens.

    Args:
      statistics: what `LanguageModel` returned for them: pairs really given, experts that really computed, tokens that
        really went through. Without them no pairs are counted, and of the others what is meant.
    """
    mixers = sum(MIXER_FLOPS[name](config, length) for _, name in config.mixers)
    per_token = mixers * config.periods + 2 * config.d_model * config.vocab_size
    kinds = ("pairs_local", "pairs_context", "pairs_expert")
    pairs = sum((float(np.sum(statistics[kind])) for kind in kinds if kind in statistics), 0.0)
    flops = rows * length * per_token + pairs * flops_per_pair(config)
    if "moe_load" in statistics:
        meant = config.periods * sum(experts_per_token(config, name) for _, name in config.mixers if name in MIXTURES)
        flops += (float(np.sum(statistics["moe_load"])) - rows * length * meant) * flops_per_expert(config)
    if "depth_tokens" in statistics:
        meant = through_flops(config, length, config.depth_capacity)
        shares = np.asarray(statistics["depth_through"]) / np.maximum(np.asarray(statistics["depth_tokens"]), 1)
        flops += rows * length * sum(through_flops(config, length, float(share)) - meant for share in shares)
    return flops


def training_flops(config: ModelConfig, rows: int, length: int, statistics: Statistics) -> float:
    """FLOPs of one step: the backward pass costs twice the forward. What `remat` computes again is not counted."""
    return 3 * forward_flops(config, rows, length, statistics)


def decode_bytes(config: ModelConfig, context: int, pairs: float) -> float:
    """Bytes that one more token of one row must touch at a context of that many tokens: parameters (float32), what is
    read of the caches, and the pairs that were given.

    Args:
      pairs: resources given to the token by all AA-MoE layers together, local ones included.

    Raises:
      KeyError: for a stack of other mixers than `aamoe` and `parallel`.
    """
    d, layer, size = config.d_model, config.aamoe, jnp.dtype(config.dtype).itemsize
    kv = config.kv_heads * config.head_dim
    dense = 4 * (2 * d * (d + kv) + 2 * d * config.ff_width) + 2 * size * kv * context
    # W^Q, W^K, W^V, W^O, W_c; the scores read the vectors of every expert and every chunk.
    resources = layer.num_experts + -(-context // layer.chunk_size)
    scored = d * layer.pooled_keys * resources if layer.router == "pooled" else d**2 + d * resources
    aamoe = 4 * (2 * d * (d + kv) + scored)
    if layer.budget.normalizer == "row":
        aamoe += 4 * PREDICTOR_WIDTH * (d + 2)
    rows = {"aamoe": aamoe, "parallel": dense}
    mixers = sum(rows[name] for _, name in config.mixers)
    # Pages are in the model's type, experts in float32: taken as pages here.
    per_pair = 2 * layer.chunk_size * d * size
    return mixers * config.periods + pairs * per_pair + 4 * d * (config.vocab_size + 1)


def peak_flops(device: jax.Device) -> float | None:
    """Peak bfloat16 FLOP/s of the device, or None where no data sheet says."""
    return PEAK_FLOPS.get(device.device_kind)


def parameter_count(params: object) -> int:
    """Scalars in a tree of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
