"""xpk: it makes the JobSet, on a cluster that it made; kubectl does the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

from launch.cluster import accelerators, exits, jobset, shell, xla_flags
from launch.cluster.exits import Retry
from launch.cluster.gke import SAVING
from launch.cluster.job import Job, refuse, require_one_line

OWN_RESTARTS = (42, *range(127, 256))
"""Codes that xpk restarts without being asked (`xpk workload create --help`, 1.16)."""


@dataclasses.dataclass(frozen=True)
class Xpk:
    """TPU slices of a cluster made by `xpk cluster create`."""

    project: Annotated[str, "Google Cloud project; `gcloud projects list` shows yours."]
    zone: Annotated[str, "Zone, such as us-east5-a."]
    gke_cluster: Annotated[str, "Name of the GKE cluster; `gcloud container clusters list` shows them."]
    accelerator: Annotated[str, "Accelerator, such as v5p-1024 or v5litepod-256."]
    image: Annotated[str, "Container image that holds Python and this repository."]
    storage: Annotated[str, "Storage that `xpk storage create` or `attach` named, with the run folder on it."]
    slices: Annotated[int, "Slices of this accelerator, joined by the data center network."] = 1
    xla_flags: Annotated[str, xla_flags.HELP] = xla_flags.BY_CHIP
    # By default the region of the zone, where xpk makes its clusters.
    location: Annotated[str | None, "Region or zone of the cluster; `gcloud container clusters list` shows it."] = None

    # Its failure policy is its own, and it cannot be told to leave out nodes.
    supervised: ClassVar[frozenset[Retry]] = frozenset()

    def __post_init__(self) -> None:
        require_one_line(self)
        if self.slices < 1:
            refuse(self, "slices", "must be at least 1")
        accelerators.parse(self.accelerator)
        xla_flags.environment(self)

    @property
    def slice(self) -> accelerators.Slice:
        """The hosts and chips of one. xpk puts 4 chips on a host where others would put all 8 of a slice."""
        found = accelerators.parse(self.accelerator)
        return dataclasses.replace(found, generation=dataclasses.replace(found.generation, whole=4))

    @property
    def _kubectl(self) -> str:
        location = self.location or self.zone.rpartition("-")[0]
        return jobset.kubectl(self.project, location, self.gke_cluster, "default")

    @property
    def devices(self) -> int:
        return self.slices * self.slice.devices

    def run(self, job: Job, avoided: Sequence[str]) -> str:
        """The probe and the job are one command, so the exit code of either is the container's."""
        # `exec`: xpk passes SIGTERM to the shell that runs this, which by then is Python.
        program = job.command(self.slices * self.slice.hosts)
        command = f"{self._probe(job)} && exec {shell.words(*shell.within(xla_flags.environment(self), program))}"
        return self._create(job, command, jobset.WAIT)

    def health(self, job: Job) -> str:
        return self._create(job, self._probe(job), jobset.REFUSE)

    def _probe(self, job: Job) -> str:
        probe = shell.words(*job.probe(self.slice.devices_per_host))
        return f"cd {shell.words(job.workdir)} && export JAX_PLATFORMS=tpu && {probe}"

    def _create(self, job: Job, command: str, running: str) -> str:
        asked = [code for code in exits.codes(Retry.LIMITED, Retry.ALWAYS) if code not in OWN_RESTARTS]
        create = shell.lines(
            *("xpk", "workload", "create"),
            *self._place(job.name),
            f"--tpu-type={self.accelerator}",
            f"--num-slices={self.slices}",
            f"--docker-image={self.image}",
            f"--storage={self.storage}",
            f"--max-restarts={job.max_retries}",
            f"--restart-on-exit-codes={','.join(map(str, asked))}",
            f"--termination-grace-period-seconds={SAVING}",
            f"--command={command}",
        )
        return shell.script(self._kubectl, jobset.make(job.name, create, running), jobset.wait(job.name))

    def _place(self, name: str) -> list[str]:
        place = [f"--project={self.project}", f"--zone={self.zone}", f"--cluster={self.gke_cluster}"]
        return [*place, f"--workload={name}"]

    def logs(self, name: str) -> str:
        return shell.script(self._kubectl, jobset.logs(name))

    def status(self, name: str) -> str:
        return shell.script(self._kubectl, jobset.status(name))

    def stop(self, name: str) -> str:
        return shell.script(shell.lines("xpk", "workload", "delete", *self._place(name), "--force"))
