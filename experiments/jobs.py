"""`launch.train` as real processes on this machine, several as one run, CPU devices as accelerators."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aamoe_jax.training.metrics import read_metrics

PATIENCE_SECONDS = 1200


class Layout(NamedTuple):
    """So many processes with so many devices each."""

    processes: int
    devices: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.devices}"


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

    def wait_for_output(self, *texts: str, seconds: float = PATIENCE_SECONDS) -> None:
        """Until process 0 has printed one of these, or has ended.

        Raises:
          TimeoutError: with what they printed, when it takes longer.
        """
        deadline = time.monotonic() + seconds
        while not any(text in self.output(0) for text in texts) and self.processes[0].poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{' or '.join(texts)} was not printed in {seconds} s:\n{self.outputs()}")
            time.sleep(0.02)

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
