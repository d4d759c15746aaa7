"""The scripts of every action: as they were, and without anything that shellcheck dislikes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.launch.cluster.cases import CLUSTERS, GOLDEN, JOB, scripts

SHELLCHECK = str(Path(sysconfig.get_path("scripts")) / "shellcheck")
# SC2016: what a host is to expand stands in single quotes. It is checked by itself, below. SC2329: a trap calls it.
MEANT = "--exclude=SC2016,SC2329"


def complaints(script: str) -> str:
    """What shellcheck says of bash."""
    command = [SHELLCHECK, "--shell=bash", "--severity=style", MEANT, "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True).stdout


def commands_for_hosts(script: str) -> list[str]:
    """What `on` and `ask` of a TPU VM script are told, and the shell inside that keeps the exit code."""
    told = []
    for line in script.splitlines():
        if re.match(r"\s*(if ! |fit )?(ask|on all|on 0) ", line):
            words = shlex.split(line)
            told.append(words[words.index("ask" if "ask" in words else "on") + (1 if "ask" in words else 2)])
    inner = [shlex.split(command)[shlex.split(command).index("-c") + 1] for command in told if " bash -c " in command]
    return told + inner


def batch_scripts(script: str) -> list[str]:
    """What stands between <<'END' and END."""
    return re.findall(r"<<'END'[^\n]*\n(.*?\n)END\n", script, flags=re.DOTALL)


def test_shellcheck_sees_what_it_must():
    assert "SC2086" in complaints("set -e\nx=$1\ncat $x\n")
    assert not complaints("set -e\nx=$1\ncat \"$x\"\necho '$(x)'\n")


@pytest.mark.parametrize("name", sorted(scripts()))
def test_a_script_is_as_it_was(name):
    assert scripts()[name] == (GOLDEN / f"{name}.sh").read_text(encoding="utf-8")


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(scripts())


def test_shellcheck_has_nothing_to_say():
    """Of any script, of what hosts are told, and of batch scripts; one call for all, so names stand before each."""
    found = dict(scripts())
    for name, script in scripts().items():
        if name.startswith("tpu_vm"):
            found |= {f"{name} on a host, {i}": command for i, command in enumerate(commands_for_hosts(script))}
        if name.startswith("slurm"):
            found |= {f"{name} on the cluster": batch for batch in batch_scripts(script)}
    assert len([name for name in found if "on a host" in name]) >= 8
    assert len([name for name in found if "on the cluster" in name]) == 3
    assert {name: said for name, script in found.items() if (said := complaints(script))} == {}


def test_xpk_is_given_a_command_that_shellcheck_likes():
    (create,) = re.findall(r"^  (xpk .*?)\nfi$", scripts()["xpk_run"], flags=re.DOTALL | re.MULTILINE)
    (command,) = [word for word in shlex.split(create) if word.startswith("--command=")]
    assert not complaints(command.removeprefix("--command=") + "\n")
    assert re.search(r"exec env 'LIBTPU_INIT_ARGS=[^']+' python3 -m launch\.train", command)


def test_what_was_unhealthy_is_left_out():
    assert "--exclude=bad-1,bad-2" in CLUSTERS["slurm"].run(JOB, ("bad-1", "bad-2"))
    assert "--exclude" not in CLUSTERS["slurm"].run(JOB, ())
