"""Figures of whole stacks, made of what their mixers counted.

Shapes: n layers that have the figure, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aamoe_jax.aamoe import statistics as aamoe_statistics
from aamoe_jax.mixers.base import Statistics

SHARES = {
    "neurons_kept": ("neurons_added", "neurons_offered"),
    "pairs_kept": ("pairs_compared", "pairs_offered"),
    "depth_chosen": ("depth_through", "depth_tokens"),
    "depth_predicted": ("depth_agree", "depth_tokens"),
}
"""Figures that are one count over another."""


def summarize(statistics: Statistics) -> dict[str, Any]:
    """Figures per layer, on the host: lists with one figure per layer that has it, in the order of the stack.

    Of AA-MoE layers see `aamoe.statistics.summarize`. Of mixtures of experts: `moe_active` experts per token;
    `moe_sparsity`, the share of experts that a token does without; `moe_dropped`, the share of choices that found no
    room; `moe_entropy` of the load over its maximum log E (1: all experts equally used); `moe_dead`, the share of
    experts that no token had. Of filtered and clustered attention the shares of neurons and pairs that were kept; of
    Mixture-of-Depths those of tokens that went through, and of tokens of which the predictor knew it; `logit_absmax`.
    """
    s = {name: np.asarray(value, np.float64) for name, value in statistics.items()}
    result = aamoe_statistics.summarize(statistics) if "capacity" in s else {}
    if "moe_load" in s:
        result |= _of_experts(s)
    for name, (part, whole) in SHARES.items():
        if part in s:
            result[name] = (s[part] / np.maximum(s[whole], 1)).tolist()
    if "logit_absmax" in s:
        result["logit_absmax"] = s["logit_absmax"].tolist()
    return result


def _of_experts(s: dict[str, np.ndarray]) -> dict[str, list[float]]:
    load, tokens = s["moe_load"], np.maximum(s["moe_tokens"], 1)
    pairs = load.sum(-1)
    entropy, dead = aamoe_statistics.expert_use(load)
    figures = {
        "moe_active": pairs / tokens,
        "moe_sparsity": 1 - pairs / tokens / load.shape[-1],
        "moe_dropped": s["moe_dropped"] / np.maximum(pairs + s["moe_dropped"], 1),
        "moe_entropy": entropy,
        "moe_dead": dead,
    }
    return {name: value.tolist() for name, value in figures.items()}
