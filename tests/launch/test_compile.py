"""launch.compile: what it refuses without a compiler, what it prints with one, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from absl import flags
from absl.testing import flagsaver

from aamoe_jax.config import ConfigError
from aamoe_jax.preflight.program import PreflightError
from launch import compile as preflight
from tests.launch.session import calls
from tests.preflight.samples import REFUSED, SUMMARY

ABSENT = "v5p:1x1x1x1" if importlib.util.find_spec("libtpu") else "v5e:2x2"
"""A slice that cannot be compiled for here."""


@pytest.fixture(scope="module", autouse=True)
def defined():
    preflight.define_flags()
    yield
    for name in ("topology", "mode", "depth", "save", "output", "gin_file", "gin_param"):
        delattr(flags.FLAGS, name)


def run(monkeypatch, answers: list, **values) -> int:
    """main() with these flags, where the compiler gives these answers."""

    def answer(*_):
        given = answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setattr(preflight, "compile_apart", answer)
    with flagsaver.flagsaver(gin_file=["quickstart.gin"], **values):
        return preflight.main(["launch.compile"])


def test_several_slices_make_one_table(monkeypatch, capsys, tmp_path):
    slices = ["v5p:4x4x4", "v5e:16x16"]
    assert run(monkeypatch, [SUMMARY, SUMMARY], topology=slices, output=str(tmp_path / "it")) == 0
    printed = capsys.readouterr().out
    assert printed.count("| topology ") == 1
    assert printed.count("| v5p:4x4x4 ") == 2
    assert (tmp_path / "it.md").read_text().endswith(printed)
    assert [entry["devices"] for entry in json.loads((tmp_path / "it.json").read_text())] == [64, 64]


def test_too_big_is_an_exit_code_and_a_message(monkeypatch, capsys):
    assert run(monkeypatch, [SUMMARY, REFUSED], topology=["v5p:4x4x4"] * 2) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: v5p:4x4x4: needs 111.0 GiB a device")
    assert "What to change:" in captured.err
    assert "too big" in captured.out


def test_a_compiler_that_fails_ends_the_program_with_its_words(monkeypatch, capsys):
    assert run(monkeypatch, [PreflightError("the words")], topology=["v5p:4x4x4"]) == 1
    assert capsys.readouterr().err == "error: the words\n"


def test_one_executable_is_saved_of_one_slice(monkeypatch):
    with pytest.raises(ConfigError, match="takes one --topology: there are 2"):
        run(monkeypatch, [SUMMARY], topology=["v5p:4x4x4"] * 2, save="step.pickle")
    saved = []
    monkeypatch.setattr(preflight, "compile_apart", lambda *given: saved.append(given[-1]) or SUMMARY)
    with flagsaver.flagsaver(gin_file=["quickstart.gin"], topology=["v5p:4x4x4"], save="step.pickle"):
        assert preflight.main(["launch.compile"]) == 0
    assert saved == [Path("step.pickle")]


def test_a_wrong_slice_is_one_line_and_so_is_a_missing_compiler():
    wrong, plain = calls(
        "compile", [["--gin_file=quickstart.gin", f"--topology={name}"] for name in ("v9:2x2", ABSENT)]
    )
    assert (wrong.code, wrong.stderr.count("\n")) == (1, 1)
    assert "expected such as v5p:8x8x8" in wrong.stderr
    assert (plain.code, plain.stderr.count("\n")) == (1, 1)
    if importlib.util.find_spec("libtpu") is None:
        assert "libtpu is not installed" in plain.stderr
        assert ".[aot]" in plain.stderr
