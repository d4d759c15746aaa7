"""Whether the files of a prepared dataset are those that were written.

Their digests are in SHA256SUMS, which `sha256sum -c` reads too. All files are read once; after that their sizes and
times are compared with those at the last check, which are kept beside them where the folder can be written.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

from absl import logging

from aamoe_jax.data.errors import DataError, shown

SUMS = "SHA256SUMS"
CHECKED = "checked.json"
LONG = 10 * 2**30
"""From so many bytes on a check takes long enough to be announced."""

Stamps = dict[str, list[int]]
"""Size, time of change and time of change of the entry, by name of file."""

_checked: dict[Path, Stamps] = {}
"""What this process has checked: in a folder that cannot be written nothing else remembers it."""


def write_sums(directory: Path) -> None:
    """Writes the digests of all files of the folder into SHA256SUMS."""
    digests = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    (directory / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


def verify(directory: Path, remedy: str) -> None:
    """Makes sure that the files of a dataset are those of SHA256SUMS, all of them and no others.

    Args:
      remedy: what the message tells the user to do.

    Raises:
      DataError: a file is missing, cannot be read or was changed.
    """
    sums = _read_sums(directory, remedy)
    stamps = {name: _stamp(directory / name, remedy) for name in (SUMS, *sums)}
    if stamps in (_checked.get(directory), _remembered(directory)):
        return
    size = sum(stamp[0] for stamp in stamps.values())
    if size >= LONG:
        logging.warning("%s: checking %.0f GB, once", directory, size / 1e9)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            found = dict(zip(sums, pool.map(_sha256, (directory / name for name in sums)), strict=True))
        except OSError as error:
            raise DataError(f"{error.filename}: cannot be read ({error.strerror}); {remedy}") from error
    for name, digest in sums.items():
        if found[name] != digest:
            raise DataError(f"{directory / name}: damaged, its digest is not that of {SUMS}; {remedy}")
    _remember(directory, stamps)


def forget(directory: Path) -> None:
    """Has the next `verify` read all files again."""
    _checked.pop(directory, None)
    with contextlib.suppress(OSError):  # in a folder that cannot be written there is none
        (directory / CHECKED).unlink()


def _read_sums(directory: Path, remedy: str) -> dict[str, str]:
    try:
        lines = (directory / SUMS).read_text(encoding="utf-8").splitlines()
        present = [path.name for path in directory.iterdir()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{directory / SUMS}: cannot be read ({shown(error)}); {remedy}") from error
    matches = [re.fullmatch(r"([0-9a-f]{64})  ([\w.-]+)", line) for line in lines]
    sums = {match[2]: match[1] for match in matches if match}
    # A list that was cut short would leave files unchecked.
    unlisted = [name for name in present if name not in (*sums, CHECKED) and re.search(r"\.(json|array_record)", name)]
    if not all(matches) or unlisted:
        what = f"does not list {unlisted[0]}" if unlisted else "has lines that are no digest with a name"
        raise DataError(f"{directory / SUMS}: damaged, it {what}; {remedy}")
    return sums


def _stamp(path: Path, remedy: str) -> list[int]:
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: is no regular file; {remedy}")
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remembered(directory: Path) -> Any:  # of any form, where it is damaged
    try:
        return json.loads((directory / CHECKED).read_bytes())
    except (OSError, ValueError, RecursionError):  # none yet, or damaged: the files are read again
        return None


def _remember(directory: Path, stamps: Stamps) -> None:
    _checked[directory] = stamps
    # By a rename, so that processes that check at once do not spoil it; and not where the folder cannot be written.
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=directory, prefix="incomplete.") as folder:
        written = Path(folder) / CHECKED
        written.write_text(json.dumps(stamps))
        os.replace(written, directory / CHECKED)
