"""Many calls of one program in one process, as a shell would make them: to start a process takes longer than most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

SESSION = """
import contextlib, importlib, inspect, io, json, sys
from absl import flags
from absl.testing import flagsaver
from launch import program

outcomes, last = [], None
for name, arguments in json.load(sys.stdin):
    if name != last:
        called, last = importlib.import_module(name if name.startswith("experiments.") else f"launch.{name}"), name
        for module, found in list(flags.FLAGS.flags_by_module_dict().items()):
            for flag in list(found) if module.startswith(("launch.", "experiments.")) else ():
                delattr(flags.FLAGS, flag.name)
        vars(called).get("define_flags", program.define_experiment_flags)()
    sys.argv, main = [called.__name__, *arguments], called.main
    if not inspect.signature(main).parameters:  # it is for `experiments.program.start`
        main = lambda argv, run=called.main: program.refuse_arguments(argv) or run()
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), flagsaver.flagsaver():
        try:
            program.run(main)
        except SystemExit as end:
            code = end.code or 0
    outcomes.append([code, *(stream.buffer.getvalue().decode() for stream in (out, err))])
json.dump(outcomes, sys.stdout)
"""


class Outcome(NamedTuple):
    """What one call left."""

    code: int
    stdout: str
    stderr: str


def calls(program: str, arguments: Sequence[Sequence[str]], **environment: str) -> list[Outcome]:
    """Outcomes of `python -m launch.PROGRAM`, or `-m experiments.NAME`, with these arguments each, one by one."""
    return calls_of([(program, each) for each in arguments], **environment)


def calls_of(programs: Sequence[tuple[str, Sequence[str]]], **environment: str) -> list[Outcome]:
    """The same of several programs, each with its arguments."""
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        input=json.dumps([(program, list(arguments)) for program, arguments in programs]),
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(*outcome) for outcome in json.loads(done.stdout)]
