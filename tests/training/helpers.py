"""Tiny experiments, and ways to look at what they leave."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from aamoe_jax.config import (
    AAMoEConfig,
    BudgetConfig,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from aamoe_jax.training.loop import Recorder, train
from aamoe_jax.training.metrics import TIMING_FIELDS, read_metrics
from tests.data.helpers import prepared, random_documents

SEQ_LEN = 64


def model_config(pattern: str = "aamoe", normalizer: str = "prefix", **values: Any) -> ModelConfig:
    budget = BudgetConfig(beta=2.0, normalizer=normalizer)
    layer = AAMoEConfig(chunk_size=8, num_experts=4, budget=budget)
    defaults = {"d_model": 32, "num_heads": 2, "num_layers": 2, "pattern": (pattern,), "d_ff": 32, "aamoe": layer}
    return ModelConfig(**(defaults | values))


def experiment(data: DataConfig, model: ModelConfig | None = None, **training: Any) -> ExperimentConfig:
    defaults = {"steps": 8, "batch_size": 4, "log_every": 1, "eval_every": 4, "eval_batches": 1, "checkpoint_every": 4}
    return ExperimentConfig(
        model=model or model_config("parallel", num_layers=1),
        data=data,
        optimizer=OptimizerConfig(warmup_steps=2),
        training=TrainingConfig(**(defaults | training)),
    )


def tiny_data(folder: Path) -> DataConfig:
    return prepared(folder, random_documents(train=60, held_out=6), seq_len=SEQ_LEN)


def replace(config: ExperimentConfig, room: str, **values: Any) -> ExperimentConfig:
    """With other values in one room, such as `training`."""
    return dataclasses.replace(config, **{room: dataclasses.replace(vars(config)[room], **values)})


def random_batch(seed: int = 0, rows: int = 4, length: int = SEQ_LEN) -> dict[str, np.ndarray]:
    """Rows of random tokens whose targets count more often in some rows than in others."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(3, 259, (rows, length + 1)).astype(np.int32)
    share = np.linspace(0.1, 1.0, rows)[:, None]
    segment_ids = np.ones((rows, length), np.int32)
    segment_ids[0, length // 2 :] = 0  # the second half of the first row is padding
    mask = (generator.random((rows, length)) < share) & (segment_ids > 0)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segment_ids,
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "loss_mask": mask.astype(np.int32),
    }


def cut_off(config: ExperimentConfig, run_dir: Path, step: int) -> None:
    """Trains until an error in a step, whose metrics and those of the step before are not recorded."""
    receive = Recorder.receive

    def failing(self: Recorder, number: int, metrics: Any) -> None:
        if number == step:
            raise KeyError(number)
        receive(self, number, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "receive", failing)
        with pytest.raises(KeyError):
            train(config, run_dir)


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of a run without what depends on the clock."""
    return [
        {name: value for name, value in record.items() if name not in TIMING_FIELDS} for record in read_metrics(run_dir)
    ]


def assert_same_bits(left: Any, right: Any) -> None:
    """Two trees of the same structure, dtypes and bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
