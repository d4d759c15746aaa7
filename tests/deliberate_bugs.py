"""Applies the deliberate bug of every mechanism, one at a time, and says whether the tests that it names notice.

    python -m tests.deliberate_bugs              # those without a result, and those that no test noticed
    python -m tests.deliberate_bugs AA-18 PM-13  # these, whatever is known of them

Works in a temporary copy of the checkout. A bug is *killed* where every test that it names passes without it and fails
with it; *survived* where one still passes; anything else (a test that cannot be collected, or takes too long) is told
and counts as not killed. Results are written after every bug: after an interruption the same command does what is left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from aamoe_jax.markdown import table
from experiments.held import BUGS, RESULTS, Bug, bugs, states
from experiments.systems import CODE

ROOT = Path(__file__).parents[1]
SECONDS = 300
"""Of the tests of one bug."""
COMMAND = "python -m tests.deliberate_bugs"
WORDS = ("PASSED", "FAILED", "ERROR")
"""What pytest says of a test."""


class Outcome(NamedTuple):
    """What pytest said of some tests."""

    passed: frozenset[str]
    failed: frozenset[str]
    trouble: str = ""
    """Why there is no such answer."""

    def sound(self, test: str) -> bool:
        """Whether the test was run, and all its cases passed."""
        return bool(cases(self.passed, test)) and not cases(self.failed, test)


def main(arguments: list[str]) -> int:
    """Applies the bugs that are asked for; 1 where a test did not notice one."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("ids", nargs="*", help="IDs such as AA-18; those that are not held if none is given")
    known, wanted = bugs(ROOT), parser.parse_args(arguments).ids
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"no bug is called {', '.join(unknown)}")
    names = wanted or [name for name, state in states(ROOT).items() if state != "held"]
    if names:
        with tempfile.TemporaryDirectory() as folder:
            apply({name: known[name] for name in names}, copied(Path(folder) / "checkout"))
    publish(results())
    return int(any(state != "held" for state in states(ROOT).values()))


def apply(wanted: Mapping[str, Bug], checkout: Path) -> None:
    """Each of the bugs in turn."""
    without = run(sorted({test for bug in wanted.values() for test in bug.tests}), checkout, seconds=None)
    for name, bug in wanted.items():
        start = time.monotonic()
        verdict = judged(bug, checkout, without)
        print(f"{name}: {verdict} ({time.monotonic() - start:.0f} s): {bug.bug}", flush=True)
        publish(results() | {name: {"digest": bug.digest, "verdict": verdict}})


def copied(to: Path) -> Path:
    """The files of this checkout that git does not ignore, elsewhere."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def judged(bug: Bug, checkout: Path, without: Outcome) -> str:
    """`killed`, `survived` with the tests that noticed nothing, or what went wrong.

    Args:
      without: what becomes of the tests of all bugs where there is none.
    """
    if without.trouble or (broken := [test for test in bug.tests if not without.sound(test)]):
        return f"without the bug: {without.trouble or ', '.join(broken)}"
    path = checkout / bug.file
    source = path.read_text(encoding="utf-8")
    try:
        _write(path, bug.applied(source))
        found = run(bug.tests, checkout, SECONDS)
    finally:
        _write(path, source)
    if found.trouble:
        return found.trouble
    unnoticed = [test for test in bug.tests if not cases(found.failed, test)]
    return f"survived: {', '.join(unnoticed)}" if unnoticed else "killed"


def _write(path: Path, source: str) -> None:
    """Writes a module. What was compiled of another of its size and second would pass for this one: it goes."""
    path.write_text(source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def run(tests: Iterable[str], checkout: Path, seconds: float | None) -> Outcome:
    """The named tests in that checkout."""
    with tempfile.TemporaryFile() as told:
        process = multiprocessing.get_context("fork").Process(
            target=_pytest, args=(tuple(tests), checkout, told.fileno())
        )
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return Outcome(frozenset(), frozenset(), f"took more than {seconds} s")
        told.seek(0)
        text = told.read().decode(errors="replace")
    found = {word: frozenset(re.findall(rf"^{word} (tests/.*?)(?: - .*)?$", text, re.M)) for word in WORDS}
    if process.exitcode not in (0, 1) or found["ERROR"]:
        last = text.strip().splitlines()[-1:]
        return Outcome(frozenset(), frozenset(), f"pytest ended with {process.exitcode}: {' '.join(last)}")
    return Outcome(found["PASSED"], found["FAILED"])


def _pytest(tests: tuple[str, ...], checkout: Path, told: int) -> None:
    """In a process of its own, which has the libraries from this one (to import them takes longer than most tests) and
    the project from that checkout."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(told, stream.fileno())
    for name in [name for name in sys.modules if name.partition(".")[0] in (*CODE, "tests")]:
        del sys.modules[name]
    sys.path[:0] = [str(checkout)]
    os.chdir(checkout)
    os.environ["COLUMNS"] = "1000"  # names of tests in one line
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--tb=no", "-rA", *tests])
    sys.stdout.flush()
    os._exit(code)


def cases(found: Iterable[str], test: str) -> list[str]:
    """Those of pytest's names that are the test, or one of its cases."""
    return [one for one in found if one == test or one.startswith(f"{test}[")]


def results() -> dict[str, dict[str, str]]:
    """What is known, by ID."""
    path = ROOT / RESULTS
    return json.loads(path.read_text(encoding="utf-8"))["bugs"] if path.exists() else {}


def publish(found: dict[str, dict[str, str]]) -> None:
    """Writes the results of the bugs that there are, and a table of them."""
    path, known = ROOT / RESULTS, bugs(ROOT)
    found = {name: found[name] for name in known if name in found}
    path.write_text(json.dumps({"command": COMMAND, "bugs": found}, indent=1) + "\n", encoding="utf-8")
    rows = [[name, known[name].bug, one["verdict"]] for name, one in found.items()]
    killed = sum(one["verdict"] == "killed" for one in found.values())
    text = (
        f"# Deliberate bugs\n\n    {COMMAND}\n\n"
        f"{len(known)} [bugs](../../{BUGS}), one for each mechanism of the papers; {killed} are killed: every\n"
        f"test that is named for one passes without it and fails with it.\n\n{table(['ID', 'bug', 'verdict'], rows)}\n"
    )
    path.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
