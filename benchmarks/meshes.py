"""One small model on every mesh of the devices: does it compute the same, and what does it send?

  python -m benchmarks.meshes --output=experiments/results/meshes.json
  python -m benchmarks.meshes --meshes=1x2x2x2 --gin_param="AAMoEConfig.local = 'none'"

For every mesh (data x fsdp x resource x tensor): by how much loss and gradients differ from those of one device, and
the collectives of the compiled step with the bytes that one device sends. The devices are threads of this machine's
CPU, the collectives those that its compiler wrote; nothing here is a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from aamoe_jax.config import ConfigError, ExperimentConfig, MeshConfig, ModelConfig
from aamoe_jax.model import LanguageModel, split, structure
from aamoe_jax.preflight import collectives, hlo
from aamoe_jax.shards import AXES
from aamoe_jax.training.auxiliary import loss_weights
from aamoe_jax.training.loop import BATCH_FIELDS
from aamoe_jax.training.state import place
from aamoe_jax.training.step import gradients_and_metrics, over_mesh
from experiments.binding import load_experiment
from experiments.program import command_line, plain_table, publish

SMALL = (
    "ModelConfig.vocab_size = 64",
    "ModelConfig.d_model = 32",
    "ModelConfig.num_heads = 8",
    "ModelConfig.num_layers = 2",
    "AAMoEConfig.chunk_size = 8",
    "AAMoEConfig.num_experts = 16",
    "BudgetConfig.beta = 3.0",
    "DataConfig.seq_len = 128",
    "DataConfig.document_align = 8",
    "TrainingConfig.batch_size = 8",
)
"""A model that every mesh of 8 devices divides."""

QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

PAIRS = ("pairs_local", "pairs_context", "pairs_expert")
COUNTS = (*PAIRS, "neurons_added", "neurons_offered", "pairs_compared", "pairs_offered", "moe_load", "moe_dropped")
MASS = ("mass_local", "mass_context", "mass_expert")

Gradients = dict[str, Any]
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Row:
    """What was found on one mesh."""

    mesh: tuple[int, ...]
    loss: float
    """Relative difference from one device."""
    gradient: float
    """The largest difference in any parameter's gradient, over the largest entry of that gradient."""
    pairs: float
    """The largest difference in how many resources of a kind, neurons, or tokens of an expert, a layer gave."""
    mass: float
    """The largest difference in a kind's share of a layer's attention, which is not exact where resources are divided.
    """
    overflow: float
    """Pairs dropped, of all layers."""
    collectives: dict[str, tuple[int, float]]
    """See `sent_by`."""


def factorizations(devices: int) -> list[tuple[int, ...]]:
    """Every way to write `devices` as a product of four sizes."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    return [sizes for sizes in itertools.product(divisors, repeat=len(AXES)) if math.prod(sizes) == devices]


def random_batch(config: ExperimentConfig) -> Batch:
    """Rows of two documents, which meet in the middle of even rows and a chunk after it in odd ones; the last row has
    padding for its second."""
    rng, chunk = np.random.default_rng(0), config.model.aamoe.chunk_size
    rows, length = config.training.batch_size, config.data.seq_len
    first = length // (2 * chunk) * chunk + chunk * (np.arange(rows)[:, None] % 2)
    place = np.broadcast_to(np.arange(length), (rows, length))
    segment_ids = np.where(place < first, 1, 2)
    segment_ids[-1, segment_ids[-1] == 2] = 0
    positions = np.where(place < first, place, place - first)
    tokens = rng.integers(1, config.model.vocab_size, (rows, length + 1))
    batch = tokens[:, :-1], tokens[:, 1:], segment_ids, positions, segment_ids > 0
    return {name: x.astype(np.int32) for name, x in zip(BATCH_FIELDS, batch, strict=True)}


@functools.cache
def random_params(config: ModelConfig) -> Gradients:
    """Initial parameters, and something in those that start at zero: budgets are to differ."""

    def build(key: jax.Array) -> Gradients:
        return split(LanguageModel(config, rngs=nnx.Rngs(key)))[1]

    params = jax.jit(build)(jax.random.key(0))
    noise = np.random.default_rng(1)
    return jax.tree.map(lambda x: np.asarray(x) if np.any(x) else noise.normal(size=x.shape).astype(x.dtype), params)


def compiled_on(
    config: ExperimentConfig, devices: Sequence[jax.Device]
) -> tuple[jax.stages.Compiled, tuple[Gradients, dict[str, jax.Array]]]:
    """The program that makes gradients and metrics, and what it is called with: one random batch."""
    placement = place(config, devices)
    compute: Callable = functools.partial(
        gradients_and_metrics,
        structure(config.model),
        accumulate=config.training.accumulate,
        weights=loss_weights(config.model)
        | {"sparsity_loss": np.full(len(config.model.layers_of("relu_moe")), 0.1, np.float32)},
        shards=placement.shards,
        byte_lengths=np.ones(config.model.vocab_size, np.int32),
    )
    step = jax.jit(over_mesh(compute, placement, (placement.params, PartitionSpec())))
    index, count = placement.shard(config.training.batch_size)
    rows = {name: np.split(x, count)[index] for name, x in random_batch(config).items()}
    batch = placement.put(rows, config.training.batch_size)
    params = placement.put_params(random_params(config.model))
    return step.lower(params, batch).compile(), (params, batch)


def gradients_of(compiled: jax.stages.Compiled, arguments: tuple) -> tuple[Gradients, Gradients]:
    """Gradients and metrics, whole."""
    gradients, metrics = compiled(*arguments)
    return jax.tree.map(_whole, gradients), jax.device_get(metrics)


def on_one_device(config: ExperimentConfig) -> tuple[Gradients, Gradients]:
    """What all meshes are held to."""
    return gradients_of(*compiled_on(dataclasses.replace(config, mesh=MeshConfig()), jax.local_devices()[:1]))


def over(config: ExperimentConfig, mesh: tuple[int, ...]) -> ExperimentConfig:
    """The experiment on a mesh of these sizes."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **dict(zip(AXES, mesh, strict=True))))


