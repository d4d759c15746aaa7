"""The kernels as a package of their own: its pyproject.toml says what setup.cfg says of the whole."""

from __future__ import annotations

import ast
import configparser
import re
import sys
import tomllib
from pathlib import Path

import pytest

import aamoe_jax

ROOT = Path(__file__).parents[2]


def modules() -> list[Path]:
    """All but the copies that pip leaves in `build`."""
    room = ROOT / "pallas_kernels"
    return [path for path in room.rglob("*.py") if path.relative_to(room).parts[0] != "build"]


@pytest.fixture
def project() -> dict:
    return tomllib.loads((ROOT / "pallas_kernels" / "pyproject.toml").read_text())


def test_all_of_it_is_packaged(project):
    folders = {path.parent.relative_to(ROOT) for path in modules()}
    assert {".".join(folder.parts) for folder in folders} == set(project["tool"]["setuptools"]["packages"])
    assert project["tool"]["setuptools"]["package-dir"] == {"pallas_kernels": "."}


def test_versions_are_those_of_the_whole(project):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert project["project"]["version"] == aamoe_jax.__version__
    assert project["project"]["requires-python"] == setup["options"]["python_requires"]
    assert set(project["project"]["dependencies"]) <= set(setup["options"]["install_requires"].split("\n"))


def test_it_needs_nothing_else(project):
    imported: set[str] = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    needed = {re.match(r"\w+", line)[0] for line in project["project"]["dependencies"]}
    assert imported - set(sys.stdlib_module_names) - {"pallas_kernels"} <= needed
    assert needed <= imported
