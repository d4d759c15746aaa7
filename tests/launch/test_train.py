"""`python -m launch.train` as people run it: stopped, killed, refused, out of room; always the same bits."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from aamoe_jax.config import DataConfig
from aamoe_jax.training.checkpoints import (
    _restore,
    find_checkpoint,
    fingerprints,
    load_checkpoint,
    read_meta,
    saved_steps,
)
from aamoe_jax.training.distributed import EXIT_LOST
from aamoe_jax.training.metrics import FILE, read_metrics
from experiments.binding import load_experiment
from launch.cluster import exits
from launch.train import EXIT_DIVERGED, EXIT_IN_USE, EXIT_NOT_SAVED, EXIT_REFUSED, EXIT_SIGNAL, EXIT_UNEXPECTED
from tests.training.helpers import assert_same_bits, tiny_data, untimed

pytestmark = pytest.mark.slow

STEPS = 120
GIN = """
ModelConfig:
    d_model = 32
    num_heads = 2
    num_layers = 1
    d_ff = 32
AAMoEConfig.chunk_size = 8
AAMoEConfig.num_experts = 4
BudgetConfig.beta = 2.0
DataConfig:
    mixture = (('tiny', 1.0),)
    seq_len = 64
    document_align = 8
TrainingConfig:
    steps = 120
    batch_size = 4
    log_every = 4
    eval_every = 30
    eval_batches = 2
    checkpoint_every = 30
"""
DENSE = "ModelConfig.pattern = ('parallel',)"


class Workplace:
    """A folder with a dataset and a gin file, where the program is run."""

    def __init__(self, folder: Path):
        self.folder, self.data = folder, tiny_data(folder / "data")
        (folder / "tiny.gin").write_text(GIN + f"DataConfig.data_dir = {self.data.data_dir!r}\n")

    def start(self, name: str, *params: str, flags: tuple[str, ...] = (), limit: int | None = None) -> subprocess.Popen:
        """Starts a run; with `limit`, none of its files can grow beyond that many bytes."""
        command = [sys.executable, "-m", "launch.train", "--gin_file", str(self.folder / "tiny.gin")]
        command += ["--run_dir", str(self.folder / name), *flags, *(f"--gin_param={param}" for param in params)]
        environment = dict(os.environ)
        if limit is None:  # a file of the cache could not grow either
            cache = str(self.folder / "cache")
            environment |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        if limit is not None:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        return process

    def run(self, name: str, *params: str, **options) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a run."""
        process = self.start(name, *params, **options)
        out, err = process.communicate(timeout=240)
        return process.returncode, out, err


