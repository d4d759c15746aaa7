"""How well a model predicts held-out text, under budgets that a sampling model could have (decisions 01, 21, 35).

Shapes: b rows, L tokens per row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from aamoe_jax import cost
from aamoe_jax.aamoe.correlations import beside_loss
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.evaluation.causality import Causality, default_cuts, probe
from aamoe_jax.mixers.base import BudgetMode, Statistics
from aamoe_jax.mixers.statistics import combine, over_all_devices, summarize
from aamoe_jax.model import merge
from aamoe_jax.sharding import RULES, on_host
from aamoe_jax.shards import ROWS, TOKENS, WHOLE, all_reduce
from aamoe_jax.training.state import Placement

MAX_BUDGET_SCALE = 1e4
"""Past any use; far larger ones would not fit into an integer."""

FIGURES = ["budget", "budget_scale", "nats_per_token", "perplexity", "bits_per_byte", "tokens", "bytes"]
FIGURES += ["flops_per_token", "spent", "clip_rate"]
"""Those of an evaluation that are one number."""

Batch = dict[str, Int[np.ndarray, "b L"]]
Arrays = dict[str, Int[Array, "b L"]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Sums over all targets of a dataset that count, and what follows from them."""

    budget: BudgetMode | None
    """None: the model has no AA-MoE layer, and so no budgets."""
    budget_scale: float
    """What every beta was multiplied by."""
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
    """`mixers.statistics.summarize`: lists with one figure per layer that has it."""
    nll_by_target: Float[np.ndarray, "rows L"] | None = None
    """-log p of every target, 0 where it does not count; None of a model on a mesh."""
    causality: Causality | None = None
    """What the probe saw on the first batch, where it was run."""

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

    @property
    def spent(self) -> float | None:
        """Resources per token, mean over layers; None for a model without budgets."""
        return _mean_over_layers(self.statistics, "spent")

    @property
    def clip_rate(self) -> float | None:
        """Share of the wanted pairs that availability, slots or the cap cut, mean over layers."""
        return _mean_over_layers(self.statistics, "clip_rate")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {name: getattr(self, name) for name in FIGURES} | {
            "causality": self.causality.to_dict() if self.causality else None,
            "nll_by_position": [None if np.isnan(x) else round(float(x), 5) for x in self.nll_by_position],
            "statistics": self.statistics,
        }


def _mean_over_layers(statistics: dict[str, Any], name: str) -> float | None:
    return float(np.mean(statistics[name])) if name in statistics else None


# Which budgets.


def causal_budget(config: ModelConfig) -> BudgetMode:
    """The causal budgets of a model: `prefix` as trained, or the predictor where it was trained on row budgets."""
    return "predictor" if config.aamoe.budget.normalizer == "row" else "prefix"


def budget_modes(config: ModelConfig) -> tuple[BudgetMode, ...]:
    """All budgets that a model can be evaluated under, the row's first: none without an AA-MoE layer, the predictor's
    only where one was trained."""
    if not config.layers_of("aamoe"):
        return ()
    trained_on_row = config.aamoe.budget.normalizer == "row"
    return ("row", "predictor_uncapped", "predictor", "prefix") if trained_on_row else ("row", "prefix")


def require_budget_scale(scale: float) -> float:
    """`scale`, if it can multiply a budget.

    Raises:
      ConfigError: it is not a positive number.
    """
    if not (scale > 0 and np.isfinite(scale)):
        raise ConfigError(f"budget_scale = {scale!r}: must be a positive number")
    if scale > MAX_BUDGET_SCALE:
        raise ConfigError(f"budget_scale = {scale!r}: must be at most {MAX_BUDGET_SCALE:g}")
    return scale


# Evaluating.


