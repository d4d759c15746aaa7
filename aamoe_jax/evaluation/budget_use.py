"""Which tokens get large budgets: those that are hard to predict, or others?

Shapes: n AA-MoE layers, b rows, L tokens per row, T tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import merge

UNEVEN = 0.25
"""A budget is uneven where it differs from the mean by more than this share of it."""


def budget_use(
    graphdef: nnx.GraphDef, params: dict[str, Any], batches: Sequence[dict[str, np.ndarray]], *, budget: BudgetMode
) -> dict[str, list[float | None]]:
    """How budgets are divided among tokens, lists with one figure per AA-MoE layer.

    `uneven`: the share of tokens whose number of resources differs from the mean by more than a quarter of it. Then
    Pearson correlations of that number, over all tokens that predict one of their document and are predicted by one:
    with the `loss` of the next token (-log p of it, given the tokens so far), the `surprisal` of the token itself, and
    the `entropy` of the distribution of the next token. None where budgets are all the same.
    """

    @jax.jit
    def read(params: dict[str, Any], batch: dict[str, Int[Array, "b L"]]) -> tuple[Any, Array, Array]:
        inputs = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        logits, statistics = merge(graphdef, params)(*inputs, budget=budget, detail="tokens")
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        loss = -jnp.take_along_axis(log_p, batch["targets"][..., None], axis=-1)[..., 0]
        return statistics["spent"], loss, -(jnp.exp(log_p) * log_p).sum(-1)

    params, found = jax.tree.map(jnp.asarray, params), []
    for batch in batches:
        spent, loss, entropy = (np.asarray(x, np.float64) for x in read(params, batch))
        counts = batch["loss_mask"] > 0
        both = counts[:, 1:] & counts[:, :-1]  # of a document's first token there is no surprisal
        signals = np.stack([loss[:, 1:], loss[:, :-1], entropy[:, 1:]])
        found.append((spent[:, :, 1:][:, both], signals[:, both]))
    spent, signals = (np.concatenate(x, axis=1) for x in zip(*found, strict=True))
    mean = spent.mean(1, keepdims=True)
    result: dict[str, list[float | None]] = {"uneven": (np.abs(spent - mean) > UNEVEN * mean).mean(1).tolist()}
    for name, signal in zip(("loss", "surprisal", "entropy"), signals, strict=True):
        result[name] = [correlation(layer, signal) for layer in spent]
    return result


def correlation(a: Float[np.ndarray, "T"], b: Float[np.ndarray, "T"]) -> float | None:
    """Pearson's; None where either does not vary."""
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else None
