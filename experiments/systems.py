"""Where every system of the sources stands: its code, its tests, and what follows from these.

Systems have IDs such as AA-26, and `systems.tsv` says what each is. Code and tests name the IDs that they are about: in
docstrings and comments, tests also in their names (`test_dec_05_...`, `TestDEC05`). That is all that is read here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from aamoe_jax.markdown import table
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import MIXERS

ROOT = Path(__file__).parents[1]
SYSTEMS = Path(__file__).with_name("systems.tsv")
CODE = ("aamoe_jax", "pallas_kernels", "experiments", "launch", "benchmarks")
TESTS = ("tests",)
SHOWN = 4
"""Places of each kind in a row of the table."""

Status = Literal["tested", "built, not tested", "tested, code does not name it", "missing"]
Places = Mapping[str, list[str]]
"""By ID."""

_RANGE, _LIST = r"-|–|\.\.|\s+to\s+(?:\1-)?", r",\s+(?:and\s+)?|\s+and\s+|/"
_NAMED = re.compile(rf"\b(AA|DEC|UNI|PM)-(\d\d)((?:(?:{_RANGE}|{_LIST})\d\d\b(?![-.,]?\d))*)(?!\d)")
_FURTHER = re.compile(r"\s*(-|–|\.\.|to\b)?[^\d]*?(\d\d)")
_FUNCTION = re.compile(r"(?:^|_)(aa|dec|uni|pm)_(\d\d(?:_\d\d)*)(?=_|$)")
_CLASS = re.compile(r"(AA|DEC|UNI|PM)((?:\d\d)+)(?!\d)")


class System(NamedTuple):
    """One row of the table."""

    id: str
    what: str
    code: list[str]
    tests: list[str]

    @property
    def status(self) -> Status:
        """By code and tests alone."""
        if self.code:
            return "tested" if self.tests else "built, not tested"
        return "tested, code does not name it" if self.tests else "missing"


def named_in(text: str) -> Iterator[tuple[str, int]]:
    """IDs in a text, and where: AA-26, ranges (AA-21-26, AA-21 to AA-26, AA-21..26) and lists (AA-21, 22 and 26)."""
    for found in _NAMED.finditer(text):
        series, last, further = found[1], int(found[2]), found[3]
        yield f"{series}-{last:02}", found.start()
        for through, number in _FURTHER.findall(re.sub(r"[A-Z]+-(?=\d)", "", further)):
            numbers = range(last + 1, int(number) + 1) if through else [int(number)]
            yield from ((f"{series}-{number:02}", found.start()) for number in numbers)
            last = int(number)


def named_by(name: str) -> Iterator[str]:
    """IDs in the name of a test: `test_dec_13_14_...`, `TestDEC05`."""
    for series, numbers in _FUNCTION.findall(name):
        yield from (f"{series.upper()}-{number}" for number in numbers.split("_"))
    for series, numbers in _CLASS.findall(name) if name.startswith("Test") else ():
        yield from (f"{series}-{number}" for number in re.findall(r"\d\d", numbers))


def places_in_code(root: Path) -> Places:
    """Files, and what in them, that name an ID."""
    places: dict[str, list[str]] = {}
    for path in _files(root, CODE, ("*.py", "*.gin")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source) if path.suffix == ".py" else None
        for system, offset in named_in(source):
            inside = _definition(tree, source.count("\n", 0, offset) + 1) if tree else ""
            _add(places, system, path.relative_to(root).as_posix() + (f":{inside}" if inside else ""))
    return places


def places_in_tests(root: Path) -> Places:
    """Tests whose names or docstrings name an ID; where a class does, its tests are not listed again."""
    places: dict[str, list[str]] = {}
    for path in _files(root, TESTS, ("*.py",)):
        tree, file = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(root).as_posix()
        if path.name.startswith("test_"):
            for system, _ in named_in(ast.get_docstring(tree) or ""):
                _add(places, system, file)
        for node in tree.body:
            known = _of_test(places, node, file, set())
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    _of_test(places, method, f"{file}::{node.name}", known)
    return places


def _of_test(places: dict[str, list[str]], node: ast.stmt, where: str, known: set[str]) -> set[str]:
    """Adds what a test or a class of tests names, and is not known of the class around it; all that it names."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not node.name.lower().startswith("test"):
        return set()
    named = {system for system, _ in named_in(ast.get_docstring(node) or "")} | set(named_by(node.name))
    for system in sorted(named - known):
        _add(places, system, f"{where}::{node.name}")
    return named


def systems(root: Path = ROOT) -> list[System]:
    """Every system, in the order of `systems.tsv`."""
    code, tests = places_in_code(root), places_in_tests(root)
    rows = [line.split("\t") for line in SYSTEMS.read_text(encoding="utf-8").splitlines()]
    return [System(name, what, code.get(name, []), tests.get(name, [])) for name, what in rows]


def report(found: list[System]) -> str:
    """The table as Markdown, and how many systems stand where."""
    statuses = [system.status for system in found]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in get_args(Status))
    rows = [[system.id, system.what, _listed(system.code), _listed(system.tests), system.status] for system in found]
    return f"{len(found)} systems: {counts}.\n\n" + table(["ID", "what", "code", "tests", "status"], rows) + "\n"


def weighted_sums() -> str:
    """Every mixer as y = sum f(x) g(x), as a Markdown table: a row for each of its parts (UNI-01)."""
    entries = [MIXERS[name] for name in sorted(MIXERS)]
    rows = [[entry.name, *part] for entry in entries for part in entry.weighted_sums]
    return table(["mixer", *WeightedSum._fields], rows) + "\n"


def _listed(places: list[str]) -> str:
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return ", ".join(f"`{place}`" for place in places[:SHOWN]) + more


def _files(root: Path, folders: tuple[str, ...], patterns: tuple[str, ...]) -> list[Path]:
    found = {path for folder in folders for pattern in patterns for path in (root / folder).rglob(pattern)}
    return sorted(found - {Path(__file__)})  # the IDs in this file are examples


def _definition(tree: ast.Module, line: int) -> str:
    """The innermost class or function around a line, with what it is in; empty at the level of the module."""
    names, body = [], tree.body
    while node := next((node for node in body if node.lineno <= line <= (node.end_lineno or 0)), None):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            break
        names.append(node.name)
        body = node.body
    return ".".join(names)


def _add(places: dict[str, list[str]], system: str, place: str) -> None:
    if place not in places.setdefault(system, []):
        places[system].append(place)
