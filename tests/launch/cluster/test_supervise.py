"""Attempts one after the other, on clusters that are folders (fakes.py): real scripts, real processes, chosen codes."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import threading
import time

import pytest
import yaml

from launch.cluster import exits
from launch.cluster.gke import Gke
from launch.cluster.slurm import Slurm
from launch.cluster.supervise import PAUSE, execute, supervise
from launch.cluster.tpu_vm import TpuVm
from launch.cluster.xpk import Xpk
from tests.launch.cluster.cases import JOB, PLACE
from tests.launch.cluster.fakes import Fake
from tests.launch.session import calls

TPU_VM = TpuVm(**PLACE, accelerator="v5p-16")
GKE = Gke(
    project="my-project",
    location="us-east5",
    gke_cluster="pods",
    accelerator="v5p-16",
    image="i",
    volume_claim="shared",
)
XPK = Xpk(**PLACE, gke_cluster="pods", accelerator="v5p-16", image="i", storage="shared")
SLURM = Slurm(nodes=2, gpus_per_node=0)


def no_pause(seconds: float) -> None:
    """In the place of time.sleep."""


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Fake:
    cluster = Fake(tmp_path)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture
def job(tmp_path):
    return dataclasses.replace(JOB, python="python-of-hosts", workdir=str(tmp_path), max_retries=1)


class TestTpuVm:
    @pytest.mark.parametrize(
        ("train", "code", "attempts"),
        [
            (["0"], 0, 1),
            (["1"], 1, 1),  # the config does not fit
            (["3"], 3, 1),  # diverged
            (["130"], 130, 1),  # a person
            (["143", "143", "0"], 0, 3),  # preempted, more often than --max_retries
            (["4", "0"], 0, 2),  # not saved
            (["4", "4", "4"], 4, 2),
            (["5/137", "0"], 0, 2),  # killed on one host, which the other noticed
            (["5/3"], 3, 1),  # diverged on one host is diverged
            (["143/5", "77", "0"], 0, 3),  # preempted, then a code that nobody knows
        ],
    )
    def test_attempts_follow_the_table(self, fake, job, train, code, attempts):
        fake.hosts_end(train)
        pauses = []
        assert supervise(TPU_VM, job, pauses.append) == code
        assert fake.trained() == 2 * attempts
        assert pauses == [PAUSE] * (attempts - 1)
        assert len(fake.calls("queued-resources create")) == 1
        assert not fake.calls("queued-resources delete")

    def test_all_hosts_are_told_of_the_others(self, fake, job):
        fake.hosts_end(["0"])
        assert supervise(TPU_VM, job, no_pause) == 0
        starts = (fake.folder / "trained").read_text().splitlines()
        assert (
            starts
            == [
                "-m launch.train --gin_file=aamoe.gin --gin_param=TrainingConfig.seed = 1 "
                "--run_dir=/mnt/shared/runs/mine --distributed=auto"
            ]
            * 2
        )

    def test_a_slice_that_is_taken_away_is_asked_for_again(self, fake, job):
        fake.hosts_end(["0", "0"])
        fake.plan("lost", "SUSPENDED")
        assert supervise(TPU_VM, job, no_pause) == 0
        assert len(fake.calls("queued-resources create")) == 2
        assert len(fake.calls("queued-resources delete")) == 1

    def test_a_connection_that_breaks_is_not_an_end(self, fake, job):
        fake.hosts_end(["0"])
        fake.plan("lost", "GLITCH", "GLITCH")
        assert supervise(TPU_VM, job, no_pause) == 0
        assert fake.trained() == 2
        assert len(fake.calls("launch.cluster.probe")) == 1

    def test_a_slice_with_a_bad_host_is_given_back(self, fake, job, capfd):
        fake.hosts_end(["0"], probe=["0/6", "0"])
        assert supervise(TPU_VM, job, no_pause) == 0
        assert "unhealthy host-1: 3 devices; 4 were expected\n" in capfd.readouterr().out
        assert len(fake.calls("queued-resources create")) == 2
        assert fake.trained() == 2

    def test_bad_slices_are_not_asked_for_for_ever(self, fake, job):
        fake.hosts_end(["0"], probe=["6"] * 9)
        assert supervise(TPU_VM, job, no_pause) == 6
        assert len(fake.calls("queued-resources create")) == 1 + job.max_retries
        assert fake.trained() == 0

    def test_stop_is_not_a_preemption(self, fake, job):
        """The job saves and ends, `run` sees that a person stopped it, and the slice is given back."""
        fake.hosts_end(["wait"])
        ended = []
        runner = threading.Thread(target=lambda: ended.append(supervise(TPU_VM, job, no_pause)))
        runner.start()
        deadline = time.monotonic() + 30
        while fake.trained() < 2 or not (fake.folder / "waiting").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        # Not `stop` whole: the slice must outlive the job for as long as `run` looks at it.
        assert execute(TPU_VM.stop(job.name).replace("slice delete --force --quiet", ":")).code == 0
        runner.join(timeout=30)
        assert ended == [130]

    def test_a_second_run_waits_for_the_first(self, fake, job):
        fake.hosts_end(["wait"])
        script = TPU_VM.run(job, ())
        first = subprocess.Popen(["bash", "-c", script], stdin=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 30
        while fake.trained() < 2 or not fake.calls("tail --pid", "exit 137"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        second = subprocess.Popen(["bash", "-c", script], stdin=subprocess.DEVNULL)
        for host in fake.HOSTS:
            os.kill(int((fake.folder / f"home.{host}/aamoe_jobs/mine/pid").read_text()), 0)  # both still run
        while len(fake.calls("tail --pid", "exit 137")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for host in fake.HOSTS:
            os.kill(int((fake.folder / f"home.{host}/aamoe_jobs/mine/pid").read_text()), signal.SIGTERM)
        assert second.wait(timeout=30) == 143
        assert fake.trained() == 2
        assert len(fake.calls("launch.cluster.probe")) == 1


class TestGke:
    def test_a_job_that_ends_well(self, fake, job):
        fake.plan("attempts", "Completed")
        assert supervise(GKE, job, no_pause) == 0
        assert len(fake.calls("apply")) == 1
        assert all("--context=gke_my-project_us-east5_pods --namespace=default" in call for call in fake.calls())

    @pytest.mark.parametrize("code", [1, 4])
    def test_what_kubernetes_gave_up_is_given_up(self, fake, job, code):
        fake.plan("attempts", f"Failed node-0 0 {code};node-1 0 5")
        assert supervise(GKE, job, no_pause) == code
        assert len(fake.calls("apply")) == 1

    def test_a_pool_with_a_bad_node_is_avoided(self, fake, job):
        fake.plan("attempts", "Failed node-0 0 ;node-1 6 ", "Failed node-8 6 ", "Completed")
        assert supervise(GKE, dataclasses.replace(job, max_retries=2), no_pause) == 0
        manifests = sorted(fake.folder.glob("manifest.*"), key=lambda path: int(path.suffix[1:]))
        avoided = []
        for path in manifests:
            job_spec = yaml.safe_load(path.read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
            affinity = job_spec["template"]["spec"].get("affinity")
            avoided.append(str(affinity).count("pool-of-node-1") + 2 * str(affinity).count("pool-of-node-8"))
        assert avoided == [0, 1, 3]
        assert len(fake.calls("delete jobset")) == len(manifests) == 3

    def test_what_runs_already_is_waited_for(self, fake, job):
        fake.plan("jobset", "RunningCompleted")
        assert supervise(GKE, job, no_pause) == 0
        assert not fake.calls("apply")
        assert not fake.calls("delete")

    def test_what_runs_is_not_probed(self, fake, job):
        fake.plan("jobset", "RunningCompleted")
        assert execute(GKE.health(job)).code == exits.UNLAUNCHED.code
        assert not fake.calls("apply")

    def test_a_job_that_somebody_deleted(self, fake, job):
        fake.plan("attempts")
        assert supervise(GKE, job, no_pause) == 130


class TestXpk:
    def test_a_job_that_ends_well(self, fake, job):
        fake.plan("attempts", "Completed")
        assert supervise(XPK, job, no_pause) == 0
        assert len(fake.calls("xpk workload create", "--tpu-type=v5p-16")) == 1

    def test_a_job_that_ended_makes_room(self, fake, job):
        fake.plan("attempts", "Failed node-0 3", "Completed")
        assert [supervise(XPK, job, no_pause) for _ in range(2)] == [3, 0]
        assert [call.split()[0] for call in fake.calls() if "create" in call or "delete" in call] == [
            "kubectl",
            "xpk",
        ] * 2

    def test_a_bad_node_is_named_and_left_to_a_person(self, fake, job, capfd):
        fake.plan("attempts", "Failed node-0 6")
        assert supervise(XPK, job, no_pause) == 6
        assert "unhealthy pool-of-node-0: the probe failed on node-0" in capfd.readouterr().out
        assert len(fake.calls("xpk")) == 1


class TestSlurm:
    @pytest.mark.parametrize(
        ("train", "code", "attempts"),
        [
            (["0"], 0, 1),
            (["3"], 3, 1),
            (["143", "143", "0"], 0, 3),
            (["4", "137", "0"], 137, 2),
            (["143", "5", "143", "0"], 0, 4),  # preemptions do not count
            (["130"], 130, 1),
        ],
    )
    def test_the_batch_script_follows_the_table(self, fake, job, train, code, attempts):
        fake.hosts_end(train)
        assert supervise(SLURM, job, no_pause) == code
        assert fake.trained() == 2 * attempts
        assert len(fake.calls("scontrol requeue 17")) == attempts - 1
        assert len(fake.calls("sbatch")) == 1  # all within one job of SLURM

    def test_a_bad_node_is_left_out(self, fake, job):
        fake.hosts_end(["0"], probe=["0/6", "6/0", "0"])
        assert supervise(SLURM, dataclasses.replace(job, max_retries=2), no_pause) == 0
        excluded = [re.findall(r"--exclude=(\S+)", call) for call in fake.calls("sbatch")]
        assert excluded == [[], ["node-1"], ["node-0,node-1"]]
        assert fake.trained() == 2

    def test_a_job_in_the_queue_is_not_sent_again(self, fake, job):
        (fake.folder / "bin" / "squeue").write_text("#!/bin/bash\necho 17 gpu mine\n")
        assert supervise(SLURM, job, no_pause) == exits.UNLAUNCHED.code
        assert not fake.calls("sbatch")


@pytest.mark.parametrize(
    ("cluster", "tool", "named"),
    [
        (TPU_VM, "gcloud", "slice create --node-id=mine"),
        (GKE, "kubectl", "kubectl delete jobset mine"),
        (XPK, "xpk", "xpk workload create"),
        (SLURM, "sbatch", "sbatch"),
    ],
    ids=["tpu_vm", "gke", "xpk", "slurm"],
)
def test_a_launch_that_fails_is_told_from_a_job_that_fails(fake, job, capfd, cluster, tool, named):
    (fake.folder / "bin" / tool).write_text('#!/bin/bash\necho "log in first" >&2\nexit 1\n')
    assert supervise(cluster, job, no_pause) == exits.UNLAUNCHED.code
    *said, named_command, end = capfd.readouterr().err.splitlines()
    assert set(said) == {"log in first"}
    assert named_command.startswith(f"error: exit code 1 of: {named}")
    assert end == "mine: exit code 10, the launch failed, not the job; is not tried again"
    assert fake.trained() == 0


def test_a_script_that_is_killed_ends_as_shells_count_it():
    assert execute("kill -KILL $$").code == 137


def test_the_program_runs_what_it_prints(fake, tmp_path):
    """`--dry_run` into bash does what the program does without it."""
    fake.hosts_end(["0", "0"])
    flags = ["--cluster=tpu_vm", "--project=my-project", "--zone=us-east5-a", "--accelerator=v5p-16", "--name=mine"]
    flags += ["--python=python-of-hosts", f"--workdir={tmp_path}"]
    train = ["--", "launch.train", "--run_dir=/mnt/shared/runs/mine"]
    shown, done = calls("cluster.__main__", [[*flags, "--dry_run", "run", *train], [*flags, "run", *train]])
    assert (shown.code, shown.stderr, done.code) == (0, "", 0)
    by_program = fake.calls()
    fake.plan("calls")
    (fake.folder / "state").unlink()
    subprocess.run(["bash", "-c", shown.stdout], check=True, timeout=60)
    assert fake.calls() == by_program
    assert fake.trained() == 4