def wait_for(process: subprocess.Popen, condition, seconds: float = 120) -> None:
    """Until the condition holds; fails when the process ends before it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def logged_steps(run_dir: Path) -> int:
    """The last step in the log of a run that may be writing it."""
    return max((record["step"] for record in read_metrics(run_dir)), default=0)


def last_state(run_dir: Path) -> dict[str, Any]:
    """Everything that the last checkpoint holds of the state."""
    directory = find_checkpoint(run_dir)
    arrays = {item: _restore(directory, item) for item in ("params", "optimizer")}
    meta = read_meta(directory)
    assert fingerprints(arrays) == meta["fingerprints"]
    return arrays | {"rest": [np.asarray(meta["key"]), np.asarray(meta["step"]), np.asarray(meta["data"]["next_step"])]}


def assert_equal_runs(left: Path, right: Path) -> None:
    """The same parameters, optimizer state, key and log, to the last bit."""
    assert_same_bits(last_state(left), last_state(right))
    assert untimed(left) == untimed(right)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Workplace:
    """One dataset for all tests."""
    return Workplace(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """A run that nothing disturbed."""
    code, out, err = place.run("whole")
    assert code == 0, err
    assert out.splitlines()[-1].startswith(f"done: {STEPS} steps, {STEPS * 4 * 64:,} tokens, loss ")
    assert "validation on tiny: loss" in out
    assert "waiting for data" in out
    return place.folder / "whole"


class TestResume:
    def test_stopped_killed_and_gone_on_each_time_in_a_new_process(self, place, whole):
        parts = place.folder / "parts"
        process = place.start("parts")
        wait_for(process, lambda: logged_steps(parts) >= 12)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 143, err
        (step,) = saved_steps(parts / "checkpoints")[-1:]
        assert 12 <= step < STEPS
        assert f"stopped by SIGTERM after step {step}, saved; the same command goes on from there" in out

        process = place.start("parts")
        wait_for(process, lambda: logged_steps(parts) >= step + 12)
        process.kill()
        out, _ = process.communicate()
        assert f"resuming at step {step}" in out
        assert STEPS not in saved_steps(parts / "checkpoints")

        code, out, err = place.run("parts")
        assert code == 0, err
        assert "resuming at step" in out
        assert_equal_runs(parts, whole)

    def test_a_damaged_checkpoint_falls_back_to_the_one_before(self, place, whole):
        copy = place.folder / "damaged"
        shutil.copytree(whole, copy)
        for path in (copy / "checkpoints" / "120" / "params").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        code, out, err = place.run("damaged")
        assert code == 0, err
        assert "resuming at step 90" in out
        assert "checkpoints/120 is damaged" in err
        assert len(err.splitlines()) == 1
        assert_equal_runs(copy, whole)

    def test_a_changed_config_is_refused_with_what_changed(self, place, whole):
        before = {path: path.read_bytes() for path in whole.iterdir() if path.is_file()}
        code, out, err = place.run("whole", "OptimizerConfig.learning_rate = 1e-3", "TrainingConfig.steps = 50")
        assert code == 1
        assert out == ""
        assert "TrainingConfig.steps: 120 -> 50" in err
        assert "OptimizerConfig.learning_rate: 0.003 -> 0.001" in err
        assert "Traceback" not in err
        assert {path: path.read_bytes() for path in before} == before

    def test_the_run_folder_says_what_was_run(self, place, whole):
        config = load_experiment([str(whole / "config.gin")])
        assert config == load_experiment([str(place.folder / "tiny.gin")])
        checkpoint = load_checkpoint(whole)
        assert (checkpoint.config, checkpoint.step) == (config, STEPS)
        assert checkpoint.metadata["datasets"]["tiny"]["corpus_digest"]
        assert len(saved_steps(whole / "checkpoints")) in (2, 3)  # the last two, and the best
        assert (whole / FILE).read_text().count("\n") == len(untimed(whole))


def test_every_step_that_is_logged_says_how_attention_was_divided(whole):
    """Though other steps do not compute it."""
    records = [record for record in read_metrics(whole) if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, *range(4, STEPS + 1, 4)]
    for record in records:
        shares = [record["layers"][f"mass_{kind}"] for kind in ("local", "context", "expert")]
        np.testing.assert_allclose(np.sum(shares, 0), 1.0, rtol=1e-5)


class TestOwner:
    def test_a_second_run_in_the_folder_is_refused_and_the_first_is_as_it_would_be(self, place, whole):
        folder = place.folder / "twice"
        process = place.start("twice")
        wait_for(process, lambda: logged_steps(folder) >= 12)
        process.send_signal(signal.SIGSTOP)  # alive, though it gives no sign of life
        code, out, err = place.run("twice")
        process.send_signal(signal.SIGCONT)
        assert code == EXIT_IN_USE
        assert out == ""
        assert (
            err
            == f"error: {folder} is in use by process {process.pid} on {socket.gethostname()}, which is alive: "
            + ("stop it, or take another run folder\n")
        )
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert_equal_runs(folder, whole)
        assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())


class TestInterrupt:
    def test_while_it_compiles_there_is_nothing_to_save(self, place):
        process = place.start("compiling", "ModelConfig.num_layers = 3")
        assert process.stdout.readline().startswith("starting: ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert err == "\nSIGINT: stopping after the step in flight; a second one ends it now\n"
        assert out == "stopped by SIGINT before the first step: nothing to save; the same command starts again\n"
        left = {path.name for path in (place.folder / "compiling").iterdir()}
        assert left == {"attempts.jsonl", "config.json", "config.gin", "metrics.jsonl", "checkpoints"}

    def test_a_second_one_ends_it_in_one_line(self, place):
        folder = place.folder / "again"
        process = place.start("again", "TrainingConfig.steps = 100000")
        wait_for(process, lambda: logged_steps(folder) >= 4)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert process.stderr.readline() == "SIGINT: stopping after the step in flight; a second one ends it now\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "Traceback" not in err


class TestFailures:
    def test_an_unexpected_error_has_a_traceback_and_a_code_of_its_own(self, place):
        code = "import launch.train as program\n\ndef fails():\n    raise RuntimeError({!r})\n\n"
        code += "program.run_training = fails\nprogram.define_flags()\nprogram.run(program.main)\n"

        def ends(text: str) -> tuple[int, str]:
            command = [sys.executable, "-c", code.format(text), f"--run_dir={place.folder / 'unexpected'}"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=120)
            return result.returncode, result.stderr

        found, err = ends("INTERNAL: of the runtime")
        assert found == EXIT_UNEXPECTED
        assert "RuntimeError: INTERNAL: of the runtime" in err
        assert err.endswith("error: unexpected, see above; what was saved is as it was\n")
        found, err = ends("RESOURCE_EXHAUSTED: of the runtime")
        assert found == EXIT_REFUSED
        assert err.startswith("error: out of memory (RESOURCE_EXHAUSTED: of the runtime): lower TrainingConfig.batch")
        assert len(err.splitlines()) == 1

    @pytest.mark.parametrize("path", ["tiny.gin", "tiny.gin/run", "/proc/run"])
    def test_a_path_that_can_be_no_run_folder_is_refused(self, place, path):
        code, _, err = place.run(path)
        assert code == EXIT_REFUSED
        assert "cannot be a run folder" in err
        assert len(err.splitlines()) == 1

    def test_a_folder_that_lost_its_checkpoints_does_not_begin_again_unasked(self, place, whole):
        folder = place.folder / "lost"
        shutil.copytree(whole, folder)
        shutil.rmtree(folder / "checkpoints")
        before = (folder / FILE).read_bytes()
        code, _, err = place.run("lost")
        assert code == 1
        assert "but no checkpoint to resume from: put the checkpoints back" in err
        assert (folder / FILE).read_bytes() == before
        code, out, err = place.run("lost", "TrainingConfig.steps = 1", flags=["--allow_restart"])
        assert code == 0, err
        assert "starting:" in out

    def test_no_room_for_a_checkpoint(self, place):
        code, _, err = place.run("full", DENSE, limit=20_000)
        assert code == 4, err
        assert "the checkpoint of step 30 could not be written" in err
        assert "Traceback" not in err
        assert list((place.folder / "full" / "checkpoints").iterdir()) == []

    def test_a_loss_that_is_not_finite(self, place):
        """The first update leaves parameters that are finite, and whose activations are not."""
        run_dir = place.folder / "diverged"
        params = ("OptimizerConfig.learning_rate = 3e38", "OptimizerConfig.warmup_steps = 0")
        code, _, err = place.run("diverged", DENSE, *params, "TrainingConfig.checkpoint_every = 1")
        assert code == 3
        assert "error: step 2, on batch 1: the sum of losses is nan" in err
        assert f"the last good checkpoint is {run_dir / 'checkpoints' / '1'}" in err
        assert "Traceback" not in err
        checkpoint = load_checkpoint(run_dir)
        assert checkpoint.step == 1
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(checkpoint.params))

    def test_losses_that_stay_not_finite_are_not_skipped_for_ever(self, place):
        params = ("OptimizerConfig.learning_rate = 3e38", "OptimizerConfig.warmup_steps = 0")
        code, out, err = place.run("skipped", DENSE, *params, "TrainingConfig.nonfinite = 'skip'")
        assert code == 3
        assert [f"step {step} skipped: on batch {step - 1}" in out for step in (1, 2, 10, 11)] == [
            False,
            True,
            True,
            False,
        ]
        assert "error: step 11, on batch 10: the sum of losses is nan" in err
        assert "the 10th step in a row; nothing was saved" in err

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--run_dir=x", "--profile=5"], "error: --profile='5': must be START:STOP"),
            (["--run_dir=x", "--distributed=host:1,2"], "error: --distributed='host:1,2': must be auto, or HOST:PORT"),
            ([], "--run_dir"),
        ],
    )
    def test_mistakes_on_the_command_line(self, tmp_path, arguments, complaint):
        command = [sys.executable, "-m", "launch.train", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 1
        assert complaint in result.stderr + result.stdout
        assert "Traceback" not in result.stderr


def test_exit_codes_are_those_of_the_table_that_launchers_follow():
    stopped = [EXIT_SIGNAL + number for number in (signal.SIGTERM, signal.SIGINT)]
    assert [EXIT_LOST, *stopped] == [exits.LOST, exits.PREEMPTED, exits.STOPPED]
    for code in (EXIT_REFUSED, EXIT_DIVERGED, EXIT_NOT_SAVED, EXIT_IN_USE, EXIT_UNEXPECTED):
        assert exits.lookup(code).meaning != "not in the table"


def test_the_data_of_this_test_is_what_the_gin_file_says(place):
    assert DataConfig(**vars(place.data)) == load_experiment([str(place.folder / "tiny.gin")]).data
