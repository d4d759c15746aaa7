"""The mutants themselves: every one parses, differs, and is told from a test that does not notice."""

import ast

import pytest

from tests import mutants
from tests.mutants import ROOMS, Finder, Mutant, nearest, outcome, report

SOURCE = """
def f(x: int = 3, *, way="sum") -> float:
    \"\"\"Adds 1.\"\"\"
    y = jnp.where(x < 2, g(x, 0.5), -x)  # é
    if x == 1 and not y:
        raise ValueError(x + 1)
    return (x + y) * 2
"""


def test_what_is_changed():
    found = Finder("a.py", SOURCE).found
    changes = {(mutant.old, mutant.new) for mutant in found}
    assert changes == {
        ("<", "<="), ("2", "3"), ("x, 0.5", "0.5, x"), ("0.5", "1.0"), ("-x", "x"), ("g(x, 0.5), -x", "-x, g(x, 0.5)"),
        ("==", "!="), ("1", "2"), ("and", "or"), ("not y", "y"), ("+", "-"), ("(x + y) * 2", "x + y"), ("*", "/"),
        ("x + y", "x"),
    }  # fmt: skip
    for mutant in found:
        assert ast.dump(ast.parse(mutant.applied(SOURCE))) != ast.dump(ast.parse(SOURCE))
        assert SOURCE[mutant.start : mutant.stop] == mutant.old
        assert SOURCE.splitlines()[mutant.line - 1].count(mutant.old) >= 1


def test_every_room_has_tests_to_ask():
    found = mutants.mutants(["aamoe_jax/aamoe/budget.py"])
    assert len({mutant.name for mutant in found}) == len(found) > 50
    for room in ROOMS:
        for path in (mutants.ROOT / room).rglob("*.py"):
            asked = nearest(path.relative_to(mutants.ROOT).as_posix())
            assert asked
            for tests in asked:
                assert (mutants.ROOT / tests.split()[0]).exists(), tests


@pytest.mark.parametrize(("test", "verdict"), [("assert f(1) == 3", "noticed"), ("f(1)", "survived")])
def test_an_outcome(tmp_path, monkeypatch, test, verdict):
    (tmp_path / "sums.py").write_text("def f(x):\n    return x + 2\n")
    (tmp_path / "test_code.py").write_text(f"from sums import f\n\n\ndef test():\n    {test}\n")
    monkeypatch.setattr(mutants, "nearest", lambda path: ["test_code.py"])
    row = outcome(Mutant("sums.py", 2, 24, 25, "+", "-"), tmp_path, 60)
    assert row["verdict"] == verdict
    assert (tmp_path / "sums.py").read_text() == "def f(x):\n    return x + 2\n"
    assert ("| sums.py:2 | `+` | `-` |" in report([row], 9)) == (verdict == "survived")
