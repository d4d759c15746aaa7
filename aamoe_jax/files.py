"""Files of a run that are whole, or as they were."""

from __future__ import annotations

import os
from pathlib import Path

from aamoe_jax.config import ConfigError


class SaveError(ConfigError):
    """A part of the run that could not be written."""


def write_whole(path: Path, text: str) -> None:
    """Writes a file that holds all of `text`, on disk, when this returns, and else what it held before.

    Raises:
      SaveError: the storage failed.
    """
    incomplete = path.with_name(f"{path.name}.incomplete")
    try:
        with incomplete.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        incomplete.replace(path)
    except OSError as error:
        incomplete.unlink(missing_ok=True)
        raise SaveError(f"{path} could not be written: {error.strerror}") from error
