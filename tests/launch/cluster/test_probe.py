"""The health probe, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch.cluster import probe
from tests.fake_gcs import FakeGCS

HOST = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
    "JAX_PLATFORMS": "cpu",
    "NODE_NAME": "node-7",
}


def outcome(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The probe as a host runs it."""
    command = [sys.executable, "-m", "launch.cluster.probe", *arguments]
    return subprocess.run(command, env=HOST, capture_output=True, text=True, timeout=120)


def test_a_healthy_host_says_so_and_nothing_is_left_behind(tmp_path):
    folder = tmp_path / "runs" / "mine"
    result = outcome("--devices=1", f"--run_dir={folder}", "--min_free_gib=0.001")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("healthy node-7: Python 3.")
    assert not list(folder.iterdir())


def test_an_unhealthy_host_says_all_that_is_wrong(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    result = outcome("--devices=4", f"--run_dir={tmp_path / 'file'}")
    assert result.returncode == 6
    assert result.stdout.splitlines() == [
        "unhealthy node-7: 1 devices; 4 were expected",
        f"unhealthy node-7: the run folder {tmp_path / 'file'} cannot be written: File exists",
    ]


def test_devices_that_do_not_answer():
    assert probe.device_trouble(1, patience=0.001) == "jax.local_devices() did not answer within 0.001 s"


def test_a_package_that_does_not_start(monkeypatch):
    monkeypatch.setattr(probe, "COUNT", "import jax_of_another_world")
    assert "No module named 'jax_of_another_world'" in probe.device_trouble(1, patience=60)


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1, "final", 0))
    assert probe.python_trouble() == "Python 3.9.1; 3.11 or newer is needed: set --python"


def test_a_bucket_is_tried_and_a_host_without_what_it_takes_says_so(monkeypatch):
    pytest.importorskip("gcsfs", reason="pip install -c constraints.txt -e '.[gcs]'")
    with FakeGCS("bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        assert probe.folder_trouble("gs://bucket/run", 1e12) is None
        assert not server.names("bucket", "")
    monkeypatch.setitem(sys.modules, "aamoe_jax.bucket", None)
    trouble = probe.folder_trouble("gs://bucket/run", 0)
    assert trouble.startswith("the run folder gs://bucket/run cannot be tried: import of aamoe_jax.bucket halted")


def test_a_full_disk(tmp_path):
    assert "1e+12 are wanted (--min_free_gib)" in probe.folder_trouble(str(tmp_path), 1e12)
    assert probe.folder_trouble(str(tmp_path), 0) is None


@pytest.mark.parametrize(("variable", "name"), [("NODE_NAME", "pod-node"), ("SLURMD_NODENAME", "gpu-3")])
def test_a_host_is_called_what_the_cluster_calls_it(monkeypatch, variable, name):
    monkeypatch.delenv("NODE_NAME", raising=False)
    monkeypatch.setenv(variable, name)
    assert probe.node_name() == name
