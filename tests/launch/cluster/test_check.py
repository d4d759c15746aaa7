"""What a job's hosts would refuse is refused before there are any."""

from __future__ import annotations

import os

from tests.launch.session import calls

FOLDER = "--run_dir=/mnt/shared/runs/mine"
CHECKED = {
    (8, "--gin_file=aamoe_1b.gin"): None,
    (2, "--gin_file", "aamoe.gin"): None,
    (2, "--gin_file=aamo.gin"): "no gin file is called 'aamo.gin'; did you mean 'aamoe.gin'?",
    (2, "--gin_param=ModelConfig.d_modl = 4"): "did you mean 'd_model'?",
    (2, "--gin_fil=aamoe.gin"): "launch.train: Unknown command line flag 'gin_fil'",
    (2, "aamoe.gin"): "unknown argument 'aamoe.gin'",
    (4, "--gin_file=aamoe.gin"): "batch_size / accumulate = 16: must be divisible by 32",
    (1, "--gin_file=aamoe_1b.gin"): "does not make 8 devices",
    (2, "--import=nowhere"): "nowhere",
    (2, "--import=/mnt/nowhere.py"): "note: /mnt/nowhere.py is not on this machine",
    (2, "--gin_file=/mnt/nowhere.gin"): "note: /mnt/nowhere.gin is not on this machine",
}


def run(nodes: int, *arguments: str) -> list[str]:
    """The flags of a job on nodes of 8 GPUs."""
    settings = ("--cluster=slurm", "--name=mine", f"--nodes={nodes}", "--gpus_per_node=8")
    return [*settings, "run", "--", "launch.train", *arguments, FOLDER]


def test_a_job_that_would_not_start_is_not_sent(tmp_path):
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\necho >>{tmp_path}/sent; echo Submitted batch job 17\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "squeue").symlink_to("/bin/true")
    path = f"{tmp_path}:{os.environ['PATH']}"
    asked = [*(run(*job) for job in CHECKED), ["--dry_run", *run(2, "--gin_file=aamo.gin")]]
    *outcomes, dry = calls("cluster.__main__", asked, JAX_PLATFORMS="cpu", PATH=path, HOME=str(tmp_path))
    sent = 0
    for (job, message), outcome in zip(CHECKED.items(), outcomes, strict=True):
        if message is None or message.startswith("note: "):
            assert outcome.code == 0, (job, outcome)
            assert outcome.stderr.startswith(message or "mine: exit code 0, finished"), job
            sent += 1
        else:
            assert (outcome.code, outcome.stdout) == (1, ""), job
            assert outcome.stderr.startswith("error: "), job
            assert message in outcome.stderr, job
            assert outcome.stderr.count("\n") == 1, job
    assert (tmp_path / "sent").read_text() == "\n" * sent
    assert (dry.code, dry.stdout) == (1, "")


def test_health_takes_any_program_and_evaluation_its_own_flags():
    gpu = ["--cluster=slurm", "--name=mine", "--nodes=1", "--gpus_per_node=1", "--dry_run"]
    asked = [
        [*gpu, "health", "--", "launch.train", "--gin_file=nowhere.gin", FOLDER],
        [*gpu, "run", "--", "launch.evaluate", "--checkpoint=/x", "--split=test"],
        [*gpu, "run", "--", "launch.generate", "--checkpoint=/x", "--prompt=a", "--mesh=1x-1x1x1"],
        [*gpu, "run", "--", "launch.generate", "--checkpoint=/x", "--prompt=a", "--mesh=1x3x1x1"],
        [*gpu, "run", "--", "launch.evaluate", "--checkpoint=/x", "--split=tset"],
    ]
    *fine, divided, wrong = calls("cluster.__main__", asked, JAX_PLATFORMS="cpu")
    assert [outcome.code for outcome in fine] == [0, 0, 0]
    assert (divided.code, wrong.code) == (1, 1)
    assert "MeshConfig: data 1 x fsdp 3" in divided.stderr
    assert "--split=tset: value should be one of <validation|test>" in wrong.stderr
