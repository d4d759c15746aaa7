"""Where every mechanism of the papers stands, by four questions, each of which is checked and not asserted.

Mechanisms have IDs such as AA-26, and `systems.toml` says what each is and how a user reaches it.

* built: code names the ID, in a docstring or a comment;
* held: a test fails where the mechanism is deliberately broken (`held.py`);
* reachable: gin bindings that load, a program that has the flags, or a function that can be imported;
* measured: a committed result is about it.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from aamoe_jax.config import ConfigError
from aamoe_jax.markdown import table
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import MIXERS
from experiments import held
from experiments.binding import load_experiment
from experiments.held import Bug, Held

ROOT = Path(__file__).parents[1]
SYSTEMS = Path(__file__).with_name("systems.toml")
RESULTS = "experiments/results"
CODE = ("aamoe_jax", "pallas_kernels", "experiments", "launch", "benchmarks")
PAPERS = {
    "AA": "Attention Is All You Need 2",
    "DEC": "Deconstructing Attention",
    "UNI": "The unified view of attention and mixtures of experts",
    "PM": "Patterns and Messages, part 4",
}
"""By the letters of the IDs."""

Built = Literal["built", "not built"]
Reachable = Literal["reachable", "a property", "not reachable"]
"""By what a user does; nothing has to be done; what was said to reach it does not."""
Measured = Literal["measured", "in part", "not measured", "a definition", "no such result"]
"""A definition is decided by a test and by no figure."""
Places = Mapping[str, list[str]]
"""By ID."""

_RANGE, _LIST = r"-|–|\.\.|\s+to\s+(?:\1-)?", r",\s+(?:and\s+)?|\s+and\s+|/"
_NAMED = re.compile(rf"\b(AA|DEC|UNI|PM)-(\d\d)((?:(?:{_RANGE}|{_LIST})\d\d\b(?![-.,]?\d))*)(?!\d)")
_FURTHER = re.compile(r"\s*(-|–|\.\.|to\b)?[^\d]*?(\d\d)")


class System(NamedTuple):
    """A mechanism, and what `systems.toml` and the code say of it."""

    id: str
    what: str
    gin: tuple[str, ...] = ()
    """Configs and bindings, all at once."""
    program: str | None = None
    function: str | None = None
    property: str | None = None
    """Why there is nothing to reach."""
    measured: tuple[str, ...] = ()
    """Results, without folder and suffix."""
    missing: str | None = None
    """What is not measured."""
    code: tuple[str, ...] = ()
    bug: Bug | None = None
    held: Held = "not shown"

    def built(self) -> Built:
        """Whether code names it."""
        return "built" if self.code else "not built"

    def reachable(self) -> Reachable:
        """Whether what is said to reach it does."""
        if unreachable(self):
            return "not reachable"
        return "a property" if self.property else "reachable"

    def figures(self) -> Measured:
        """Whether there are results, and all of them exist."""
        if not all(map(result_file, self.measured)):
            return "no such result"
        if self.measured:
            return "in part" if self.missing else "measured"
        return "not measured" if self.missing else "a definition"


def systems(root: Path = ROOT) -> list[System]:
    """Every mechanism, in the order of `systems.toml`."""
    code, bugs, found = places_in_code(root), held.bugs(root), held.states(root)
    return [
        System(
            name, **_fields(one), code=tuple(code.get(name, ())), bug=bugs.get(name), held=found.get(name, "not shown")
        )
        for name, one in tomllib.loads(SYSTEMS.read_text(encoding="utf-8")).items()
    ]


def _fields(one: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}


# Built.


def named_in(text: str) -> Iterator[tuple[str, int]]:
    """IDs in a text, and where: AA-26, ranges (AA-21-26, AA-21 to AA-26, AA-21..26) and lists (AA-21, 22 and 26)."""
    for found in _NAMED.finditer(text):
        series, last, further = found[1], int(found[2]), found[3]
        yield f"{series}-{last:02}", found.start()
        for through, number in _FURTHER.findall(re.sub(r"[A-Z]+-(?=\d)", "", further)):
            numbers = range(last + 1, int(number) + 1) if through else [int(number)]
            yield from ((f"{series}-{number:02}", found.start()) for number in numbers)
            last = int(number)


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


# Reachable.


def unreachable(system: System) -> list[str]:
    """What is wrong with the ways in which a user is said to reach a mechanism: nothing where each of them does."""
    complaints = [] if system.property or any(_ways(system)) else ["no way is given, and no reason"]
    if system.property and any(_ways(system)):
        complaints.append("a property is not reached")
    checks: list[tuple[Callable, str | tuple[str, ...] | None]] = [
        (_load, system.gin),
        (_find_program, system.program),
        (pkgutil.resolve_name, system.function),
    ]
    for check, way in checks:
        try:
            if way:
                check(way)
        except (ConfigError, ImportError, AttributeError, ValueError) as error:
            complaints.append(str(error))
    return complaints


def _ways(system: System) -> list[str]:
    """The ways, as a user writes them."""
    return [f"`{way}`" for way in (*system.gin, system.program, system.function) if way]


def _load(gin: Sequence[str]) -> None:
    configs = [one for one in gin if one.endswith(".gin")]
    load_experiment(
        configs if "aamoe.gin" in configs else ["aamoe.gin", *configs], [x for x in gin if x not in configs]
    )


def _find_program(command: str) -> None:
    """A program is found by its file, and its flags in the calls that define them: to import all would take minutes.

    Raises:
      ValueError: there is no such program, or it lacks a flag.
    """
    first, name, *words = shlex.split(command)
    files = [path for folder in ("launch", "experiments") if (path := ROOT / folder / f"{name}.py").is_file()]
    if first != "aamoe" or not files:
        raise ValueError(f"{command}: there is no program {name}")
    source = files[0].read_text(encoding="utf-8")
    if "define_experiment_flags" in source:
        source += (ROOT / "launch/program.py").read_text(encoding="utf-8")
    for word in words:
        flag, _, value = word.removeprefix("--").partition("=")
        if not re.search(rf'DEFINE_\w+\(\s*"{flag}"', source):
            raise ValueError(f"{command}: {name} has no flag --{flag}")
        if re.fullmatch("[a-z,]+", value) and not all(re.search(rf"\b{one}\b", source) for one in value.split(",")):
            raise ValueError(f"{command}: {name} knows no {value}")


# Measured.


def result_file(name: str) -> Path | None:
    """The committed file of a result: the one for reading where there are two."""
    paths = (ROOT / RESULTS / f"{name}{suffix}" for suffix in (".md", ".json"))
    return next((path for path in paths if path.is_file()), None)


# The report.


def counts(found: Sequence[System]) -> str:
    """How many mechanisms of each paper are in which state, as a Markdown table."""
    rows = []
    for letters, paper in (*PAPERS.items(), ("", "all")):
        of_paper = [system for system in found if system.id.startswith(letters)]
        cells = [_counted([row[at] for row in map(states, of_paper)], kind) for at, kind in enumerate(STATES)]
        rows.append([paper, str(len(of_paper)), *cells])
    return table(["paper", "mechanisms", "built", "held", "reachable", "measured"], rows)


STATES = (Built, Held, Reachable, Measured)


def states(system: System) -> tuple[Built, Held, Reachable, Measured]:
    """The four of them."""
    return system.built(), system.held, system.reachable(), system.figures()


def _counted(found: Sequence[str], kind: object) -> str:
    return ", ".join(f"{number} {state}" for state in get_args(kind) if (number := found.count(state)))


def tables(found: Sequence[System], *, links: bool = False) -> str:
    """The states of all mechanisms as Markdown: a table for each paper.

    Args:
      links: IDs lead to `details`.
    """
    parts = []
    for letters, paper in PAPERS.items():
        rows = [
            [f"[{one.id}](#{one.id.lower()})" if links else one.id, one.what, *states(one)]
            for one in found
            if one.id.startswith(f"{letters}-")
        ]
        parts.append(f"## {paper}\n\n{table(['ID', 'what', 'built', 'held', 'reachable', 'measured'], rows)}\n")
    return "\n".join(parts)


def details(found: Sequence[System]) -> str:
    """What stands behind the states, mechanism by mechanism, as Markdown with links from `experiments/results`."""
    return "\n".join(f"### {system.id}\n\n{system.what}\n\n{_detail(system)}\n" for system in found)


def _detail(system: System) -> str:
    code = [f"[{place}](../../{place.partition(':')[0]})" for place in system.code]
    results = [f"[{name}]({path.name})" for name in system.measured if (path := result_file(name))]
    tests = ", ".join(f"`{test}`" for test in system.bug.tests) if system.bug else ""
    lines = {
        "code": ", ".join(code),
        system.held: f"where {system.bug.bug}, there must fail {tests}" if system.bug else "",
        system.reachable(): system.property or ", ".join(_ways(system)),
        system.figures(): "; ".join(filter(None, [", ".join(results), system.missing])),
    }
    return "\n".join(f"* {name}: {text}" if text else f"* {name}" for name, text in lines.items())


def weighted_sums() -> str:
    """Every mixer as y = sum f(x) g(x), as a Markdown table: a row for each of its parts (UNI-01)."""
    entries = [MIXERS[name] for name in sorted(MIXERS)]
    rows = [[entry.name, *part] for entry in entries for part in entry.weighted_sums]
    return table(["mixer", *WeightedSum._fields], rows) + "\n"


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
