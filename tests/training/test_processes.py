"""Real processes as one run: stopped, killed, frozen, cut off, refused; and the bits that come out of it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from aamoe_jax.training import local_tier
from aamoe_jax.training.checkpoints import find_checkpoint, read_meta, saved_steps
from aamoe_jax.training.distributed import EXIT_LOST
from aamoe_jax.training.metrics import read_metrics
from experiments.jobs import Job, Layout, free_port
from tests.training.helpers import tiny_data, untimed

pytestmark = pytest.mark.distributed
STEPS = 40
GIN = """
ModelConfig:
    d_model = 32
    num_heads = 2
    num_layers = 1
    d_ff = 32
    pattern = ('parallel',)
DataConfig:
    mixture = (('tiny', 1.0),)
    seq_len = 64
    document_align = 8
TrainingConfig:
    steps = 40
    batch_size = 4
    log_every = 1
    eval_every = 20
    eval_batches = 1
    checkpoint_every = 20
"""
FOREVER = "TrainingConfig.steps = 100000"
WITHIN_A_MINUTE = 60


class Workplace:
    """A folder with a dataset, a gin file and a compilation cache, where jobs are started."""

    def __init__(self, folder: Path):
        self.folder = folder
        data = tiny_data(folder / "data")
        (folder / "tiny.gin").write_text(GIN + f"DataConfig.data_dir = {data.data_dir!r}\n")

    def start(self, name: str, layout: Layout, *params: str, arguments: Sequence[str] = (), **options) -> Job:
        """Starts a run."""
        gin = [f"--gin_file={self.folder / 'tiny.gin'}", *(f"--gin_param={param}" for param in params)]
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return Job(self.folder / name, [*gin, *arguments], layout, environment=cache, **options)

    def run(self, name: str, layout: Layout, *params: str) -> Job:
        """A run that is to finish."""
        with self.start(name, layout, *params) as job:
            assert job.wait() == [0] * layout.processes, job.outputs()
        return job


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    """One dataset for all tests."""
    return Workplace(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """A run of one process with four devices that nothing disturbed."""
    place.run("whole", Layout(1, 4))
    return place.folder / "whole"


@pytest.fixture(scope="module")
def stopped(place) -> Path:
    """A run of two processes that SIGTERM to the second one stopped."""
    run_dir = place.folder / "stopped"
    with place.start("stopped", Layout(2, 2)) as job:
        job.wait_for_step(run_dir, 4)
        job.processes[1].send_signal(signal.SIGTERM)
        assert job.wait() == [143, 143], job.outputs()
        (step,) = saved_steps(run_dir / "checkpoints")
        assert 4 <= step < STEPS
        assert f"stopped by SIGTERM after step {step}, saved" in job.output(0)
        assert "stopped" not in job.output(1)
        assert max(record["step"] for record in read_metrics(run_dir)) == step
    return run_dir


def last_fingerprints(run_dir: Path) -> dict[str, int]:
    """Of the parameters and the optimizer's state in the last checkpoint."""
    return read_meta(find_checkpoint(run_dir))["fingerprints"]


def survivor_says(job: Job, index: int) -> str:
    """The lines of a process that are its own, not a library's."""
    return "\n".join(line for line in job.output(index).splitlines() if line.startswith(("error:", "warning:")))


