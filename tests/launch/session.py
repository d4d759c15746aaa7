"""Many calls of one program in one process, as a shell would make them: to start a process takes longer than most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

SESSION = """
import contextlib, importlib, io, json, sys
from absl.testing import flagsaver
from launch import program

called = importlib.import_module(f"launch.{sys.argv[1]}")
called.define_flags()
outcomes = []
for arguments in json.load(sys.stdin):
    sys.argv = [called.__name__, *arguments]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), flagsaver.flagsaver():
        try:
            program.run(called.main)
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
    """Outcomes of `python -m launch.PROGRAM` with these arguments each, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", SESSION, program],
        input=json.dumps([list(each) for each in arguments]),
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(*outcome) for outcome in json.loads(done.stdout)]
