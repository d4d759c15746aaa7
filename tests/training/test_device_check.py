"""A step computed twice, and processes that are slow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from aamoe_jax.training import loop
from aamoe_jax.training.checkpoints import find_checkpoint, read_meta, saved_steps
from aamoe_jax.training.device_check import Speed, WrongBitsError, speeds, stragglers
from aamoe_jax.training.loop import train
from tests.training.helpers import experiment, tiny_data, untimed


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return experiment(tiny_data(tmp_path_factory.mktemp("data")))


def checked(config, every: int):
    return experiment(config.data, check_every=every)


def test_it_changes_nothing(config, tmp_path, capfd):
    train(config, tmp_path / "plain")
    train(checked(config, 3), tmp_path / "checked")
    one, other = (read_meta(find_checkpoint(tmp_path / name))["fingerprints"] for name in ("plain", "checked"))
    assert one == other
    assert untimed(tmp_path / "plain") == untimed(tmp_path / "checked")
    lines = [line for line in capfd.readouterr().out.splitlines() if "computed twice: equal" in line]
    assert [line.split(" computed")[0] for line in lines] == ["step 3", "step 6", "step 8"]


def test_a_bit_that_differs_ends_the_run_with_nothing_saved_of_it(config, tmp_path, monkeypatch):
    calls = []
    compile_step = loop.compile_step

    def with_a_bad_device(*args):
        step = compile_step(*args)

        def bad(state, batch):
            after, metrics = step(state, batch)
            calls.append(int(after.step))
            if calls.count(6) != 2:
                return after, metrics
            with jax.transfer_guard("allow"):
                return after._replace(params=jax.tree.map(lambda leaf: leaf + 1e-6, after.params)), metrics

        return bad

    monkeypatch.setattr(loop, "compile_step", with_a_bad_device)
    with pytest.raises(
        WrongBitsError, match=r"the step to 6 gave different bits when .* in \d+ of \d+ arrays, such as para"
    ):
        train(checked(config, 2), tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [4]


def test_a_slow_process_is_named():
    times = [Speed("a", 0.010), Speed("b", 0.011), Speed("c", 0.016), Speed("d", 0.0105)]
    assert stragglers(times) == [
        "process 2 on c takes 1.5 times as long as the median of 4 processes: 16.0 ms against 10.8 ms"
    ]
    assert stragglers(times[:2]) == []


def test_speeds_are_of_all_processes():
    (speed,) = speeds()
    assert speed.seconds > 0
    assert jnp.isfinite(speed.seconds)
