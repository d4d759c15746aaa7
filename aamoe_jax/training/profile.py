"""Profiler traces: of a few steps, on every process, and on request through a port."""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax

from aamoe_jax.bucket import AnyPath
from aamoe_jax.config import ConfigError


class ProfileWindow(NamedTuple):
    """Steps START to STOP, both included."""

    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> ProfileWindow:
        """From `START:STOP`."""
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--profile={text!r}: must be START:STOP, two steps counted from 1, such as 10:12")
        return cls(int(match[1]), int(match[2]))


class Profiler(contextlib.AbstractContextManager["Profiler"]):
    """Traces the steps of a window, if there is one, into `profile` in the run folder.

    All processes trace. A viewer finds them as hosts of one session, `steps_START_STOP`, each called after its number:
    several processes may share a machine, and so its name.
    """

    def __init__(self, window: ProfileWindow | None, run_dir: AnyPath):
        self._window, self._run_dir = window, run_dir
        self._local: tempfile.TemporaryDirectory[str] | None = None

    def __exit__(self, kind: type | None, *_: object) -> None:
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):  # which would hide that error
            self.close()

    def before(self, step: int) -> None:
        """Starts the trace when the window opens."""
        if self._window is not None and step == self._window.start:
            self._local = tempfile.TemporaryDirectory(prefix="profile.")
            jax.profiler.start_trace(self._local.name)

    def after(self, step: int, result: Any) -> None:
        """Ends the trace when the window closes, once `result` is computed."""
        if self._local is not None and self._window is not None and step == self._window.stop:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Ends a trace, also one whose window outlasts the run, and moves it into the run folder."""
        if self._local is None or self._window is None:
            return
        with self._local as local:
            self._local = None
            jax.profiler.stop_trace()
            name = f"steps_{self._window.start}_{self._window.stop}"
            session = self._run_dir / "profile" / "plugins" / "profile" / name
            session.mkdir(parents=True, exist_ok=True)
            for kind in ("xplane.pb", "trace.json.gz"):
                for file in Path(local).rglob(f"*.{kind}"):
                    (session / f"process_{jax.process_index()}.{kind}").write_bytes(file.read_bytes())


def serve_profiles(port: int) -> None:
    """Starts JAX's profiler server on this process, which gives traces to whoever can reach its port.

    Args:
      port: of process 0; process n listens on the n-th after it.

    Raises:
      ConfigError: something else listens there.
    """
    port += jax.process_index()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--profiler_port: this process cannot listen on {port}: {error}") from error
    jax.profiler.start_server(port)
