"""Attention and feed-forwards in NumPy and float64, token by token, as their definitions have it."""

import numpy as np

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.sparse_attention import SparseAttentionConfig
from tests.mixers.rows import Rows, heads_of, rms, turned


def parallel(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    parts = params["parts"]
    return attend(parts["attention"], h, rows, config) + feed_forward(params, h, rows, config)


def attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    return attend(params["parts"]["attention"], h, rows, config)


def convolved_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["attention"]
    looked_back = h.copy()
    for row, i in np.ndindex(h.shape[:2]):
        for s, weight in enumerate(layer["convolution"]["kernel"], start=1):
            if i - s in rows.seen(row, i):
                looked_back[row, i] += weight * h[row, i - s]
    return attend(layer, h, rows, config, of_scores=looked_back)


def local_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    window = config.of(SparseAttentionConfig).window
    return attend(params["parts"]["attention"], h, rows, config, lambda i, j: i - j < window)


def strided_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    stride = config.of(SparseAttentionConfig).stride
    return attend(params["parts"]["attention"], h, rows, config, lambda i, j: i - j < stride or (i - j) % stride == 0)


def sink_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    sparse = config.of(SparseAttentionConfig)
    return attend(params["parts"]["attention"], h, rows, config, lambda i, j: i - j < sparse.window or j < sparse.sinks)


def all_attention(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["attention"]
    memory = [heads_of(layer[name], config) for name in ("memory_keys", "memory_values")]
    if config.qk_norm == "rms":
        memory[0] = rms(memory[0], layer["qkv"]["key_norm"]["scale"])
    return attend(layer, h, rows, config, memory=memory)


def feed_forward(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = params["parts"]["feed_forward"]
    return np.maximum(h @ layer["key"]["kernel"], 0) @ layer["value"]["kernel"]


def attend(layer, h, rows, config, keeps=lambda i, j: True, memory=None, of_scores=None) -> np.ndarray:
    """Every token of every row and head by itself. `keeps(i, j)` are positions in the document; queries and keys are of
    h, or of `of_scores`."""
    inputs = {"query": of_scores, "key": of_scores, "value": None}
    query, key, value = (
        heads_of((h if x is None else x) @ layer["qkv"][name]["kernel"], config) for name, x in inputs.items()
    )
    if config.qk_norm == "rms":
        query, key = (rms(x, layer["qkv"][f"{n}_norm"]["scale"]) for n, x in (("query", query), ("key", key)))
    output = np.zeros((*h.shape[:2], config.num_heads, config.head_dim))
    group = config.num_heads // config.kv_heads
    for row, i in np.ndindex(h.shape[:2]):
        at = rows.positions[row]
        seen = [j for j in rows.seen(row, i) if keeps(at[i], at[j])]
        for head in range(config.num_heads):
            keys, values = (x[row, seen, head // group] for x in (key, value))
            keys = np.array([turned(k, at[j], config) for k, j in zip(keys, seen, strict=True)])
            scores = keys @ turned(query[row, i, head], at[i], config)
            if memory is not None:  # met un-rotated
                scores = np.concatenate([scores, memory[0][:, head] @ query[row, i, head]])
                values = np.concatenate([values, memory[1][:, head]])
            weights = np.exp(scores / config.head_dim**0.5)
            output[row, i, head] = weights @ values / weights.sum()
    return output.reshape(h.shape) @ layer["output"]["kernel"]


ORACLES = {
    function.__name__: function
    for function in (
        parallel,
        attention,
        convolved_attention,
        local_attention,
        strided_attention,
        sink_attention,
        all_attention,
        feed_forward,
    )
}
