"""Which mechanisms of the papers a test holds: for each there is one deliberate bug, and tests that must notice it.

The bugs are data, `tests/deliberate_bugs.toml`. `python -m tests.deliberate_bugs` applies them and writes what became
of each to `experiments/results/systems_held.json`. A result belongs to one bug: to its text, its place and its tests.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

BUGS = "tests/deliberate_bugs.toml"
RESULTS = "experiments/results/systems_held.json"

Held = Literal["held", "not held", "not shown since it changed", "not shown"]
"""Its tests failed with the bug; one did not; the result is of another bug; there is no result, or no bug."""


class Bug(NamedTuple):
    """One change of the code that some tests must notice."""

    bug: str
    """What is wrong then, in words."""
    file: str
    text: str
    """What stands there, exactly once."""
    becomes: str
    tests: tuple[str, ...]
    """Tests that must fail, every one of them."""

    @property
    def digest(self) -> str:
        """Changes with everything but the words."""
        content = json.dumps([self.file, self.text, self.becomes, self.tests])
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def applied(self, source: str) -> str:
        """The source with the bug.

        Raises:
          ValueError: the text does not stand there exactly once.
        """
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"{self.file} has {self.text!r} {count} times: the text of a bug must stand there once")
        return source.replace(self.text, self.becomes)


def bugs(root: Path) -> dict[str, Bug]:
    """The bug of every mechanism, by ID."""
    found = tomllib.loads((root / BUGS).read_text(encoding="utf-8"))
    return {name: Bug(**fields | {"tests": tuple(fields["tests"])}) for name, fields in found.items()}


def states(root: Path) -> dict[str, Held]:
    """How every bug stands, by ID."""
    path = root / RESULTS
    results = json.loads(path.read_text(encoding="utf-8"))["bugs"] if path.exists() else {}
    return {name: _state(bug, results.get(name)) for name, bug in bugs(root).items()}


def _state(bug: Bug, result: dict | None) -> Held:
    if result is None:
        return "not shown"
    if result["digest"] != bug.digest:
        return "not shown since it changed"
    return "held" if result["verdict"] == "killed" else "not held"
