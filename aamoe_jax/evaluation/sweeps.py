"""A trained model at budgets and at lengths that it was not trained for, without fine-tuning (AA-34, AA-35,
DEC-18).

All points are of the same text. Longer rows are fewer, so that a forward pass always holds about the same number of
tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from flax import nnx
from jaxtyping import Int

from aamoe_jax.config import ConfigError, DataConfig, ModelConfig
from aamoe_jax.data import Stream, evaluation_batches
from aamoe_jax.evaluation.perplexity import Batch, Evaluation, Evaluator
from aamoe_jax.mixers.base import BudgetMode

BUDGET_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
LENGTH_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)

Fixed = Literal["beta", "B", "none"]
"""What stays the same while rows grow: resources per token, resources per row; `none`: the model has no budgets."""


class UnfitLengthError(ConfigError):
    """The split cannot be cut into rows of some length. The message says why."""


# The budget.


def budget_sweep(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    config: ModelConfig,
    batches: Sequence[Batch],
    byte_lengths: Int[np.ndarray, "V"],
    *,
    budget: BudgetMode,
    scales: Sequence[float],
) -> list[Evaluation]:
    """The same text at every budget scale, in ascending order, compiled once.

    Raises:
      ConfigError: a scale that is not a positive number, or nothing to predict.
    """
    # Work is laid out for the largest budget: smaller ones take no less memory, and cost less only in pairs.
    evaluator = Evaluator(graphdef, config, budget=budget, max_budget_scale=max(scales))
    return [evaluator(params, batches, byte_lengths, budget_scale=scale, probed=True) for scale in sorted(scales)]


def rises(bits_per_byte: Sequence[float]) -> list[int]:
    """The places at which a row of figures is larger than just before: none if it falls monotonically."""
    return [i for i in range(1, len(bits_per_byte)) if bits_per_byte[i] > bits_per_byte[i - 1]]


# The length.


@dataclasses.dataclass(frozen=True)
class LengthPoint:
    """One length of rows."""

    factor: float
    """In training lengths."""
    length: float
    """Tokens per row; a whole number, unless it was skipped for not being one."""
    evaluations: dict[Fixed, Evaluation]
    skipped: str | None = None
    """Why there are no evaluations."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        evaluations = {fixed: evaluation.to_dict() for fixed, evaluation in self.evaluations.items()}
        return {"factor": self.factor, "length": self.length, "skipped": self.skipped, "fixed": evaluations}


def length_sweep(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    config: ModelConfig,
    batches_of: Callable[[float], Sequence[Batch]],
    byte_lengths: Int[np.ndarray, "V"],
    *,
    budget: BudgetMode,
    trained_length: int,
    factors: Sequence[float],
) -> list[LengthPoint]:
    """The same text in rows of every length, in ascending order, with beta fixed and with B fixed.

    Args:
      batches_of: the text in rows of so many tokens; may raise UnfitLengthError, which skips the point.

    Raises:
      ConfigError: no length was fit.
    """
    points = []
    for factor in sorted(factors):
        length = factor * trained_length
        try:
            batches = batches_of(length)
        except UnfitLengthError as unfit:
            points.append(LengthPoint(factor, length, {}, skipped=str(unfit)))
            continue
        # At the training length beta and B are one.
        scales: dict[Fixed, float] = {"beta": 1.0, "B": 1.0 / factor} if config.layers_of("aamoe") else {"none": 1.0}
        different = sorted(set(scales.values()))
        found = budget_sweep(graphdef, params, config, batches, byte_lengths, budget=budget, scales=different)
        by_scale = dict(zip(different, found, strict=True))
        points.append(LengthPoint(factor, length, {fixed: by_scale[scale] for fixed, scale in scales.items()}))
    if all(point.skipped for point in points):
        raise ConfigError(f"no length can be evaluated; the last one: {points[-1].skipped}")
    return points


def held_out(
    data: DataConfig, name: str, split: str, *, length: float | int, batch_size: int, max_batches: int | None = None
) -> Sequence[Batch]:
    """A split in rows of `length` tokens, as many at once as hold the tokens of `batch_size` rows of training.

    Args:
      max_batches: take the text of so many batches at the training length alone.

    Raises:
      UnfitLengthError: documents would not start at chunk boundaries, or the text does not fill one row.
    """
    if length % data.document_align:
        raise UnfitLengthError(f"{length:g} tokens are not a multiple of document_align = {data.document_align}")
    available = len(Stream(data, name, split))
    if available <= length:
        found = f"the {split} split of {name!r} has {available} tokens"
        raise UnfitLengthError(f"{found}, less than one row of {int(length)}")
    length, tokens = int(length), batch_size * data.seq_len
    rows = max(1, tokens // length)
    batches = evaluation_batches(dataclasses.replace(data, seq_len=length), name, split=split, batch_size=rows)
    if max_batches is None:
        return batches
    return [batches[i] for i in range(min(math.ceil(max_batches * tokens / (rows * length)), len(batches)))]