class Evaluator:
    """A model under one kind of budget: compiled once for every shape of batch, whatever the budget scale."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: ModelConfig,
        *,
        budget: BudgetMode,
        max_budget_scale: float = 1.0,
        placement: Placement | None = None,
    ):
        """Prepares for some kind of budget.

        Args:
          max_budget_scale: the largest budget scale that static shapes allow for.
          placement: the mesh that the parameters lie on; None: one device.
        """
        self._config, self._budget, self._max_scale, self._placement = config, budget, max_budget_scale, placement
        shards = WHOLE if placement is None else placement.shards
        options: dict[str, Any] = {"budget": budget, "max_budget_scale": max_budget_scale, "detail": "tokens"}

        def forward(params: dict[str, Any], batch: Arrays, scale: Float[Array, ""]) -> tuple[Array, Statistics]:
            inputs = (batch[name] for name in ("tokens", "segment_ids", "positions"))
            return merge(graphdef, params)(*inputs, budget_scale=scale, shards=shards, **options)

        def logits(*inputs: Any) -> Float[Array, "b n V"]:
            return forward(*inputs)[0]

        def losses(params: dict[str, Any], batch: Arrays, scale: Float[Array, ""]) -> tuple[Array, Statistics]:
            """-log p of every target, 0 where it does not count; of the rows and devices of a mesh together."""
            logits, statistics = forward(params, batch, scale)
            statistics = beside_loss(statistics, logits, batch, shards)
            targets, counts = (shards.part(batch[name], TOKENS) for name in ("targets", "loss_mask"))
            nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * counts
            if placement is not None:
                nll, statistics = all_reduce(nll.sum(0), axes=ROWS), over_all_devices(statistics)
            return nll, statistics

        if placement is not None:
            inputs = placement.params, placement.batch.spec, PartitionSpec()
            divided = functools.partial(jax.shard_map, mesh=placement.mesh, in_specs=inputs)
            losses = divided(losses, out_specs=(RULES.spec("tokens"), PartitionSpec()))
            logits = divided(logits, out_specs=RULES.spec("rows", "tokens", None))
        self._losses, self._logits = jax.jit(losses), jax.jit(logits)

    def __call__(
        self,
        params: dict[str, Any],
        batches: Sequence[Batch],
        byte_lengths: Int[np.ndarray, "V"],
        *,
        budget_scale: float = 1.0,
        probed: bool = False,
    ) -> Evaluation:
        """Predicts every target of the batches once.

        Args:
          probed: `causality` is found on the first batch.

        Raises:
          ConfigError: when no target counts, or the budget scale is not a positive number.
        """
        scale, text_bytes = self._traced(budget_scale), 0
        nll: Any = 0
        count: Any = 0
        by_target: list[np.ndarray] = []
        statistics: Statistics = {}
        for index in range(len(batches)):
            batch = batches[index]
            batch_nll, more = on_host(self._losses(params, self._put(batch), scale))
            if self._placement is None:
                by_target.append(batch_nll)
                batch_nll = batch_nll.sum(0, dtype=np.float64)
            nll = nll + batch_nll.astype(np.float64)
            # In float64 on the host: counts of a long evaluation leave the integers of float32.
            more = jax.tree.map(lambda x: x.astype(np.float64), more)
            statistics = combine(statistics, more) if statistics else more
            count = count + batch["loss_mask"].sum(0)
            text_bytes += int((byte_lengths[batch["targets"]] * batch["loss_mask"]).sum())
        if not np.any(count):
            raise ConfigError("evaluation: there is nothing to predict in this split; prepare a larger dataset")
        rows, length = batches[0]["tokens"].shape
        return Evaluation(
            budget=self._budget if self._config.layers_of("aamoe") else None,
            budget_scale=budget_scale,
            nll=float(nll.sum()),
            tokens=int(count.sum()),
            bytes=text_bytes,
            nll_by_position=np.divide(nll, count, out=np.full(length, np.nan), where=count > 0),
            flops=cost.forward_flops(self._config, rows * len(batches), length, statistics),
            statistics=summarize(statistics),
            nll_by_target=np.concatenate(by_target) if by_target else None,
            causality=self.probe(params, batches[0], budget_scale=budget_scale) if probed else None,
        )

    def probe(self, params: dict[str, Any], batch: Batch, *, budget_scale: float = 1.0, rows: int = 2) -> Causality:
        """Probes the model on the first rows of a batch, at a few cuts."""
        if self._placement is not None:
            size = self._placement.mesh.shape
            rows = size["data"] * size["fsdp"]  # as few as every device has one of
        scale, part = self._traced(budget_scale), {name: value[:rows] for name, value in batch.items()}
        return probe(
            lambda tokens: self._logits(params, self._put(part | {"tokens": tokens}), scale),
            part["tokens"],
            default_cuts(part["tokens"].shape[1], self._config.aamoe.chunk_size),
            vocab_size=self._config.vocab_size,
        )

    def _put(self, batch: Batch) -> Batch | dict[str, Array]:
        return batch if self._placement is None else self._placement.put(batch)

    def _traced(self, budget_scale: float) -> Float[np.ndarray, ""]:
        """The budget scale as an array: a Python number would be compiled into the program."""
        if require_budget_scale(budget_scale) > self._max_scale:
            raise ConfigError(f"budget_scale = {budget_scale!r}: must be at most max_budget_scale = {self._max_scale}")
        return np.asarray(budget_scale, np.float32)


# What row budgets read, and how well they are guessed.


def flip_rate(row: Evaluation) -> float:
    """Share of tokens whose predicted budget is not the row's, mean over layers; `row` is evaluated with row
    budgets."""
    return 1.0 - float(np.mean(row.statistics["predictor_exact"]))


def leakage_gap(causal: Evaluation, row: Evaluation) -> float:
    """Bits per byte that row budgets gain over causal ones: what they read from the future (decision 21)."""
    return causal.bits_per_byte - row.bits_per_byte


def predictor_figures(row: Evaluation) -> dict[str, list[Any]]:
    """How well the predictor guesses the row's budgets, lists with one entry per layer (decision 22).

    `exact`, `within_one`: shares of tokens. `error`: mean |guess - B_i|. `total`: predicted budgets over B. `affords`:
    for k = 1, 2, ... the accuracy of [B_i >= k], up to the last k that anybody gets wrong.
    """
    prefix = "predictor_"
    figures = {name.removeprefix(prefix): value for name, value in row.statistics.items() if name.startswith(prefix)}
    affords = np.asarray(figures["affords"])
    wrong = np.flatnonzero((affords < 1).any(0))
    last = int(wrong[-1]) + 1 if len(wrong) else 1
    return figures | {"affords": affords[:, :last].tolist()}
