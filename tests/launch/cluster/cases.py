"""A job and a cluster of every kind, and what is done with them: the cases of the golden scripts.

Written anew, after a change that is meant, by: python -m tests.launch.cluster.cases
"""

from __future__ import annotations

from pathlib import Path

from launch.cluster.gke import Gke
from launch.cluster.job import Cluster, Job
from launch.cluster.slurm import Slurm
from launch.cluster.tpu_vm import TpuVm
from launch.cluster.xpk import Xpk

GOLDEN = Path(__file__).parent / "golden"

JOB = Job(
    name="mine",
    program="launch.train",
    arguments=("--gin_file=aamoe.gin", "--gin_param=TrainingConfig.seed = 1", "--run_dir=/mnt/shared/runs/mine"),
)
PLACE = {"project": "my-project", "zone": "us-east5-a"}
CLUSTERS: dict[str, Cluster] = {
    "tpu_vm": TpuVm(**PLACE, accelerator="v5p-128", capacity="spot", setup="sudo mount -a"),
    "gke": Gke(
        project="my-project",
        location="us-east5",
        gke_cluster="pods",
        accelerator="v5litepod-256",
        image="gcr.io/p/i",
        volume_claim="shared",
    ),
    "xpk": Xpk(**PLACE, gke_cluster="pods", accelerator="v6e-8", image="gcr.io/p/i", storage="shared"),
    "slurm": Slurm(nodes=4, gpus_per_node=8, partition="gpu", account="lab"),
}


def scripts() -> dict[str, str]:
    """The scripts of every action of every kind of cluster, by the names of their golden files."""
    found = {}
    for kind, cluster in CLUSTERS.items():
        found[f"{kind}_run"] = cluster.run(JOB, ())
        found[f"{kind}_run_again"] = cluster.run(JOB, ("bad-1", "bad-2"))
        found[f"{kind}_health"] = cluster.health(JOB)
        for action in (cluster.logs, cluster.status, cluster.stop):
            found[f"{kind}_{action.__name__}"] = action(JOB.name)
    return {name: text for name, text in found.items() if name not in ("tpu_vm_run_again", "xpk_run_again")}


if __name__ == "__main__":
    for name, text in scripts().items():
        (GOLDEN / f"{name}.sh").write_text(text, encoding="utf-8")
