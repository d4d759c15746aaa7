"""Compiles the real step of an experiment for a slice that is not there, and sums up what the compiler says.

The TPU compiler reads its environment once, when it is loaded: the work is done in a process of its own, which
`compile_apart` starts with a request on its standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable, topologies

from aamoe_jax.config import ConfigError, ExperimentConfig, from_dict, to_dict
from aamoe_jax.cost import parameter_count
from aamoe_jax.preflight import buffers, collectives, hlo, work
from aamoe_jax.preflight.closed_form import KernelWork, kernel_work, step_flops
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.summary import Memory, Mode, Network, Summary
from aamoe_jax.training.evaluation import CAUSAL
from aamoe_jax.training.loop import BATCH_FIELDS
from aamoe_jax.training.optimizer import build_optimizer
from aamoe_jax.training.state import Placement, abstract_state, place
from aamoe_jax.training.step import make_eval_step, make_train_step
from pallas_kernels import aot, chips

TOO_BIG = "RESOURCE_EXHAUSTED"
BUFFERS = 12


class PreflightError(RuntimeError):
    """The step cannot be compiled, for another reason than its size."""


@dataclasses.dataclass(frozen=True)
class Step:
    """The step of an experiment before it is compiled."""

    lowered: jax.stages.Lowered
    placement: Placement
    parameters: int
    tokens: int


def compile_apart(config: ExperimentConfig, topology: str, mode: Mode, save: Path | None = None) -> Summary:
    """Compiles the step in a process of its own.

    Args:
      save: where the compiled executable goes.

    Raises:
      ConfigError: the experiment does not fit the slice: its mesh, or something that cannot be divided over it.
      PreflightError: libtpu is missing, or the compiler fails.
    """
    piece = Slice.parse(topology)
    try:
        aot.require_compiler(piece.chip)
    except aot.CompileError as error:
        raise PreflightError(f"{error}") from None
    request = {
        "config": to_dict(config),
        "topology": topology,
        "mode": mode,
        "save": None if save is None else str(save),
    }
    command = [sys.executable, "-m", "aamoe_jax.preflight.program"]
    environment = os.environ | aot.ENVIRONMENT
    result = subprocess.run(command, env=environment, input=json.dumps(request), capture_output=True, text=True)
    answer = result.stdout.splitlines()[-1] if result.stdout else ""
    if result.returncode == 0:
        return Summary.from_json(answer)
    if answer.startswith(ConfigError.__name__):
        raise ConfigError(answer.partition(": ")[2])
    last = "\n".join(result.stderr.splitlines()[-8:])
    raise PreflightError(f"the process that compiles for {topology} ended with {result.returncode}:\n{last}")


def lower(config: ExperimentConfig, mode: Mode, devices: list[Any]) -> Step:
    """The step as training or evaluation runs it, over these devices."""
    placement, training = place(config, devices), config.training
    optimizer = build_optimizer(config.optimizer, training.steps)
    graphdef, like = abstract_state(config.model, optimizer, placement)
    byte_lengths = np.ones(config.model.vocab_size, np.int32)  # the program is the same for every tokenizer
    rows = training.batch_size if mode == "train" else training.batch_size // training.accumulate
    shape = jax.ShapeDtypeStruct((rows, config.data.seq_len), jnp.int32, sharding=placement.batch)
    batch = dict.fromkeys(BATCH_FIELDS, shape)
    if mode == "train":
        step = make_train_step(config, graphdef, optimizer, byte_lengths, placement)
        out = jax.tree.map(lambda leaf: leaf.sharding, like), placement.replicated
        lowered = jax.jit(step, donate_argnums=0, out_shardings=out).lower(like, batch)
    else:
        budget = CAUSAL[config.model.aamoe.budget.normalizer]
        step = make_eval_step(graphdef, budget, byte_lengths, placement)
        lowered = jax.jit(step).lower(like.params, batch)
    return Step(lowered, placement, parameter_count(like.params), rows * config.data.seq_len)


def summarize(config: ExperimentConfig, topology: str, mode: Mode, devices: list[Any], save: Path | None) -> Summary:
    """Compiles the step for the devices of a slice, and reads the compiler's notes."""
    start = time.perf_counter()
    with _as_on(Slice.parse(topology).chip):
        step = lower(config, mode, devices)
    with tempfile.TemporaryDirectory() as notes:
        compiled, refusal = _compile(step.lowered, Path(notes))
        texts = buffers.read_notes(Path(notes))
    seconds = time.perf_counter() - start
    if texts is None:
        raise PreflightError(f"the compiler left no notes: {refusal}")
    if compiled is not None and save is not None:
        save.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    return _summary(config, topology, mode, step, compiled, refusal, texts, seconds)


