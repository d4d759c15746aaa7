"""Files of a run that are whole, or as they were: of this machine, or of a bucket."""

from __future__ import annotations

import abc
import os
import shutil
import time
from pathlib import Path

from aamoe_jax.bucket import BLOCK, AnyPath, BucketPath
from aamoe_jax.config import ConfigError

PART_BYTES = 2**18
"""A part of lines in a bucket that is as long is followed by a new one."""
PART_SECONDS = 5.0
"""How old lines become before they are in the bucket, unless they are wanted there at once."""


class SaveError(ConfigError):
    """Storage that failed: a part of the run could not be written, or a dataset not copied to here."""


def write_whole(path: AnyPath, text: str) -> None:
    """Writes a file that holds all of `text`, on disk, when this returns, and else what it held before.

    Raises:
      SaveError: the storage failed.
    """
    try:
        if isinstance(path, BucketPath):
            path.write_text(text)
        else:
            _replace(path, text)
    except OSError as error:
        raise SaveError(f"{path} could not be written: {error.strerror}") from error


def append(path: AnyPath, text: str) -> None:
    """Adds text to the end of a file, which need not be there. In a bucket all of it is written anew."""
    if isinstance(path, BucketPath):
        path.write_text((path.read_text() if path.exists() else "") + text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _replace(path: Path, text: str) -> None:
    incomplete = path.with_name(f"{path.name}.incomplete")
    try:
        with incomplete.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        incomplete.replace(path)
    except OSError:
        incomplete.unlink(missing_ok=True)
        raise


def files_below(path: AnyPath) -> list[AnyPath]:
    """All files of a folder and of those below."""
    return [*path.files()] if isinstance(path, BucketPath) else [file for file in path.rglob("*") if file.is_file()]


def read_through(path: AnyPath) -> None:
    """Reads a file and forgets it."""
    if isinstance(path, BucketPath):
        path.read_through()
        return
    with path.open("rb") as opened:
        while opened.read(BLOCK):
            pass


def remove_folder(path: AnyPath) -> None:
    """Removes a folder and all that is in it."""
    if isinstance(path, BucketPath):
        path.rmtree(missing_ok=True)
    else:
        shutil.rmtree(path)


def read_lines(path: AnyPath) -> list[bytes]:
    """The whole lines of a file, without their ends. In a bucket, where nothing can be appended to an object, those of
    its parts: `metrics.jsonl` is `metrics/00000-00000000.jsonl`, ..., named after the start of the run that wrote it,
    and the number of its first line. What earlier starts have from there on is superseded, whenever it was written."""
    if isinstance(path, BucketPath):
        lines: list[bytes] = []
        for part in _parts(path):
            lines = lines[: _numbers(part)[1]] + part.read_bytes().split(b"\n")[:-1]
        return lines
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


class Lines(abc.ABC):
    """What lines are appended to. All methods raise OSErrors."""

    @abc.abstractmethod
    def write(self, line: bytes) -> None:
        """Appends a line with its end."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Until all lines are in the storage."""

    @abc.abstractmethod
    def close(self) -> None:
        """No more will come."""


def open_lines(path: AnyPath, kept: list[bytes]) -> Lines:
    """Goes on after the lines that are kept.

    Args:
      kept: in a bucket the first of those that are there.

    Raises:
      SaveError: the storage failed.
    """
    if not isinstance(path, BucketPath):
        write_whole(path, "".join(f"{line.decode()}\n" for line in kept))
        return _File(path)
    return _Parts(path, max((_numbers(part)[0] + 1 for part in _parts(path)), default=0), len(kept))


class _File(Lines):
    """A run that is killed has every line."""

    def __init__(self, path: Path):
        self._file = path.open("ab", buffering=0)

    def write(self, line: bytes) -> None:
        self._file.write(line)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class _Parts(Lines):
    """A run that is killed has every line but those of the last seconds. The last part is written anew with each."""

    def __init__(self, path: BucketPath, start: int, count: int):
        self._path, self._start, self._first, self._lines = path, start, count, list[bytes]()
        self._pending, self._written = False, time.monotonic()

    def write(self, line: bytes) -> None:
        self._lines.append(line)
        self._pending = True
        if time.monotonic() - self._written >= PART_SECONDS:
            self.sync()

    def sync(self) -> None:
        if not self._pending:
            return
        content = b"".join(self._lines)
        (self._path.with_suffix("") / f"{self._start:05}-{self._first:08}{self._path.suffix}").write_bytes(content)
        self._pending, self._written = False, time.monotonic()
        if len(content) >= PART_BYTES:
            self._first, self._lines = self._first + len(self._lines), []

    def close(self) -> None:
        self.sync()


def _parts(path: BucketPath) -> list[BucketPath]:
    return sorted(path.with_suffix("").glob(f"[0-9]*-[0-9]*{path.suffix}"), key=_numbers)


def _numbers(part: BucketPath) -> tuple[int, int]:
    """The start that wrote it, and its first line."""
    start, _, first = part.stem.partition("-")
    return int(start), int(first)
