"""How well a model predicts held-out text, under budgets that a sampling model could have (decisions 01, 21, 35).

Shapes: b rows, L tokens per row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax import cost
from aamoe_jax.aamoe.statistics import combine, summarize
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.mixers.base import BudgetMode, Statistics
from aamoe_jax.model import merge

Batch = dict[str, Int[np.ndarray, "b L"]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Sums over all targets of a dataset that count, and what follows from them."""

    budget: BudgetMode
    nll: float
    """Sum of -log p, in nats."""
    tokens: int
    bytes: int
    """Bytes of text that the targets stand for."""
    nll_by_position: Float[np.ndarray, "L"]
    """Mean -log p at every position of the row, in nats; NaN where no target counts."""
    flops: float
    """FLOPs spent by the forward passes, padding included."""
    statistics: dict[str, Any]
    """`aamoe.statistics.summarize`: lists with one figure per AA-MoE layer."""

    @property
    def nats_per_token(self) -> float:
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nats_per_token))

    @property
    def bits_per_byte(self) -> float:
        return self.nll / np.log(2) / self.bytes

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {
            "budget": self.budget,
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "flops_per_token": self.flops_per_token,
            "nll_by_position": [None if np.isnan(x) else round(float(x), 5) for x in self.nll_by_position],
            "statistics": self.statistics,
        }


def causal_budget(config: ModelConfig) -> BudgetMode:
    """The causal budgets of a model: `prefix` as trained, or the predictor where it was trained on row budgets."""
    return "predictor" if config.aamoe.budget.normalizer == "row" else "prefix"


def evaluate(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    config: ModelConfig,
    batches: Sequence[Batch],
    byte_lengths: Int[np.ndarray, "V"],
    *,
    budget: BudgetMode,
) -> Evaluation:
    """Predicts every target of the batches once.

    Raises:
      ConfigError: when no target counts.
    """
    step = jax.jit(functools.partial(_evaluate_batch, graphdef, budget=budget))
    nll = count = text_bytes = 0
    statistics: Statistics = {}
    for index in range(len(batches)):
        batch = batches[index]
        batch_nll, more = step(params, batch)
        nll = nll + np.asarray(batch_nll, np.float64)
        # In float64 on the host: counts of a long evaluation leave the integers of float32.
        more = jax.tree.map(lambda x: np.asarray(x, np.float64), more)
        statistics = combine(statistics, more) if statistics else more
        count = count + batch["loss_mask"].sum(0)
        text_bytes += int((byte_lengths[batch["targets"]] * batch["loss_mask"]).sum())
    if not np.sum(count):
        raise ConfigError("evaluation: there is nothing to predict in this split; prepare a larger dataset")
    rows, length = batches[0]["tokens"].shape
    statistics = jax.device_get(statistics)
    return Evaluation(
        budget=budget,
        nll=float(nll.sum()),
        tokens=int(count.sum()),
        bytes=text_bytes,
        nll_by_position=np.divide(nll, count, out=np.full(length, np.nan), where=count > 0),
        flops=cost.forward_flops(config, rows * len(batches), length, statistics),
        statistics=summarize(statistics),
    )


def _evaluate_batch(
    graphdef: nnx.GraphDef, params: dict[str, Any], batch: dict[str, Int[Array, "b L"]], *, budget: BudgetMode
) -> tuple[Float[Array, "L"], Statistics]:
    """Sum of -log p over the rows, for every position."""
    logits, statistics = merge(graphdef, params)(
        batch["tokens"], batch["segment_ids"], batch["positions"], budget=budget
    )
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jnp.sum(nll * batch["loss_mask"], axis=0), statistics


def flip_rate(row: Evaluation) -> float:
    """Share of tokens whose predicted budget is not the row's, mean over layers; `row` is evaluated with row
    budgets."""
    return 1.0 - float(np.mean(row.statistics["predictor_exact"]))


def leakage_gap(causal: Evaluation, row: Evaluation) -> float:
    """Bits per byte that row budgets gain over causal ones: what they read from the future (decision 21)."""
    return causal.bits_per_byte - row.bits_per_byte
