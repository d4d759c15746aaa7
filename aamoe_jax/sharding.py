"""The mesh, and typed rules: over which of its axes every dimension of parameters and batches is divided.

Modules name the dimensions of their parameters (`nnx.Param(..., axes=("storage", "heads"))`); the rules say what these
names mean on the mesh. The arithmetic knows neither: inside `jax.shard_map` it sees its own part of everything, and
`shards.py` moves what it needs of others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, PartitionSpec

from aamoe_jax.config import ConfigError, ExperimentConfig, MeshConfig, ModelConfig
from aamoe_jax.model import LanguageModel
from aamoe_jax.shards import AXES, FSDP, RESOURCE, ROWS, TENSOR, TOKENS

MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """Which axes of the mesh divide a dimension, by the name of the dimension: what `shards.py` moves follows it."""

    rows: MeshAxes = ROWS
    """Rows of a batch."""
    tokens: MeshAxes = TOKENS
    """Tokens of a row, contiguous parts of it, wherever a mixer does not attend."""
    resources: MeshAxes = RESOURCE
    """The first axis of the representation tensor: chunks of context, and experts with their router embeddings."""
    heads: MeshAxes = TENSOR
    """Heads of queries, keys and values, those of expert rows included; hidden units of a feed-forward."""
    storage: MeshAxes = FSDP
    """A dimension along which a parameter is divided at rest; it is gathered for use, in the type of activations."""
    storage_float32: MeshAxes = FSDP
    """The same for parameters that are used in float32."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            for axis in getattr(self, field.name):
                if axis not in AXES:
                    raise ValueError(f"ShardingRules.{field.name}: {axis!r} is no axis; there are {', '.join(AXES)}")

    def spec(self, *dimensions: str | None) -> PartitionSpec:
        """Where an array lies whose dimensions are called so; None: not divided.

        Raises:
          ValueError: a name that is no rule, or two dimensions on one axis of the mesh.
        """
        rules = dataclasses.asdict(self)
        unknown = [name for name in dimensions if name is not None and name not in rules]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no rule; there are {', '.join(rules)}")
        axes = [() if name is None else rules[name] for name in dimensions]
        used = [axis for names in axes for axis in names]
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            raise ValueError(f"dimensions {dimensions} are divided over {twice[0]!r} twice")
        return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in axes))


RULES = ShardingRules()


def make_mesh(
    config: MeshConfig, devices: Sequence[jax.Device] | None = None, axis_type: AxisType = AxisType.Explicit
) -> Mesh:
    """The devices (None: all of all processes) as a mesh.

    Raises:
      ConfigError: the axes do not multiply to the number of devices, or `data` is not divided over their slices.
    """
    devices = jax.devices() if devices is None else devices
    slices = devices_of_slices(devices, config.slices)
    sizes = tuple(sizes_in_slice(mesh_sizes(config, len(devices)), len(slices)).values())
    # An axis of ours may take a part of one of the torus: jax.make_mesh refuses that, and so many meshes.
    grids = [mesh_utils.create_device_mesh(sizes, part, allow_split_physical_axes=True) for part in slices]
    return Mesh(np.concatenate(grids), AXES, axis_types=(axis_type,) * len(AXES))  # `data` is the first axis


def devices_of_slices(devices: Sequence[jax.Device], count: int | None) -> list[list[jax.Device]]:
    """The devices of every slice.

    Args:
      count: MeshConfig.slices.

    Raises:
      ConfigError: they are not so many slices.
    """
    if devices[0].platform == "tpu":
        known = sorted({_slice_of(device) for device in devices})
        if count not in (None, len(known)):
            raise ConfigError(
                f"MeshConfig.slices = {count}: the devices are of {len(known)}: give that, or None for what there is"
            )
        return [[device for device in devices if _slice_of(device) == index] for index in known]
    if count in (None, 1):
        return [list(devices)]
    if len(devices) % count:
        raise ConfigError(f"MeshConfig.slices = {count}: {len(devices)} devices do not make so many equal slices")
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    return np.reshape(np.array(ordered, dtype=object), (count, -1)).tolist()


def _slice_of(device: jax.Device) -> int:
    try:
        return device.slice_index
    except AttributeError:  # a topology of one slice, without its hardware
        return 0


