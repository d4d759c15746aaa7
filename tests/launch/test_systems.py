"""The table of systems says what is shown: what is built, held by a test, reachable and measured."""

import re

import pytest

from aamoe_jax.registry import MIXERS
from experiments.held import Bug
from experiments.systems import (
    ROOT,
    System,
    counts,
    details,
    named_in,
    places_in_code,
    systems,
    tables,
    unreachable,
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


class TestStates:
    """Each of the four follows from something that can be wrong."""

    def test_built_is_what_code_names(self):
        assert System("AA-01", "").built() == "not built"
        assert System("AA-01", "", code=("x.py",)).built() == "built"

    @pytest.mark.parametrize(
        ("ways", "complaint"),
        [
            ({}, "no way is given, and no reason"),
            ({"gin": ("BudgetConfig.beta = 2.0",), "property": "names"}, "a property is not reached"),
            ({"gin": ("dense.gin", "ModelConfig.d_fff = 2")}, "ModelConfig.d_fff"),
            ({"gin": ("BudgetConfig.beta = -1.0",)}, "must be a positive number"),
            ({"gin": ("no_such.gin",)}, "no_such.gin"),
            ({"program": "aamoe evaluates"}, "there is no program evaluates"),
            ({"program": "aamoe evaluate --swep=length"}, "evaluate has no flag --swep"),
            ({"program": "aamoe evaluate --sweep=width"}, "evaluate knows no width"),
            ({"function": "aamoe_jax.analysis.neurons.as_neuron"}, "as_neuron"),
            ({"function": "aamoe_jax.analysis.neuron.as_neurons"}, "neuron"),
        ],
    )
    def test_what_does_not_reach_it_is_told(self, ways, complaint):
        system = System("AA-01", "", **ways)
        (found,) = unreachable(system)
        assert complaint in found
        assert system.reachable() == "not reachable"

    @pytest.mark.parametrize(
        "ways",
        [
            {"gin": ("dense.gin", "ModelConfig.num_kv_heads = 2")},
            {"program": "aamoe evaluate --sweep=length --budget_scale=0.5"},
            {"program": "aamoe match --gin_file=dense.gin --field=ModelConfig.d_ff"},
            {"program": "aamoe studies --study=compute"},
            {"function": "aamoe_jax.analysis.neurons.Neurons.grow"},
        ],
    )
    def test_what_reaches_it_does(self, ways):
        assert not unreachable(System("AA-01", "", **ways))
        assert System("AA-01", "", **ways).reachable() == "reachable"

    def test_a_property_is_not_reached(self):
        assert System("AA-01", "", property="names").reachable() == "a property"

    def test_measured_is_what_results_exist_of(self):
        assert System("AA-01", "").figures() == "a definition"
        assert System("AA-01", "", missing="no run").figures() == "not measured"
        assert System("AA-01", "", measured=("recall",)).figures() == "measured"
        assert System("AA-01", "", measured=("recall",), missing="long rows").figures() == "in part"
        assert System("AA-01", "", measured=("recall", "recal")).figures() == "no such result"

    def test_counts_and_tables(self):
        bug = Bug("one more", "x.py", "1", "2", ("tests/test_x.py::test_one",))
        one = System("AA-01", "one", gin=("aamoe.gin",), code=("aamoe_jax/x.py:f",), bug=bug, held="held")
        both = [one, System("PM-01", "two", property="names", measured=("recall",), missing="more")]
        total = [cell.strip() for cell in counts(both).splitlines()[-1].split("|")[1:-1]]
        assert total == [
            *("all", "2", "1 built, 1 not built", "1 held, 1 not shown"),
            *("1 reachable, 1 a property", "1 in part, 1 a definition"),
        ]
        text = tables(both, links=True)
        assert text.index("## Attention Is All You Need 2") < text.index("| [AA-01](#aa-01)")
        assert text.index("| [AA-01](#aa-01)") < text.index("## Patterns and Messages") < text.index("| [PM-01]")
        assert details([one]).splitlines()[4:] == [
            "* code: [aamoe_jax/x.py:f](../../aamoe_jax/x.py)",
            "* held: where one more, there must fail `tests/test_x.py::test_one`",
            "* reachable: `aamoe.gin`",
            "* a definition",
        ]
        assert "* in part: [recall](recall.md); more" in details(both)


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
        assert set(places_in_code(ROOT)) <= set(found)

    def test_nothing_that_the_documents_claim_is_missing(self, found):
        claimed = {name for page in (ROOT / "docs").glob("*.md") for name in ids(page.read_text())}
        assert claimed
        assert claimed <= set(found)
        assert not [system for system in sorted(claimed) if found[system].built() != "built"]

    def test_the_ledger_is_found(self, found):
        for system in ("DEC-13", "DEC-14", "DEC-15", "AA-37"):
            assert any(place.startswith("aamoe_jax/ledger/") for place in found[system].code), system

    def test_what_is_said_to_reach_each_does(self, found):
        assert not [(name, complaints) for name, system in found.items() if (complaints := unreachable(system))]

    def test_results_that_are_named_exist(self, found):
        assert not [name for name, system in found.items() if system.figures() == "no such result"]

    def test_the_committed_table_is_of_today(self, found):
        """`python -m launch.systems --output=experiments/results/systems.md` makes it."""
        assert counts(list(found.values())) in (ROOT / "experiments/results/systems.md").read_text(encoding="utf-8")


def test_the_program_prints_and_writes(tmp_path):
    output = tmp_path / "systems.md"
    (done,) = calls("systems", [[f"--output={output}"]])
    assert done.code == 0, done.stderr
    assert len(re.findall(r"^\| (?:AA|DEC|UNI|PM)-\d\d ", done.stdout, re.MULTILINE)) == 91
    assert max(map(len, done.stdout.partition("## Mixers")[0].splitlines())) < 200
    text = output.read_text()
    anchors = {heading.lower() for heading in re.findall(r"^### (.*)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(.*?)\)", text)) == anchors
    links = re.findall(r"\]\(([^#].*?)\)", text)
    assert len(links) > 91
    assert not [link for link in links if not (ROOT / "experiments/results" / link).exists()]


def test_every_mixer_is_a_weighted_sum():
    """UNI-01: one row for each part of each mixer, with nothing left out."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in weighted_sums().splitlines()[2:]]
    assert list(dict.fromkeys(row[0] for row in rows)) == sorted(MIXERS)
    assert all(len(row) == 6 and all(row) for row in rows)
