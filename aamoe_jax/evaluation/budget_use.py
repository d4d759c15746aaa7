"""How budgets are divided among tokens: evenly, or by how hard these are to predict?

Shapes: n AA-MoE layers, b rows, L tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from aamoe_jax.aamoe.correlations import correlations, moments, signals
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import merge

UNEVEN = 0.25
"""A budget is uneven where it differs from the mean by more than this share of it."""


def budget_use(
    graphdef: nnx.GraphDef, params: dict[str, Any], batches: Sequence[dict[str, np.ndarray]], *, budget: BudgetMode
) -> dict[str, list[float | None]]:
    """How budgets are divided among tokens, lists with one figure per AA-MoE layer.

    `uneven`: the share of tokens whose number of resources differs from the mean by more than a quarter of it; and the
    `loss`, `surprisal` and `entropy` that the number correlates with (`aamoe.correlations`). All of the tokens that
    predict one of their document and are predicted by one.
    """

    @jax.jit
    def read(params: dict[str, Any], batch: dict[str, Int[Array, "b L"]]) -> tuple[Array, Array, Array]:
        inputs = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        logits, statistics = merge(graphdef, params)(*inputs, budget=budget, detail="tokens")
        signal, counts = signals(logits, batch)
        return statistics["spent"], counts, moments(statistics["spent"], signal, counts)

    params = jax.tree.map(jnp.asarray, params)
    found = [[np.asarray(x) for x in read(params, batch)] for batch in batches]
    spent = np.concatenate([spent[:, counts] for spent, counts, _ in found], axis=1).astype(np.float64)
    mean = spent.mean(1, keepdims=True)
    uneven = (np.abs(spent - mean) > UNEVEN * mean).mean(1).tolist()
    return {"uneven": uneven} | correlations(np.sum([np.asarray(sums, np.float64) for *_, sums in found], axis=0))
