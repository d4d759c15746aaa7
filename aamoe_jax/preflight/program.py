"""Has the real step of an experiment compiled for a slice that is not there, and sums up what the compiler says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from aamoe_jax.config import ConfigError, ExperimentConfig, to_dict
from aamoe_jax.extensions import imported
from aamoe_jax.preflight import buffers, collectives, hlo, work
from aamoe_jax.preflight.closed_form import kernel_work, step_flops
from aamoe_jax.preflight.compiler import Outcome, Traced
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.summary import Memory, Mode, Network, Summary
from aamoe_jax.shards import Shards
from pallas_kernels import aot

Depth = Literal["placed", "compiled"]
"""How far the compiler goes: to where all buffers have their place, after which nothing that is summed up here changes
but the size of the code; or to the executable, which takes several times as long."""

BUFFERS = 12
POLL_SECONDS = 0.5


class PreflightError(RuntimeError):
    """The step cannot be compiled, for another reason than its size."""


def compile_apart(
    config: ExperimentConfig, topology: str, mode: Mode, depth: Depth = "compiled", save: Path | None = None
) -> Summary:
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
    with tempfile.TemporaryDirectory() as folder:
        notes, start = Path(folder), time.perf_counter()
        request: dict[str, Any] = {"config": to_dict(config), "imports": imported(), "topology": topology, "mode": mode}
        request |= {"notes": folder, "save": None if save is None else str(save)}
        (notes / "request").write_text(json.dumps(request))
        code = _compile(notes, depth)
        answers = [json.loads(line) for line in (notes / "answers").read_text().splitlines()]
        if answers and "refused" in answers[0]:
            raise ConfigError(answers[0]["refused"])
        texts = buffers.read_notes(notes)
        if code != 0 or texts is None:
            last = "\n".join((notes / "errors").read_text().splitlines()[-8:])
            raise PreflightError(f"the process that compiles for {topology} ended with {code}:\n{last}")
        outcome = Outcome(**answers[1]) if len(answers) > 1 else Outcome()
        return summarize(config, piece, mode, Traced(**answers[0]), outcome, texts, time.perf_counter() - start)


def _compile(notes: Path, depth: Depth) -> int:
    """The exit code of the compiling process: 0 too where it was stopped, having placed all buffers."""
    command, variables = [sys.executable, "-m", "aamoe_jax.preflight.compiler"], os.environ | aot.ENVIRONMENT
    with (
        open(notes / "request") as request,
        open(notes / "answers", "w") as answers,
        open(notes / "errors", "w") as errors,
        subprocess.Popen(command, env=variables, stdin=request, stdout=answers, stderr=errors) as process,
    ):
        while process.poll() is None:
            if depth == "placed" and buffers.are_placed(notes):
                process.kill()
                process.wait()
                return 0
            time.sleep(POLL_SECONDS)
        return process.returncode


def summarize(
    config: ExperimentConfig,
    piece: Slice,
    mode: Mode,
    traced: Traced,
    outcome: Outcome,
    texts: tuple[str, str, str],
    seconds: float,
) -> Summary:
    """Reads the compiler's notes: program, buffer assignment, live ranges."""
    text, assigned, live = texts
    module = hlo.parse(text)
    runs = list(hlo.runs(module))
    done = work.measure(module, runs)
    held = buffers.assignment(module, assigned, live)
    devices = len(traced.places)
    mesh, bound = traced.mesh, config.mesh.pair_bound
    shards = Shards(mesh["fsdp"], mesh["resource"], mesh["tensor"], bound)
    kernels = kernel_work(config, piece, shards, traced.tokens / devices, mode, done.kernels)
    within = collectives.collectives(module, runs, traced.mesh)
    speeds = [piece.group_bandwidth([traced.places[index] for index in part.members]) for part in within]
    network = [Network(part, part.sent / speed) for part, speed in zip(within, speeds, strict=True)]
    across = collectives.between_slices(runs, piece.count)
    network += [Network(part, 0.0, part.sent * piece.devices_per_chip / piece.kind.dcn) for part in across]
    return Summary(
        topology=piece.topology,
        mode=mode,
        mesh=traced.mesh,
        devices=devices,
        tokens=traced.tokens,
        parameters=traced.parameters,
        memory=Memory(
            arguments=held.bytes["argument"],
            output=held.bytes["output"],
            aliased=held.aliased,
            temporaries=held.bytes["temporary"] + held.bytes["constant"],
            code=outcome.code_bytes,
            limit=piece.kind.memory,
        ),
        buffers=held.buffers[:BUFFERS],
        refusal=outcome.refusal,
        model_flops=step_flops(config, traced.tokens, mode) / devices,
        product_flops=done.product_flops,
        pass_flops=done.pass_flops,
        kernel_flops=kernels.flops,
        compiler_flops=outcome.flops,
        kernel_seconds=kernels.seconds,
        moved_bytes=done.bytes + done.kernel_bytes,
        kernels=done.kernels,
        network=tuple(network),
        compile_seconds=seconds,
    )
