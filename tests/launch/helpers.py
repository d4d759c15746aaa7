"""Run folders for programs to read."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from aamoe_jax.config import ExperimentConfig
from aamoe_jax.data import dataset_metadata
from aamoe_jax.training.checkpoints import CheckpointStore, Snapshot
from aamoe_jax.training.state import TrainState
from tests.evaluation.helpers import random_params


def save_run(folder: Path, config: ExperimentConfig) -> None:
    """A run folder with a checkpoint of random parameters: nothing here depends on training."""
    datasets = {name: dataset_metadata(config.data, name) for name, _ in config.data.mixture}
    params = jax.tree.map(jnp.asarray, random_params(config.model))
    state = TrainState(jnp.asarray(8, jnp.int32), params, {"count": jnp.asarray(8)}, jax.random.key(0), jnp.zeros(0))
    with CheckpointStore(folder / "checkpoints", keep_last=1) as store:
        store.save(Snapshot(state, config, datasets))
