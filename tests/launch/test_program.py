"""What all programs share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    if argv[1:] == ["print"]:
        print("long " * 10_000, flush=True)
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


@pytest.mark.parametrize("argument", ["--help", "print"])
def test_output_that_nobody_reads_any_more_is_no_error(argument):
    """As in `... | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", PROGRAM, argument]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


COMPILING = """
import jax
from launch.program import run

def main(argv):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.jit(lambda x: x + 1)(1.0)
    print(jax.config.jax_compilation_cache_dir)

run(main)
"""


class TestCompiledPrograms:
    def folder(self, **environment: str) -> str:
        """Where a program keeps what it compiled."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
        command = [sys.executable, "-c", COMPILING]
        found = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=120)
        assert (found.returncode, found.stderr) == (0, "")
        return found.stdout.strip()

    def test_they_are_kept_in_the_users_cache(self, tmp_path):
        folder = Path(self.folder(XDG_CACHE_HOME=str(tmp_path)))
        assert folder == tmp_path / "aamoe_jax" / "compiled"
        kept = {path: path.stat().st_mtime_ns for path in folder.glob("*-cache")}
        assert kept
        assert self.folder(XDG_CACHE_HOME=str(tmp_path)) == str(folder)
        assert {path: path.stat().st_mtime_ns for path in folder.glob("*-cache")} == kept

    def test_the_environment_has_its_way(self, tmp_path):
        assert self.folder(XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "x")).endswith("/x")
        self.folder(XDG_CACHE_HOME=str(tmp_path), JAX_ENABLE_COMPILATION_CACHE="false")
        assert not list(tmp_path.glob("aamoe_jax/compiled/*-cache"))

    def test_without_a_place_for_them_programs_run_all_the_same(self, tmp_path):
        (tmp_path / "file").touch()
        assert self.folder(XDG_CACHE_HOME=str(tmp_path / "file")) == "None"
