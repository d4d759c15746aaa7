"""Section 2.2 of the paper as a definition: dense, in float64, a token at a time. Slow, and for reading.

`layer.py` is held to it, forward and, by finite differences, all gradients (tests/aamoe/test_layer.py,
tests/mixers/test_every_mixer.py).

    r_ij = (W_c^T h_i, rotated to i) . (h of the last token of chunk j, rotated to there) / sqrt(d)      eq 4
    r_il = h_i . e_l / sqrt(d)                                                                           eq 4
    B_i  = floor(B b_i), where B b_i is beta times exp(s_i) over its mean, s_i = w_B . h_i / sqrt(d)         AA-11
    R_i  = the B_i resources of the largest r_i, the local one first                                     eq 8
    log P(i, j_k) = log sigma(B b_i - k) + r_ij, where k is the rank of j, up to a constant of i         eq 10-15
    o_i  = softmax(q_i . K / sqrt(k) + log P) V over all keys of R_i, head by head                       eq 5-7, 9, 16

Shapes: L tokens of one document, m keys per resource, E experts, d width, H heads, k = d / H.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from aamoe_jax.config import AAMoEConfig, ModelConfig
from aamoe_jax.mixers.weighted_sum import everything, weighted_sum

Params = dict[str, Any]
"""Parameters of one layer, `nnx.to_pure_dict(nnx.state(layer))`, as float64."""
Resource = tuple[str, int]
"""("chunk", j), ("expert", l) or ("local", the own chunk)."""


def reference_layer(params: Params, config: ModelConfig, h: Float[np.ndarray, "L d"]) -> Float[np.ndarray, "L d"]:
    """The layer's output for one document, under the budgets that it trains with."""
    layer, heads = config.aamoe, config.num_heads
    query, keys, values = (projected(params, config, name, h) for name in ("query", "key", "value"))
    rotated = [np.stack([rotate_heads(x, t, config) for t, x in enumerate(rows)]) for rows in (query, keys)]
    rotated_query, keys = rotated
    nothing = np.zeros((0, layer.chunk_size, config.d_model))
    expert_keys, expert_values = (split(params.get(f"expert_{name}", nothing), heads) for name in ("keys", "values"))
    expert_keys = normed(params, config, "key", expert_keys)
    budget = reference_budgets(params, config, h)
    granted = reference_granted(config, budget)
    if layer.router == "pooled":
        chunks = pooled(layer, keys[: len(h) // layer.chunk_size * layer.chunk_size])
        experts = pooled(layer, expert_keys.reshape(-1, *expert_keys.shape[2:]))
    output = np.zeros_like(query)
    load = np.zeros(layer.num_experts)  # what the tokens so far wanted of every expert
    for i in range(len(h)):
        if layer.router == "pooled":
            completed = i // layer.chunk_size if layer.context == "routed" else 0
            score = pooled_scores(query[i], rotated_query[i], chunks[:completed], experts, i // layer.chunk_size)
        else:
            score = learned_scores(params, config, h, i)
        neurons: list[tuple[Any, ...]] = []  # the query as it meets the key, the key, its value, its bias
        given = allocated(config, score, i, budget[i], int(granted[i]), load / max(i, 1))
        if layer.num_experts:
            load += softmax(np.array([score["expert", expert] for expert in range(layer.num_experts)]))
        for (kind, j), log_p in given:
            if kind == "expert" and layer.expert_gate:
                log_p += params["expert_gate"]["kernel"][j] @ h[i] / config.d_model**0.5
            bias = np.full(heads, log_p if layer.bias == "log_prob" else 0.0)
            if kind == "expert":  # verbatim: neither projected nor rotated
                rows = zip(expert_keys[j], expert_values[j], strict=True)
                neurons += [(query[i], key, value, bias) for key, value in rows]
            else:
                neurons += [(rotated_query[i], keys[t], values[t], bias) for t in tokens_of(config, kind, j, i)]
        if not neurons:
            continue  # the token bypasses the layer (AA-26)
        if layer.null_slot == "learned":
            zero = np.zeros_like(query[i])
            neurons.append((zero, zero, zero, params["null_logit"]))
        output[i] = weighted_sum(
            [np.array(x) for x in zip(*neurons, strict=True)],
            scores=lambda found: dot(found[0], found[1]) / config.head_dim**0.5 + found[3],
            selection=everything,  # of what the budget bought
            coefficients=lambda scores, _: softmax(scores),
            values=lambda found: found[2],
        )
    return output.reshape(h.shape) @ params["output"]["kernel"]


def reference_budgets(params: Params, config: ModelConfig, h: Float[np.ndarray, "L d"]) -> Float[np.ndarray, "L"]:
    """B b_i: beta exp(s_i) over the mean of exp(s), of all tokens or of those so far (decision 21)."""
    layer, importance = config.aamoe.budget, h @ params["importance"] / h.shape[-1] ** 0.5
    if layer.importance == "bounded":
        importance = np.log(2) * np.tanh(importance / np.log(2))
    weight = np.exp(np.zeros_like(importance) if layer.importance == "uniform" else importance)
    mean = np.cumsum(weight) / np.arange(1, len(weight) + 1)
    return config.betas[0] * weight / (weight.mean() if layer.normalizer == "row" else mean)


def reference_granted(config: ModelConfig, budget: Float[np.ndarray, "L"]) -> Int[np.ndarray, "L"]:
    """B_i: what a token may spend of its budget's floor, and of what the cap leaves over (decision 23)."""
    layer, granted = config.aamoe, np.zeros(len(budget), int)
    for i, real in enumerate(budget):
        wanted = int(np.floor(real + 1e-4))
        if layer.budget.expert_share is not None:
            wanted = min(wanted, layer.max_resources or wanted)
        elif not prices_differ(layer):  # or prices are what it pays for
            wanted = min(wanted, most_resources(config, i))
        if layer.budget.normalizer == "prefix":
            allowance = int(np.floor(config.betas[0] * (i + 1) + 1e-4)) + layer.budget.slack
            wanted = min(wanted, allowance - granted[:i].sum())
        granted[i] = wanted
    return granted


def most_resources(config: ModelConfig, i: int) -> int:
    """How many resources there are for token i; at most K_max."""
    layer = config.aamoe
    chunks = i // layer.chunk_size if layer.context == "routed" else 0
    there = chunks + layer.num_experts + (layer.local != "none")
    return min(there, layer.max_resources or there)


def allocated(
    config: ModelConfig,
    score: dict[Resource, float],
    i: int,
    budget: float,
    granted: int,
    load: Float[np.ndarray, "E"],
) -> list[tuple[Resource, float]]:
    """R_i, best first, and log P of each: eq 8, 10-15."""
    layer, order = config.aamoe, ranked(config, score, i)
    if layer.null_slot == "learned" or layer.signal == "separate":
        score = log_choice(config, {name: score[name] for name in order})
        order = ranked(config, score, i)  # chunks and experts that are normalised apart change places
    share = layer.budget.expert_share
    if share is None:
        cost, given = 0.0, []
        for name in order[: most_resources(config, i)]:
            cost += price(config, name, i, load)
            if cost <= granted + 1e-4:
                given.append((name, log_sigmoid(budget - cost) + score[name]))
        return given
    first = layer.local in ("window", "chunk")
    for_experts = min(int(share * granted + 1e-4), max(granted - first, 0))
    context = [name for name in order if name[0] != "expert"][: granted - for_experts]
    experts = [name for name in order if name[0] == "expert"][:for_experts]
    return [
        (name, log_sigmoid(part * budget - k) + score[name])
        for part, names in ((1 - share, context), (share, experts))
        for k, name in enumerate(names, start=1)
    ]


def prices_differ(layer: AAMoEConfig) -> bool:
    """Whether a resource may cost other than 1."""
    return layer.budget.expert_price != 1 or layer.budget.distance_price > 0 or layer.budget.load_price > 0


def price(config: ModelConfig, resource: Resource, i: int, load: Float[np.ndarray, "E"]) -> float:
    """What a resource costs token i (AA-39).

    Args:
      load: the mean softmax over experts of the tokens before.
    """
    (kind, j), budget = resource, config.aamoe.budget
    if kind == "expert":
        return budget.expert_price + budget.load_price * len(load) * load[j]
    back = i // config.aamoe.chunk_size - j
    return 1.0 + budget.distance_price * np.log2(back) if kind == "chunk" else 1.0


def log_choice(config: ModelConfig, score: dict[Resource, float]) -> dict[Resource, float]:
    """r - log sum_l exp(r_il) over all that is available (eq 14), or over its own kind (`signal = separate`). Of pooled
    scores exp(r) adds up to 1 as it is, the local resource aside."""
    if config.aamoe.signal == "separate":
        kinds = [[name for name in score if (name[0] == "expert") is expert] for expert in (False, True)]
    else:
        kinds = [[]] if config.aamoe.router == "pooled" else [list(score)]
    result = dict(score)
    for names in kinds:
        total = sum(np.exp(score[name]) for name in names)
        result |= {name: score[name] - np.log(total) for name in names}
    return result


def learned_scores(params: Params, config: ModelConfig, h: Float[np.ndarray, "L d"], i: int) -> dict[Resource, float]:
    """Eq 4: r of token i for all completed chunks and experts, and for its own neighbourhood (decision 03)."""
    m, d, base = config.aamoe.chunk_size, config.d_model, config.rope_base
    router = params["router"]
    if config.aamoe.router_input == "causal_conv":
        h = convolved(router["convolution"]["kernel"], h)
    route, score = h[i] @ router["context_kernel"], {}
    for j in range(i // m if config.aamoe.context == "routed" else 0):
        end = (j + 1) * m - 1
        at, to = (i, end) if config.aamoe.router == "learned" else (0, 0)
        score["chunk", j] = rotate(route, at, base) @ rotate(h[end], to, base) / d**0.5
    for expert, embedding in enumerate(router.get("expert_embeddings", ())):
        score["expert", expert] = embedding @ h[i] / d**0.5
    if "expert_attention" in router:  # of numbers, one for each expert
        query, key, value = (h[i] @ router["expert_attention"][name] for name in ("query", "key", "value"))
        for expert, q in enumerate(query):
            weight = np.exp(q * key - (q * key).max())
            score["expert", expert] = weight @ value / weight.sum()
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
    own: int,
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
    return {name: np.log((weight / total).mean()) for name, weight in weights.items()} | {("local", own): 0.0}


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


def projected(
    params: Params, config: ModelConfig, name: str, h: Float[np.ndarray, "L d"]
) -> Float[np.ndarray, "L H k"]:
    """Queries, keys or values, not rotated; heads that have theirs in common get copies."""
    look_back = {"query": config.aamoe.query_convolution, "key": config.aamoe.key_convolution, "value": False}[name]
    x = (convolved(params["convolution"]["kernel"], h) if look_back else h) @ params["qkv"][name]["kernel"]
    x = normed(params, config, name, x.reshape(len(h), -1, config.head_dim))
    return np.repeat(x, config.num_heads // x.shape[1], axis=1)


def normed(params: Params, config: ModelConfig, name: str, x: Float[np.ndarray, "*n k"]) -> Float[np.ndarray, "*n k"]:
    """QK-norm: RMSNorm of query and key heads, those of experts included."""
    if config.qk_norm == "none" or name == "value":
        return x
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * params["qkv"][f"{name}_norm"]["scale"]


def convolved(kernels: Float[np.ndarray, "t d"], h: Float[np.ndarray, "L d"]) -> Float[np.ndarray, "L d"]:
    """h_i + sum over s of w_s * h_{i-s}, channel by channel."""
    result = h.copy()
    for s, kernel in enumerate(kernels, start=1):
        result[s:] += kernel * h[:-s]
    return result


def split(x: Float[np.ndarray, "*n d"], heads: int) -> Float[np.ndarray, "*n H k"]:
    """Vectors as heads."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def dot(a: Float[np.ndarray, "*n H k"], b: Float[np.ndarray, "*n H k"]) -> Float[np.ndarray, "*n H"]:
    """Head by head."""
    return np.einsum("...hk,...hk->...h", a, b)


def softmax(x: Float[np.ndarray, "n *H"]) -> Float[np.ndarray, "n *H"]:
    """Over n, head by head."""
    weights = np.exp(x - x.max(0))
    return weights / weights.sum(0)


def rotate(x: Float[np.ndarray, "k"], position: int, base: float) -> Float[np.ndarray, "k"]:
    """Rotary embedding: the pair (x_n, x_{n + k/2}) is rotated by position * base^(-2n/k)."""
    half = len(x) // 2
    angle = position * base ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def rotate_heads(x: Float[np.ndarray, "H k"], position: int, config: ModelConfig) -> Float[np.ndarray, "H k"]:
    """`rotate` of every head."""
    return np.stack([rotate(head, position, config.rope_base) for head in x])


def log_sigmoid(x: float) -> float:
    """log sigma(x)."""
    return -np.logaddexp(0.0, -x)
