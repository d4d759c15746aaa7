"""Evaluates a checkpoint on held-out text."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from aamoe_jax.config import ConfigError, DataConfig, ModelConfig
from aamoe_jax.data import load_tokenizer
from aamoe_jax.evaluation.perplexity import Evaluation, Evaluator, budget_modes, causal_budget
from aamoe_jax.evaluation.sweeps import held_out
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import Skipped, structure
from aamoe_jax.training.checkpoints import Checkpoint
from aamoe_jax.training.state import Placement

Split = Literal["validation", "test"]


def evaluate(
    checkpoint: Checkpoint,
    dataset: str | None = None,
    *,
    split: Split = "test",
    budget: BudgetMode | None = None,
    budget_scale: float = 1.0,
    batch_size: int = 8,
    max_batches: int | None = None,
    data_dir: str | None = None,
    skipped: frozenset[Skipped] = frozenset(),
    placement: Placement | None = None,
) -> Evaluation:
    """Predicts every token of a held-out split once, and probes the causality of the model on the first batch.

    Args:
      checkpoint: from `load_checkpoint`.
      dataset: a prepared dataset; None: the one that the checkpoint was trained on.
      budget: None: `causal_budget` of the model, which a sampling model has too. `row` budgets see the future.
      budget_scale: multiplies the budget of every token in the AA-MoE layers.
      batch_size: rows per forward pass, each of DataConfig.seq_len tokens.
      max_batches: only the text of the first so many batches; None: all.
      data_dir: where prepared datasets lie; None: DataConfig.data_dir of the checkpoint.
      skipped: layers by number and mixers by name that are left out of the stack.
      placement: the mesh that the parameters lie on; None: one device.

    Raises:
      ConfigError: the dataset must be named, the split has too little text, or the model has no such budget.
      DataError: the dataset is not prepared.
    """
    model, data = checkpoint.config.model, checkpoint.config.data
    if data_dir is not None:
        data = dataclasses.replace(data, data_dir=data_dir)
    if split not in get_args(Split):
        raise ConfigError(f"split = {split!r}: must be one of {', '.join(get_args(Split))}")
    _require_budget(model, budget, budget_scale)
    batches = held_out(
        data,
        _only_dataset(data) if dataset is None else dataset,
        split,
        length=data.seq_len,
        batch_size=batch_size,
        max_batches=max_batches,
    )
    evaluator = Evaluator(
        structure(model, skipped),
        model,
        budget=causal_budget(model) if budget is None else budget,
        max_budget_scale=max(1.0, budget_scale),
        placement=placement,
    )
    byte_lengths = load_tokenizer(data.tokenizer).byte_lengths
    return evaluator(checkpoint.params, batches, byte_lengths, budget_scale=budget_scale, probed=True)


def _only_dataset(data: DataConfig) -> str:
    names = [name for name, _ in data.mixture]
    if len(names) > 1:
        raise ConfigError(f"dataset = None: the checkpoint was trained on several; give one of {', '.join(names)}")
    return names[0]


def _require_budget(model: ModelConfig, budget: BudgetMode | None, budget_scale: float) -> None:
    offered = budget_modes(model)
    if not offered and budget_scale != 1:
        raise ConfigError(f"budget_scale = {budget_scale!r}: this model has no AA-MoE layer, so it has no budgets")
    if budget not in (None, causal_budget(model), *offered):
        known = f"it has {', '.join(offered)}" if offered else "it has no AA-MoE layer, so it has no budgets"
        raise ConfigError(f"budget = {budget!r}: this model was not trained for that; {known}")
