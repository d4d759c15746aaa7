"""Programs on a bucket, as people run them: trained, killed while saving, resumed, looked at, refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gcsfs", reason="pip install -c constraints.txt -e '.[gcs]'")

from aamoe_jax.bucket import location
from aamoe_jax.training.checkpoints import COMMIT, find_checkpoint, read_meta, saved_steps
from aamoe_jax.training.metrics import read_metrics
from experiments.jobs import free_port
from launch.train import EXIT_IN_USE, EXIT_NOT_SAVED, EXIT_REFUSED
from tests.fake_gcs import FakeGCS
from tests.launch.session import calls_of
from tests.launch.test_train import DENSE, GIN, STEPS
from tests.training.helpers import tiny_data, untimed

OTHER = "must be a path or gs://BUCKET/FOLDER; mount other storage and give its path here"
HERE = "must be a path; mount other storage and give its path here"


class Workplace:
    """A bucket, and a folder with a dataset and a gin file, from which programs are started."""

    def __init__(self, folder: Path, server: FakeGCS):
        self.folder, self.server = folder, server
        data = tiny_data(folder / "data")
        (folder / "tiny.gin").write_text(GIN + f"DataConfig.data_dir = {data.data_dir!r}\n")
        (folder / "work").mkdir()
        self.environment = os.environ | server.environment | {"PYTHONPATH": str(Path(__file__).parents[2])}
        self.environment |= {"XDG_CACHE_HOME": str(folder / "cache")}

    def start(self, program: str, *flags: str, **environment: str) -> subprocess.Popen:
        """A program, from an empty folder."""
        return subprocess.Popen(
            [sys.executable, "-m", f"launch.{program}", *flags],
            cwd=self.folder / "work",
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, run_dir: str, *params: str, flags: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        """A run of a dense model."""
        given = [f"--gin_param={param}" for param in (DENSE, *params)]
        return self.start(
            "train", f"--gin_file={self.folder / 'tiny.gin'}", f"--run_dir={run_dir}", *given, *flags, **environment
        )

    def finish(self, process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
        """Its standard output and its standard error."""
        out, err = process.communicate(timeout=500)
        assert process.returncode == code, out + err
        assert list((self.folder / "work").iterdir()) == []  # such as gs:/
        return out, err


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, FakeGCS("bucket") as server:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield Workplace(tmp_path_factory.mktemp("bucket"), server)


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """A run in a folder that nothing disturbed."""
    place.finish(place.train(str(place.folder / "whole")))
    return place.folder / "whole"


def wait_until(condition, process: subprocess.Popen, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_equal_to(whole: Path, address: str) -> None:
    """The same parameters, optimizer state and metrics, to the last bit."""
    run = location("run_dir", address)
    found, wanted = read_meta(find_checkpoint(run)), read_meta(find_checkpoint(whole))
    assert found["step"] == wanted["step"] == STEPS
    assert found["fingerprints"] == wanted["fingerprints"]
    assert untimed(run) == untimed(whole)


@pytest.mark.distributed
def test_killed_while_it_saves_it_resumes_to_equal_bits_and_every_program_reads_it(place, whole):
    """The server holds back the file that completes the checkpoint of step 60, and the process is killed."""
    address, server = "gs://bucket/runs/killed", place.server
    server.hold(rf"runs/killed/checkpoints/60/{COMMIT}")
    process = place.train(address)
    wait_until(lambda: server.held, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    server.let_go()
    assert server.names("bucket", "runs/killed/checkpoints/60/params/")
    run = location("run_dir", address)
    assert saved_steps(run / "checkpoints") == [30]
    out, err = place.finish(place.train(address))
    assert "resuming at step 30" in out
    assert "ended without releasing gs://bucket/runs/killed: taken over" in err
    assert_equal_to(whole, address)
    assert not [name for name in server.names("bucket", "runs/killed/") if name.endswith("owner.json")]
    for program, flags, wanted in (
        ("draw", [f"--run_dir={address}"], "picture gs://bucket/runs/killed/loss.png"),
        ("goodput", [f"--run_dir={address}"], "in 2 starts"),
        ("evaluate", [f"--checkpoint={address}", "--max_batches=1"], "written to gs://bucket/runs/killed/evaluation-"),
        ("generate", [f"--checkpoint={address}/checkpoints/90", "--prompt=ab", "--tokens=2"], "ab"),
    ):
        assert wanted in place.finish(place.start(program, *flags))[0], program
    assert server.objects["bucket"]["runs/killed/loss.png"].data.startswith(b"\x89PNG")


@pytest.mark.distributed
def test_budgets_of_a_run_in_a_bucket_are_looked_at_and_its_weights_exported(place):
    address, folder = "gs://bucket/runs/budgets", place.folder
    few = "--gin_param=TrainingConfig.steps = 2"
    place.finish(place.start("train", f"--gin_file={folder / 'tiny.gin'}", f"--run_dir={address}", few))
    (folder / "passage.txt").write_text("what was read before should be easy\n")
    (folder / "items.jsonl").write_text('{"context": "ab", "choices": ["c", "de"], "answer": 0}\n')
    given = f"--checkpoint={address}"
    for program, flags, wanted in (
        ("inspect", [f"--text={folder / 'passage.txt'}"], "written to gs://bucket/runs/budgets/inspect-passage.html"),
        ("inspect", ["--copies", "--max_batches=1"], "written to gs://bucket/runs/budgets/copying.json"),
        ("choose", [f"--items={folder / 'items.jsonl'}", f"--output={folder / 'chosen.json'}"], "1 items"),
        ("export", [f"--output={folder / 'weights'}"], f"{folder / 'weights'}"),
    ):
        assert wanted in place.finish(place.start(program, given, *flags))[0], program
    assert b"passage.txt" in place.server.objects["bucket"]["runs/budgets/inspect-passage.html"].data
    assert json.loads((folder / "chosen.json").read_text())["log_probabilities"]
    assert (folder / "weights" / "model.safetensors").is_file()


@pytest.mark.distributed
def test_slow_and_failing_storage_delays_a_run_and_changes_nothing(place, whole):
    address, server = "gs://bucket/runs/slow", place.server
    server.slow_down(0.02)
    server.fail(0.05)
    before = server.failed
    try:
        place.finish(place.train(address))
    finally:
        server.slow_down(0)
        server.fail(0)
    assert server.failed > before + 10
    assert_equal_to(whole, address)


@pytest.mark.distributed
def test_two_processes_write_one_run(place):
    addresses = "gs://bucket/runs/two", str(place.folder / "two")
    for address in addresses:
        port = free_port()
        params = ("MeshConfig.fsdp = 2", "TrainingConfig.steps = 20", "TrainingConfig.checkpoint_every = 10")
        both = [place.train(address, *params, flags=(f"--distributed=127.0.0.1:{port},2,{i}",)) for i in range(2)]
        for process in both:
            place.finish(process)
    found, wanted = (location("run_dir", address) for address in addresses)
    assert read_meta(find_checkpoint(found))["fingerprints"] == read_meta(find_checkpoint(wanted))["fingerprints"]
    assert untimed(found) == untimed(wanted)


@pytest.mark.distributed
def test_one_run_at_a_time_and_compiled_programs_in_the_bucket(place):
    address, server = "gs://bucket/runs/owned", place.server
    cache = {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/compiled", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    first = place.train(address, "TrainingConfig.steps = 100000", **cache)
    wait_until(lambda: server.names("bucket", "runs/owned/checkpoints/30/"), first)
    _, err = place.finish(place.train(address, "TrainingConfig.steps = 100000"), EXIT_IN_USE)
    assert "gs://bucket/runs/owned is in use by process" in err
    first.send_signal(signal.SIGTERM)
    out, _ = place.finish(first, 128 + signal.SIGTERM)
    step = int(re.search(r"stopped by SIGTERM after step (\d+), saved", out)[1])
    run = location("run_dir", address)
    assert saved_steps(run / "checkpoints")[-1] == step
    assert read_metrics(run)[-1]["step"] <= step
    assert server.names("bucket", "compiled/")


@pytest.mark.distributed
def test_data_is_prepared_into_a_bucket_and_trained_from_it(place, whole):
    text = place.folder / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_text(f"document {number} " * 9)
    flags = (f"--text={text}/*.txt", "--name=mine", "--data_dir=gs://bucket/data", "--document_align=8")
    out, _ = place.finish(place.start("prepare", *flags))
    assert "gs://bucket/data/token_stream/mine-bytes-8/" in out
    params = (
        "DataConfig.data_dir = 'gs://bucket/data'",
        "DataConfig.mixture = (('mine', 1.0),)",
        "TrainingConfig.steps = 10",
    )
    other = {"XDG_CACHE_HOME": str(place.folder / "another_machine")}
    out, _ = place.finish(place.train("gs://bucket/runs/data", *params, **other))
    assert "done: 10 steps" in out


@pytest.mark.distributed
def test_no_bucket_and_no_credentials_are_one_line(place):
    refused = {"gs://no-bucket/run": "no such object, or no bucket 'no-bucket'", "s3://bucket/run": OTHER}
    for address, reason in refused.items():
        _, err = place.finish(place.train(address), EXIT_REFUSED)
        assert err.startswith("error: ")
        assert reason in err
        assert err.count("\n") == 1
    with FakeGCS("bucket", denied=True) as denied:
        _, err = place.finish(place.train("gs://bucket/run", **denied.environment), EXIT_REFUSED)
        assert re.fullmatch(
            r"error: gs://bucket/run cannot be a run folder: the storage refuses \(.*\): log in.*\n", err
        )


def test_storage_that_is_away_for_good_ends_a_run_with_the_code_that_is_tried_again():
    """What the launcher makes of an error from anywhere in training."""
    from launch.train import unexpected

    assert unexpected(OSError(5, "unavailable", "gs://bucket/run/x")) == EXIT_NOT_SAVED


def test_every_program_refuses_other_addresses(tmp_path):
    run, checkpoint = "--run_dir=s3://bucket/run", "--checkpoint=s3://bucket/run"
    programs = {
        ("train", (run,)): f"--run_dir = 's3://bucket/run': {OTHER}",
        ("draw", (run,)): f"--run_dir = 's3://bucket/run': {OTHER}",
        ("goodput", (run,)): f"--run_dir = 's3://bucket/run': {OTHER}",
        ("evaluate", (checkpoint,)): f"--checkpoint = 's3://bucket/run': {OTHER}",
        ("choose", (checkpoint, "--items=x")): f"--checkpoint = 's3://bucket/run': {OTHER}",
        ("generate", (checkpoint, "--prompt=http://is.text")): f"--checkpoint = 's3://bucket/run': {OTHER}",
        ("inspect", (checkpoint,)): f"--checkpoint = 's3://bucket/run': {OTHER}",
        ("neurons", (checkpoint,)): f"--checkpoint = 's3://bucket/run': {OTHER}",
        ("export", (checkpoint, "--output=x")): f"--checkpoint = 's3://bucket/run': {OTHER}",
        ("export", ("--checkpoint=x", "--output=gs://bucket/x")): f"--output = 'gs://bucket/x': {HERE}",
        ("harness", (checkpoint, "--tasks=x")): f"--checkpoint = 's3://bucket/run': {OTHER}",
        ("prepare", ("--data_dir=s3://bucket/data",)): f"--data_dir = 's3://bucket/data': {OTHER}",
        ("prepare", ("--tokenizer=gs://bucket/t.model",)): f"--tokenizer = 'gs://bucket/t.model': {HERE}",
        ("ledger", ("--output=gs://bucket/x",)): f"--output = 'gs://bucket/x': {HERE}",
        ("systems", ("--output=gs://bucket/x",)): f"--output = 'gs://bucket/x': {HERE}",
        (
            "compile",
            (
                "--topology=v5e:4x4",
                "--output=gs://bucket/x",
            ),
        ): f"--output = 'gs://bucket/x': {HERE}",
        (
            "config",
            (
                "resolve",
                "--gin_param=DataConfig.data_dir = 'abfs://a/b'",
            ),
        ): f"""--gin_param "DataConfig.data_dir = 'abfs://a/b'": DataConfig.data_dir = 'abfs://a/b': {OTHER}""",
    }
    outcomes = calls_of(list(programs), JAX_PLATFORMS="cpu")
    for call, outcome in zip(programs, outcomes, strict=True):
        assert (outcome.code, outcome.stdout) == (1, ""), (call, outcome)
        assert outcome.stderr == f"error: {programs[call]}\n"


def test_a_cache_of_another_kind_is_refused():
    (outcome,) = calls_of([("config", ())], JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR="s3://bucket/cache")
    assert outcome.stderr == f"error: JAX_COMPILATION_CACHE_DIR = 's3://bucket/cache': {OTHER}\n"
    assert json.dumps(outcome.code) == "1"
