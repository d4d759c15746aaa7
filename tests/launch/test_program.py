"""What all programs share."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from aamoe_jax.config import ConfigError
from launch.program import run

class DataError(ConfigError):
    pass

def main(argv):
    if argv[1:] == ["bad"]:
        raise DataError("no data called 'x'")
    if argv[1:] == ["memory"]:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\\nAnd more.")
    if argv[1:] == ["defect"]:
        raise RuntimeError("a defect keeps its traceback")
    return 3

run(main)
"""


def outcome(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program above, run in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_errors_that_a_user_can_mend_are_one_line():
    result = outcome("bad")
    assert (result.returncode, result.stderr) == (1, "error: no data called 'x'\n")


def test_no_memory_is_one_line():
    result = outcome("memory")
    said = "error: out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.): fewer or shorter rows need"
    assert (result.returncode, result.stderr) == (1, f"{said} less\n")


def test_defects_keep_their_traceback():
    result = outcome("defect")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_what_main_returns_is_the_exit_code():
    assert outcome().returncode == 3


def test_a_program_without_an_experiment_refuses_its_flags():
    assert "Unknown command line flag 'gin_file'" in outcome("--gin_file=aamoe.gin").stderr
