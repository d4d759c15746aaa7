"""The command `aamoe`: what it lists and refuses, and that it works in a folder whose packages have our names."""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import aamoe_jax
from launch.__main__ import PROGRAMS, help_text, main

ROOT = Path(__file__).parents[2]
NOT_COMMANDS = {"launch.__main__", "launch.cluster.probe"}
"""The command itself, and what launchers run on each host."""


def call(monkeypatch, *arguments: str) -> int | None:
    monkeypatch.setattr(sys, "argv", ["aamoe", *arguments])
    return main()


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> list[str]:
    """The console script of setup.cfg, as pip writes it, in a folder of its own."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    name, target = settings["options.entry_points"]["console_scripts"].strip().split(" = ")
    module, function = target.split(":")
    assert vars(importlib.import_module(module))[function] is main
    path = tmp_path_factory.mktemp("bin") / name
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """A folder with packages `launch` and `experiments` of somebody else."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in ("launch", "experiments"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    return folder


def run(script: list[str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The console script with the packages of this checkout, as if they were installed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*script, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


def test_every_program_is_a_command():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "launch").rglob("*.py")
        if any(
            isinstance(node, ast.If) and "__main__" in ast.unparse(node) for node in ast.parse(path.read_text()).body
        )
    }
    assert modules - NOT_COMMANDS == {module for module in PROGRAMS.values() if module.startswith("launch.")}


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)], ids=str)
def test_commands_are_listed_with_one_line_each(arguments, monkeypatch, capsys):
    assert call(monkeypatch, *arguments) == 0
    head, commands = capsys.readouterr().out.split("commands:\n")
    assert head.startswith("usage: aamoe COMMAND")
    lines = [line.split(maxsplit=1) for line in commands.splitlines()]
    assert [name for name, _ in lines] == list(PROGRAMS)
    for name, text in lines:
        assert text.endswith("."), name
        assert len(text) <= 85, name


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"aamoe_jax {aamoe_jax.__version__}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trian", "no command is called 'trian'; did you mean train? `aamoe --help` lists them"),
        ("xyz", "no command is called 'xyz'; `aamoe --help` lists them"),
        ("--gin_file=a.gin", "--gin_file=a.gin: flags follow the command, as in `aamoe train --gin_file=a.gin`;"),
    ],
)
def test_what_is_no_command_is_refused_with_a_hint(word, message, monkeypatch, capsys):
    assert call(monkeypatch, word) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_listing_the_commands_imports_no_library():
    code = (
        "import sys; sys.argv = ['aamoe']; from launch.__main__ import main; main();"
        "print(sorted({'jax', 'numpy', 'absl', 'gin', 'aamoe_jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_program_works_where_other_packages_have_our_names(script, foreign):
    """The current folder is not searched for packages, and shipped configs are found by their names."""
    done = run(script, "config", "diff", "aamoe.gin", cwd=foreign)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# defaults -> aamoe.gin: ")


def test_the_help_of_a_program_is_shown_under_the_name_of_its_command(script, foreign):
    done = run(script, "train", "--help", cwd=foreign)
    assert done.stdout.strip().startswith(help_text("train")), done.stderr
    assert "\naamoe train:\n  --[no]allow_restart: " in done.stdout
    assert "launch/train.py" not in done.stdout
