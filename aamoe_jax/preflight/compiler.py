"""The process that compiles: it traces the real step for a slice that is not there, and hands it to libtpu.

libtpu reads its environment once, when it is loaded, and is stopped where its notes are all that is wanted: so it has a
process of its own, started by `program.py` with a request on its standard input.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable, topologies

from aamoe_jax.config import ConfigError, ExperimentConfig, from_dict
from aamoe_jax.cost import parameter_count
from aamoe_jax.extensions import import_again
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.summary import Mode
from aamoe_jax.training.evaluation import CAUSAL
from aamoe_jax.training.loop import abstract_batch, lower_step
from aamoe_jax.training.optimizer import build_optimizer
from aamoe_jax.training.state import abstract_state, place
from aamoe_jax.training.step import make_eval_step, make_train_step
from pallas_kernels import chips

TOO_BIG = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class Traced:
    """What is known before the compiler starts."""

    mesh: dict[str, int]
    places: list[list[int]]
    """(x, y, z, core) of every device, in the order of the mesh."""
    parameters: int
    tokens: int
    """Of a step."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the compiler says when it is done."""

    code_bytes: int = 0
    flops: float = 0.0
    refusal: str = ""
    """Why the program would be too big; empty where it is not."""


def trace(config: ExperimentConfig, mode: Mode, devices: list[Any]) -> tuple[jax.stages.Lowered, Traced]:
    """The step as training or evaluation runs it, over these devices.

    Raises:
      ConfigError: the mesh does not make the devices, or something cannot be divided over it.
    """
    placement, training = place(config, devices), config.training
    optimizer = build_optimizer(config.optimizer, training.steps)
    graphdef, like = abstract_state(config.model, optimizer, placement)
    byte_lengths = np.ones(config.model.vocab_size, np.int32)  # the program is the same for every tokenizer
    rows = training.batch_size if mode == "train" else training.batch_size // training.accumulate
    if mode == "train":
        step = make_train_step(config, graphdef, optimizer, byte_lengths, placement)
        lowered = lower_step(step, like, config, placement)
    else:
        evaluate = make_eval_step(graphdef, CAUSAL[config.model.aamoe.budget.normalizer], byte_lengths, placement)
        batch = abstract_batch((rows, config.data.seq_len), placement)
        lowered = jax.jit(evaluate).lower(like.params, batch)
    mesh = placement.mesh
    places = [place_of(device) for device in mesh.devices.flat]
    return lowered, Traced(dict(mesh.shape), places, parameter_count(like.params), rows * config.data.seq_len)


def place_of(device: jax.Device) -> list[int]:
    """(x, y, z, core) of a device in its slice."""
    return [*device.coords, device.core_on_chip]


def compile_step(lowered: jax.stages.Lowered, notes: Path, save: Path | None) -> Outcome:
    """Compiles to the end, leaves the compiler's notes in a folder, and the executable in a file."""
    try:
        compiled: Any = lowered.compile({"xla_dump_to": str(notes), "xla_dump_hlo_as_text": True})
    except jax.errors.JaxRuntimeError as error:
        if TOO_BIG not in str(error):
            raise
        return Outcome(refusal=str(error))
    if save is not None:
        save.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    code = compiled.memory_analysis().generated_code_size_in_bytes
    return Outcome(code, float(compiled.cost_analysis()["flops"]))


def main() -> int:
    request = json.loads(sys.stdin.read())
    import_again(map(tuple, request["imports"]))
    config, piece = from_dict(ExperimentConfig, request["config"]), Slice.parse(request["topology"])
    asked: dict[str, Any] = {"platform": "tpu", "topology_name": piece.name}
    asked |= {"num_slices": piece.count} if piece.count > 1 else {}
    devices = list(topologies.get_topology_desc(**asked).devices)
    start = time.perf_counter()
    try:
        with chips.assume(piece.chip):
            lowered, traced = trace(config, request["mode"], devices)
    except ConfigError as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return 1
    print(json.dumps(dataclasses.asdict(traced)), flush=True)
    print(f"traced in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    save = None if request["save"] is None else Path(request["save"])
    print(json.dumps(dataclasses.asdict(compile_step(lowered, Path(request["notes"]), save))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
