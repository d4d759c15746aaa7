"""The benchmark of training steps: it trains, gives every stack its own figures, and its ratios are of rounds."""

import dataclasses

import jax
import pytest

from aamoe_jax.training.loop import train
from aamoe_jax.training.metrics import read_metrics
from benchmarks import steps
from experiments.matching import active_flops, parameters
from tests.experiments.test_local_context import tiny_experiment

pytestmark = pytest.mark.slow


def test_a_call_is_a_step_of_training(tmp_path):
    config = tiny_experiment(tmp_path)
    train(config, tmp_path / "run")
    wanted = [record for record in read_metrics(tmp_path / "run") if record["kind"] == "train"]
    training = steps.Training(config)
    found = {index + 1: training() for index in range(wanted[-1]["step"])}
    for record in wanted:
        metrics = jax.device_get(found[record["step"]])
        assert metrics["nll"] / metrics["count"] == pytest.approx(record["loss"], rel=1e-6)


def test_every_stack_has_its_own_figures(tmp_path):
    config = tiny_experiment(tmp_path)
    wide = dataclasses.replace(config, model=dataclasses.replace(config.model, d_model=2 * config.model.d_model))
    found = steps.measured({"narrow": config, "wide": wide}, 2)
    for name, of in {"narrow": config, "wide": wide}.items():
        assert found[name]["parameters"] == parameters(of)
        assert found[name]["flops_per_token"] == active_flops(of, config.data.seq_len)
        assert len(found[name]["seconds"]) == 2
    assert found["wide"]["compiled_bytes"] > found["narrow"]["compiled_bytes"]


def test_ratios_are_those_of_rounds():
    """The machine is ten times slower in the second round, for both."""
    about = {"parameters": 2e6, "flops_per_token": 1e6, "tokens": 1000, "compiled_bytes": 2**21, "compile_seconds": 1.0}
    stacks = {"a": about | {"seconds": [1.0, 10.0, 2.0]}, "b": about | {"seconds": [0.5, 5.0, 3.0]}}
    machine = {"device": "x", "cores": 1, "versions": {"jax": "0"}}
    record = {"machine": machine, "command": "c", "rounds": 3, "product_gflops_per_second": 7.0, "stacks": stacks}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in steps.report(record).splitlines()]
    (row,) = (line for line in lines if line[:1] == ["b"])
    assert row == ["b", "2.00", "1.00", "3000", "0.50", "333", "1", "2", "1"]
