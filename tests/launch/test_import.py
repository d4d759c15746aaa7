"""A user's own mixer, from training to sampling: --import, gin's import, and what a checkpoint remembers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aamoe_jax.config import ExperimentConfig
from experiments.binding import operative_gin
from tests.launch.session import calls
from tests.training.helpers import experiment, model_config, tiny_data

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "my_mixer.py"
PATTERN = "ModelConfig.pattern = ('moving_average',)"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder beside `mine/my_mixer.py`, whose gin file imports it."""
    folder = tmp_path_factory.mktemp("run")
    config: ExperimentConfig = experiment(
        tiny_data(folder / "data"),
        model_config("feed_forward", num_layers=1),
        steps=2,
        checkpoint_every=2,
        eval_every=0,
    )
    (folder / "mine").mkdir()
    shutil.copy(EXAMPLE, folder / "mine" / "my_mixer.py")
    (folder / "mine" / "run.gin").write_text(
        f"{operative_gin(config)}\nimport my_mixer\n{PATTERN}\nMovingAverageConfig.half_life = 2.0\n"
    )
    done = launch("train", folder, "--gin_file=mine/run.gin", "--run_dir=out")
    assert done.returncode == 0, done.stderr
    return folder


def launch(program: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program, from another folder than the repository's."""
    command = [sys.executable, "-m", f"launch.{program}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_it_is_evaluated_and_sampled_from_without_being_named(run, tmp_path):
    done = launch("evaluate", tmp_path, f"--checkpoint={run / 'out'}", "--max_batches=1")
    assert done.returncode == 0, done.stderr
    assert "bits/byte" in done.stdout
    done = launch("generate", run, "--checkpoint=out", "--prompt=abc", "--tokens=3", "--temperature=0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("abc")


def test_the_run_folder_says_what_it_was(run):
    text = (run / "out" / "config.gin").read_text()
    assert text.startswith("import my_mixer\n")
    assert "MovingAverageConfig.half_life = 2.0\n" in text


def test_a_file_that_is_gone_is_named_and_can_be_given_anew(run, tmp_path):
    elsewhere = tmp_path / "moved.py"
    (run / "mine" / "my_mixer.py").rename(elsewhere)
    try:
        done = launch("generate", run, "--checkpoint=out", "--prompt=abc", "--tokens=1")
        assert done.returncode == 1
        assert "was trained with --import=my_mixer, which is not to be found from " in done.stderr
        assert done.stderr.endswith("run from the folder that has it, or pass --import=PATH\n")
        again = launch("generate", run, "--checkpoint=out", f"--import={elsewhere}", "--prompt=abc", "--tokens=1")
        assert again.returncode == 0, again.stderr
    finally:
        elsewhere.rename(run / "mine" / "my_mixer.py")


def test_it_is_shown_by_the_config_and_in_the_ledger(tmp_path):
    shown = launch("config", tmp_path, f"--import={EXAMPLE}", "show", "moving_average", "half_life")
    assert "moving_average: an exponential moving average of earlier tokens" in shown.stdout
    assert "half_life: float = 4.0" in shown.stdout
    (ledger,) = calls("ledger", [[f"--import={EXAMPLE}", f"--gin_param={PATTERN}", "--length=64"]])
    assert ledger.code == 0, ledger.stderr
    (line,) = [line for line in ledger.stdout.splitlines() if line.startswith("| moving_average ")]
    assert [cell.strip() for cell in line.split("|")][4] == "-"