class TestStopping:
    def test_it_goes_on_with_other_processes_to_the_same_bits(self, place, whole, stopped):
        copy = place.folder / "goes_on"
        shutil.copytree(stopped, copy)
        place.run("goes_on", Layout(4, 1))
        assert last_fingerprints(copy) == last_fingerprints(whole)
        assert untimed(copy) == untimed(whole)
        assert (copy / "config.json").read_text() == (whole / "config.json").read_text()

    def test_on_another_mesh_a_torn_checkpoint_is_passed_over_by_all(self, place, whole):
        copy = place.folder / "torn"
        shutil.copytree(whole, copy)
        parts = [path for path in (copy / "checkpoints" / "40" / "params").rglob("*") if path.parent.name == "d"]
        assert parts
        for path in parts:
            path.unlink()
        params = ("MeshConfig.data = 2", "MeshConfig.fsdp = 1")
        with place.start("torn", Layout(2, 1), *params) as job:
            assert job.wait() == [0, 0], job.outputs()
            assert "resuming at step 20" in job.output(0)
            assert "checkpoints/40 is damaged" in survivor_says(job, 0)
            assert survivor_says(job, 1) == ""
        assert (copy / "checkpoints" / "40.corrupt").is_dir()
        found, wanted = (
            [record["loss"] for record in read_metrics(run) if record["kind"] == "train"] for run in (copy, whole)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_two_slices_of_two_hosts_each_train_to_the_same_bits(place):
    """Processes stand for hosts: CPUs know nothing of slices."""
    params = "MeshConfig.data = 2", "MeshConfig.slices = 2"
    for name, layout in (("slices", Layout(4, 1)), ("slices_alone", Layout(1, 4))):
        place.run(name, layout, *params)
    assert last_fingerprints(place.folder / "slices") == last_fingerprints(place.folder / "slices_alone")


class TestLosses:
    @pytest.mark.parametrize("victim", [0, 1])
    def test_when_one_is_killed_the_other_ends_within_a_minute(self, place, victim):
        name = f"killed_{victim}"
        with place.start(name, Layout(2, 2), FOREVER) as job:
            job.wait_for_step(place.folder / name, 3)
            job.processes[victim].kill()
            assert job.wait(WITHIN_A_MINUTE, but=[victim]) == [EXIT_LOST], job.outputs()
            said = survivor_says(job, 1 - victim)
        assert said.startswith(f"error: process {1 - victim} of 2: "), said
        assert "another process of the run is lost" in said
        assert said.count("\n") == 0
        assert "go on from the newest checkpoint" in said

    def test_a_write_that_fails_on_one_ends_all(self, place):
        """The second process has no room for its part of the first checkpoint."""
        name = "full"
        with place.start(name, Layout(2, 2), FOREVER) as job:
            job.wait_for_step(place.folder / name, 3)
            resource.prlimit(job.processes[1].pid, resource.RLIMIT_FSIZE, (2000, 2000))
            codes = job.wait(WITHIN_A_MINUTE + 60)
            assert codes[1] == 4, job.outputs()
            assert codes[0] in (4, EXIT_LOST)
            assert "process 1 of 2: the checkpoint of step 20 could not be written" in survivor_says(job, 1)
        assert saved_steps(place.folder / name / "checkpoints") == []


@pytest.fixture(scope="module")
def killed(place) -> tuple[Path, Path, list[str]]:
    """A run of four processes, each with a local folder of its own, all killed between two checkpoints: where it
    lies, where the local ones lie, and what they were started with."""
    run_dir, local_dir = place.folder / "local", place.folder / "machines"
    params = [f"TrainingConfig.local_dir = '{local_dir}/{{process}}'", "TrainingConfig.local_every = 1"]
    with place.start("local", Layout(4, 1), *params) as job:
        job.wait_for_step(run_dir, 25)
        for process in job.processes:
            process.kill()
        job.wait()
    assert saved_steps(run_dir / "checkpoints") == [20]
    return run_dir, local_dir, params


class TestLocalCheckpoints:
    @pytest.mark.parametrize(("empty", "whole_again"), [((0, 2), True), ((1, 2), False)])
    def test_machines_that_come_back_empty(self, place, whole, killed, empty, whole_again):
        """Each has a copy of what the one before it holds: so two neighbours may not be lost."""
        source, machines, params = killed
        name = f"local_{empty[0]}"
        run_dir, kept = place.folder / name, place.folder / f"{name}.machines"
        shutil.copytree(source, run_dir)
        named = json.loads((run_dir / local_tier.FILE).read_text()) | {"run_dir": str(run_dir)}
        (run_dir / local_tier.FILE).write_text(json.dumps(named))  # a copy that is to have them
        shutil.copytree(machines, kept)
        for process in empty:
            shutil.rmtree(kept / str(process))
        params = [param.replace(str(machines), str(kept)) for param in params]
        with place.start(name, Layout(4, 1), *params) as job:
            assert job.wait() == [0] * 4, job.outputs()
            resumed = re.search(r"resuming at step (\d+):", job.output(0))
            assert resumed is not None, job.outputs()
            assert (int(resumed[1]) >= 23) if whole_again else (resumed[1] == "20"), job.outputs()
            assert ("parts of the local checkpoint of step" in survivor_says(job, 0)) is not whole_again
        assert last_fingerprints(run_dir) == last_fingerprints(whole)
        assert untimed(run_dir) == untimed(whole)
        assert [path for path in kept.rglob("*") if path.is_file()] == []


@pytest.fixture
def hosts():
    """Two network namespaces with a cable between them: their names. Where the machine allows it."""
    names = [f"host{index}.{os.getpid()}" for index in range(2)]
    ends = [f"cable{index}" for index in range(2)]
    if os.geteuid() != 0 or any(shutil.which(program) is None for program in ("ip", "unshare")):
        pytest.skip("network namespaces are made by root, with ip and unshare")
    if subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("this machine allows no network namespaces")
    try:
        sh(f"ip netns add {names[1]}")
        sh(f"ip link add {ends[0]} netns {names[0]} type veth peer name {ends[1]} netns {names[1]}")
        for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
            sh(f"ip -n {name} addr add 10.99.0.{number}/24 dev {end}")
            sh(f"ip -n {name} link set {end} up")
            sh(f"ip -n {name} link set lo up")
        yield names
    finally:
        for name in names:
            sh(f"ip netns del {name}")


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=30)


