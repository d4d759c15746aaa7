"""Datasets in a bucket: copied to this machine once, and read there.

array_record can open files of a bucket, but asks for every record by a request of its own, and closes the connection.
All of a dataset is read before training anyway, to compare it with its digests. So the copy costs nothing but disk. A
dataset is in the bucket once SHA256SUMS is, which is written last.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from aamoe_jax.bucket import BucketPath, location
from aamoe_jax.data.errors import DataError
from aamoe_jax.data.integrity import SUMS, forget, verify
from aamoe_jax.files import SaveError


def local_folder(data_dir: str) -> Path:
    """Where the datasets of `data_dir` are read: there, or, of a bucket, in ~/.cache/aamoe_jax/data."""
    folder = location("data_dir", data_dir)
    if not isinstance(folder, BucketPath):
        return folder
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "aamoe_jax", "data", str(folder).removeprefix("gs://"))


def fetch_prepared(data_dir: str, directory: Path) -> bool:
    """Copies a dataset of a bucket to here, unless an intact copy is here. Whether there is one.

    Args:
      directory: the dataset, below `local_folder(data_dir)`.

    Raises:
      DataError: there is no such bucket, or no access to it.
      SaveError: the storage failed.
    """
    source = _in_bucket(data_dir, directory)
    if source is None:
        return directory.is_dir()
    with _failing(source), _alone(directory):
        if not (source / SUMS).exists():
            return False
        if not _is_copy(source, directory):
            _copy(source, directory)
        return True


def publish(data_dir: str, directory: Path) -> None:
    """Copies a dataset into the bucket, in place of the one that is there, where `data_dir` is one.

    Raises:
      DataError: there is no such bucket, or no access to it.
      SaveError: the storage failed.
    """
    target = _in_bucket(data_dir, directory)
    if target is None:
        return
    with _failing(target):
        (target / SUMS).unlink(missing_ok=True)
        target.rmtree(missing_ok=True)
        names = (directory / SUMS).read_text(encoding="utf-8").splitlines()
        for name in [*(line.split()[1] for line in names), SUMS]:
            (target / name).upload(directory / name)


def require_writable(data_dir: str) -> None:
    """Writes to a bucket and removes it again, before hours of work go into what is copied there.

    Raises:
      DataError: there is no such bucket, or no access to it.
      SaveError: the storage failed.
    """
    folder = location("data_dir", data_dir)
    if isinstance(folder, BucketPath):
        marker = folder / f".writable-{os.getpid()}"
        with _failing(marker):
            marker.write_text("")
            marker.unlink()


def prepared_names(data_dir: str, folder: str, version: str) -> list[str]:
    """The datasets in a folder of `data_dir`."""
    where = location("data_dir", data_dir) / folder
    if not isinstance(where, BucketPath):
        return [path.parent.name for path in where.glob(f"*/{version}")]
    with _failing(where):
        return [path.name for path in where.iterdir() if (path / version / SUMS).is_file()]


def published(data_dir: str, directory: Path) -> BucketPath | Path:
    """Where others find a dataset that was prepared here."""
    return _in_bucket(data_dir, directory) or directory


def _in_bucket(data_dir: str, directory: Path) -> BucketPath | None:
    folder = location("data_dir", data_dir)
    if not isinstance(folder, BucketPath):
        return None
    return BucketPath(folder, directory.relative_to(local_folder(data_dir)))


def _is_copy(source: BucketPath, directory: Path) -> bool:
    try:
        if (directory / SUMS).read_bytes() != (source / SUMS).read_bytes():
            return False
        verify(directory, "it is copied again")
    except (FileNotFoundError, NotADirectoryError, DataError):
        return False
    return True


def _copy(source: BucketPath, directory: Path) -> None:
    incomplete = directory.with_name(f"incomplete.{os.getpid()}")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    try:
        for file in source.files():
            file.download(incomplete / file.name)
        shutil.rmtree(directory, ignore_errors=True)
        forget(directory)
        incomplete.rename(directory)
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """The processes of a machine copy one after the other, and all but the first find the copy."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(directory.parent / "copying.lock"):
        yield


@contextlib.contextmanager
def _failing(path: BucketPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = DataError if isinstance(error, FileNotFoundError | PermissionError) else SaveError
        raise kind(f"{error.filename or path}: {error.strerror or error}") from error
