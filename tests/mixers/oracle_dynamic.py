"""Heads as networks of tokens in NumPy and float64, neuron by neuron, as their definitions have it."""

from collections.abc import Callable

import numpy as np

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.clustered import ClusteredAttentionConfig
from aamoe_jax.mixers.filtered import FilteredAttentionConfig
from tests.mixers.rows import Rows, heads_of, rms, turned


def projected(layer: dict, name: str, h: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Queries, keys or values of all tokens, [b, L, heads, k], normed as `name` is, not rotated."""
    x = heads_of(h @ layer["qkv"][name]["kernel"], config)
    normed = config.qk_norm == "rms" and name != "value"
    return rms(x, layer["qkv"][f"{name}_norm"]["scale"]) if normed else x


def each_head(layer: dict, h: np.ndarray, rows: Rows, config: ModelConfig, head_of: Callable) -> np.ndarray:
    """`head_of(row, i, head, group, seen)` [k] for every token and head, and W^O over all heads."""
    output = np.zeros((*h.shape[:2], config.num_heads, config.head_dim))
    for row, i, head in np.ndindex(output.shape[:3]):
        group = head // (config.num_heads // config.kv_heads)
        output[row, i, head] = head_of(row, i, head, group, rows.seen(row, i))
    return output.reshape(h.shape) @ layer["output"]["kernel"]


def scores_of(query: np.ndarray, key: np.ndarray, rows: Rows, config: ModelConfig) -> Callable:
    """(row, i, j, head, group) -> q_i . k_j / sqrt(k), both turned to their positions."""

    def score(row: int, i: int, j: int, head: int, group: int) -> float:
        at = rows.positions[row]
        left, right = turned(query[row, i, head], at[i], config), turned(key[row, j, group], at[j], config)
        return left @ right / config.head_dim**0.5

    return score


def silu(x: float) -> float:
    return x / (1 + np.exp(-x))


def sqrt_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["attention"]
    query, key, value = (projected(layer, name, h, config) for name in ("query", "key", "value"))
    score = scores_of(query, key, rows, config)

    def head_of(row, i, head, group, seen):
        return sum(score(row, i, j, head, group) * value[row, j, group] for j in seen) / len(seen) ** 0.5

    return each_head(layer, h, rows, config, head_of)


def gated_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["attention"]
    query, key, value = (projected(layer, name, h, config) for name in ("query", "key", "value"))
    gate = heads_of(h @ layer["gate"]["kernel"], config)
    if config.qk_norm == "rms":
        gate = rms(gate, layer["qkv"]["key_norm"]["scale"])
    score, gate_score = (scores_of(query, x, rows, config) for x in (key, gate))

    def head_of(row, i, head, group, seen):
        neurons = [(row, i, j, head, group) for j in seen]
        activations = [silu(gate_score(*neuron)) * score(*neuron) for neuron in neurons]
        return np.array(activations) @ value[row, seen, group] / len(seen) ** 0.5

    return each_head(layer, h, rows, config, head_of)


def filter_gate(params: dict, h: np.ndarray, config: ModelConfig) -> np.ndarray:
    """What the filter multiplies a token's neuron by in every head [b, L, G]; 0 where it is left out."""
    layer, filtering = params["parts"]["attention"], config.of(FilteredAttentionConfig)
    wanted = filtering.threshold
    if filtering.filter == "learned":
        certainty = 1 / (1 + np.exp(-(h @ layer["filter"]["kernel"] + layer["filter_bias"])))
        return np.where(certainty >= wanted, certainty, 0)
    kept = np.ones((*h.shape[:2], config.kv_heads))
    size, repeats = config.head_dim, config.num_heads // config.kv_heads
    for row, j, group in np.ndindex(kept.shape):
        columns = slice(group * size, (group + 1) * size)
        value_map = layer["qkv"]["value"]["kernel"][:, columns]
        heads = range(group * repeats, (group + 1) * repeats)
        outputs = [layer["output"]["kernel"][head * size : (head + 1) * size] for head in heads]
        message_map = np.concatenate([value_map @ output for output in outputs], axis=1)
        message = h[row, j] @ message_map
        if filtering.filter == "message_norm" and np.linalg.norm(message) < wanted * np.linalg.norm(message_map):
            kept[row, j, group] = 0
    return kept


def filtered_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["attention"]
    query, key, value = (projected(layer, name, h, config) for name in ("query", "key", "value"))
    score, gate = scores_of(query, key, rows, config), filter_gate(params, h, config)

    def head_of(row, i, head, group, seen):
        kept = [j for j in seen if gate[row, j, group] > 0]
        if not kept:
            return np.zeros(config.head_dim)
        weights = np.array([gate[row, j, group] * np.exp(score(row, i, j, head, group)) for j in kept])
        return weights @ value[row, kept, group] / weights.sum()

    return each_head(layer, h, rows, config, head_of)


def clustered_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["attention"]
    query, key, value = (projected(layer, name, h, config) for name in ("query", "key", "value"))
    score, centroids = scores_of(query, key, rows, config), heads_of(layer["centroids"], config)
    count = config.of(ClusteredAttentionConfig).clusters_kept

    def head_of(row, i, head, group, seen):
        own = centroids[:, group]
        best = sorted(range(len(own)), key=lambda c: -own[c] @ query[row, i, head])[:count]
        nearest = {j: min(range(len(own)), key=lambda c: np.linalg.norm(own[c] - key[row, j, group])) for j in seen}
        kept = [j for j in seen if j == i or nearest[j] in best]
        weights = np.exp([score(row, i, j, head, group) for j in kept])
        return weights @ value[row, kept, group] / weights.sum()

    return each_head(layer, h, rows, config, head_of)


def swiglu(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["feed_forward"]
    return (silu(h @ layer["gate"]["kernel"]) * (h @ layer["key"]["kernel"])) @ layer["value"]["kernel"]


ORACLES = {
    function.__name__: function
    for function in (
        sqrt_attention,
        gated_attention,
        filtered_attention,
        clustered_attention,
        swiglu,
    )
}
