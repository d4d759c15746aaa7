"""Local checkpoints: a run goes on from the newest that is whole, to the same bits."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.training import local_tier
from aamoe_jax.training.checkpoints import find_checkpoint, read_meta, saved_steps
from aamoe_jax.training.loop import train
from tests.training.helpers import cut_off, experiment, tiny_data, untimed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run without local checkpoints."""
    run_dir = tmp_path_factory.mktemp("whole")
    train(experiment(data), run_dir)
    return run_dir


def tiered(data, folder, **training):
    return experiment(data, local_dir=str(folder), local_every=1, **training)


def local_steps(folder) -> list[int]:
    (run,) = folder.iterdir()
    return saved_steps(run / "0")


def assert_equal(run_dir, whole):
    one, other = (read_meta(find_checkpoint(path))["fingerprints"] for path in (run_dir, whole))
    assert one == other
    assert untimed(run_dir) == untimed(whole)


@pytest.mark.parametrize("step", [3, 7])  # before and after the first checkpoint of the run folder
def test_it_goes_on_from_the_newest_and_leaves_nothing(data, whole, tmp_path, step, capfd):
    local, run = tmp_path / "local", tmp_path / "run"
    config = tiered(data, local)
    cut_off(config, run, step)
    assert local_steps(local)[-1] == step - 1
    assert len(local_steps(local)) <= local_tier.KEPT + 1
    train(config, run)
    assert f"resuming at step {step - 1}" in capfd.readouterr().out
    assert_equal(run, whole)
    assert list(local.iterdir()) == []


def test_what_is_damaged_is_passed_over(data, whole, tmp_path, capfd):
    local, run = tmp_path / "local", tmp_path / "run"
    config = tiered(data, local)
    cut_off(config, run, 8)
    newest = next(local.iterdir()) / "0" / "7"
    content = bytearray((newest / local_tier.PARTS).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / local_tier.PARTS).write_bytes(content)
    train(config, run)
    said = capfd.readouterr()
    assert "7 is damaged" in said.err
    assert "could be written" not in said.err  # step 7 is made again
    assert "resuming at step 6" in said.out
    assert_equal(run, whole)


def test_an_empty_file_is_no_checkpoint(data, tmp_path, capfd):
    """As a machine that lost its power may leave it."""
    local, run = tmp_path / "local", tmp_path / "run"
    config = tiered(data, local)
    cut_off(config, run, 8)
    (next(local.iterdir()) / "0" / "7" / local_tier.PARTS).write_bytes(b"")
    train(config, run)
    assert "resuming at step 6" in capfd.readouterr().out


def test_a_copy_of_a_run_folder_does_not_touch_those_of_the_original(data, tmp_path, capfd):
    local, run = tmp_path / "local", tmp_path / "run"
    config = tiered(data, local)
    cut_off(config, run, 8)
    (original,) = local.iterdir()
    shutil.copytree(run, tmp_path / "copy")
    train(config, tmp_path / "copy")
    assert "resuming at step 4" in capfd.readouterr().out
    assert saved_steps(original / "0")[-1] == 7


def test_without_the_machine_the_run_folder_is_used(data, whole, tmp_path, capfd):
    config = tiered(data, tmp_path / "local")
    cut_off(config, tmp_path / "run", 7)
    shutil.rmtree(tmp_path / "local")
    train(config, tmp_path / "run")
    assert "resuming at step 4" in capfd.readouterr().out
    assert_equal(tmp_path / "run", whole)


def test_a_missing_part_is_told(data, whole, tmp_path, capfd):
    local = tmp_path / "local"
    config = tiered(data, local)
    cut_off(config, tmp_path / "run", 3)
    for file in local.rglob(local_tier.PARTS):
        with np.load(file) as parts:
            names = sorted(parts)[1:]
            np.savez(file, **{name: parts[name] for name in names})
    train(config, tmp_path / "run")
    said = capfd.readouterr()
    assert "parts of the local checkpoint of step 2 are missing" in said.err
    assert "resuming" not in said.out
    assert_equal(tmp_path / "run", whole)


def test_another_run_in_the_same_folder_is_another(data, whole, tmp_path, capfd):
    local, run = tmp_path / "local", tmp_path / "run"
    config = tiered(data, local)
    cut_off(config, run, 3)
    shutil.rmtree(run)
    train(config, run)
    assert "resuming" not in capfd.readouterr().out
    assert_equal(run, whole)


def test_a_failing_disk_is_a_warning(data, whole, tmp_path, monkeypatch, capfd):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_tier.np, "savez", full)
    train(tiered(data, tmp_path / "local"), tmp_path / "run")
    assert "no local checkpoint could be written to" in capfd.readouterr().err
    assert_equal(tmp_path / "run", whole)


def test_a_folder_that_cannot_be_is_refused(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"TrainingConfig.local_dir: .*file.* cannot be made: "):
        train(tiered(data, tmp_path / "file"), tmp_path / "run")
