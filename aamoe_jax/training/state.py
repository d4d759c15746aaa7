"""What a run carries from step to step, and where it lies.

Plain nested dicts of arrays under this project's path names, so that a checkpoint outlives the modules that made it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Key

from aamoe_jax.config import ConfigError, ModelConfig, TrainingConfig
from aamoe_jax.model import LanguageModel, split

MESH_AXES = ("data", "fsdp", "resource", "tensor")


class TrainState(NamedTuple):
    """Everything that one step hands to the next."""

    step: Int[Array, ""]
    """Updates made so far; also the number of the next batch."""
    params: dict[str, Any]
    optimizer: optax.OptState
    key: Key[Array, ""]
    """The key of the run. What step n draws comes from `jax.random.fold_in(key, n)`, so nothing else is state."""


class Placement(NamedTuple):
    """Where arrays lie: rows of a batch over the `data` axis, everything else on every device."""

    mesh: Mesh
    state: NamedSharding
    batch: NamedSharding

    def put(self, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """A batch on its devices."""
        return jax.device_put(batch, self.batch)


def local_placement(config: TrainingConfig) -> Placement:
    """Data parallelism over the devices of this process.

    Raises:
      ConfigError: when the rows of a micro-batch cannot be shared out evenly.
    """
    devices = jax.local_devices()
    rows = config.batch_size // config.accumulate
    if rows % len(devices):
        raise ConfigError(
            f"TrainingConfig.batch_size = {config.batch_size}: batch_size / accumulate = {rows} rows must be divisible "
            f"by the number of devices, {len(devices)}"
        )
    mesh = jax.make_mesh(
        (len(devices), 1, 1, 1), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices
    )
    return Placement(mesh, NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data")))


def build_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step: a pure function of its arguments, to be run under jit."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    _, params = split(LanguageModel(config, rngs=nnx.Rngs(init_key)))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), run_key)


def initial_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int, placement: Placement
) -> TrainState:
    """The state before the first step, on its devices."""
    build = jax.jit(build_state, static_argnums=(0, 1, 2), out_shardings=placement.state)
    return build(config, optimizer, seed)


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, placement: Placement
) -> tuple[nnx.GraphDef, TrainState]:
    """The structure of the model, and the state as shapes with shardings: nothing is computed."""
    graphdef, _ = split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
    shapes = jax.eval_shape(lambda: build_state(config, optimizer, 0))
    return graphdef, jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.state), shapes
    )
