"""docs/pods.md: its commands are ones that the program takes, and its table is the program's."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from launch.cluster.exits import TABLE
from tests.launch.cluster.test_scripts import SHELLCHECK
from tests.launch.session import calls

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "pods.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
# SC2086: the variables of the page hold several words each, and are meant to be split.
MEANT = "--exclude=SC2086"
# In the place of Python: prints what it was called with, one word a line, after a line of its own.
ECHO = 'python() { echo ">"; printf "%s\\n" "$@"; }\n'


def programs() -> list[list[str]]:
    """The words of every `python ...` of the page, as bash makes them; variables hold from one block to the next."""
    others = re.compile(r"^(gcloud|docker|kubectl|xprof) .*$", re.MULTILINE)
    script = ECHO + "".join(others.sub(":", block) for block in BLOCKS)
    printed = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    return [call.splitlines() for call in printed.split(">\n")[1:]]


def flags_of(commands: list[list[str]]) -> set[str]:
    """The names of the flags of commands."""
    return {word.removeprefix("--").partition("=")[0] for words in commands for word in words if word.startswith("--")}


def defined(*modules: str) -> set[str]:
    """The flags that modules of launch/ define, by their source: to import one for it takes seconds."""
    sources = ((ROOT / "launch" / f"{module}.py").read_text(encoding="utf-8") for module in modules)
    return {name for source in sources for name in re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', source)}


def test_every_command_is_one_that_the_program_takes():
    launches = [words[2:] for words in programs() if words[:2] == ["-m", "launch.cluster"]]
    prepares = [words[2:] for words in programs() if words[:2] == ["-m", "launch.prepare"]]
    trains = [words[words.index("launch.train") + 1 :] for words in launches if "launch.train" in words]
    assert len(launches) + len(prepares) == PAGE.count("\npython -m ") > 0
    assert flags_of(prepares) <= defined("prepare")
    assert flags_of(trains) <= defined("train", "program")
    kinds = {word for words in launches for word in words if word.startswith("--cluster=")}
    assert kinds == {f"--cluster={kind}" for kind in ("tpu_vm", "gke", "xpk", "slurm")}
    for words, outcome in zip(launches, calls("cluster.__main__", [["--dry_run", *w] for w in launches]), strict=True):
        assert (outcome.code, outcome.stderr) == (0, ""), shlex.join(words)
        assert outcome.stdout.startswith("set -Eeuo pipefail\n")


def test_what_is_not_run_here_is_good_bash():
    command = [SHELLCHECK, "--shell=bash", MEANT, "-"]
    assert subprocess.run(command, input="\n".join(BLOCKS), capture_output=True, text=True).stdout == ""


def test_its_table_is_the_table():
    rows = sorted(TABLE, key=lambda row: row.code)
    expected = [f"| {row.code} | {row.meaning} | {row.retry.value if row.code else ''} |" for row in rows]
    found = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [re.sub(" +", " ", line) for line in found] == [re.sub(" +", " ", line) for line in expected]
