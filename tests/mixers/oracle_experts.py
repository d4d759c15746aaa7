"""Mixtures of experts in NumPy and float64, token by token, as their definitions have it."""

import numpy as np

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.experts import MoEConfig
from tests.mixers.rows import Rows, softmax


def scores_of(layer: dict, h: np.ndarray, rows: Rows, config: ModelConfig, row: int, i: int) -> np.ndarray:
    """What the router says of one token."""
    x = h[row, i].copy()
    if config.of(MoEConfig).router_input == "causal_conv":
        for j in rows.seen(row, i)[:-1]:
            if i - j <= 3:
                x += layer["router"]["convolution"]["kernel"][i - j - 1] * h[row, j]
    weights = layer["router"]["scores"]
    if config.of(MoEConfig).router == "linear":
        return x @ weights["kernel"]
    query, key, value = (x @ weights[name] for name in ("query", "key", "value"))
    return np.array([softmax(q * key) @ value for q in query])


def expert(layer: dict, x: np.ndarray, index: int) -> np.ndarray:
    return np.maximum(x @ layer["keys"][index], 0) @ layer["values"][index]


def real(rows: Rows) -> list[tuple[int, int]]:
    """(row, token) of all that is no padding, in order."""
    return [at for at in np.ndindex(rows.segment_ids.shape) if rows.segment_ids[at] > 0]


def moe(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer, output = params["parts"]["experts"], np.zeros_like(h)
    for row, i in real(rows):
        r = scores_of(layer, h, rows, config, row, i)
        best = np.argsort(-r, kind="stable")[: config.of(MoEConfig).top_k]
        p = softmax(r[best]) if config.of(MoEConfig).coefficients == "softmax_selected" else softmax(r)[best]
        output[row, i] = sum(w * expert(layer, h[row, i], e) for w, e in zip(p, best, strict=True))
    return output


def relu_moe(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer, output = params["parts"]["experts"], np.zeros_like(h)
    for row, i in real(rows):
        p = np.maximum(scores_of(layer, h, rows, config, row, i), 0)
        output[row, i] = sum(w * expert(layer, h[row, i], e) for e, w in enumerate(p))
    return output


def switch(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer, output, taken = params["parts"]["experts"], np.zeros_like(h), {}
    moe = config.of(MoEConfig)
    for row, i in real(rows):
        p = softmax(scores_of(layer, h, rows, config, row, i))
        best = int(p.argmax())
        group = row, rows.segment_ids[row, i], rows.positions[row, i] // moe.capacity_tokens, best
        taken[group] = taken.get(group, 0) + 1
        if taken[group] <= np.ceil(moe.capacity_factor * moe.capacity_tokens / moe.num_experts):
            output[row, i] = p[best] * expert(layer, h[row, i], best)
    return output


ORACLES = {function.__name__: function for function in (moe, relu_moe, switch)}
