"""A profiler trace of a few steps."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

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
    """Traces the steps of a window, if there is one, into the run folder."""

    def __init__(self, window: ProfileWindow | None, run_dir: Path):
        self._window, self._directory = window, run_dir / "profile"
        self._tracing = False

    def __exit__(self, *_: object) -> None:
        self.close()

    def before(self, step: int) -> None:
        """Starts the trace when the window opens."""
        if self._window is not None and step == self._window.start:
            jax.profiler.start_trace(str(self._directory))
            self._tracing = True

    def after(self, step: int, result: Any) -> None:
        """Ends the trace when the window closes, once `result` is computed."""
        if self._tracing and self._window is not None and step == self._window.stop:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Ends a trace whose window outlasts the run."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
