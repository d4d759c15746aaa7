"""Validation inside a run: the first batches of each dataset's validation split, always with causal budgets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Int

from aamoe_jax.aamoe.correlations import budget_figures
from aamoe_jax.config import ExperimentConfig
from aamoe_jax.data import evaluation_batches
from aamoe_jax.data.batches import Batch
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.training import distributed
from aamoe_jax.training.goodput import Stopwatch
from aamoe_jax.training.metrics import Record, loss_fields
from aamoe_jax.training.progress import compiling
from aamoe_jax.training.state import Placement
from aamoe_jax.training.step import make_eval_step

CAUSAL: dict[str, BudgetMode] = {"row": "predictor", "prefix": "prefix"}
"""What stands in for the budgets of training: the row's see the future, and so would their loss (decision 21)."""


class Validation:
    """Evaluates parameters on the validation splits of the mixture."""

    def __init__(
        self,
        config: ExperimentConfig,
        graphdef: nnx.GraphDef,
        byte_lengths: Int[np.ndarray, "V"],
        placement: Placement,
        stopwatch: Stopwatch,
    ):
        self._stopwatch = stopwatch
        trained = config.model.aamoe.budget.normalizer
        budgets = dict.fromkeys((CAUSAL[trained], trained) if config.model.layers_of("aamoe") else (CAUSAL[trained],))
        self._steps = [jax.jit(make_eval_step(graphdef, budget, byte_lengths, placement)) for budget in budgets]
        self._compiled: list[Any] = []
        self._rows = rows = config.training.batch_size // config.training.accumulate
        index, count = placement.shard(rows)
        self._batches = {
            name: evaluation_batches(
                config.data, name, split="validation", batch_size=rows, shard_index=index, shard_count=count
            )
            for name, _ in config.data.mixture
        }
        self._weights = list(dict(config.data.mixture).values())
        # Whole batches are too large for the memory that micro-batches fit; the rows are the same ones.
        self._count, self._placement = config.training.eval_batches * config.training.accumulate, placement

    def __call__(self, params: dict[str, Any], step: int) -> tuple[list[Record], float]:
        """A record per dataset, and the loss that ranks checkpoints: their mean under the weights of the mixture."""
        if not self._compiled:
            batch = self._placement.put(next(iter(self._batches.values()))[0], self._rows)
            with self._stopwatch.during("compile"), compiling("the validation step"):
                self._compiled = [eval_step.lower(params, batch).compile() for eval_step in self._steps]
                distributed.wait_for_all("compiled")
        records: list[Record] = []
        for name, batches in self._batches.items():
            causal, *row = (self._sums(params, batches, eval_step) for eval_step in self._compiled)
            records.append({"kind": "validation", "step": step, "dataset": name, **loss_fields(causal)})
            if "budget_moments" in causal:
                records[-1]["layers"] = budget_figures(causal["budget_moments"])
            if row:
                records[-1]["loss_row"] = loss_fields(row[0])["loss"]
        return records, float(np.average([record["loss"] for record in records], weights=self._weights))

    def _sums(self, params: dict[str, Any], batches: Sequence[Batch], eval_step: Any) -> dict[str, Any]:
        total: dict[str, Any] = {}
        for batch in itertools.islice(batches, self._count):
            with jax.transfer_guard("disallow"):
                sums = eval_step(params, self._placement.put(batch, self._rows))
            sums = jax.device_get(sums)
            sums |= {name: x for name, x in sums.pop("statistics").items() if name == "budget_moments"}
            # In float64: float32 sums of a long validation would lose what is small beside them.
            total = {name: np.asarray(x, np.float64) + total.get(name, 0) for name, x in sums.items()}
        return total
