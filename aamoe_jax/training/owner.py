"""One owner for a run folder: two runs in one folder would destroy each other's metrics and checkpoints.

The owner keeps `owner.json` in the folder and raises a count in it every BEAT_SECONDS. Whoever finds the file refuses
to run, unless its owner is dead: a process of this machine that is gone, or one whose count stands still for
DEAD_SECONDS. This needs no lock of the file system and no clock in common: shared folders and buckets will do. The file
is made by whoever finds none, as one request that the storage grants to one alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from aamoe_jax.bucket import AnyPath, BucketPath
from aamoe_jax.config import ConfigError
from aamoe_jax.files import SaveError
from aamoe_jax.training import distributed
from aamoe_jax.training.checkpoints import InUseError, unanimous

FILE = "owner.json"
BEAT_SECONDS = 5.0
DEAD_SECONDS = 30.0
SETTLE_SECONDS = 1.0
"""Where several take over at once the last one to write wins, and the others see it after so long."""
CLOCK_STEP = 60.0
"""Seconds by which the clock of a machine may be set while it runs: the birth of a process seems to move by as much."""

_WILL_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOMEM}
"""Errors of a folder that may be gone when it is tried again. Others are of the path."""

_held: set[str] = set()
"""Owners that are this very process."""

Record = dict[str, Any]


class Owner(contextlib.AbstractContextManager["Owner"]):
    """Owns a run folder, which it makes if it is missing, inside the `with`. Process 0 does, for all.

    Raises:
      InUseError: on entering: another process owns it. From `poll` and `confirm`: another one has taken it.
      ConfigError: there can be no folder at this path.
      SaveError: the storage failed.
    """

    def __init__(self, run_dir: AnyPath):
        self._folder, self._path = run_dir, run_dir / FILE
        self._id = uuid.uuid4().hex
        self._lost: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="owner", daemon=True)

    def __enter__(self) -> Owner:
        unanimous(lambda: self._acquire() if distributed.is_first() else None)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._id not in _held:
            return
        self._thread.join()
        _held.discard(self._id)
        if self._lost is None and _read(self._path).get("id") == self._id:
            self._path.unlink(missing_ok=True)

    def poll(self) -> None:
        """Raises once another process was seen to have taken the folder. Cheap: for every step."""
        if self._lost is not None:
            raise InUseError(self._lost)

    def confirm(self) -> None:
        """Looks whether the folder is still ours, before something is written that the owner alone may write."""
        if self._id in _held:
            self._look()
            self.poll()

    def _acquire(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while not (self._create() or self._take_over()):
                pass
        except OSError as error:
            if error.errno in _WILL_PASS:
                raise SaveError(f"{self._folder} cannot be written: {error.strerror}") from error
            raise ConfigError(f"{self._folder} cannot be a run folder: {error.strerror}; take another path") from error
        _held.add(self._id)
        self._thread.start()

    def _create(self) -> bool:
        """Whether there was no owner, so that this is the one now."""
        try:
            if isinstance(self._path, BucketPath):
                self._path.create(self._record(0))
            else:
                with self._path.open("x", encoding="utf-8") as file:
                    file.write(self._record(0))
        except FileExistsError:
            return _read(self._path).get("id") == self._id  # of a request that was sent again
        return True

    def _take_over(self) -> bool:
        """Takes the place of an owner that is dead. False where it has left by itself meanwhile."""
        dead = self._watch()
        if dead is None:
            return False
        now = _read(self._path)
        if now.get("id") == dead.get("id"):
            self._path.write_text(self._record(0), encoding="utf-8")
            time.sleep(SETTLE_SECONDS)
            now = _read(self._path)
        if now.get("id") != self._id:
            raise self._in_use(now)
        print(f"warning: {_name(dead)} ended without releasing {self._folder}: taken over", file=sys.stderr)
        return True

    def _watch(self) -> Record | None:
        """The record of an owner that is dead; None if it has left.

        Raises:
          InUseError: it is alive.
        """
        first, deadline, told = _read(self._path), time.monotonic() + DEAD_SECONDS, False
        while time.monotonic() < deadline:
            now, alive = _read(self._path), _is_alive(first)
            if not self._path.exists():
                return None
            if alive or now != first:
                raise self._in_use(now)
            if alive is False:
                break
            if not told:
                told = True
                seconds = f"for {DEAD_SECONDS:.0f} s"
                print(f"{_name(now)} owns {self._folder}: looking {seconds} whether it is alive", file=sys.stderr)
            time.sleep(min(1.0, DEAD_SECONDS / 10))
        return first

    def _in_use(self, found: Record) -> InUseError:
        return InUseError(
            f"{self._folder} is in use by {_name(found)}, which is alive: stop it, or take another run folder"
        )

    def _record(self, beat: int) -> str:
        me = psutil.Process()
        record = {"id": self._id, "where": _where(), "pid": me.pid, "born": me.create_time(), "beat": beat}
        return json.dumps(record | {"host": socket.gethostname()})

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            self._look()
            if self._lost is not None:
                return
            with contextlib.suppress(OSError):  # whoever saves next will say what is wrong with the folder
                self._path.write_text(self._record(beat), encoding="utf-8")

    def _look(self) -> None:
        found = _read(self._path)
        if found.get("id", self._id) != self._id:
            self._lost = (
                f"{_name(found)} has taken {self._folder}, after this process gave no sign of life for "
                f"{DEAD_SECONDS:.0f} s: nothing more is written by this one"
            )


def _read(path: AnyPath) -> Record:
    """What the owner says; nothing where there is none, while it is being written, and where it was torn."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _name(record: Record) -> str:
    return f"process {record.get('pid', 'unknown')} on {record.get('host', 'an unknown host')}"


def _where() -> str:
    """Names the processes among which a process id means one thing: this boot of this machine, or container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{uuid.getnode():x}"


def _is_alive(record: Record) -> bool | None:
    """Whether the process of a record runs; None where that cannot be seen from here."""
    if record.get("where") != _where():
        return None
    try:
        process = psutil.Process(record["pid"])
        same = abs(process.create_time() - record["born"]) < CLOCK_STEP and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    return same and (process.pid != os.getpid() or record["id"] in _held)