def sent_by(compiled: jax.stages.Compiled, mesh: tuple[int, ...]) -> dict[str, tuple[int, float]]:
    """`kind axes` -> (how often, bytes that one device sends) in one step."""
    module = hlo.parse(compiled.as_text())
    found = collectives.collectives(module, hlo.runs(module), dict(zip(AXES, mesh, strict=True)))
    return {f"{item.kind} {'+'.join(item.axes)}": (item.count, item.sent) for item in found}


def measure(config: ExperimentConfig, mesh: tuple[int, ...], one: tuple[Gradients, Gradients]) -> Row:
    """One mesh against one device."""
    compiled, arguments = compiled_on(over(config, mesh), jax.devices())
    gradients, metrics = gradients_of(compiled, arguments)
    expected, single = one
    statistics, known = metrics["statistics"], single["statistics"]
    mass = [name for name in MASS if name in statistics]
    return Row(
        mesh,
        abs(metrics["nll"] / single["nll"] - 1).item(),
        _largest(jax.tree.leaves(jax.tree.map(_difference, gradients, expected))),
        _largest([float(np.abs(statistics[name] - known[name]).max()) for name in COUNTS if name in statistics]),
        _largest([float(np.abs(statistics[name] - known[name]).max() / known["tokens"].max()) for name in mass]),
        float(np.sum(statistics.get("overflow", 0))),
        sent_by(compiled, mesh),
    )


def _whole(x: jax.Array) -> np.ndarray:
    """The array, of which another process may have a part."""
    here = x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x) if here else multihost_utils.process_allgather(x, tiled=True)


def _largest(differences: Sequence[float]) -> float:
    """NaN if any of them is."""
    return float(np.max(differences, initial=0.0))


def _difference(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-12)) if x.size else 0.0


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = []
    for row in rows:
        sent = sum(size for _, size in row.collectives.values())
        what = ", ".join(f"{count} {name} ({size:,.0f})" for name, (count, size) in row.collectives.items())
        mesh = " x ".join(map(str, row.mesh))
        lines.append([mesh, f"{row.loss:.1e}", f"{row.gradient:.1e}", f"{row.pairs:g}", what, f"{sent:,.0f}"])
    heads = [" x ".join(AXES), "loss", "gradients", "pairs", "collectives of a step (bytes a device sends)", "bytes"]
    return plain_table(heads, "lrrrlr", lines)


def parse_meshes(text: str, devices: int) -> list[tuple[int, ...]]:
    """`all`, or a list such as 1x2x2x2,8x1x1x1.

    Raises:
      ConfigError: for anything else, or a product that is not the number of devices.
    """
    if text == "all":
        return factorizations(devices)
    meshes = []
    for part in text.split(","):
        sizes = part.split("x")
        if len(sizes) != len(AXES) or not all(size.isdecimal() for size in sizes):
            raise ConfigError(f"--meshes: {part!r} is not four sizes such as 1x2x2x2")
        if math.prod(map(int, sizes)) != devices:
            raise ConfigError(f"--meshes: {part} does not make --devices={devices}")
        meshes.append(tuple(map(int, sizes)))
    return meshes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="devices that the CPU is to stand for")
    parser.add_argument(
        "--meshes", default="all", help="such as 1x2x2x2,8x1x1x1; all: every one that makes the devices"
    )
    parser.add_argument("--gin_param", action="append", default=[], help="a binding that changes the model; repeat it")
    parser.add_argument("--output", type=Path, help="a .json file for the rows; a table goes beside it as .md")
    given = parser.parse_args()
    try:
        meshes = parse_meshes(given.meshes, given.devices)
        config = load_experiment((), [*SMALL, *given.gin_param])
    except ConfigError as error:
        parser.error(str(error))
    # Nothing here is a time: most of it would be the compiler's.
    os.environ["XLA_FLAGS"] = f"{QUICKLY} {os.environ.get('XLA_FLAGS', '')}"
    jax.config.update("jax_num_cpu_devices", given.devices)
    one = on_one_device(config)
    rows = []
    for mesh in meshes:
        rows.append(measure(config, mesh, one))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    command = command_line("benchmarks.meshes")
    result = {"command": command, "jax": jax.__version__, "rows": [dataclasses.asdict(row) for row in rows]}
    publish(result, f"{__doc__}\n{table(rows)}\n\n```\n{command}\n```\n", given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
