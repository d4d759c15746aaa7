"""Statistics of stacks: sums that add up over micro-batches and devices, and the figures that are made of them.

Every value is a sum over the real tokens of a batch, or a largest value (MAXIMA), so that statistics of several
micro-batches combine exactly. In a model each has a leading axis over the layers that have it.

Shapes: n layers that have the figure, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from aamoe_jax.mixers.base import Statistics
from aamoe_jax.registry import MIXERS
from aamoe_jax.shards import all_reduce

MAXIMA = ("max_budget", "logit_absmax")
"""What is a largest value, and not a sum."""


def combine(left: Statistics, right: Statistics) -> Statistics:
    """Statistics of two micro-batches together."""
    return {name: jnp.maximum(left[name], right[name]) if name in MAXIMA else left[name] + right[name] for name in left}


def over_all_devices(statistics: Statistics) -> Statistics:
    """Statistics of the tokens of all devices, inside `jax.shard_map`."""
    reduce = {name: jax.lax.pmax if name in MAXIMA else jax.lax.psum for name in statistics}
    return {name: all_reduce(value, reduce[name]) for name, value in statistics.items()}


def summarize(statistics: Statistics) -> dict[str, Any]:
    """Figures per layer, on the host: lists with one figure per layer that has it, in the order of the stack.

    They are those of the mixers' own `summarize`, and `logit_absmax`, the largest score that entered a softmax.
    """
    s = {name: np.asarray(value, np.float64) for name, value in statistics.items()}
    result: dict[str, Any] = {}
    for figures in dict.fromkeys(entry.cls.summarize for entry in MIXERS.values()):
        result |= figures(s)
    if "logit_absmax" in s:
        result["logit_absmax"] = s["logit_absmax"].tolist()
    return result


def shares(statistics: Statistics, parts: Mapping[str, tuple[str, str]]) -> dict[str, list[float]]:
    """Figures that are one count over another: of {figure: (part, whole)} those whose counts are there."""
    return {
        name: (statistics[part] / np.maximum(statistics[whole], 1)).tolist()
        for name, (part, whole) in parts.items()
        if part in statistics
    }


def expert_use(load: Float[np.ndarray, "n E"]) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Of the loads of experts: entropy over its maximum log E, and the share of experts without any."""
    share = load / np.maximum(load.sum(-1, keepdims=True), 1)
    entropy = -np.sum(share * np.log(np.where(share > 0, share, 1)), axis=-1)
    return entropy / np.log(max(load.shape[-1], 2)), np.mean(load == 0, axis=-1)
