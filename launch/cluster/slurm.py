"""SLURM: a batch script that puts itself back into the queue, one process per GPU, or per node where there are none."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, ClassVar

from launch.cluster import exits, shell
from launch.cluster.exits import Retry
from launch.cluster.job import Job, refuse, require_one_line

SAVING = 300
"""Seconds before the time limit at which the job is told to save and stop."""
FOLDER = "aamoe_jobs"
"""In the home folder, which SLURM's hosts share: logs, and how often a job was tried."""


@dataclasses.dataclass(frozen=True)
class Slurm:
    """Nodes of a SLURM cluster, seen from its login node."""

    nodes: Annotated[int, "Nodes of the job."]
    gpus_per_node: Annotated[int, "GPUs of every node; 0: processors only."]
    time_limit: Annotated[str, "Time limit of one attempt, such as 24:00:00. The job goes on after it."] = "24:00:00"
    partition: Annotated[str | None, "Partition; the cluster's own default if not given."] = None
    account: Annotated[str | None, "Account that is charged; the user's own if not given."] = None

    slices: ClassVar[None] = None
    supervised: ClassVar[frozenset[Retry]] = frozenset({Retry.ELSEWHERE})

    def __post_init__(self) -> None:
        require_one_line(self)
        if self.nodes < 1:
            refuse(self, "nodes", "must be at least 1")
        if self.gpus_per_node < 0:
            refuse(self, "gpus_per_node", "must be at least 0, which is a job on processors")
        if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", self.time_limit, re.ASCII):
            refuse(self, "time_limit", "must be written as 24:00:00 or 7-00:00:00")

    @property
    def devices(self) -> int:
        """jax.distributed gives every task of SLURM one GPU, so there are as many processes."""
        return self.nodes * max(1, self.gpus_per_node)

    def run(self, job: Job, avoided: Sequence[str]) -> str:
        """A process that ends must not end the others: they notice, and say with which code."""
        train = shell.lines("srun", "--kill-on-bad-exit=0", *job.command(self.devices))
        return self._submit(job, (self._probe(job), train), avoided)

    def health(self, job: Job) -> str:
        return self._submit(job, (self._probe(job),), ())

    def _probe(self, job: Job) -> str:
        per_node = ("srun", f"--nodes={self.nodes}", f"--ntasks={self.nodes}", "--ntasks-per-node=1")
        return shell.lines(*per_node, *job.probe(max(1, self.gpus_per_node)))

    def _submit(self, job: Job, steps: Sequence[str], avoided: Sequence[str]) -> str:
        stem = f'"$HOME/{FOLDER}/{job.name}'
        log, sent = f'{stem}.log"', f'{stem}.sent"'
        # Options as words of the command: in `#SBATCH` lines nothing would be quoted.
        options = [
            f"--job-name={job.name}",
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={max(1, self.gpus_per_node)}",
            *([f"--gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            f"--time={self.time_limit}",
            *([f"--partition={self.partition}"] if self.partition else []),
            *([f"--account={self.account}"] if self.account else []),
            *([f"--exclude={','.join(avoided)}"] if avoided else []),
            "--requeue",
            "--open-mode=append",
            f"--signal=TERM@{SAVING}",
        ]
        sbatch = f"{shell.lines('sbatch', '--wait', *options)} \\\n  --output={log}"
        return shell.script(
            f'mkdir -p "$HOME/{FOLDER}"\ntouch {log}\nbefore=$(wc -l <{log})',
            f'if [ -n "$(squeue --me --name={job.name} --noheader)" ]; then\n'
            f'  echo "{job.name} is in the queue already: stop it, or choose another --name" >&2\n'
            f"  exit {exits.UNLAUNCHED.code}\nfi",
            "code=0\n" + shell.heredoc(sbatch, self.batch(job, steps), then=f"| tee {sent} || code=$?"),
            "# sbatch says that the job was sent, and ends as it did.\n"
            f'if [ ! -s {sent} ]; then\n  echo "error: exit code $code of: sbatch" >&2\n'
            f"  exit {exits.UNLAUNCHED.code}\nfi",
            f"tail -n +$((before + 1)) {log} | grep -E '^(un)?healthy ' || true",
            'exit "$code"',
        )

    def batch(self, job: Job, steps: Sequence[str]) -> str:
        """The batch script: the steps one after the other until one fails, then the table of exit codes."""
        body = " || return\n".join(steps)
        return f"""\
#!/bin/bash
cd {shell.words(job.workdir)} || exit 1
export JAX_PLATFORMS={"cuda" if self.gpus_per_node else "cpu"}

attempt() {{
{body}
}}
code=0
attempt || code=$?

tried="$HOME/{FOLDER}/$SLURM_JOB_ID.tried"
case $code in
  {shell.either(exits.codes(Retry.ALWAYS))}) scontrol requeue "$SLURM_JOB_ID" ;;
  0 | {shell.either(exits.codes(Retry.NEVER, Retry.ELSEWHERE))}) ;;
  *)
    echo "$code" >>"$tried"
    if [ "$(wc -l <"$tried")" -le {job.max_retries} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    ;;
esac
exit "$code"
"""

    def logs(self, name: str) -> str:
        return shell.script(f'tail -n 100 -F "$HOME/{FOLDER}/{name}.log"')

    def status(self, name: str) -> str:
        return shell.script(f"squeue --me --name={name} --long")

    def stop(self, name: str) -> str:
        """SIGINT to the steps: they save and exit with 130, which is not tried again. What waits is taken out."""
        return shell.script(
            f"scancel --me --name={name} --state=PENDING\nscancel --me --name={name} --state=RUNNING --signal=INT"
        )
