"""What the programs of experiments and of benchmarks share: inputs that are flags, and reports with their command."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import app, logging


def start(define_flags: Callable[[], None], main: Callable[[], int | None]) -> None:
    """`absl.app.run` of a program whose every input is a flag."""

    def checked(argv: list[str]) -> int | None:
        if len(argv) > 1:
            raise app.UsageError(f"unknown argument {argv[1]!r}; inputs are given as --flag=value")
        logging.set_verbosity(logging.WARNING)  # TFDS and Orbax report every file
        return main()

    define_flags()
    app.run(checked)


def command_line(module: str) -> str:
    """What was typed, for the report."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def publish(record: Any, report: str, output: str | Path | None, *, indent: int | None = 1) -> None:
    """Prints the report, and writes it and the record if there is a place for them."""
    print(report, end="")
    if output is not None:
        write(record, report, output, indent=indent)


def write(record: Any, report: str, output: str | Path, *, indent: int | None = None) -> None:
    """The record to `output`, a .json file, and the report beside it as Markdown."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=indent) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(report, encoding="utf-8")


def plain_table(heads: Sequence[str], aligned: str, rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table of narrow columns; `aligned`: `l` or `r` for each of them."""
    rules = "|".join("---" if side == "l" else "--:" for side in aligned)
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows))
    return "\n".join([head, f"|{rules}|", *lines])