def _compile(lowered: jax.stages.Lowered, notes: Path) -> tuple[jax.stages.Compiled | None, str]:
    """The executable, or the compiler's words about why it would be too big."""
    try:
        return lowered.compile({"xla_dump_to": str(notes), "xla_dump_hlo_as_text": True}), ""
    except jax.errors.JaxRuntimeError as error:
        if TOO_BIG not in str(error):
            raise
        return None, str(error)


def _summary(
    config: ExperimentConfig,
    topology: str,
    mode: Mode,
    step: Step,
    compiled: jax.stages.Compiled | None,
    refusal: str,
    texts: tuple[str, str, str],
    seconds: float,
) -> Summary:
    text, assigned, live = texts
    piece, mesh = Slice.parse(topology), step.placement.mesh
    module = hlo.parse(text)
    runs = list(hlo.runs(module))
    done = work.measure(module, runs)
    held = buffers.assignment(module, assigned, live)
    kernels: KernelWork = kernel_work(config.model, piece.chip, step.tokens / mesh.size, mode, done.kernels)
    sent = collectives.collectives(module, runs, dict(mesh.shape))
    flops = step_flops(config, step.tokens, mode) / mesh.size
    return Summary(
        topology=topology,
        mode=mode,
        mesh=dict(mesh.shape),
        devices=mesh.size,
        tokens=step.tokens,
        parameters=step.parameters,
        memory=_memory(compiled, held, piece.kind.memory),
        buffers=held.buffers[:BUFFERS],
        refusal=refusal,
        model_flops=flops,
        product_flops=done.product_flops,
        pass_flops=done.pass_flops,
        kernel_flops=kernels.flops,
        compiler_flops=0.0 if compiled is None else compiled.cost_analysis()["flops"],
        kernel_seconds=kernels.seconds,
        moved_bytes=done.bytes + done.kernel_bytes,
        kernels=done.kernels,
        network=_network(sent, piece, mesh),
        compile_seconds=seconds,
    )


def _memory(compiled: jax.stages.Compiled | None, held: buffers.Assignment, limit: float) -> Memory:
    """The compiler's own figures; those of its buffer assignment where it gave up."""
    if compiled is None:
        return Memory(held.bytes["argument"], held.bytes["output"], 0, held.bytes["temporary"], 0, limit)
    stats = compiled.memory_analysis()
    return Memory(
        arguments=stats.argument_size_in_bytes,
        output=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        limit=limit,
    )


def _network(sent: tuple[collectives.Collective, ...], piece: Slice, mesh: jax.sharding.Mesh) -> tuple[Network, ...]:
    """Every collective with its time over the links between its members."""
    places = [(*device.coords, device.core_on_chip) for device in mesh.devices.flat]
    return tuple(
        Network(part, part.sent / piece.group_bandwidth([places[index] for index in part.members])) for part in sent
    )


@contextlib.contextmanager
def _as_on(chip: str) -> Iterator[None]:
    """Code traced within makes the choices that it would make on the chip, inside of `jax.shard_map`."""
    with chips.assume(chip), mock.patch.object(chips, "kernels_by_default", return_value=True):
        yield


def main() -> int:
    request = json.loads(sys.stdin.read())
    config = from_dict(ExperimentConfig, request["config"])
    save = None if request["save"] is None else Path(request["save"])
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=request["topology"]).devices)
    try:
        print(summarize(config, request["topology"], request["mode"], devices, save).to_json())
    except ConfigError as error:
        print(f"{ConfigError.__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
