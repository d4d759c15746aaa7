"""Section 2.2 of the paper as a definition: dense, in float64, a token at a time. Slow, and for reading.

`layer.py` is held to it (tests/aamoe/test_layer.py), forward and, by finite differences, all gradients.

    r_ij = (W_c^T h_i, rotated to i) . (h of the last token of chunk j, rotated to there) / sqrt(d)      eq 4
    r_il = h_i . e_l / sqrt(d)                                                                           eq 4
    B_i  = floor(B b_i), where B b_i is beta times exp(s_i) over its mean, s_i = w_B . h_i / sqrt(d)         AA-11
    R_i  = the B_i resources of the largest r_i, the local one first                                     eq 8
    log P(i, j_k) = log sigma(B b_i - k) + r_ij, where k is the rank of j, up to a constant of i         eq 10-15
    o_i  = softmax(q_i . K / sqrt(k) + log P) V over all keys of R_i, head by head                       eq 5-7, 9, 16

Shapes: L tokens of one row, m keys per resource, E experts, d width, H heads, k = d / H. The row is one document.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from aamoe_jax.config import AAMoEConfig, ModelConfig

Params = dict[str, Any]
"""Parameters of one layer, `nnx.to_pure_dict(nnx.state(layer))`, as float64."""
Resource = tuple[str, int]
"""("chunk", j), ("expert", l) or ("local", the own chunk)."""


def reference_layer(
    params: Params,
    config: ModelConfig,
    h: Float[np.ndarray, "L d"],
    budget: Float[np.ndarray, "L"],
    count: Int[np.ndarray, "L"],
) -> Float[np.ndarray, "L d"]:
    """The layer's output for one row.

    Without QK-norm, null slot, prices and shares, which are no part of section 2.2.

    Args:
      budget: B b_i, as `prefix_budgets` or the row's softmax gives it.
      count: B_i, its floor within availability and cap.
    """
    layer, heads = config.aamoe, config.num_heads
    size = config.d_model // heads
    weights = {name: params["qkv"][name]["kernel"] for name in ("query", "key", "value")}
    looking_back = convolved(params, config, h)
    keys, values = looking_back @ weights["key"], h @ weights["value"]
    queries = (looking_back if layer.query_convolution else h) @ weights["query"]
    keys = np.stack([rotate_heads(key, t, config) for t, key in enumerate(keys)])
    if layer.router == "pooled":
        rows = split(params["expert_keys"].reshape(-1, config.d_model), heads)
        chunks, experts = pooled(layer, keys), pooled(layer, rows)
    output = np.zeros_like(h)
    for i in range(len(h)):
        if count[i] == 0:
            continue  # the token bypasses the layer (AA-26)
        query, rotated_query = queries[i], rotate_heads(queries[i], i, config)
        if layer.router == "pooled":
            score = pooled_scores(split(query, heads), rotated_query, chunks[: i // layer.chunk_size], experts)
        else:
            score = learned_scores(params, config, h, i)
        logits, seen = [], []
        for k, (kind, j) in enumerate(ranked(config, score, i)[: count[i]], start=1):
            log_p = -np.log1p(np.exp(-(budget[i] - k))) + score[kind, j]
            if kind == "expert":  # verbatim: neither projected nor rotated
                for key, value in zip(params["expert_keys"][j], params["expert_values"][j], strict=True):
                    logits.append(dot(split(query, heads), split(key, heads)) / size**0.5 + log_p)
                    seen.append(split(value, heads))
                continue
            for t in tokens_of(config, kind, j, i):
                logits.append(dot(rotated_query, keys[t]) / size**0.5 + log_p)
                seen.append(split(values[t], heads))
        attention = np.exp(np.array(logits) - np.max(logits))
        attention /= attention.sum(0)
        output[i] = np.einsum("nh,nhk->hk", attention, np.array(seen)).reshape(-1)
    return output @ params["output"]["kernel"]


def reference_budgets(params: Params, config: ModelConfig, h: Float[np.ndarray, "L d"]) -> Float[np.ndarray, "L"]:
    """B b_i of one row: beta exp(s_i) over the running mean of exp(s) (decision 21)."""
    importance = h @ params["importance"] / h.shape[-1] ** 0.5
    if config.aamoe.budget.importance == "bounded":
        importance = np.log(2) * np.tanh(importance / np.log(2))
    weight = np.exp(importance)
    return config.betas[0] * weight / (np.cumsum(weight) / np.arange(1, len(weight) + 1))


def learned_scores(params: Params, config: ModelConfig, h: Float[np.ndarray, "L d"], i: int) -> dict[Resource, float]:
    """Eq 4: r of token i for all completed chunks and experts, and for its own neighbourhood (decision 03)."""
    m, d, base = config.aamoe.chunk_size, config.d_model, config.rope_base
    router = params["router"]
    route, score = h[i] @ router["context_kernel"], {}
    for j in range(i // m):
        end = (j + 1) * m - 1
        score["chunk", j] = rotate(route, i, base) @ rotate(h[end], end, base) / d**0.5
    for expert, embedding in enumerate(router["expert_embeddings"]):
        score["expert", expert] = embedding @ h[i] / d**0.5
    return score | {("local", i // m): route @ h[i] / d**0.5}


def pooled(layer: AAMoEConfig, rows: Float[np.ndarray, "n H k"]) -> Float[np.ndarray, "j g H k"]:
    """g keys for every resource: the mean of each group, as long as its keys are (root mean square)."""
    groups = rows.reshape(-1, layer.pooled_keys, layer.pool_size, *rows.shape[1:])
    mean = groups.mean(2)
    length = np.sqrt(np.square(groups).mean((2, 4)) / np.square(mean).mean(-1))
    return mean * length[..., None]


def pooled_scores(
    query: Float[np.ndarray, "H k"],
    rotated_query: Float[np.ndarray, "H k"],
    chunks: Float[np.ndarray, "j g H k"],
    experts: Float[np.ndarray, "E g H k"],
) -> dict[Resource, float]:
    """r = log P(choose) from pooled keys (`pooled.py`): a softmax over all of them in every head, then the mean over
    heads; of the local resource 0.

    Args:
      chunks: those that are complete, rotated.
    """
    size = query.shape[-1]
    kinds = ("chunk", rotated_query, chunks), ("expert", query, experts)
    weights = {
        (kind, j): np.exp(np.einsum("hk,ghk->gh", q, keys) / size**0.5).sum(0)
        for kind, q, rows in kinds
        for j, keys in enumerate(rows)
    }
    total = sum(weights.values())
    return {name: np.log((weight / total).mean()) for name, weight in weights.items()} | {("local", len(chunks)): 0.0}


def ranked(config: ModelConfig, score: dict[Resource, float], i: int) -> list[Resource]:
    """What token i can choose from, best first: a window or the own chunk before all, or the own chunk among them."""
    m, local = config.aamoe.chunk_size, config.aamoe.local
    own = ("local", i // m)
    chosen = sorted((name for name in score if name != own), key=lambda name: -score[name])
    if local == "none":
        return chosen
    return [own, *chosen] if local in ("window", "chunk") else sorted(score, key=lambda name: -score[name])


def tokens_of(config: ModelConfig, kind: str, j: int, i: int) -> list[int]:
    """The tokens of chunk j that token i sees, or those of its neighbourhood. What a window holds is seen there."""
    m, window = config.aamoe.chunk_size, config.aamoe.local == "window"
    if kind == "local":
        return list(range(max(0, i - m + 1) if window else j * m, i + 1))
    return [t for t in range(j * m, (j + 1) * m) if t <= (i - m if window else i)]


def convolved(params: Params, config: ModelConfig, h: Float[np.ndarray, "L d"]) -> Float[np.ndarray, "L d"]:
    """h, or a causal convolution of it (`AAMoEConfig.key_convolution`)."""
    result = h.copy()
    if config.aamoe.key_convolution:
        for s, kernel in enumerate(params["convolution"]["kernel"], start=1):
            result[s:] += kernel * h[:-s]
    return result


def split(x: Float[np.ndarray, "*n d"], heads: int) -> Float[np.ndarray, "*n H k"]:
    """Vectors as heads."""
    return x.reshape(*x.shape[:-1], heads, -1)


def dot(a: Float[np.ndarray, "H k"], b: Float[np.ndarray, "H k"]) -> Float[np.ndarray, "H"]:
    """Head by head."""
    return np.einsum("hk,hk->h", a, b)


def rotate(x: Float[np.ndarray, "k"], position: int, base: float) -> Float[np.ndarray, "k"]:
    """Rotary embedding: the pair (x_n, x_{n + k/2}) is rotated by position * base^(-2n/k)."""
    half = len(x) // 2
    angle = position * base ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def rotate_heads(x: Float[np.ndarray, "d"], position: int, config: ModelConfig) -> Float[np.ndarray, "H k"]:
    """`rotate` of every head."""
    return np.stack([rotate(head, position, config.rope_base) for head in split(x, config.num_heads)])
