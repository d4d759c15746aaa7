"""A drill with real processes: a run is stopped, goes on as other processes on other meshes, and is compared.

    python -m experiments.drill --steps=24 --output=experiments/results/drill

Runs `launch.train` on this machine, several processes as one run, CPU devices as accelerators: once unbroken, then
once per layout in which a run goes on that SIGTERM stopped: a random process, at a random step. Writes OUTPUT.md.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

from aamoe_jax.config import ExperimentConfig
from aamoe_jax.data import ensure_prepared, training_batches
from aamoe_jax.training.checkpoints import find_checkpoint, read_meta
from aamoe_jax.training.metrics import read_metrics
from experiments.binding import load_experiment
from experiments.program import command_line, plain_table, start

FLAGS = flags.FLAGS
PATIENCE_SECONDS = 1200


class Layout(NamedTuple):
    """So many processes with so many devices each."""

    processes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices}"


UNBROKEN = Layout(2, 2)
RESTARTS = (Layout(4, 1), Layout(4, 2), Layout(1, 1))


class Job:
    """`launch.train` as several processes of one run, on this machine."""

    def __init__(
        self,
        run_dir: Path,
        arguments: Sequence[str],
        layout: Layout,
        *,
        host: str = "127.0.0.1",
        wrap: Callable[[int], Sequence[str]] = lambda index: (),
        environment: Mapping[str, str] | None = None,
    ):
        """Starts it.

        Args:
          arguments: flags of `launch.train`, without its run folder.
          host: where process 0 listens.
          wrap: what to put before the command of a process, by index, such as `ip netns exec NAME`.
        """
        self._logs = tempfile.TemporaryDirectory(prefix="job.")
        address = f"{host}:{free_port()}"
        flags_of_xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={layout.devices}"
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags_of_xla, **(environment or {})}
        self.processes = []
        for index in range(layout.processes):
            command = [*wrap(index), sys.executable, "-m", "launch.train", "--run_dir", str(run_dir), *arguments]
            command.append(f"--distributed={address},{layout.processes},{index}")
            with self._log(index).open("w") as log:
                self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=variables))

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._logs.cleanup()

    def _log(self, index: int) -> Path:
        return Path(self._logs.name) / str(index)

    def output(self, index: int) -> str:
        """What a process has printed so far."""
        return self._log(index).read_text(errors="replace")

    def outputs(self) -> str:
        """What all have printed, for a person who looks for what went wrong."""
        return "\n".join(f"-- process {index}\n{self.output(index)}" for index in range(len(self.processes)))

    def wait(self, seconds: float = PATIENCE_SECONDS, but: Sequence[int] = ()) -> list[int]:
        """Exit codes of all processes but some.

        Raises:
          TimeoutError: with what they printed, when they take longer.
        """
        deadline = time.monotonic() + seconds
        waited_for = [process for index, process in enumerate(self.processes) if index not in but]
        try:
            return [process.wait(max(deadline - time.monotonic(), 0)) for process in waited_for]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the processes have not ended in {seconds} s:\n{self.outputs()}") from error

    def wait_for_step(self, run_dir: Path, step: int, seconds: float = PATIENCE_SECONDS) -> None:
        """Until a step is in the log of the run.

        Raises:
          TimeoutError: with what they printed, when it takes longer, or when a process ended before.
        """
        deadline = time.monotonic() + seconds
        while last_step(run_dir) < step:
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                raise TimeoutError(f"step {step} was not reached:\n{self.outputs()}")
            time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def last_step(run_dir: Path) -> int:
    """The last step in the log of a run that may be writing it."""
    return max((record["step"] for record in read_metrics(run_dir)), default=0)


class Broken(NamedTuple):
    """How a run that was stopped and went on compares with the unbroken one."""

    restart: Layout
    victim: int
    wanted: int
    """The step in the log when the signal was sent."""
    stopped: int
    """The step after which all stopped."""
    loss: float
    """Largest relative difference of a training loss."""
    validation: float
    bits: str
    """Whether the last checkpoints are equal."""


def compare(broken: Path, unbroken: Path) -> tuple[float, float, str]:
    """Largest relative difference of training and of validation losses, and whether the last states are equal."""
    left, right = (
        {(record["kind"], record["step"]): record["loss"] for record in read_metrics(run)} for run in (broken, unbroken)
    )
    if left.keys() != right.keys():
        raise AssertionError(f"{broken} has records of other steps than {unbroken}")
    off = {key: abs(left[key] / right[key] - 1) for key in right}
    worst = {kind: max(off[key] for key in off if key[0] == kind) for kind in ("train", "validation")}
    one, other = (read_meta(find_checkpoint(run))["fingerprints"] for run in (broken, unbroken))
    equal = sum(one[name] == number for name, number in other.items())
    bits = "equal" if equal == len(other) else f"{len(other) - equal} of {len(other)} arrays differ"
    return worst["train"], worst["validation"], bits


def drill(work_dir: Path, arguments: Sequence[str], config: ExperimentConfig, chance: random.Random) -> list[Broken]:
    """All runs, one after the other."""
    unbroken = work_dir / "unbroken"
    run(Job(unbroken, arguments, UNBROKEN), [0] * UNBROKEN.processes)
    results = []
    for number, restart in enumerate(RESTARTS):
        run_dir = work_dir / f"broken_{number}"
        victim, wanted = chance.randrange(UNBROKEN.processes), chance.randrange(3, config.training.steps - 6)
        with Job(run_dir, arguments, UNBROKEN) as job:
            job.wait_for_step(run_dir, wanted)
            job.processes[victim].send_signal(signal.SIGTERM)
            require(job, [128 + signal.SIGTERM] * UNBROKEN.processes)
        stopped = read_meta(find_checkpoint(run_dir))["step"]
        run(Job(run_dir, arguments, restart), [0] * restart.processes)
        results.append(Broken(restart, victim, wanted, stopped, *compare(run_dir, unbroken)))
        print(results[-1], flush=True)
    return results


def run(job: Job, codes: list[int]) -> None:
    """Waits for a job that is to end with these exit codes."""
    with job:
        require(job, codes)


def require(job: Job, codes: list[int]) -> None:
    """Raises an AssertionError with what the processes printed, unless they end with these exit codes."""
    found = job.wait()
    if found != codes:
        raise AssertionError(f"exit codes {found}, wanted {codes}:\n{job.outputs()}")


def data_digest(config: ExperimentConfig, shards: int) -> int:
    """CRC of all rows of all steps, loaded in so many shards."""
    training, digest = config.training, 0
    parts = [
        training_batches(
            config.data, batch_size=training.batch_size, seed=training.seed, shard_index=index, shard_count=shards
        )
        for index in range(shards)
    ]
    for step in range(training.steps):
        batches = [part[step] for part in parts]
        for name in batches[0]:
            digest = zlib.crc32(np.concatenate([batch[name] for batch in batches]).tobytes(), digest)
    return digest


def report(command: str, config: ExperimentConfig, results: Sequence[Broken]) -> str:
    """The log of the drill as markdown."""
    training = config.training
    digests = {shards: data_digest(config, shards) for shards in (1, 2, 4)}
    sums = ", ".join(f"{digest:08x} in {shards} shards" for shards, digest in digests.items())
    heads = ["went on as", "mesh", "SIGTERM to process", "sent after step", "stopped after", "training loss"]
    rows = [
        [one.restart, one.restart.processes * one.restart.devices, *one[1:4], *(f"{x:.1e}" for x in one[4:6]), one.bits]
        for one in results
    ]
    parts = [
        "# Stopped, and gone on with as other processes",
        f"    {command}",
        f"{training.steps} steps of {training.batch_size} x {config.data.seq_len} tokens, d = {config.model.d_model}, "
        f"{config.model.num_layers} layers, {', '.join(config.model.pattern)}, on CPU devices: processes x devices of "
        f"each, and the mesh (fsdp) is their product. The unbroken run is {UNBROKEN}; so is the first part of every "
        "other, which SIGTERM to one process stops at a random step. All processes ended with exit code 143 after the "
        "same step, and one checkpoint. Differences are the largest of all steps, relative to the loss of the unbroken "
        "run; states are the last checkpoint's.",
        plain_table([*heads, "validation loss", "parameters and optimizer"], "lrrrrrrl", rows),
        f"The rows of all steps, by their CRC: {sums}.",
    ]
    return "\n\n".join(parts) + "\n"


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("gin_file", "quickstart.gin", "The experiment.")
    flags.DEFINE_multi_string("gin_param", [], "One more binding; repeat it.")
    flags.DEFINE_integer("steps", 40, "Steps of every run.")
    flags.DEFINE_integer("seed", 0, "Of when a run is stopped, and on which process.")
    flags.DEFINE_string("output", None, "Path of the log, without its .md.", required=True)


def main() -> None:
    params = [
        "TrainingConfig.log_every = 1",
        *(f"TrainingConfig.{field} = {FLAGS.steps // 4}" for field in ("eval_every", "checkpoint_every")),
        f"TrainingConfig.steps = {FLAGS.steps}",
        "TrainingConfig.batch_size = 8",
        *FLAGS.gin_param,
    ]
    config = load_experiment([FLAGS.gin_file], params)
    ensure_prepared(config.data)
    arguments = [f"--gin_file={FLAGS.gin_file}", *(f"--gin_param={param}" for param in params)]
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    with tempfile.TemporaryDirectory(prefix="drill.") as folder:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(folder) / "cache"))  # a layout is compiled once
        results = drill(Path(folder), arguments, config, random.Random(FLAGS.seed))
    quickly = f"{shlex.join([f'XLA_FLAGS={found}'])} " if (found := os.environ.get("XLA_FLAGS")) else ""
    path = Path(f"{FLAGS.output}.md")
    path.write_text(report(quickly + command_line("experiments.drill"), config, results), encoding="utf-8")
    print(path)


if __name__ == "__main__":
    start(define_flags, main)
