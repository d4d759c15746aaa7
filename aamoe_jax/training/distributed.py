"""Several processes as one run: how they find each other, what they agree on, and how one ends when another is lost.

Arrays and collectives are JAX's. Here is what goes around the devices, through the key-value store and the barriers of
JAX's coordination service, which process 0 hosts. In a run of one process all of it is trivially true.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import re
import signal
import socket
import sys
from typing import Any, NoReturn

import jax
from jax._src import distributed as jax_distributed  # the client has no public name; Orbax takes it from here too

from aamoe_jax.config import ConfigError, first_line

AUTO = "auto"
EXIT_LOST = 5
"""Exit code of a process that had to end because another one is gone, or because a step hung."""
HEARTBEAT_SECONDS = 20
"""Without a sign of life from a process for so long, the others end."""
START_SECONDS = 300
"""How long a process waits for the others to be started."""
AGREE_SECONDS = 1800
"""How long a process waits for what the others say: one may still be compiling. A lost one ends the wait at once."""
LEAVE_SECONDS = 5
"""How long a process that failed waits for others that are failing in the same way."""

_LOST = "another process of the run is lost, or cannot be reached"
_GO_ON = "start all of them again: they go on from the newest checkpoint"
_numbers = itertools.count()


def parse(text: str) -> tuple[str, int, int]:
    """`HOST:PORT,NUM,INDEX`: the address of process 0, how many processes there are, and which one this is."""
    match = re.fullmatch(r"([^,\s]+:\d+),(\d+),(\d+)", text)
    if match is None or not int(match[3]) < int(match[2]):
        raise ConfigError(
            f"--distributed={text!r}: must be auto, or HOST:PORT,NUM,INDEX: where process 0 listens, how many "
            "processes there are, and which one this is, counted from 0, such as 10.0.0.1:8476,4,0"
        )
    return match[1], int(match[2]), int(match[3])


def initialize(text: str) -> None:
    """Makes this process one of a run's. Before anything touches a device.

    Args:
      text: `auto`, where JAX knows the cluster (TPU, SLURM, Open MPI, Kubernetes), or `HOST:PORT,NUM,INDEX`.

    Raises:
      ConfigError: neither; or no cluster is known here; or the port of process 0 is taken.
    """
    # It takes SIGTERM away from Python. What it is for is in `interrupt.PreemptionSync`.
    jax.config.update("jax_enable_preemption_service", False)
    meet = functools.partial(
        jax.distributed.initialize,
        initialization_timeout=START_SECONDS,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )
    if text == AUTO:
        _say_on_abort(f"the processes of the run did not meet within {START_SECONDS} s: are all of them started?")
        try:
            meet()
        except ValueError as error:
            raise ConfigError(
                f"--distributed=auto: no cluster is known here ({error}); name it: --distributed=HOST:PORT,NUM,INDEX"
            ) from error
    else:
        address, count, index = parse(text)
        if index == 0:
            _require_free(address)
        _say_on_abort(
            f"process {index} of {count} did not meet the others at {address} within "
            f"{START_SECONDS} s: are all of them started, each with its own INDEX, and can they reach that port?"
        )
        meet(address, count, index)
    _say_on_abort(f"{this_process()}JAX gave up, as it does when {_LOST}: what it knows is above; {_GO_ON}")


def is_first() -> bool:
    """Whether this is the process that writes for all."""
    return jax.process_index() == 0


def warn(text: str) -> None:
    """Says once for all processes what each of them has found."""
    if is_first():
        print(f"warning: {text}", file=sys.stderr)


def this_process() -> str:
    """`process 2 of 4: ` at the head of an error, nothing in a run of one process."""
    return f"process {jax.process_index()} of {jax.process_count()}: " if jax.process_count() > 1 else ""


def unique(name: str) -> str:
    """A name for one thing to agree on. Every process makes the same ones in the same order."""
    return f"aamoe/{name}/{next(_numbers)}"


def gather(name: str, value: str) -> list[str]:
    """What every process says, by index. Waits for all.

    Args:
      name: from `unique`, and for this alone.
    """
    if jax.process_count() == 1:
        return [value]
    client = _client()
    client.key_value_set(f"{name}/{jax.process_index()}", value)
    client.wait_at_barrier(name, AGREE_SECONDS * 1000)
    # One request for all answers: one for each would be the square of the processes.
    answers = {int(path.rsplit("/", 1)[1]): answer for path, answer in client.key_value_dir_get(f"{name}/")}
    return [answers[index] for index in range(jax.process_count())]


def _client() -> Any:
    return jax_distributed.global_state.client


def wait_for_all(what: str) -> None:
    """Until every process has come to here."""
    gather(unique(what), "")


def announce(name: str, value: str) -> None:
    """Tells all processes, unless one of them has already said something under this name."""
    try:
        _client().key_value_set(f"{name}/announced", value)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise


def announced(name: str) -> str | None:
    """What was announced under a name, so far."""
    return dict(_client().key_value_dir_get(f"{name}/")).get(f"{name}/announced")


def is_loss(error: BaseException) -> bool:
    """Whether an error of a computation means that another process is gone."""
    signs = ("Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CoordinationService", "coordination service")
    return jax.process_count() > 1 and any(sign in str(error) for sign in signs)


def end_lost(error: BaseException) -> NoReturn:
    """Ends this process, to which an error told that another one is gone."""
    end(f"{_LOST} ({first_line(error)})")


def end(reason: str) -> NoReturn:
    """Ends this process at once: the others cannot be waited for. Whatever is being written is left unfinished."""
    _say_on_abort(None)
    print(f"error: {this_process()}{reason}; {_GO_ON}", file=sys.stderr)
    leave_at_once(EXIT_LOST)


def leave(code: int) -> NoReturn:
    """Ends a process that failed. Processes that fail together leave together, each with its own message.

    If they did not wait, the first would be the loss that the others report. Python's way out would wait far longer:
    for processes that are in the middle of a step that cannot end without this one.
    """
    _say_on_abort(None, code)  # process 0 may be gone a moment before this one
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the others go on, until they miss this one
        _client().wait_at_barrier("aamoe/leave", LEAVE_SECONDS * 1000)
    leave_at_once(code)


def leave_at_once(code: int) -> NoReturn:
    """Ends the process past Python's clean-up, with what it has printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _require_free(address: str) -> None:
    """JAX crashes where the port is taken."""
    port = int(address.rsplit(":", 1)[1])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(f"--distributed: process 0 cannot listen on port {port}: {error.strerror}") from error


_OnAbort = ctypes.CFUNCTYPE(None, ctypes.c_int)
_on_abort: list[object] = []  # the handler that is installed: ctypes does not keep it alive


def _say_on_abort(message: str | None, code: int = EXIT_LOST) -> None:
    """What to print, and what to exit with, when JAX's client ends the process because others are lost.

    It does so by abort(), with a stack trace of its own, the moment the coordinator cannot be reached or reports a lost
    process. It can be given a callback instead, but not from Python: the status does not cross (std::bad_cast). And
    handlers of `signal` would run after abort() has returned, which it does not. So this is a handler of C's.
    """

    def handle(number: int) -> None:
        del number
        if message is not None:
            os.write(2, f"error: {message}\n".encode())
        os._exit(code)

    _on_abort.append(_OnAbort(handle))
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort[-1])