def sizes_in_slice(sizes: Mapping[str, int], slices: int) -> dict[str, int]:
    """The part of a mesh that one slice has.

    Raises:
      ConfigError: `data` is not divided over the slices.
    """
    if sizes["data"] % slices:
        raise ConfigError(
            f"MeshConfig.data = {sizes['data']}: must be a multiple of {slices}, the number of slices: other axes send "
            f"too much to cross between them. Set MeshConfig.data = {slices}, and MeshConfig.fsdp = -1 for the rest"
        )
    return {**sizes, "data": sizes["data"] // slices}


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """The size of every axis of the mesh of so many devices.

    Raises:
      ConfigError: the axes do not multiply to the number of devices.
    """
    sizes = {axis: getattr(config, axis) for axis in AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if devices % given or (not free and given != devices):
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
        raise ConfigError(
            f"MeshConfig: {product} = {given} does not make {devices} devices: change an axis, "
            f"or let one take the rest, such as MeshConfig.{free[0] if free else 'fsdp'} = -1"
        )
    return sizes | dict.fromkeys(free, devices // given)


def parameter_specs(config: ModelConfig) -> dict[str, Any]:
    """Where every parameter lies, as a nested dict like the parameters."""

    def spec(param: nnx.Param) -> PartitionSpec:
        if "axes" not in param.get_metadata():
            raise ConfigError(
                f"a parameter of shape {param.shape} in {config.pattern} has no axes: write nnx.Param(value, axes=...) "
                "with None or a name of ShardingRules for every dimension"
            )
        stacked = param.ndim - len(param.axes)  # the axis over periods, which is never divided
        return RULES.spec(*(None,) * stacked, *param.axes)

    state = nnx.state(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))
    return nnx.to_pure_dict(state, extract_fn=spec)


def require_divisible(config: ExperimentConfig, size: Mapping[str, int]) -> None:
    """Refuses what a mesh cannot divide evenly, naming the field, its value and what is wanted.

    Args:
      size: of every axis.

    Raises:
      ConfigError: of the first such field.
    """
    model, training = config.model, config.training
    tokens, parts = config.data.seq_len, size["resource"] * size["tensor"]
    rows = training.batch_size // training.accumulate
    wanted = [
        ("TrainingConfig.batch_size / accumulate", rows, size["data"] * size["fsdp"], "data x fsdp"),
        ("DataConfig.seq_len", tokens, parts, "resource x tensor"),
        ("ModelConfig.num_heads", model.num_heads, size["tensor"], "tensor"),
        ("ModelConfig.num_kv_heads", model.kv_heads, size["tensor"], "tensor"),
    ]
    if model.layers_of("aamoe"):
        m, experts = model.aamoe.chunk_size, model.aamoe.num_experts
        wanted.append(("AAMoEConfig.num_experts", experts, size["resource"], "resource"))
        if parts > 1:
            wanted.append(("DataConfig.seq_len", tokens, m * size["resource"], "AAMoEConfig.chunk_size x resource"))
    for name, value, divisor, what in wanted:
        if value % divisor:
            raise ConfigError(f"{name} = {value}: must be divisible by {divisor}, the mesh's {what}")
    require_storable(config.model, size)


def require_storable(config: ModelConfig, size: Mapping[str, int]) -> None:
    """Refuses parameters with a dimension that the axes it lies on do not divide.

    Args:
      size: of every axis.

    Raises:
      ConfigError: of the first such parameter.
    """
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))))
    specs = jax.tree_util.tree_leaves(parameter_specs(config))
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(shapes), specs, strict=True):
        for length, names in zip(leaf.shape, spec, strict=False):
            axes: tuple[str, ...] = () if names is None else (names,) if isinstance(names, str) else names
            parts = math.prod(size[axis] for axis in axes)
            if length % parts:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ConfigError(
                    f"MeshConfig.{axes[0]} = {parts}: parameter {name} of shape {leaf.shape} cannot be divided into "
                    f"{parts} along its {length}; take a smaller {axes[0]} axis"
                )


def on_host(tree: Any) -> Any:
    """Arrays of all processes, whole, as NumPy arrays. Every process asks for the same, in the same order."""

    def whole(x: Any) -> np.ndarray:
        elsewhere = isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True) if elsewhere else x)

    return jax.tree.map(whole, tree)
