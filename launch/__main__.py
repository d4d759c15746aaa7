"""The command `aamoe`: all programs as subcommands. `aamoe NAME ...` is `python -m MODULE ...` under a shorter name.

`python -m` puts the current folder first on the search path, so that a folder `launch` or `experiments` there hides the
installed package of that name. A console script does not: `aamoe` works in any folder.

This module imports neither JAX nor any program before one is chosen, so that listing them takes no time.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

PROGRAMS = {
    "prepare": "launch.prepare",
    "train": "launch.train",
    "evaluate": "launch.evaluate",
    "generate": "launch.generate",
    "choose": "launch.choose",
    "harness": "launch.harness",
    "export": "launch.export",
    "inspect": "launch.inspect",
    "draw": "launch.draw",
    "goodput": "launch.goodput",
    "neurons": "launch.neurons",
    "config": "launch.config",
    "match": "launch.match",
    "ledger": "launch.ledger",
    "compile": "launch.compile",
    "cluster": "launch.cluster.__main__",
    "systems": "launch.systems",
    "studies": "experiments.studies",
    "recall": "experiments.recall",
    "ruler": "experiments.ruler",
    "questions": "experiments.questions",
    "sweeps": "experiments.sweeps",
    "frontier": "experiments.frontier",
    "local_context": "experiments.local_context",
    "router_precision": "experiments.router_precision",
}
"""Subcommands and their modules, in the order in which they are listed."""
EXIT_USAGE = 2


def main() -> int | None:
    """Runs the program that the command line names, in this process."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("--help", "-h"):
        print(overview())
    elif name == "--version":
        print(f"aamoe_jax {importlib.metadata.version('aamoe_jax')}")
    elif name in PROGRAMS:
        run(name, arguments)
    else:
        print(f"error: {unknown(name)}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def run(name: str, arguments: list[str]) -> None:
    """Runs a program as `python -m` does, as the module `__main__`, but under the name `aamoe NAME`."""
    spec, loader = find(name)
    program, code = importlib.util.module_from_spec(spec), loader.get_code(spec.name)
    # absl and argparse take names from argv; absl looks for help in `__main__`.
    program.__name__, program.__doc__ = "__main__", help_text(name)
    sys.modules["__main__"], sys.argv = program, [f"aamoe {name}", *arguments]
    exec(code, program.__dict__)


def overview() -> str:
    """The subcommands, each with the first line of its help."""
    width = max(map(len, PROGRAMS))
    lines = [f"  {name:<{width}}  {help_text(name).splitlines()[0]}" for name in PROGRAMS]
    head = ["usage: aamoe COMMAND [--flag=value ...]", "       aamoe COMMAND --help", "       aamoe --version", ""]
    return "\n".join([*head, "commands:", *lines])


def help_text(name: str) -> str:
    """The docstring of a program, read from its source: nothing is imported."""
    spec, loader = find(name)
    return ast.get_docstring(ast.parse(loader.get_source(spec.name))) or ""


def find(name: str) -> tuple[ModuleSpec, Any]:
    """The spec of a program and its loader."""
    spec = importlib.util.find_spec(PROGRAMS[name])
    assert spec is not None
    return spec, spec.loader


def unknown(name: str) -> str:
    """What is wrong with a first word that is no subcommand."""
    if name.startswith("-"):
        return f"{name}: flags follow the command, as in `aamoe train {name}`; `aamoe --help` lists the commands"
    close = difflib.get_close_matches(name, PROGRAMS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"no command is called {name!r}; {hint}`aamoe --help` lists them"


if __name__ == "__main__":
    sys.exit(main())
