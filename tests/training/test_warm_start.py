"""A run that begins with the parameters of another: they are those, and all else is as in any run."""

import shutil

import jax
import numpy as np
import pytest

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.training.checkpoints import CheckpointError, load_checkpoint
from aamoe_jax.training.goodput import Stopwatch
from aamoe_jax.training.loop import set_up, train
from aamoe_jax.training.resume import warm_started
from tests.training.helpers import experiment, model_config, replace, tiny_data


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataConfig:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def source(data, tmp_path_factory):
    """A run folder with a checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("runs") / "source"
    train(experiment(data, steps=4), folder)
    return folder


def test_it_begins_with_the_parameters_and_nothing_else(data, source):
    config = experiment(data, init_from=str(source))
    setup = set_up(config, Stopwatch())
    fresh = setup.begin()
    found = warm_started(fresh, setup.like, config, setup.datasets)
    jax.tree.map(np.testing.assert_array_equal, found.params, load_checkpoint(source).params)
    same = jax.tree.map(lambda x, y: bool((x == y).all()), found.params, setup.begin().params)
    assert not all(jax.tree.leaves(same))
    assert int(found.step) == 0
    jax.tree.map(np.testing.assert_array_equal, found.optimizer, setup.begin().optimizer)


def test_it_learns_on_from_where_the_other_stopped(data, source, tmp_path, capfd):
    """After two steps it is ahead of a run with random parameters."""
    warm = experiment(data, steps=2, init_from=str(source))
    result = train(warm, tmp_path / "warm")
    cold = train(replace(warm, "training", init_from=None), tmp_path / "cold")
    assert f"starting with the parameters of {source}: " in capfd.readouterr().out
    assert result.validation_loss < cold.validation_loss
    assert load_checkpoint(tmp_path / "warm").config.training.init_from == str(source)


def test_a_resumed_run_needs_the_other_no_more(data, source, tmp_path):
    """The checkpoint of its own comes first: the other may be gone."""
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    config = experiment(data, steps=8, init_from=str(copy))
    whole = train(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "8")
    shutil.rmtree(copy)
    assert train(config, tmp_path / "half").validation_loss == whole.validation_loss


def test_another_model_another_tokenizer_and_nothing_are_refused(data, source, tmp_path):
    other = experiment(data, model_config("parallel", num_layers=1, d_ff=48), init_from=str(source))
    with pytest.raises(CheckpointError, match=r"init_from = .*does not fit the model: .* another model"):
        train(other, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"TrainingConfig.init_from = .*there is no checkpoint in"):
        train(experiment(data, init_from=str(tmp_path / "nothing")), tmp_path / "run")
    config = experiment(data, init_from=str(source))
    setup = set_up(config, Stopwatch())
    foreign = {name: dict(held, tokenizer_digest="another") for name, held in setup.datasets.items()}
    with pytest.raises(ConfigError, match=r"init_from = .*it was trained with another tokenizer"):
        warm_started(setup.begin(), setup.like, config, foreign)
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_path_is_of_the_experiment(data, source, tmp_path):
    """A run that began elsewhere is another run."""
    train(experiment(data, steps=4), tmp_path / "run")
    config = experiment(data, steps=4, init_from=str(source))
    with pytest.raises(ConfigError, match=r"TrainingConfig.init_from: None -> "):
        train(config, tmp_path / "run")