class TestHosts:
    def test_when_the_cable_is_cut_both_end_within_a_minute(self, place, hosts):
        def on_host(index: int) -> list[str]:
            # Gloo listens on the address of the machine's name: so every host is named after its address.
            named = f'hostname 10.99.0.{index + 1} && exec "$@"'
            return ["ip", "netns", "exec", hosts[index], "unshare", "--uts", "sh", "-c", named, "sh"]

        with place.start("hosts", Layout(2, 2), FOREVER, host="10.99.0.1", wrap=on_host) as job:
            job.wait_for_step(place.folder / "hosts", 3)
            sh(f"ip -n {hosts[1]} link set cable1 down")
            assert job.wait(WITHIN_A_MINUTE) == [EXIT_LOST, EXIT_LOST], job.outputs()
            for index in range(2):
                said = survivor_says(job, index)
                assert said.startswith(f"error: process {index} of 2: JAX gave up, as it does when another process"), (
                    said
                )


class TestRefusals:
    @pytest.mark.parametrize(
        ("param", "said"),
        [
            ("MeshConfig.fsdp = 3", "MeshConfig"),
            ("DataConfig.mixture = (('far', 1.0),)", "dataset 'far' is not prepared"),
        ],
    )
    def test_all_say_what_does_not_fit(self, place, param, said):
        with place.start("refused", Layout(2, 1), param) as job:
            assert job.wait() == [1, 1], job.outputs()
            for index in range(2):
                assert survivor_says(job, index).startswith(f"error: process {index} of 2: {said}"), job.outputs()
        assert not (place.folder / "refused" / "metrics.jsonl").exists()

    def test_one_that_is_slow_to_leave_keeps_its_exit_code(self):
        """Process 0, which hosts JAX's service, is gone before it."""
        program = [sys.executable, "-c", LEAVE, f"127.0.0.1:{free_port()}"]
        processes = [subprocess.Popen([*program, str(index)], stderr=subprocess.DEVNULL) for index in range(2)]
        assert [process.wait(120) for process in processes] == [1, 1]


LEAVE = """
import sys, time
from aamoe_jax.training import distributed

index = int(sys.argv[2])
distributed.initialize(f"{sys.argv[1]},2,{index}")
leave_at_once = distributed.leave_at_once
distributed.leave_at_once = lambda code: (time.sleep(2 * index), leave_at_once(code))
distributed.leave(1)
"""

HANG = """
import time
from pathlib import Path
from aamoe_jax.training.watchdog import Limits, Watchdog

limits = Limits(step_seconds=(0.2, 0.6), step_medians=(1.0, 2.0), first_steps=1, poll_seconds=0.05)
with Watchdog(Path("RUN"), 3, limits) as watchdog:
    with watchdog.step(1):
        time.sleep(0.7)  # longer than any later one may take
    time.sleep(0.7)  # neither is this a step
    with watchdog.step(2):
        def waits_for_ever():
            time.sleep(60)
        waits_for_ever()
"""


class TestWatchdog:
    def test_a_step_that_hangs_is_looked_at_and_ended(self, tmp_path):
        start = time.monotonic()
        program = [sys.executable, "-c", HANG.replace("RUN", str(tmp_path))]
        result = subprocess.run(program, capture_output=True, text=True, timeout=120, env=dict(os.environ))
        assert time.monotonic() - start < 60
        assert result.returncode == EXIT_LOST, result.stderr
        assert "warning: step 2 takes far too long" in result.stderr
        assert "step 1 " not in result.stderr
        assert "error: step 2 has not ended in" in result.stderr
        stacks = (tmp_path / "stacks.3.txt").read_text()
        assert "waits_for_ever" in stacks
        assert "waits_for_ever" in result.stderr


def test_every_process_is_profiled_and_serves_profiles(place):
    """The window outlasts the run, and both processes are on one machine."""
    port = free_port()
    arguments = ["--profile=2:900", f"--profiler_port={port}"]
    with place.start("profiled", Layout(2, 1), FOREVER, arguments=arguments) as job:
        job.wait_for_step(place.folder / "profiled", 4)
        for index in range(2):
            socket.create_connection(("127.0.0.1", port + index), timeout=10).close()
        job.processes[0].send_signal(signal.SIGTERM)
        assert job.wait() == [143, 143], job.outputs()
    session = place.folder / "profiled" / "profile" / "plugins" / "profile" / "steps_2_900"
    files = sorted(path.name for path in session.iterdir())
    assert files == [f"process_{index}.{kind}" for index in range(2) for kind in ("trace.json.gz", "xplane.pb")]
    for index in range(2):
        planes = jax.profiler.ProfileData.from_file(str(session / f"process_{index}.xplane.pb")).planes
        events = [event.name for plane in planes for line in plane.lines for event in line.events]
        assert any("jit_train_step" in name or "Execut" in name for name in events), events[:50]
