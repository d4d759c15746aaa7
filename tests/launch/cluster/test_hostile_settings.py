"""Settings that try to reach a shell: every script runs for real, and none of them runs what a setting says."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from aamoe_jax.config import ConfigError
from launch.cluster import settings, shell
from launch.cluster.job import Cluster, Job
from tests.launch.cluster.cases import CLUSTERS

HOSTILE = [
    "$(hit)",
    "`hit`",
    "; hit;",
    "'; hit; '",
    '"; hit; "',
    "'\"'\"'; hit; '\"'\"'",
    "' $(hit) '",
    '" $(hit) "',
    "\\'; hit #",
    "& hit &",
    "| hit",
    "|| hit",
    "); hit; (",
    "}; hit; {",
    "<(hit)",
    "${x:-$(hit)}",
    "x --wrap=hit",
    "--command=hit",
    "x # hit",
    "\\",
    "'",
    '"',
    "END",
    "\nhit\n",
    "x\nEND\nhit\n",
    "x\nEND_\nEND\nhit\n",
    "x\n#SBATCH --wrap=hit",
    "x\\\nhit",
    "\rhit\r",
    "\x1b]0;hit\x07",
    "\u2028hit",
    "\udc80hit",
]
# Fields that have checks of their own, and bash, which is meant to run.
NOT_TEXT = {"name", "accelerator", "topology", "capacity", "time_limit", "setup", "mount"}
# Hosts, pods and nodes are processes here; whatever they end with is taken for success, so that all of a script runs.
PROGRAMS = {
    "hit": 'echo hit >>"$FAKE/hits"',
    "gcloud": """
case "$*" in *describe*) echo ACTIVE ;; esac
for word in "$@"; do
  case $word in
    --command=*"kill -0"*) echo "exit code 1" ;;
    --command=*) bash -c "${word#--command=}" 9>&1 >/dev/null 2>&1 | cat; echo "exit code 0" ;;
  esac
done""",
    "kubectl": 'case "$*" in *apply*) cat >/dev/null ;; *"get jobset"*) echo "JobSet Completed" ;; esac',
    "xpk": 'for word in "$@"; do case $word in --command=*) bash -c "${word#--command=}" ;; esac; done; true',
    "sbatch": "SLURM_JOB_ID=17 bash; echo sent",
    "srun": 'while [[ $1 == --* ]]; do shift; done; "$@"; true',
    **dict.fromkeys(("squeue", "scontrol", "scancel", "sleep", "tail", "fine"), ""),
}


def texts(owner: type) -> list[str]:
    """The settings that are any text."""
    kinds = settings.settings_of(owner)
    return [name for name, (kind, _) in kinds.items() if kind in (str, str | None) and name not in NOT_TEXT]


def accepted(owner: type, values: dict, hostile: dict[str, str]) -> dict:
    """The values with those of the hostile ones that are not refused, alone, in one short line."""
    values = dict(values)
    for name, value in hostile.items():
        with contextlib.suppress(ConfigError):
            owner(**{**values, name: value})
            values[name] = value
    return values


def hostile_scripts() -> list[str]:
    """All actions of all kinds of clusters; at each turn every setting has another one of the hostile texts."""
    written = []
    for turn in range(0, len(HOSTILE), 2):
        job, others = hostile_job(turn), HOSTILE[turn:] + HOSTILE[:turn]
        for example in CLUSTERS.values():
            kind = type(example)
            values = vars(example) | ({"accelerator": "v5p-8"} if "accelerator" in vars(example) else {})
            cluster: Cluster = kind(**accepted(kind, values, dict(zip(texts(kind), others, strict=False))))
            written += [cluster.run(job, others[:2]), cluster.health(job)]
            written += [action(job.name) for action in (cluster.logs, cluster.status, cluster.stop)]
    return written


def hostile_job(turn: int) -> Job:
    """A job whose arguments are all of the hostile texts that it takes, and its run folder one of them. Its folder of
    the repository is one at every other turn: where it is not, no script goes on."""
    plain = {"name": "mine", "program": "launch.train", "arguments": ("--run_dir=/mnt/shared/x",), "python": "fine"}
    plain["workdir"] = "/tmp"
    hostile = {"workdir": f"/{HOSTILE[turn]}"} if turn % 4 else {}
    for argument in (*(f"--gin_param={text}" for text in HOSTILE), f"--run_dir=/mnt/shared/{HOSTILE[turn]}"):
        plain = accepted(Job, plain, {"arguments": (*plain["arguments"], argument)})
    return Job(**accepted(Job, plain, hostile))


def hits(folder: Path, scripts: list[str]) -> int:
    """How often `hit` ran in the scripts, one after the other."""
    (folder / "bin").mkdir()
    for name, text in PROGRAMS.items():
        path = folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
    for number, script in enumerate(scripts):
        (folder / f"{number}.sh").write_text(script, encoding="utf-8", errors="surrogateescape")
    every = f'for script in {shlex.quote(str(folder))}/*.sh; do bash "$script" </dev/null >/dev/null 2>&1; done'
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), "FAKE": str(folder)}
    subprocess.run(["bash", "-c", every], env=environment, cwd=folder, timeout=300)
    return len((folder / "hits").read_text().splitlines()) if (folder / "hits").exists() else 0


@pytest.mark.slow
def test_no_setting_is_run(tmp_path):
    scripts = hostile_scripts()
    assert sum(script.count("hit") for script in scripts) > 2000
    assert hits(tmp_path, scripts) == 0


def test_what_is_not_quoted_would_be_run(tmp_path):
    open_to_shells = [
        "gcloud ssh --project=$(hit)",
        "gcloud ssh --command='(echo $(hit) &)'",
        "xpk workload create --command='hit'",
        "srun --nodes=1 hit",
        "sbatch <<'END'\nsrun hit\nEND",
        "kubectl apply <<END\n$(hit)\nEND",
    ]
    assert hits(tmp_path, open_to_shells) == len(open_to_shells)


def test_line_breaks_are_refused_by_name():
    slurm = {"nodes": 1, "gpus_per_node": 1}
    with pytest.raises(ConfigError, match=r"--partition = 'a\\n#SBATCH x': must be one line of printable characters"):
        type(CLUSTERS["slurm"])(**slurm, partition="a\n#SBATCH x")
    with pytest.raises(ConfigError, match=r"must be one line of printable characters"):
        Job(name="mine", program="launch.train", arguments=("--run_dir=/x", "x\nEND\nhit"))


def test_no_text_ends_a_heredoc():
    text = "one\nEND\nhit\nEND_\ntwo"
    done = subprocess.run(["bash", "-c", shell.heredoc("cat", text)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{text}\n"


def test_a_setup_is_bash_of_any_number_of_lines():
    values = {"project": "p", "zone": "z", "accelerator": "v5p-8"}
    kind = type(CLUSTERS["tpu_vm"])
    assert kind(**values, setup="one\ntwo").setup == "one\ntwo"
    for setup in ("if", "a; ) (", "'"):
        with pytest.raises(ConfigError, match=r"--setup = .*: must be bash: "):
            kind(**values, setup=setup)
