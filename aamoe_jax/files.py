"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file that holds all of `text`, on disk, when this returns, and else what it held before."""
    incomplete = path.with_name(f"{path.name}.incomplete")
    with incomplete.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    incomplete.replace(path)
