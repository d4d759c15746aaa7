"""Folders in object storage (`gs://BUCKET/FOLDER`), with as much of pathlib as runs and datasets need.

An object appears whole or not at all, cannot be appended to, and has no folder around it but in its name. Requests that
fail for a while are sent again by the libraries, for about half a minute. What fails for good is an OSError, and never
reads as "there is no such file": that would begin a run again whose checkpoints are there.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from etils.epath import gpath

from aamoe_jax.config import ConfigError, first_line, in_bucket

BLOCK = 2**24
"""Bytes that are read at a time where the content does not matter."""
CONNECT_SECONDS, READ_SECONDS = 30.0, 60.0
"""How long a request waits for a connection, and for the next bytes of an answer, before it is sent again."""


class BucketPath(gpath.PosixGPath):
    """A folder or an object of a bucket. Every method raises OSErrors with their `errno` and `strerror`."""

    def exists(self) -> bool:
        """Whether there is an object of this name, or one in this folder."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether an object is in this folder."""
        return self._kind() == "directory"

    def iterdir(self) -> Iterator[BucketPath]:
        """What lies directly in this folder; nothing where there is none."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            names = [entry["name"] for entry in _files().ls(str(self), detail=True)]
            return iter([self / name.rsplit("/", 1)[1] for name in names if name != str(self).removeprefix("gs://")])
        return iter(())

    def glob(self, pattern: str) -> Iterator[BucketPath]:
        """What lies directly in this folder and has such a name."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def read_bytes(self) -> bytes:
        """All of an object."""
        with self._errors():
            return bytes(_files().cat_file(str(self)))

    def read_text(self, encoding: str | None = "utf-8") -> str:
        """All of an object."""
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, data: bytes) -> int:
        """Writes an object whole, in place of the one that was there."""
        with self._errors():
            _files().pipe_file(str(self), data)
        return len(data)

    def write_text(self, data: str, encoding: str | None = "utf-8", errors: str | None = None) -> int:
        """Writes an object whole, in place of the one that was there."""
        del errors
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def create(self, data: str) -> None:
        """Writes an object that is not there yet. Of several who try at once one alone succeeds.

        Raises:
          FileExistsError: there is one, which may be ours: of a request that was sent twice the second finds the first.
        """
        with self._errors():
            _files().pipe_file(str(self), data.encode(), mode="create")  # ifGenerationMatch=0

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object."""
        try:
            with self._errors():
                _files().call("DELETE", "b/{}/o/{}", *str(self).removeprefix("gs://").split("/", 1))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a folder is there as soon as something is in it."""

    def rmtree(self, missing_ok: bool = False) -> None:
        """Removes everything in a folder."""
        try:
            with self._errors():
                _files().rm(str(self), recursive=True)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def copy_folder(self, target: BucketPath) -> None:
        """Copies everything in a folder to another one, within the storage."""
        for path in self.files():
            with path._errors():
                _files().cp_file(str(path), str(target / str(path)[len(str(self)) + 1 :]))

    def files(self) -> list[BucketPath]:
        """All objects in this folder and in those below."""
        with self._errors():
            return [BucketPath(f"gs://{name}") for name in _files().find(str(self))]

    def read_through(self) -> None:
        """Reads an object and forgets it."""
        with self._errors():
            for start in range(0, _files().info(str(self))["size"], BLOCK):
                _files().cat_file(str(self), start, start + BLOCK)

    def download(self, target: Path) -> None:
        """Writes an object to a file of this machine."""
        with self._errors():
            _files().get_file(str(self), str(target))

    def upload(self, source: Path) -> None:
        """Writes a file of this machine to an object."""
        with self._errors():
            _files().put_file(str(source), str(self))

    def absolute(self) -> BucketPath:
        """Itself: epath's own prepends the folder of the process."""
        return self

    def resolve(self, strict: bool = False) -> BucketPath:
        """Itself."""
        return self

    def _kind(self) -> str | None:
        try:
            with self._errors():
                return str(_files().info(str(self))["type"])
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """What the libraries raise, as OSErrors of this path."""
        import google.auth.exceptions
        from gcsfs.retry import HttpError

        bucket = str(self).removeprefix("gs://").partition("/")[0]
        log_in = f"log in, by `gcloud auth application-default login` or GOOGLE_APPLICATION_CREDENTIALS ({bucket})"
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, f"no such object, or no bucket {bucket!r}", str(self)) from error
        except FileExistsError as error:
            raise FileExistsError(errno.EEXIST, "is there already", str(self)) from error
        except google.auth.exceptions.DefaultCredentialsError as error:
            raise PermissionError(errno.EACCES, f"no credentials: {log_in}", str(self)) from error
        except Exception as error:  # HttpError is none of any kind; a 403 is a bare OSError
            denied = isinstance(error, HttpError) and error.code in (401, 403)
            if denied or str(error).startswith("Forbidden"):
                raise PermissionError(
                    errno.EACCES, f"the storage refuses ({first_line(error)}): {log_in}", str(self)
                ) from error
            raise OSError(errno.EIO, first_line(error), str(self)) from error


AnyPath: TypeAlias = Path | BucketPath
"""Of this machine, or of a bucket."""


def location(name: str, path: str | AnyPath) -> AnyPath:
    """The folder or file that a flag or field names.

    Raises:
      ConfigError: it is the address of something else; or the library for buckets is missing.
    """
    if not in_bucket(name, path):
        return Path(path)
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(f"{name} = {str(path)!r}: needs gcsfs: pip install -c constraints.txt -e '.[gcs]'")
    _files()
    return BucketPath(str(path))


@functools.cache
def _files() -> Any:
    """The storage, as fsspec sees it. What others write is to be seen at once, by Orbax and JAX too, through epath."""
    # Else every bucket is asked by gRPC for its kind, which needs permissions of its own.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import aiohttp
    import fsspec

    # Without limits a connection that died without a word would be waited for without end.
    limits = aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS)
    for scheme in ("gs", "gcs"):
        settings = fsspec.config.conf.setdefault(scheme, {})
        settings.setdefault("use_listings_cache", False)
        settings.setdefault("requests_timeout", limits)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs the traceback of every error that it also raises
    logging.getLogger("google.auth").setLevel(logging.ERROR)  # it warns that this is no machine of Google's
    return fsspec.filesystem("gs")
