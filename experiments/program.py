"""What all programs share: inputs that are flags, errors that are one line, and reports with their command."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags, logging

from aamoe_jax.bucket import location
from aamoe_jax.config import ConfigError, first_line, local_path

LONGEST = 600
"""Characters of an error that are shown."""
BUCKETS = ("run_dir", "checkpoint", "data_dir")
"""Flags that may be the address of a bucket."""
FILES = (
    "gin_file",
    "import",
    "items",
    "output",
    "prompt_file",
    "save",
    "tasks",
    "text",
    "tfds_dir",
    "tokenizer",
    "work_dir",
)
"""Flags that are files or folders of this machine."""
COMPILED_BYTES = 2 * 2**30
"""Compiled programs that are kept; of more than that, those that were used last."""


def start(define_flags: Callable[[], None], main: Callable[[], int | None]) -> None:
    """`absl.app.run` of a program whose every input is a flag."""

    def checked(argv: list[str]) -> int | None:
        refuse_arguments(argv)
        return main()

    define_flags()
    run(checked)


def run(main: Callable[[list[str]], Any]) -> None:
    """`absl.app.run(main)`, but flags that do not fit, a UsageError, a ConfigError, a file that cannot be used and
    memory that is used up end the program with one line on stderr and exit code 1."""

    def guarded(argv: list[str]) -> Any:
        logging.set_verbosity(logging.WARNING)  # libraries report every file that they read
        try:
            _refuse_addresses()
            return main(argv)
        except (ConfigError, app.UsageError) as error:
            print(f"error: {shorten(str(error))}", file=sys.stderr)
            return 1
        except BrokenPipeError:
            return _nobody_reads()
        except OSError as error:
            if error.filename is None:
                raise
            print(f"error: {shorten(f'{error.strerror}: {error.filename}')}", file=sys.stderr)
            return 1
        except Exception as error:
            if not (isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)):
                raise
            print(
                f"error: out of memory ({shorten(first_line(error))}): fewer or shorter rows need less", file=sys.stderr
            )
            return 1

    app.run(guarded, flags_parser=_parse_flags)


def keep_compiled_programs() -> None:
    """Turns JAX's compilation cache on, unless the environment says where it is (JAX_COMPILATION_CACHE_DIR, which may
    be empty, or in a bucket) or that there is none (JAX_ENABLE_COMPILATION_CACHE=false).

    Raises:
      ConfigError: JAX_COMPILATION_CACHE_DIR is the address of something else than a bucket.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        location("JAX_COMPILATION_CACHE_DIR", os.environ["JAX_COMPILATION_CACHE_DIR"])
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "aamoe_jax", "compiled")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # there is no home: they are compiled anew every time
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
            jax.config.update("jax_compilation_cache_max_size", COMPILED_BYTES)


def _refuse_addresses() -> None:
    for names, check in ((BUCKETS, location), (FILES, local_path)):
        for name in names:
            value = flags.FLAGS[name].value if name in flags.FLAGS else None
            for path in value if isinstance(value, list) else [value or ""]:
                check(f"--{name}", path)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        print(f"error: {shorten(describe_flag_error(error))}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # of the text for --help, which is printed here
        sys.exit(_nobody_reads())


def _nobody_reads() -> int:
    """The exit code where whoever read our output has seen enough, as in `... | head`. The last flush is silent too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def describe_flag_error(error: flags.Error) -> str:
    """What is wrong with the flags, and what a flag that is missing is for."""
    missing = re.match(r"flag --(\w+)=None: Flag --\w+ must have a value other than None", str(error))
    if missing:
        return f"--{missing[1]} is missing: {flags.FLAGS[missing[1]].help.splitlines()[0].rstrip(';')}"
    return f"{' '.join(str(error).split()).rstrip('.')}; see --help"


def shorten(message: str) -> str:
    """A message as a terminal can show it, without its middle if it is very long: the field stands at its start, what
    to do at its end."""
    message = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in message)
    half = LONGEST // 2 - 3
    return message if len(message) <= LONGEST else f"{message[:half]} ... {message[-half:]}"


def refuse_arguments(argv: list[str]) -> None:
    """Every input is a flag: a stray word is a typing slip, and is not ignored."""
    if len(argv) > 1:
        raise ConfigError(f"unknown argument {argv[1]!r}: inputs are given as --flag=value; see --help")


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
