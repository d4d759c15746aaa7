"""GKE: a JobSet with one pod on every host of one TPU slice, or of several that the data center network joins."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import yaml

from aamoe_jax.config import in_bucket
from launch.cluster import accelerators, exits, jobset, shell, xla_flags
from launch.cluster.exits import Retry
from launch.cluster.job import Job, refuse, require_one_line

Action = Literal["run", "health"]
TPU = "google.com/tpu"
QUEUE = "kueue.x-k8s.io/queue-name"
"""Label of a JobSet that Kueue is to admit: it waits, suspended, until there is room for all of it."""
SAVING = 600
"""Seconds between SIGTERM and SIGKILL. A spot node leaves less, whatever this says."""
PORTS = {"tpu": 8471, "jax": 8482, "megascale": 8080}
"""Of the TPU runtime, of the coordinator of jax.distributed on TPUs (jax/_src/clusters/cloud_tpu_cluster.py), and of
what joins slices. GKE tells the pods of a JobSet which slice they are (MEGASCALE_SLICE_ID and the like)."""


@dataclasses.dataclass(frozen=True)
class Gke:
    """TPU slices of a GKE cluster."""

    project: Annotated[str, "Google Cloud project; `gcloud projects list` shows yours."]
    location: Annotated[str, "Region or zone of the cluster; `gcloud container clusters list` shows it."]
    gke_cluster: Annotated[str, "Name of the GKE cluster; `gcloud container clusters list` shows them."]
    accelerator: Annotated[str, "Accelerator, such as v5p-1024 or v5litepod-256."]
    image: Annotated[str, "Container image that holds Python and this repository."]
    volume_claim: Annotated[
        str | None, "PersistentVolumeClaim (ReadWriteMany) of the run folder's file system; none for a bucket."
    ] = None
    mount: Annotated[str, "Where the pods see it."] = "/mnt/shared"
    topology: Annotated[str | None, "Shape of the slice, such as 8x8x8; the usual one if not given."] = None
    slices: Annotated[int, "Slices of this accelerator, joined by the data center network."] = 1
    capacity: Annotated[Literal["on_demand", "spot", "reserved"], "How nodes are paid for."] = "on_demand"
    node_pool: Annotated[str | None, "Node pool; any that fits if not given."] = None
    namespace: Annotated[str, "Kubernetes namespace."] = "default"
    queue: Annotated[str | None, "LocalQueue of Kueue that admits the job; none if not given."] = None
    xla_flags: Annotated[str, xla_flags.HELP] = xla_flags.BY_CHIP

    supervised: ClassVar[frozenset[Retry]] = frozenset({Retry.ELSEWHERE})

    def __post_init__(self) -> None:
        require_one_line(self)
        if not self.mount.startswith("/"):
            refuse(self, "mount", "must begin with /")
        if self.slices < 1:
            refuse(self, "slices", "must be at least 1")
        if self.slices > 1 and self.node_pool is not None:
            refuse(self, "node_pool", f"one node pool is one slice, and --slices={self.slices}: leave it out")
        if self.queue is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", self.queue):
            refuse(self, "queue", "must be the name of a LocalQueue: small letters, digits and dashes, at most 63")
        accelerators.parse(self.accelerator, self.topology)
        xla_flags.environment(self)

    @property
    def slice(self) -> accelerators.Slice:
        """The hosts and chips of one."""
        return accelerators.parse(self.accelerator, self.topology)

    @property
    def _kubectl(self) -> str:
        return jobset.kubectl(self.project, self.location, self.gke_cluster, self.namespace)

    @property
    def devices(self) -> int:
        return self.slices * self.slice.devices

    def run(self, job: Job, avoided: Sequence[str]) -> str:
        return self._script(job.name, self.manifest(job, avoided), jobset.WAIT)

    def health(self, job: Job) -> str:
        return self._script(job.name, self.manifest(job, (), "health"), jobset.REFUSE)

    def _script(self, name: str, manifest: dict[str, Any], running: str) -> str:
        apply = shell.heredoc("kubectl apply --filename=-", yaml.safe_dump(manifest, sort_keys=False, width=1000))
        return shell.script(self._kubectl, jobset.make(name, apply, running), jobset.wait(name))

    def manifest(self, job: Job, avoided: Sequence[str], action: Action = "run") -> dict[str, Any]:
        """The JobSet: `run` probes the hosts and runs the job, `health` probes them and ends."""
        if not in_bucket("run_dir", job.run_dir):
            if self.volume_claim is None:
                refuse(self, "volume_claim", f"the run folder {job.run_dir} needs one, or is in a bucket")
            if not f"{job.run_dir}/".startswith(f"{self.mount}/"):
                refuse(self, "mount", f"the run folder {job.run_dir} is not in it, and would be lost with the pod")
        hosts = self.slice.hosts
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {
                "name": job.name,
                "namespace": self.namespace,
                **({} if self.queue is None else {"labels": {QUEUE: self.queue}}),
                # The pods of a replica on one node pool, which is one slice, and no other job's beside them.
                "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": jobset.POOL},
            },
            "spec": {
                "network": {"enableDNSHostnames": True},  # by a headless service that JobSet makes
                "failurePolicy": {"maxRestarts": job.max_retries, "rules": JOBSET_RULES},
                "replicatedJobs": [
                    {
                        "name": "slice",
                        "replicas": self.slices,
                        "template": {
                            "spec": {
                                "parallelism": hosts,
                                "completions": hosts,
                                "completionMode": "Indexed",
                                "backoffLimit": 0,  # a pod alone cannot come back: the others wait in a collective
                                "podFailurePolicy": {"rules": POD_RULES},
                                "template": {"spec": self._pod(job, avoided, action)},
                            }
                        },
                    }
                ],
            },
        }

    def _pod(self, job: Job, avoided: Sequence[str], action: Action) -> dict[str, Any]:
        probe = self._container(job, "probe", job.probe(self.slice.devices_per_host))
        selector = {
            "cloud.google.com/gke-tpu-accelerator": self.slice.generation.node,
            "cloud.google.com/gke-tpu-topology": self.slice.topology,
        }
        if self.capacity == "spot":
            selector["cloud.google.com/gke-spot"] = "true"
        if self.node_pool is not None:
            selector[jobset.POOL] = self.node_pool
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": SAVING,
            "nodeSelector": selector,
            "tolerations": [
                {"key": TPU, "operator": "Exists", "effect": "NoSchedule"},
                {"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"},
            ],
        }
        if self.volume_claim is not None:
            pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": self.volume_claim}}]
        if avoided:
            terms = [{"matchExpressions": [{"key": jobset.POOL, "operator": "NotIn", "values": list(avoided)}]}]
            required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
            pod["affinity"] = {"nodeAffinity": required}
        if action == "health":
            return pod | {"containers": [probe]}
        trainer = self._container(job, "main", job.command(self.slices * self.slice.hosts))
        trainer["env"] += [{"name": name, "value": value} for name, value in xla_flags.environment(self).items()]
        return pod | {"initContainers": [probe], "containers": [trainer]}

    def _container(self, job: Job, name: str, command: list[str]) -> dict[str, Any]:
        node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
        chips = {TPU: str(self.slice.chips_per_host)}
        return {
            "name": name,
            "image": self.image,
            "command": command,  # without a shell between: SIGTERM reaches Python
            "workingDir": job.workdir,
            "env": [{"name": "JAX_PLATFORMS", "value": "tpu"}, {"name": "NODE_NAME", "valueFrom": node}],
            "ports": [{"name": port, "containerPort": number} for port, number in PORTS.items()],
            "resources": {"requests": chips, "limits": dict(chips)},
        } | ({} if self.volume_claim is None else {"volumeMounts": [{"name": "shared", "mountPath": self.mount}]})

    def logs(self, name: str) -> str:
        return shell.script(self._kubectl, jobset.logs(name))

    def status(self, name: str) -> str:
        return shell.script(self._kubectl, jobset.status(name))

    def stop(self, name: str) -> str:
        return shell.script(self._kubectl, jobset.delete(name))


def _fail_job(*retries: Retry) -> dict[str, Any]:
    return {"action": "FailJob", "onExitCodes": {"operator": "In", "values": exits.codes(*retries)}}


def _jobset_rule(name: str, action: str, *indices: int) -> dict[str, Any]:
    # Kubernetes ends the message with the index of the rule of POD_RULES that failed the Job.
    pattern = f"matching FailJob rule at index [{''.join(map(str, indices))}]$"
    reasons = {"onJobFailureReasons": ["PodFailurePolicy"], "onJobFailureMessagePatterns": [pattern]}
    return {"name": name, "action": action} | reasons


POD_RULES = [
    _fail_job(Retry.NEVER, Retry.ELSEWHERE),
    _fail_job(Retry.ALWAYS),
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
]
"""Every failed pod fails the Job; a rule that matches says why. All else is BackoffLimitExceeded."""

JOBSET_RULES = [
    _jobset_rule("final", "FailJobSet", 0),
    _jobset_rule("preempted", "RestartJobSetAndIgnoreMaxRestarts", 1, 2),
    {"name": "other", "action": "RestartJobSet"},
]
