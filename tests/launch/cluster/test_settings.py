"""Flags of the launcher: what does not fit is refused in one line that says what to do."""

from __future__ import annotations

import pytest

from aamoe_jax.config import ConfigError
from launch.cluster import settings
from launch.cluster.job import Job, check_name
from launch.cluster.slurm import Slurm
from launch.cluster.tpu_vm import TpuVm
from tests.launch.session import calls

TRAIN = ("--", "launch.train", "--gin_file=aamoe.gin", "--run_dir=/mnt/shared/runs/mine")
GKE = ("--cluster=gke", "--name=mine", "--project=p", "--location=us-east5", "--gke_cluster=c", "--image=i")
TPU_VM = ("--cluster=tpu_vm", "--name=mine", "--project=p", "--zone=us-east5-a")
SLURM = ("--cluster=slurm", "--name=mine", "--nodes=2", "--gpus_per_node=8")

REFUSED = {
    (*TPU_VM[:2], "run", *TRAIN): "--project is missing: Google Cloud project; `gcloud projects list` shows yours",
    (*TPU_VM, "run", *TRAIN): "--accelerator is missing: Accelerator, such as v5p-1024",
    (*TPU_VM, "--accelerator=v5e-256", "run", *TRAIN): "did you mean 'v5litepod-256'?",
    (*TPU_VM, "--accelerator=tpu7x-8", "run", *TRAIN): "--accelerator = 'tpu7x-8': is to be had through GKE alone",
    (*GKE, "--accelerator=v5p-8", "run", *TRAIN): "--volume_claim = None: the run folder /",
    (*GKE, "--accelerator=v5p-8", "--volume_claim=v", "--topology=4x4x4", "run", *TRAIN): "has 64 chips, but v5p-8",
    (
        *GKE,
        "--accelerator=v5p-8",
        "--volume_claim=v",
        "--mount=/data",
        "run",
        *TRAIN,
    ): "--mount = '/data': the run folder",
    (*SLURM, "--zone=us-east5-a", "run", *TRAIN): "--zone = 'us-east5-a': --cluster=slurm has no such setting",
    (*SLURM, "--nodes=0", "run", *TRAIN): "--nodes = 0: must be at least 1",
    (*SLURM, "--time_limit=soon", "run", *TRAIN): "--time_limit = 'soon': must be written as",
    (*SLURM, "--name=Mine", "run", *TRAIN): "--name = 'Mine': must be small letters",
    (*SLURM, "--max_retries=-1", "run", *TRAIN): "--max_retries = -1: must be at least 0",
    (*SLURM,): "what to do is missing: one of run, health, logs, status, stop",
    (*SLURM, "rum", *TRAIN): "'rum': must be one of run, health, logs, status, stop; did you mean run?",
    (*SLURM, "run"): "the program is missing: end with -- launch.train",
    (*SLURM, "logs", *TRAIN): "'launch.train': logs takes no program",
    (*SLURM, "run", "--", "launch.trian", "--run_dir=/x"): "did you mean launch.train?",
    (*SLURM, "run", "--", "launch.train"): "--run_dir is missing: add --run_dir=FOLDER",
    (
        *SLURM,
        "run",
        "--",
        "launch.train",
        "--run_dir=s3://bucket/x",
    ): "--run_dir = 's3://bucket/x': must be a path or gs://BUCKET/FOLDER",
    (*SLURM, "run", "--", "launch.train", "--run_dir=runs/x"): "--run_dir = 'runs/x': must begin with /",
}


def test_what_does_not_fit_is_refused_in_one_line():
    outcomes = calls("cluster.__main__", [("--dry_run", *flags) for flags in REFUSED], JAX_PLATFORMS="cpu")
    for flags, outcome, message in zip(REFUSED, outcomes, REFUSED.values(), strict=True):
        assert (outcome.code, outcome.stdout) == (1, ""), flags
        assert outcome.stderr.startswith("error: "), flags
        assert outcome.stderr.count("\n") == 1, flags
        assert message in outcome.stderr


def test_every_setting_of_a_cluster_is_a_flag_with_one_type():
    kinds: dict[str, set] = {}
    for owner in (Job, *settings.CLUSTERS.values()):
        for name, (kind, text) in settings.settings_of(owner).items():
            kinds.setdefault(name, set()).add((str if kind == str | None else kind, text))
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def test_one_process_is_not_told_of_others():
    job = Job(program="launch.evaluate", arguments=("--checkpoint=/mnt/runs/x",), name="mine")
    assert "--distributed" not in TpuVm("p", "z", "v5p-8").run(job, ())
    assert "--distributed" not in Slurm(nodes=1, gpus_per_node=1).run(job, ())
    assert "--distributed=auto" in TpuVm("p", "z", "v5p-16").run(job, ())


@pytest.mark.parametrize("name", ["", "9lives", "a_b", "a-", "A", "a" * 41])
def test_names_that_pods_cannot_have(name):
    with pytest.raises(ConfigError, match="--name"):
        check_name(name)
