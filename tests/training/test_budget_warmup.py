"""Budgets that are larger in the first steps of training."""

from __future__ import annotations

import dataclasses

import pytest

from aamoe_jax.config import BudgetConfig, ConfigError
from aamoe_jax.training.checkpoints import find_checkpoint, read_meta
from aamoe_jax.training.loop import train
from aamoe_jax.training.metrics import read_metrics
from tests.training.helpers import cut_off, experiment, model_config, tiny_data, untimed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data(tmp_path_factory.mktemp("data"))


def warmed_up(data, steps: int, scale: float = 2.0, beta: float = 2.0, **training):
    model = model_config()
    budget = dataclasses.replace(model.aamoe.budget, beta=beta, warmup_steps=steps, warmup_scale=scale)
    model = dataclasses.replace(model, aamoe=dataclasses.replace(model.aamoe, budget=budget))
    return experiment(data, model, checkpoint_every=3, eval_every=0, **({"steps": 6} | training))


def fingerprints(run_dir, step: int) -> dict[str, int]:
    return read_meta(find_checkpoint(run_dir / "checkpoints" / str(step)))["fingerprints"]


def test_its_steps_are_those_of_larger_budgets_and_the_others_are_not(data, tmp_path):
    train(warmed_up(data, 3), tmp_path / "warmed")
    train(warmed_up(data, 0, beta=4.0), tmp_path / "large")
    assert fingerprints(tmp_path / "warmed", 3) == fingerprints(tmp_path / "large", 3)
    assert fingerprints(tmp_path / "warmed", 6) != fingerprints(tmp_path / "large", 6)
    spent = [record["layers"]["spent"][0] for record in read_metrics(tmp_path / "warmed") if record["kind"] == "train"]
    assert min(spent[:3]) > 1.3 * max(spent[3:])


@pytest.mark.parametrize("stop", [3, 4])
def test_it_resumes_to_the_same_bits(data, tmp_path, stop):
    config = warmed_up(data, 3)
    train(config, tmp_path / "whole")
    cut_off(config, tmp_path / "resumed", stop + 1)
    train(config, tmp_path / "resumed")
    assert fingerprints(tmp_path / "resumed", 6) == fingerprints(tmp_path / "whole", 6)
    assert untimed(tmp_path / "resumed") == untimed(tmp_path / "whole")


def test_every_layer_is_scaled():
    budget = BudgetConfig(beta=(1.0, 3.0), warmup_steps=2, warmup_scale=4.0)
    assert budget.at_step(2).beta == (4.0, 12.0)
    assert budget.at_step(3) is budget


@pytest.mark.parametrize(("field", "value"), [("warmup_steps", -1), ("warmup_scale", 0.5)])
def test_what_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"BudgetConfig.{field} = {value}: must be"):
        BudgetConfig(**{field: value})
