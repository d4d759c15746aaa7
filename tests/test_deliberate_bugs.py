"""Deliberate bugs: every one can be applied, its tests exist, its result is of today; and the verdicts are right."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import held
from experiments.held import Bug, bugs, states
from experiments.systems import CODE, systems
from tests import deliberate_bugs
from tests.deliberate_bugs import ROOT, copied

BUGS = bugs(ROOT)


def test_every_mechanism_has_one_in_order():
    assert list(BUGS) == [system.id for system in systems()]


@pytest.mark.parametrize("name", BUGS)
def test_it_stands_there_once_and_its_tests_exist(name):
    bug = BUGS[name]
    assert bug.file.startswith(CODE), "of the project, not of its tests"
    source = (ROOT / bug.file).read_text(encoding="utf-8")
    changed = bug.applied(source)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), "another program, which still parses"
    assert bug.tests
    for test in bug.tests:
        file, *names = test.partition("[")[0].split("::")
        body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        for inner in names:
            (node,) = [one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == inner]
            body = node.body
        assert isinstance(node, ast.FunctionDef), test


def test_the_parameters_of_its_tests_exist():
    """What pytest does not find would not run, and no bug could be tried again."""
    named = {test for bug in BUGS.values() for test in bug.tests if "[" in test}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *files]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not named - set(collected.splitlines())


def test_all_are_held_by_results_of_today():
    """After a change of a bug, `python -m tests.deliberate_bugs` tries it again."""
    assert not {name: state for name, state in states(ROOT).items() if state != "held"}


class TestStates:
    def test_a_result_is_of_one_bug(self, tmp_path):
        (tmp_path / held.BUGS).parent.mkdir()
        bug = {"bug": "words", "file": "x.py", "text": "1", "becomes": "2", "tests": ["t"]}
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in bug.items())
        (tmp_path / held.BUGS).write_text("".join(f"[AA-0{n}]\n{lines}\n" for n in (1, 2, 3, 4)))
        assert set(states(tmp_path).values()) == {"not shown"}
        digest = Bug(**bug | {"tests": ("t",)}).digest
        results = {
            "AA-01": {"digest": digest, "verdict": "killed"},
            "AA-02": {"digest": digest, "verdict": "survived: t"},
            "AA-03": {"digest": "0", "verdict": "killed"},
        }
        (tmp_path / held.RESULTS).parent.mkdir(parents=True)
        (tmp_path / held.RESULTS).write_text(json.dumps({"bugs": results}))
        assert list(states(tmp_path).values()) == ["held", "not held", "not shown since it changed", "not shown"]

    def test_a_text_that_is_not_there_once_is_refused(self):
        bug = Bug("", "x.py", "one", "two", ("t",))
        assert bug.applied("one") == "two"
        for source, count in (("", 0), ("one, one", 2)):
            with pytest.raises(ValueError, match=rf"x.py has 'one' {count} times"):
                bug.applied(source)

    def test_the_digest_changes_with_all_but_the_words(self):
        bug = Bug("words", "x.py", "one", "two", ("t",))
        assert bug.digest == bug._replace(bug="others").digest
        others = bug._replace(file="y"), bug._replace(text="y"), bug._replace(becomes="y"), bug._replace(tests=("y",))
        assert len({one.digest for one in (bug, *others)}) == 5


SOURCE = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"
TESTS = """
import time
import pytest
import numbers_of
@pytest.mark.parametrize("x", [0, 1])
def test_double(x): assert numbers_of.double(x) == 2 * x
def test_triple(): assert numbers_of.triple(0) == 0
def test_wrong(): assert False
def test_slow(): time.sleep(100 * (numbers_of.double(1) != 2))
"""


CASES = {
    "noticed": ("2 * x", "2 + x", ["test_double"], "killed"),
    "by the case that is named": ("2 * x", "2 + x", ["test_double[1]"], "killed"),
    "by one of two": ("2 * x", "2 + x", ["test_double", "test_triple"], "survived: tests/test_numbers.py::test_triple"),
    "by none": ("3 * x", "2 * x", ["test_triple"], "survived: tests/test_numbers.py::test_triple"),
    "noticed before it is there": (
        "2 * x",
        "2 + x",
        ["test_wrong"],
        "without the bug: tests/test_numbers.py::test_wrong",
    ),
    "no program": ("2 * x", "(", ["test_double"], "pytest ended with 4"),
    "endless": ("2 * x", "x", ["test_slow"], "took more than 5 s"),
    "without a test": ("2 * x", "2 + x", ["test_none"], "without the bug: pytest ended with 4"),
}
"""Text, what becomes of it, tests, and how the verdict begins."""
JUDGE = """
import json, pathlib, sys
from experiments.held import Bug
from tests import deliberate_bugs

folder, cases = json.load(sys.stdin)
verdicts = {}
for name, (text, becomes, tests, _) in cases.items():
    deliberate_bugs.SECONDS = 5 if name == "endless" else 60
    bug = Bug("", "numbers_of.py", text, becomes, tuple(f"tests/test_numbers.py::{test}" for test in tests))
    without = deliberate_bugs.run(bug.tests, pathlib.Path(folder), seconds=60)
    verdicts[name] = deliberate_bugs.judged(bug, pathlib.Path(folder), without)
print(json.dumps(verdicts))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "tests").mkdir()
    (folder / "numbers_of.py").write_text(SOURCE)
    (folder / "tests/test_numbers.py").write_text(TESTS)
    return folder


@pytest.fixture(scope="module")
def verdicts(checkout) -> dict[str, str]:
    """Of all cases, in a process of its own: it forks, which one that computes should not."""
    done = subprocess.run(
        [sys.executable, "-c", JUDGE],
        input=json.dumps([str(checkout), CASES]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
class TestVerdicts:
    @pytest.mark.parametrize("name", CASES)
    def test_of_a_bug(self, verdicts, name):
        assert verdicts[name].startswith(CASES[name][-1])

    def test_the_checkout_is_as_it_was(self, checkout, verdicts):
        assert (checkout / "numbers_of.py").read_text() == SOURCE

    def test_a_copy_has_what_git_does_not_ignore(self, tmp_path, monkeypatch):
        here = tmp_path / "here"
        for name in ("kept.py", "folder/kept.py", "left_out.py", ".gitignore"):
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_text("left_out.py\n")
        subprocess.run(["git", "init", "-q"], cwd=here, check=True)
        monkeypatch.setattr(deliberate_bugs, "ROOT", here)
        there = copied(tmp_path / "there")
        found = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
        assert found == {"kept.py", "folder/kept.py", ".gitignore"}
