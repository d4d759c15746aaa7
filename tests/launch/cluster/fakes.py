"""Clusters that are folders: gcloud, kubectl, xpk, sbatch and the rest, as executables that record their calls.

Every host is a folder, and what it is told runs there for real, in processes of its own; only Python is not: it ends
with the codes that a test laid out, one for each start.
"""

from __future__ import annotations

import os
from pathlib import Path

# Where a file is given as `$FAKE/x`, FAKE is the folder of the cluster.

LINE = 'next() { head -n 1 "$1"; sed -i 1d "$1"; }\n'  # of a file: takes its first line

PYTHON = """
case "$2" in
  launch.cluster.probe) plan=probe ;;
  *) plan=train; echo "$*" >>"$FAKE/trained" ;;
esac
code=$(next "$FAKE/$plan.$HOST")
case $code in
  6) echo "unhealthy $NODE_NAME: 3 devices; 4 were expected" ;;
  wait) trap 'exit 143' TERM; touch "$FAKE/waiting"; while true; do /bin/sleep 0.05; done ;;
esac
exit "${code:-0}"
"""

# A queued resource is ACTIVE from its creation; `lost` says what becomes of it when the end of a job is waited for.
GCLOUD = """
case "$*" in
  *"queued-resources describe"*) cat "$FAKE/state" 2>/dev/null ;;
  *"queued-resources create"*) echo ACTIVE >"$FAKE/state" ;;
  *"queued-resources delete"*) rm -rf "$FAKE/state" "$FAKE"/home.* ;;
  *"tpu-vm ssh"*)
    for word in "$@"; do case $word in --command=*) told=${word#--command=} ;; esac; done
    if [[ $told == *"exit 137"* && -s $FAKE/lost ]]; then
      lost=$(next "$FAKE/lost")
      if [ "$lost" != GLITCH ]; then echo "$lost" >"$FAKE/state"; rm -rf "$FAKE"/home.*; fi
      exit 255
    fi
    ended=0
    for host in $HOSTS; do
      mkdir -p "$FAKE/home.$host"
      (cd "$FAKE/home.$host" && HOST=$host NODE_NAME=host-$host bash -c "$told") || ended=$?
    done
    exit "$ended"
    ;;
esac
"""

# A line of `attempts` is what becomes of a JobSet when it is made: its state, then `NODE CODES...` of its pods.
KUBECTL = """
case "$*" in
  *apply*) cat >"$FAKE/manifest.$(wc -l <"$FAKE/calls")"; next "$FAKE/attempts" >"$FAKE/jobset" ;;
  *"delete jobset"*) rm -f "$FAKE/jobset" ;;
  *"get jobset"*)
    if [ -s "$FAKE/jobset" ]; then
      echo "JobSet $(sed 's/ .*//; s/^Running.*//' "$FAKE/jobset")"
      sed -i 's/^Running//' "$FAKE/jobset" # at the second look it has ended
    fi
    ;;
  *"get pods"*) cut -d ' ' -f 2- "$FAKE/jobset" | tr ';' '\\n' ;;
  *"get node "*) echo "pool-of-$(sed 's/.*get node //; s/ .*//' <<<"$*")" ;;
esac
"""
XPK = 'next "$FAKE/attempts" >"$FAKE/jobset"\n'

# Runs the batch script again for as long as it is put back into the queue, and ends as it does, as --wait has it.
SBATCH = """
cat >"$FAKE/batch"
echo "Submitted batch job 17"
for output in "$@"; do case $output in --output=*) log=${output#--output=} ;; esac; done
while true; do
  rm -f "$FAKE/requeued"
  code=0
  SLURM_JOB_ID=17 bash "$FAKE/batch" >>"$log" 2>&1 || code=$?
  if [ ! -f "$FAKE/requeued" ]; then exit "$code"; fi
done
"""
SCONTROL = 'touch "$FAKE/requeued"\n'
# As many hosts, whatever is asked for; ends with the highest code, as srun does.
SRUN = """
while [[ $1 == --* ]]; do shift; done
ended=0
for host in $HOSTS; do
  code=0
  HOST=$host NODE_NAME=node-$host "$@" || code=$?
  if [ "$code" -gt "$ended" ]; then ended=$code; fi
done
exit "$ended"
"""
PROGRAMS = {
    "gcloud": GCLOUD,
    "kubectl": KUBECTL,
    "xpk": XPK,
    "sbatch": SBATCH,
    "scontrol": SCONTROL,
    "srun": SRUN,
    "squeue": "",
    "scancel": "",
}


class Fake:
    """A cluster of two hosts in a folder."""

    HOSTS = ("0", "1")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in PROGRAMS.items():
            record = f'echo "{name} $*" >>"$FAKE/calls"\n'
            self._executable(name, record + text)
        self._executable("python-of-hosts", PYTHON)
        self._executable("sleep", "exec /bin/sleep 0.02\n")
        (folder / "calls").touch()
        self.plan("lost")

    def _executable(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{LINE}{text}", encoding="utf-8")
        path.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        """What must be set where the cluster is spoken to."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {"PATH": path, "FAKE": str(self.folder), "HOME": str(self.folder), "HOSTS": " ".join(self.HOSTS)}

    def plan(self, name: str, *lines: str) -> None:
        """Lays out what is to happen, one line for each time."""
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def hosts_end(self, train: list[str], probe: list[str] | None = None) -> None:
        """The exit codes of both hosts, `0/3` where they differ, for each start."""
        for name, codes in (("train", train), ("probe", probe or [])):
            for index, host in enumerate(self.HOSTS):
                self.plan(f"{name}.{host}", *(code.split("/")[index % len(code.split("/"))] for code in codes))

    def calls(self, *words: str) -> list[str]:
        """The calls that hold all of these words, in order."""
        lines = (self.folder / "calls").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if all(word in line for word in words)]

    def trained(self) -> int:
        """How often a host started to train."""
        path = self.folder / "trained"
        return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
