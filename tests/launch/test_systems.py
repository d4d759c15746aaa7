"""The table of systems is read off code and tests, and reads them rightly."""

import re

import pytest

from aamoe_jax.registry import MIXERS
from experiments.systems import (
    ROOT,
    System,
    named_by,
    named_in,
    places_in_code,
    places_in_tests,
    report,
    systems,
    weighted_sums,
)
from tests.launch.session import calls


def ids(text):
    return [system for system, _ in named_in(text)]


class TestReading:
    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            ("bypass (AA-26)", [26]),
            ("AA-21-24", [21, 22, 23, 24]),
            ("AA-21–23", [21, 22, 23]),
            ("AA-21..23", [21, 22, 23]),
            ("AA-21 to AA-23", [21, 22, 23]),
            ("AA-21 to 23", [21, 22, 23]),
            ("AA-21\n    to AA-23", [21, 22, 23]),
            ("AA-13, 14, 15", [13, 14, 15]),
            ("AA-13, 14 and 15", [13, 14, 15]),
            ("AA-13, AA-15", [13, 15]),
            ("AA-01-03, 07", [1, 2, 3, 7]),
            ("AA-13/14", [13, 14]),
            ("AA-13, 140 tokens", [13]),
            ("AA-13, 14.5 nats", [13]),
            ("AA-130 and XAA-13", []),
            ("AA-1", []),
        ],
    )
    def test_ranges_and_lists(self, text, wanted):
        assert ids(text) == [f"AA-{number:02}" for number in wanted]

    def test_several_series(self):
        assert ids("DEC-13 to DEC-15; UNI-01, UNI-06, PM-09") == [
            *("DEC-13", "DEC-14", "DEC-15"),
            *("UNI-01", "UNI-06", "PM-09"),
        ]

    def test_names_of_tests(self):
        assert list(named_by("test_dec_13_14_the_compiler_agrees")) == ["DEC-13", "DEC-14"]
        assert list(named_by("test_it_is_aa_26")) == ["AA-26"]
        assert list(named_by("TestDEC05")) == ["DEC-05"]
        assert list(named_by("TestAA3233Baselines")) == ["AA-32", "AA-33"]
        assert not list(named_by("test_decode_13"))
        assert not list(named_by("TestReading"))


class TestScanning:
    @pytest.fixture
    def checkout(self, tmp_path):
        files = {
            "aamoe_jax/x.py": (
                '"""Module (AA-01)."""\n\n\nclass A:\n    """Bypass (AA-26)."""\n\n'
                "    def f(self):\n        # AA-27 to AA-28\n        return 1\n\n\ny = 1  # AA-29\n"
            ),
            "experiments/configs/x.gin": "# AA-32\n",
            "docs/x.md": "AA-33\n",
            "tests/test_x.py": (
                '"""All of AA-02."""\n\n\nclass TestAA26:\n    """Also AA-27."""\n\n'
                "    def test_aa_26_again(self):\n        pass\n\n"
                '    def test_other(self):\n        """AA-28."""\n\n\n'
                'def test_it():\n    """AA-30."""\n    x = "AA-31"\n'
            ),
            "tests/oracle.py": '"""Of AA-03."""\n',
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    def test_places_in_code(self, checkout):
        assert places_in_code(checkout) == {
            "AA-01": ["aamoe_jax/x.py"],
            "AA-26": ["aamoe_jax/x.py:A"],
            "AA-27": ["aamoe_jax/x.py:A.f"],
            "AA-28": ["aamoe_jax/x.py:A.f"],
            "AA-29": ["aamoe_jax/x.py"],
            "AA-32": ["experiments/configs/x.gin"],
        }

    def test_tests_by_name_and_docstring(self, checkout):
        assert places_in_tests(checkout) == {
            "AA-02": ["tests/test_x.py"],
            "AA-26": ["tests/test_x.py::TestAA26"],
            "AA-27": ["tests/test_x.py::TestAA26"],
            "AA-28": ["tests/test_x.py::TestAA26::test_other"],
            "AA-30": ["tests/test_x.py::test_it"],
        }

    def test_status_follows_from_both(self):
        assert System("AA-01", "", ["x.py"], ["t.py"]).status == "tested"
        assert System("AA-01", "", ["x.py"], []).status == "built, not tested"
        assert System("AA-01", "", [], []).status == "missing"
        assert System("AA-01", "", [], ["t.py"]).status == "tested, code does not name it"
        text = report([System("AA-01", "one layer", [f"{n}.py" for n in range(6)], [])])
        assert text.startswith("1 systems: 0 tested, 1 built, not tested, 0 tested, code does not name it, 0 missing.")
        assert "`3.py` and 2 more" in text


@pytest.fixture(scope="module")
def found():
    return {system.id: system for system in systems()}


class TestHere:
    """The list of this repository."""

    def test_all_ids_in_order(self, found):
        sizes = {"AA": 41, "DEC": 23, "UNI": 11, "PM": 16}
        assert list(found) == [f"{name}-{n:02}" for name, size in sizes.items() for n in range(1, size + 1)]
        assert all(system.what for system in found.values())

    def test_every_id_that_is_named_exists(self, found):
        for places in (places_in_code(ROOT), places_in_tests(ROOT)):
            assert set(places) <= set(found)

    def test_nothing_that_the_documents_claim_is_missing(self, found):
        claimed = {name for page in (ROOT / "docs").glob("*.md") for name in ids(page.read_text())}
        assert claimed
        assert claimed <= set(found)
        assert not [system for system in sorted(claimed) if found[system].status == "missing"]

    def test_the_ledger_is_found(self, found):
        for system in ("DEC-13", "DEC-14", "DEC-15", "AA-37"):
            assert any(place.startswith("aamoe_jax/ledger/") for place in found[system].code), system
            assert any(place.startswith("tests/ledger/") for place in found[system].tests), system


def test_the_program_prints_and_writes(tmp_path):
    output = tmp_path / "systems.md"
    (done,) = calls("systems", [[f"--output={output}"]])
    assert done.code == 0, done.stderr
    assert output.read_text().endswith(done.stdout)
    assert len(re.findall(r"^\| (?:AA|DEC|UNI|PM)-\d\d ", done.stdout, re.MULTILINE)) == 91


def test_every_mixer_is_a_weighted_sum():
    """UNI-01: one row for each part of each mixer, with nothing left out."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in weighted_sums().splitlines()[2:]]
    assert list(dict.fromkeys(row[0] for row in rows)) == sorted(MIXERS)
    assert all(len(row) == 6 and all(row) for row in rows)
