"""Ends a process whose step hangs, after it has written down where every thread stands."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from aamoe_jax.bucket import AnyPath, BucketPath
from aamoe_jax.files import append
from aamoe_jax.training import distributed

FILE = "stacks.{index}.txt"
UPLOAD_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds after which something takes far too long: it is reported after `report`, and ended after `end`.

    Those of a step are `report` or `end` times the median of the last steps, if that is more.
    """

    step_seconds: tuple[float, float] = (60.0, 300.0)
    step_medians: tuple[float, float] = (10.0, 30.0)
    other_seconds: tuple[float, float] = (1800.0, 5400.0)
    """Of all that is not a step: to compile, evaluate, restore or save."""
    first_steps: int = 3
    """Steps that may take as long as all that is not a step: connections are made, and caches filled."""
    poll_seconds: float = 1.0


class Stretch(NamedTuple):
    """What the main thread is at, and since when."""

    what: str
    start: float
    limits: tuple[float, float]


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Watches the main thread from another one.

    The main thread may be stuck in a collective that nothing can interrupt, so the process ends past Python's clean-up.
    """

    def __init__(self, run_dir: AnyPath, index: int, limits: Limits = Limits()):
        self._file, self._limits = run_dir / FILE.format(index=index), limits
        self._seconds: deque[float] = deque(maxlen=51)
        self._at = self._other("what comes before the first step")
        self._reported: Stretch | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step, with the wait for its batch and for the metrics of the one before."""
        self._at = Stretch(f"step {step}", time.monotonic(), self._step_limits())
        yield
        self._seconds.append(time.monotonic() - self._at.start)
        self._at = self._other(f"what comes after step {step}")

    def _step_limits(self) -> tuple[float, float]:
        if len(self._seconds) < self._limits.first_steps:
            return self._limits.other_seconds
        median = statistics.median(self._seconds)
        pairs = zip(self._limits.step_seconds, self._limits.step_medians, strict=True)
        report, end = (max(seconds, times * median) for seconds, times in pairs)
        return report, end

    def _other(self, what: str) -> Stretch:
        return Stretch(what, time.monotonic(), self._limits.other_seconds)

    def _watch(self) -> None:
        while not self._ended.wait(self._limits.poll_seconds):
            at = self._at
            seconds = time.monotonic() - at.start
            report, end = at.limits
            if seconds > report and self._reported is not at:
                self._reported = at
                self._report(at, seconds)
            if seconds > end:
                distributed.end(f"{at.what} has not ended in {seconds:.0f} s; the stacks are in {self._file}")

    def _report(self, at: Stretch, seconds: float) -> None:
        warning = (
            f"warning: {distributed.this_process()}{at.what} takes far too long: {seconds:.0f} s so far; after "
            f"{at.limits[1]:.0f} s the process ends. Where its threads stand, also in {self._file}:"
        )
        print(warning, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr)
        if not isinstance(self._file, BucketPath):
            self._keep(warning)
            return
        # Storage that does not answer may be what takes so long: it does not keep the process from its end.
        upload = threading.Thread(target=self._keep, args=(warning,), daemon=True)
        upload.start()
        upload.join(UPLOAD_SECONDS)

    def _keep(self, warning: str) -> None:
        """Appends the warning and the stacks to their file."""
        try:
            with tempfile.TemporaryFile("w+") as file:
                print(warning, file=file, flush=True)
                faulthandler.dump_traceback(file=file)
                file.seek(0)
                append(self._file, file.read())
        except OSError as error:
            print(f"warning: {self._file} could not be written: {error.strerror}", file=sys.stderr)
