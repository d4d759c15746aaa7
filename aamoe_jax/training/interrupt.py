"""SIGTERM and SIGINT as a wish to stop, and which step is the last one when there are several processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax

from aamoe_jax.training import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_SECONDS = 1.0

Value = TypeVar("Value")


class StoppedEarly(KeyboardInterrupt):
    """A signal came before the first step: nothing is there to be saved."""

    def __init__(self, number: signal.Signals):
        super().__init__(f"stopped by {number.name} before the first step")
        self.signal = number


class Interrupt(contextlib.AbstractContextManager["Interrupt"]):
    """Inside the `with`, the first signal is noted in `requested`; a second one does what it always did."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def before_steps(self, work: Callable[[], Value]) -> Value:
        """What `work()` returns. In a run of one process, a signal that comes before or meanwhile ends it.

        The work is done in another thread, and is left to end by itself: a compiler cannot be stopped, and until it is
        done Python handles no signal in the thread that waits for it. Several processes stop together, between steps.

        Raises:
          StoppedEarly: there was a signal.
        """
        if jax.process_count() > 1:
            return work()
        future: Future[Value] = Future()
        threading.Thread(target=_fulfil, args=(future, work), name="before steps", daemon=True).start()
        while not wait([future], timeout=0.1).done:
            if self.requested is not None:
                raise StoppedEarly(self.requested)
        return future.result()

    def _note(self, number: int, frame: object) -> None:
        self._restore()
        self.requested = signal.Signals(number)
        note = f"{self.requested.name}: stopping after the step in flight; a second one ends it now"
        os.write(sys.stderr.fileno(), f"\n{note}\n".encode())  # print is not reentrant

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _fulfil(future: Future[Value], work: Callable[[], Value]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


class PreemptionSync(contextlib.AbstractContextManager["PreemptionSync"]):
    """Which step is the last, once a signal has reached any process: the same one for all.

    A step is made by all processes or by none, and they are never at the same place. So each promises its steps one by
    one, and when a stop is wanted all say which step they have promised. The last step is the largest of these: every
    process can still make it, and none has gone past it. A thread answers, under the lock that a promise takes:
    a process that waits inside a step answers too, and none promises more until all have answered.

    It costs one small request a second and process to the coordination service, and nothing per step. JAX's own
    `reached_preemption_sync_point` knows SIGTERM alone, does not tell which signal it was, and works only where Python
    has no handler for it.
    """

    def __init__(self, interrupt: Interrupt, step: int):
        self.signal: signal.Signals | None = None
        """What was asked for, on whichever process."""
        self._interrupt = interrupt
        self._wish, self._answers = distributed.unique("stop"), distributed.unique("promised")
        self._promised = step
        self._last: int | None = None
        self._lock = threading.Lock()
        self._settled, self._ended = threading.Event(), threading.Event()
        self._listener = threading.Thread(target=self._listen, name="stop", daemon=True)

    def __enter__(self) -> PreemptionSync:
        if jax.process_count() > 1:
            self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._listener.ident is not None:
            self._listener.join()

    def allows(self, step: int) -> bool:
        """Whether to make this step, the next one. A yes is a promise."""
        if self._interrupt.requested is not None and self.signal is None:
            self._ask(self._interrupt.requested)
        with self._lock:
            if self._last is None:
                self._promised = step
                return True
            return step <= self._last

    def _ask(self, number: signal.Signals) -> None:
        if jax.process_count() == 1:
            self.signal, self._last = number, self._promised
        else:
            distributed.announce(self._wish, number.name)
            self._settled.wait()

    def _listen(self) -> None:
        try:
            while (name := distributed.announced(self._wish)) is None:
                if self._ended.wait(POLL_SECONDS):
                    return
            with self._lock:
                promised = distributed.gather(self._answers, str(self._promised))
                self.signal, self._last = signal.Signals[name], max(map(int, promised))
        except jax.errors.JaxRuntimeError as error:
            distributed.end_lost(error)
        self._settled.set()
