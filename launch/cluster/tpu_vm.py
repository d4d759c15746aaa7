"""TPU VMs: a queued resource for the slice, ssh to all hosts, and on each a process that outlives the connection."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from launch.cluster import accelerators, exits, shell, xla_flags
from launch.cluster.exits import Retry
from launch.cluster.job import Job, refuse, require_one_line

FOLDER = "aamoe_jobs"
"""In the home folder of every host: a folder for each job, with its log, process id and exit code."""
SAVING = 600
"""Seconds that a process has to save after SIGTERM."""
SILENT = 255
"""What `ask` ends with where some host did not answer; as ssh does."""


@dataclasses.dataclass(frozen=True)
class TpuVm:
    """One slice of TPU VMs, which has the name of the job."""

    project: Annotated[str, "Google Cloud project; `gcloud projects list` shows yours."]
    zone: Annotated[str, "Zone, such as us-east5-a."]
    accelerator: Annotated[str, "Accelerator, such as v5p-1024 or v5litepod-256."]
    capacity: Annotated[Literal["on_demand", "spot", "reserved"], "How nodes are paid for."] = "on_demand"
    runtime_version: Annotated[str | None, "Software of the TPU VMs; that of the generation if not given."] = None
    xla_flags: Annotated[str, xla_flags.HELP] = xla_flags.BY_CHIP
    setup: Annotated[str, "Bash that every host runs before the probe: mounts the run folder, installs."] = ":"

    slices: ClassVar[int] = 1
    supervised: ClassVar[frozenset[Retry]] = frozenset({Retry.ALWAYS, Retry.LIMITED, Retry.ELSEWHERE})

    def __post_init__(self) -> None:
        require_one_line(self, besides="setup")
        xla_flags.environment(self)
        checked = subprocess.run(["bash", "-n", "-c", self.setup], capture_output=True, text=True, errors="replace")
        if checked.returncode:
            refuse(self, "setup", f"must be bash: {checked.stderr.strip().splitlines()[0]}")
        if self.slice.generation.runtime is None:
            refuse(self, "accelerator", "is to be had through GKE alone: use --cluster=gke or --cluster=xpk")

    @property
    def slice(self) -> accelerators.Slice:
        """The hosts and chips. A TPU VM has the usual shape."""
        return accelerators.parse(self.accelerator)

    @property
    def devices(self) -> int:
        return self.slice.devices

    def run(self, job: Job, avoided: Sequence[str]) -> str:
        # Nothing is avoided by name: a slice with a bad host is given back whole, and another one is asked for.
        return shell.script(
            *(self._slice(job.name), self._on(job.name), self._ask()),
            self._acquire(job.name),
            FIT,
            "# Where every host still runs the job, only a connection broke.\n"
            f"if ! ask {_within(job.name, ALIVE)} 2>/dev/null; then\n"
            f"  fit ask {_within(job.name, END)}\n"
            f"  fit ask {shell.words(self.setup)}\n"
            f"  fit ask {shell.words(self._probe(job))}\n"
            f"  fit ask {_within(job.name, self._start(job))}\n"
            "fi",
            _watch(job.name),
        )

    def health(self, job: Job) -> str:
        return shell.script(
            *(self._slice(job.name), self._on(job.name), self._ask()),
            self._acquire(job.name),
            f"ask {shell.words(self.setup)} || exit $?\nask {shell.words(self._probe(job))} || exit $?",
        )

    def logs(self, name: str) -> str:
        return shell.script(self._on(name), f"on 0 {_within(name, 'tail -n 100 -F log')}")

    def status(self, name: str) -> str:
        return shell.script(
            self._slice(name), self._on(name), f'echo "the slice is $(state)"\non all {_within(name, REPORT)}'
        )

    def stop(self, name: str) -> str:
        return shell.script(
            *(self._slice(name), self._on(name), self._ask()),
            f"ask {_within(name, f'touch stopped; {END}')} || true\nslice delete --force --quiet",
        )

    @property
    def _place(self) -> str:
        return shell.words(f"--project={self.project}", f"--zone={self.zone}")

    def _slice(self, name: str) -> str:
        return f"""\
slice() {{ gcloud compute tpus queued-resources "$1" {name} {self._place} "${{@:2}}"; }}
state() {{ slice describe --format='value(state.state)' 2>/dev/null || echo ABSENT; }}"""

    def _on(self, name: str) -> str:
        # --quiet: gcloud makes a key without asking.
        return f'on() {{ gcloud compute tpus tpu-vm ssh {name} {self._place} --worker="$1" --command="$2" --quiet; }}'

    def _ask(self) -> str:
        # Hosts say their exit codes themselves: gcloud has one for all.
        return f"""\
{shell.WORST}

