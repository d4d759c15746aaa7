"""Deconstructed attention in NumPy and float64, token by token, as Xue, Moosavi and Aletras define it."""

from collections.abc import Callable

import numpy as np

from aamoe_jax.config import ModelConfig
from tests.mixers.rows import Rows, heads_of, rms, turned


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def mlp(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer = {name: value["kernel"] for name, value in params["parts"]["mlp"].items()}
    return (silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"] @ layer["output"]


def approximate(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer, width = params["parts"]["attention"], config.head_dim

    def weights(query, at, keys, places):
        query = turned(query, at, config)
        keys = [turned(key, place, config) for key, place in zip(keys, places, strict=True)]
        weights = np.array([1 + query @ k / width**0.5 + sum(query**2 * k**2) / (2 * width) for k in keys])
        return weights / max(weights.sum(), len(keys) / 2)

    query, key = (projected(layer, name, h, config) for name in ("query", "key"))
    return mixed(layer, query, key, h, rows, weights, config)


def non_approximate(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    layer, width = params["parts"]["attention"], config.head_dim
    query, key = (projected(layer, name, h, config) for name in ("query", "key"))
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = (silu(query) * key).sum(-1) / width**0.5
    value = np.repeat(projected(layer, "value", h, config), query.shape[2] // config.kv_heads, axis=2)
    output = np.zeros_like(value)
    for row, i, head in np.ndindex(value.shape[:3]):
        seen = rows.seen(row, i)
        weights = np.exp(logits[row, seen, head])
        output[row, i, head] = weights @ value[row, seen, head] / weights.sum()
    return output.reshape(h.shape) @ layer["output"]["kernel"]


def random_qk(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    return of_places(params["parts"]["attention"], rows.fixed("random_qk", config), h, rows, config)


def fixed_qk(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    return of_places(params["parts"]["attention"], rows.fixed("fixed_qk", config), h, rows, config)


def of_places(layer: dict, fixed: np.ndarray, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    """Every place of a row looks from where it stands, not from where its document began."""
    every = np.broadcast_to(fixed, h.shape)
    places = rows._replace(positions=np.tile(np.arange(h.shape[1]), (len(h), 1)))
    return attended(layer, every, h, places, config)


def static_qk(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    return attended(params["parts"]["attention"], rows.embedded(config), h, rows, config)


def attended(layer: dict, source: np.ndarray, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    """Softmax over dot products of queries and keys made of `source`."""

    def weights(query, at, keys, places):
        query = turned(query, at, config)
        keys = [turned(key, place, config) for key, place in zip(keys, places, strict=True)]
        weights = np.exp([query @ key / config.head_dim**0.5 for key in keys])
        return weights / weights.sum()

    query, key = (projected(layer, name, source, config) for name in ("query", "key"))
    return mixed(layer, query, key, h, rows, weights, config)


def mixed(
    layer: dict, query: np.ndarray, key: np.ndarray, h: np.ndarray, rows: Rows, weights: Callable, config: ModelConfig
) -> np.ndarray:
    """Every token of every row and head by itself."""
    value, output = projected(layer, "value", h, config), np.zeros((*h.shape[:2], config.num_heads, config.head_dim))
    for row, i, head in np.ndindex(output.shape[:3]):
        seen, at, group = rows.seen(row, i), rows.positions[row], head * config.kv_heads // config.num_heads
        given = weights(query[row, i, head], at[i], key[row, seen, group], at[seen])
        output[row, i, head] = given @ value[row, seen, group]
    return output.reshape(h.shape) @ layer["output"]["kernel"]


def projected(layer: dict, name: str, x: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Heads of queries, keys or values, normed where the config asks."""
    heads = heads_of(x @ layer["qkv"][name]["kernel"], config)
    normed = config.qk_norm == "rms" and name != "value"
    return rms(heads, layer["qkv"][f"{name}_norm"]["scale"]) if normed else heads


ORACLES = {
    function.__name__: function for function in (mlp, approximate, non_approximate, random_qk, fixed_qk, static_qk)
}
