"""A run that is given more steps: it is the run that had them from the start, or it is refused."""

import shutil

import pytest

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.training.checkpoints import load_checkpoint
from aamoe_jax.training.loop import train
from aamoe_jax.training.resume import refuse_other_schedule
from tests.training.helpers import assert_same_bits, experiment, replace, tiny_data, untimed

CONSTANT = {"schedule": "wsd", "decay_fraction": 0.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    return tiny_data(tmp_path_factory.mktemp("data"))


def assert_same_run(left, right):
    """The same state, the optimizer's too, and the same records of training."""
    first, second = load_checkpoint(left), load_checkpoint(right)
    assert_same_bits(first.params, second.params)
    assert first.metadata["fingerprints"] == second.metadata["fingerprints"]
    assert [record for record in untimed(left) if record["kind"] == "train"] == [
        record for record in untimed(right) if record["kind"] == "train"
    ]


def test_a_finished_run_of_a_constant_schedule_goes_on(data, tmp_path):
    more = replace(experiment(data, steps=7), "optimizer", **CONSTANT)
    train(more, tmp_path / "whole")
    train(replace(more, "training", steps=3), tmp_path / "extended")
    assert train(more, tmp_path / "extended").step == 7
    assert_same_run(tmp_path / "extended", tmp_path / "whole")


def test_one_that_has_not_begun_to_decay_goes_on(data, tmp_path):
    """Of 8 steps, the last 4 decay: from the checkpoint of step 4 it is a run of 10, whose last 5 decay."""
    short = replace(experiment(data, steps=8), "optimizer", schedule="wsd", decay_fraction=0.5)
    more = replace(short, "training", steps=10)
    train(more, tmp_path / "whole")
    train(short, tmp_path / "extended")
    with pytest.raises(ConfigError, match=r"steps = 10: .* has made 8, and with 10 step 5 would have .*'wsd'"):
        train(more, tmp_path / "extended")
    shutil.rmtree(tmp_path / "extended" / "checkpoints" / "8")
    assert train(more, tmp_path / "extended").step == 10
    assert_same_run(tmp_path / "extended", tmp_path / "whole")


def test_schedules_that_differ_are_refused_with_what_to_do(data):
    cosine = experiment(data).optimizer  # two steps of warm-up
    refuse_other_schedule(2, 8, 16, cosine)
    with pytest.raises(
        ConfigError, match=r"step 3 would have .*with TrainingConfig.init_from.*after step 2 are removed"
    ):
        refuse_other_schedule(3, 8, 16, cosine)
    constant = replace(experiment(data), "optimizer", **CONSTANT).optimizer
    with pytest.raises(ConfigError, match=r"TrainingConfig.steps = 6: the run folder holds step 8; take at least as"):
        refuse_other_schedule(8, 8, 6, constant)