# Runs a command on every host, prints what they print, and ends as the worst of them did.
ask() {{
  local output
  output=$(on all "($1); printf '\\nexit code %s\\n' \\"\\$?\\"") || true
  sed -e '/^exit code /d' -e '/^$/d' <<<"$output"
  output=$(sed -n 's/^exit code //p' <<<"$output")
  if [ "$(grep -c . <<<"$output")" -lt {self.slice.hosts} ]; then return {SILENT}; fi
  worst <<<"$output"
}}"""

    def _acquire(self, name: str) -> str:
        capacity = {"on_demand": [], "spot": ["--spot"], "reserved": ["--reserved"]}[self.capacity]
        runtime = self.runtime_version or self.slice.generation.runtime
        create = [f"--node-id={name}", f"--accelerator-type={self.accelerator}", f"--runtime-version={runtime}"]
        return f"""\
# A slice that was lost is given back before another one is asked for.
case $(state) in
  SUSPENDING | SUSPENDED | FAILED) slice delete --force --quiet ;;
esac
if [ "$(state)" = ABSENT ]; then
  slice create {shell.words(*create, *capacity)}
fi
until now=$(state) && [ "$now" = ACTIVE ]; do
  case $now in
    SUSPENDING | SUSPENDED) exit {exits.PREEMPTED} ;;
    FAILED) exit {exits.LOST} ;;
  esac
  sleep 30
done"""

    def _probe(self, job: Job) -> str:
        probe = shell.words(*job.probe(self.slice.devices_per_host))
        return f"cd {shell.words(job.workdir)} && JAX_PLATFORMS=tpu {probe}"

    def _start(self, job: Job) -> str:
        """Starts the job and a shell that keeps its exit code, both cut off from the connection."""
        train = shell.words(*shell.within(xla_flags.environment(self), job.command(self.slice.hosts)))
        keep = (
            f"cd {shell.words(job.workdir)} || exit 1; export JAX_PLATFORMS=tpu; "
            f'{train} & echo $! >"$OLDPWD/pid"; wait $!; code=$?; '
            f'cd "$OLDPWD" || exit; if [ -f stopped ]; then code={exits.STOPPED}; fi; echo "$code" >code'
        )
        return (
            f"rm -f pid code stopped; nohup setsid bash -c {shell.words(keep)} >>log 2>&1 </dev/null & "
            "for _ in 1 2 3 4 5 6 7 8 9 10; do if [ -s pid ]; then exit 0; fi; sleep 1; done; exit 1"
        )


def _within(name: str, command: str) -> str:
    """A command in the job's folder on a host, as one word."""
    return shell.words(f"mkdir -p {FOLDER}/{name} && cd {FOLDER}/{name} && {{ {command}; }}")


# On a host. `tail --pid` waits for a process that is no child.

ALIVE = 'kill -0 "$(cat pid)"'
END = (
    'if [ ! -s pid ] || ! kill -TERM "$(cat pid)" 2>/dev/null; then exit 0; fi; '
    f'timeout {SAVING} tail --pid="$(cat pid)" -f /dev/null || kill -KILL "$(cat pid)"'
)
AWAIT = (
    'tail --pid="$(cat pid)" -f /dev/null; '
    'for _ in 1 2 3 4 5 6 7 8 9 10; do if [ -s code ]; then exit "$(cat code)"; fi; sleep 1; done; exit 137'
)
REPORT = (
    'if [ -s code ]; then echo "$(hostname): ended with exit code $(cat code)"; '
    'elif [ -s pid ] && kill -0 "$(cat pid)"; then echo "$(hostname): runs"; else echo "$(hostname): idle"; fi'
)

# On the machine of whoever launches.

FIT = f"""\
# Does what it is told, or gives the slice back where a host is not fit.
fit() {{
  local code=0
  "$@" || code=$?
  case $code in
    0) ;;
    {exits.UNHEALTHY} | {SILENT})
      echo "unhealthy slice: it is given back, and another one asked for"
      slice delete --force --quiet
      exit {exits.UNHEALTHY}
      ;;
    *) exit "$code" ;;
  esac
}}"""


def _watch(name: str) -> str:
    """Waits for the end, over several connections if need be."""
    return f"""\
for _ in 1 2 3 4 5 6 7 8 9 10; do
  code=0
  ask {_within(name, AWAIT)} || code=$?
  if [ "$code" != {SILENT} ]; then exit "$code"; fi
  if [ "$(state)" != ACTIVE ]; then exit {exits.PREEMPTED}; fi
  sleep 30
done
exit {exits.LOST}"""
