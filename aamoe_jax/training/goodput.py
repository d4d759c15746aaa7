"""Where the wall time of a run goes: every second of its processes in one phase, over all its starts.

`attempts.jsonl` in the run folder has a line for every start. Goodput is the share of the wall time, from the first
start to the last end, that steps took which were not lost again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import psutil

from aamoe_jax.bucket import AnyPath
from aamoe_jax.config import ConfigError
from aamoe_jax.files import SaveError, write_whole
from aamoe_jax.training import distributed

FILE = "attempts.jsonl"
PHASES = ("startup", "restore", "compile", "data", "train", "evaluate", "save")
UPDATE_SECONDS = 60.0
"""A start that is killed has its time until then."""

Attempt = dict[str, Any]
"""`began` and `until` (seconds since 1970), `from_step`, `to_step`, `ended` (None: it was killed) and `seconds`, by
phase."""


class Stopwatch:
    """Divides time among phases, beginning with `startup`: each second belongs to one of them.

    Args:
      whole_process: counts from the creation of this process, imports included; else from now.
    """

    def __init__(self, *, whole_process: bool = False):
        self.began = psutil.Process().create_time() if whole_process else time.time()
        self._phase = PHASES[0]
        self._since = time.perf_counter() - (time.time() - self.began)
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Around a phase. Inside another one, the time is this phase's alone."""
        before = self._switch(phase)
        try:
            yield
        finally:
            self._switch(before)

    def read(self) -> dict[str, float]:
        """Seconds until now, by phase."""
        self._switch(self._phase)
        return dict(self._seconds)

    def _switch(self, phase: str) -> str:
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._since, before, self._phase = now, self._phase, phase
        return before


class Attempts(contextlib.AbstractContextManager["Attempts"]):
    """Keeps the line of this start, once it has begun, if this is process 0."""

    def __init__(self, run_dir: AnyPath, stopwatch: Stopwatch):
        self._path, self._stopwatch = run_dir / FILE, stopwatch
        self._earlier: list[Attempt] = []
        self._from: int | None = None
        self._to = 0
        self._updated = 0.0
        self.ended: str | None = None
        """How the run ended: noted by whoever knows; else the name of the exception."""

    def begin(self, step: int) -> None:
        """From a step on: what was refused before leaves no line."""
        self._earlier = read_attempts(self._path.parent)
        self._from = step
        self.update(step)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._from is None:
            return
        self.ended = self.ended or (kind.__name__ if kind is not None else "finished")
        with contextlib.suppress(SaveError):  # no error of this file hides the one on its way out
            self.update(self._to)

    def update(self, step: int, *, at_once: bool = True) -> None:
        """Writes the time until this step; if not at once, then no more often than every UPDATE_SECONDS."""
        self._to = step
        if not distributed.is_first() or not (at_once or time.perf_counter() - self._updated > UPDATE_SECONDS):
            return
        self._updated = time.perf_counter()
        seconds = {phase: round(took, 6) for phase, took in self._stopwatch.read().items()}
        line = {
            "began": self._stopwatch.began,
            "until": self._stopwatch.began + sum(seconds.values()),
            "from_step": self._from,
            "to_step": self._to,
            "ended": self.ended,
            "seconds": seconds,
        }
        write_whole(self._path, "".join(json.dumps(attempt) + "\n" for attempt in [*self._earlier, line]))


class Goodput(NamedTuple):
    """The time of a run. The parts add up to `wall`."""

    wall: float
    """Seconds from the first start to the last end."""
    starts: int
    parts: dict[str, float]
    """Seconds of every phase, of `repeated` steps (made again after the next start), and `down`, between starts."""

    @property
    def share(self) -> float:
        """Goodput: of the wall time, what went into steps that lasted."""
        return self.parts["train"] / self.wall

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {took / self.wall:.1%}" for name, took in self.parts.items() if took > 0)
        starts = "1 start" if self.starts == 1 else f"{self.starts} starts"
        return f"goodput {self.share:.1%} of {self.wall:,.0f} s in {starts} ({parts})"


def read_attempts(run_dir: AnyPath) -> list[Attempt]:
    """The starts of a run, oldest first."""
    path = run_dir / FILE
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def goodput(run_dir: AnyPath) -> Goodput:
    """Adds up the starts of a run.

    The time from the last line of a start that was killed to the next start is `down`. Steps are taken to last equally
    long within a start.

    Raises:
      ConfigError: the folder has no record of a start.
    """
    attempts = read_attempts(run_dir)
    if not attempts:
        raise ConfigError(f"{run_dir} has no {FILE}: it is no run folder, or its run began with an older version")
    parts = dict.fromkeys((*PHASES, "repeated", "down"), 0.0)
    for attempt, after in zip(attempts, [*attempts[1:], None], strict=True):
        for phase, seconds in attempt["seconds"].items():
            parts[phase] += seconds
        if after is None:
            continue
        parts["down"] += after["began"] - attempt["until"]
        made = attempt["to_step"] - attempt["from_step"]
        again = min(max(attempt["to_step"] - after["from_step"], 0), made)
        repeated = attempt["seconds"]["train"] * again / made if made else 0.0
        parts["train"] -= repeated
        parts["repeated"] += repeated
    return Goodput(attempts[-1]["until"] - attempts[0]["began"], len(attempts), parts)
