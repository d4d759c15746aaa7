"""What a run carries from step to step, and where it lies.

Plain nested dicts of arrays under this project's path names, so that a checkpoint outlives the modules that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from aamoe_jax.config import ExperimentConfig, ModelConfig
from aamoe_jax.model import LanguageModel, split, structure
from aamoe_jax.sharding import RULES, make_mesh, parameter_specs, require_divisible, require_storable
from aamoe_jax.shards import Shards
from aamoe_jax.training.auxiliary import first_sparsity_weights


class TrainState(NamedTuple):
    """Everything that one step hands to the next."""

    step: Int[Array, ""]
    """Updates made so far; also the number of the next batch."""
    params: dict[str, Any]
    optimizer: optax.OptState
    key: Key[Array, ""]
    """The key of the run. What step n draws comes from `jax.random.fold_in(key, n)`, so nothing else is state."""
    sparsity_weight: Float[Array, "n"]
    """lambda of every layer of ReLU experts: the weight of its sparsity loss in the next step (UNI-05)."""


class Placement(NamedTuple):
    """Where arrays lie on the mesh."""

    mesh: Mesh
    shards: Shards
    """The mesh as the model sees it."""
    params: dict[str, Any]
    """PartitionSpecs like the parameters."""
    replicated: NamedSharding
    """On every device."""
    batch: NamedSharding
    """Of an array [rows, L] of a batch: every device has whole rows."""

    def of_params(self) -> dict[str, Any]:
        """Where every parameter lies."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.params)

    def put_params(self, params: dict[str, Any]) -> dict[str, Array]:
        """Parameters on their devices."""
        return jax.device_put(params, self.of_params())

    def shard(self, rows: int) -> tuple[int, int]:
        """(index, count): in which of how many equal parts of a batch all rows are that this process needs."""
        places = self.batch.addressable_devices_indices_map((rows, 1)).values()
        starts, stops = zip(*(place[0].indices(rows)[:2] for place in places if place), strict=True)
        size = max(stops) - min(starts)
        return (min(starts) // size, rows // size) if rows % size == 0 and min(starts) % size == 0 else (0, 1)

    def put(self, batch: dict[str, np.ndarray], rows: int | None = None) -> dict[str, Array]:
        """A batch on its devices, given the rows of `shard`.

        Args:
          rows: of the batch of all processes; None: as many as given.
        """
        with jax.transfer_guard_host_to_device("allow"):  # this one is meant
            return {
                name: jax.make_array_from_process_local_data(self.batch, x, (rows or len(x), *x.shape[1:]))
                for name, x in batch.items()
            }


def place(config: ExperimentConfig, devices: Sequence[jax.Device] | None = None) -> Placement:
    """The mesh that the experiment asks for over `devices` (None: all of all processes).

    Raises:
      ConfigError: the mesh does not make the devices, or something cannot be divided evenly over it.
    """
    mesh = make_mesh(config.mesh, devices)
    require_divisible(config, mesh.shape)
    return _placement(config, mesh)


def place_params(config: ExperimentConfig, devices: Sequence[jax.Device] | None = None) -> Placement:
    """The same for programs that the compiler divides, by where the parameters lie: only these have to divide evenly.

    Raises:
      ConfigError: the mesh does not make the devices, or a parameter cannot be divided evenly over it.
    """
    mesh = make_mesh(config.mesh, devices, AxisType.Auto)
    require_storable(config.model, mesh.shape)
    return _placement(config, mesh)


def _placement(config: ExperimentConfig, mesh: Mesh) -> Placement:
    replicated, rows = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), RULES.spec("rows", None)))
    shards = Shards.of_mesh(mesh, config.mesh.pair_bound)
    return Placement(mesh, shards, parameter_specs(config.model), replicated, rows)


def build_state(config: ModelConfig, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step: a pure function of its arguments, to be run under jit."""
    init_key, run_key = jax.random.split(jax.random.key(seed))
    _, params = split(LanguageModel(config, rngs=nnx.Rngs(init_key)))
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), run_key, first_sparsity_weights(config))


def initial_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, seed: int, placement: Placement
) -> TrainState:
    """The state before the first step, on its devices."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract_state(config, optimizer, placement)[1])
    return jax.jit(build_state, static_argnums=(0, 1, 2), out_shardings=shardings)(config, optimizer, seed)


def abstract_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, placement: Placement
) -> tuple[nnx.GraphDef, TrainState]:
    """The structure of the model, and the state as shapes with shardings: nothing is computed."""
    shapes = jax.eval_shape(lambda: build_state(config, optimizer, 0))
    shardings = jax.tree.map(lambda _: placement.replicated, shapes)
    # What the optimizer has of every parameter lies beside it.
    beside = optax.tree.map_params(
        optimizer,
        lambda _, at: at,
        shapes.optimizer,
        placement.of_params(),
        transform_non_params=lambda _: placement.replicated,
    )
    return structure(config), _laid(shapes, shardings._replace(params=placement.of_params(), optimizer=beside))


def abstract_params(config: ModelConfig, placement: Placement) -> dict[str, Any]:
    """The parameters as shapes with shardings: nothing is computed."""
    return _laid(jax.eval_shape(lambda: split(LanguageModel(config, rngs=nnx.Rngs(0)))[1]), placement.of_params())


def _laid(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)
