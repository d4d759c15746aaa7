"""Where the time of a run went: the parts add up, over starts that ended, were killed, or were made again."""

from __future__ import annotations

import contextlib
import json
import time

import psutil
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.training import goodput as module
from aamoe_jax.training.goodput import FILE, PHASES, Attempts, Stopwatch, goodput, read_attempts
from aamoe_jax.training.loop import train
from tests.training.helpers import experiment, tiny_data


class TestStopwatch:
    def test_every_second_belongs_to_one_phase(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
        stopwatch = Stopwatch()
        now[0] += 1
        with stopwatch.during("train"):
            now[0] += 2
            with stopwatch.during("evaluate"):
                now[0] += 4
                with stopwatch.during("compile"):
                    now[0] += 8
            with contextlib.suppress(ZeroDivisionError), stopwatch.during("save"):
                now[0] += 16
                raise ZeroDivisionError
        now[0] += 32
        expected = {"startup": 33, "train": 2, "evaluate": 4, "compile": 8, "save": 16}
        assert stopwatch.read() == {phase: pytest.approx(expected.get(phase, 0.0), abs=0.01) for phase in PHASES}

    def test_the_whole_process(self):
        alive = time.time() - psutil.Process().create_time()
        assert Stopwatch(whole_process=True).read()["startup"] == pytest.approx(alive, abs=5)
        assert Stopwatch().read()["startup"] < 5


def attempt(began: float, steps: tuple[int, int], ended: str | None = "finished", **seconds: float) -> dict:
    until = began + sum(seconds.values())
    return {
        "began": began,
        "until": until,
        "from_step": steps[0],
        "to_step": steps[1],
        "ended": ended,
        "seconds": seconds,
    }


class TestGoodput:
    def test_steps_that_were_lost_are_no_goodput(self, tmp_path):
        attempts = [
            attempt(100.0, (0, 50), None, startup=10.0, compile=20.0, train=50.0),  # until 180
            attempt(200.0, (40, 40), "StoppedEarly", startup=10.0),  # until 210
            attempt(215.0, (40, 60), "SIGTERM", startup=10.0, restore=5.0, train=20.0, save=1.0),  # until 251
            attempt(260.0, (60, 80), startup=10.0, train=20.0, data=4.0),  # until 294
        ]
        (tmp_path / FILE).write_text("".join(json.dumps(one) + "\n" for one in attempts))
        found = goodput(tmp_path)
        assert (found.wall, found.starts) == (194.0, 4)
        parts = {"train": 80.0, "repeated": 10.0, "down": 34.0, "startup": 40.0, "compile": 20.0, "restore": 5.0}
        assert found.parts == pytest.approx({**dict.fromkeys(found.parts, 0.0), **parts, "save": 1.0, "data": 4.0})
        assert sum(found.parts.values()) == pytest.approx(found.wall)
        assert found.share == pytest.approx(80 / 194)
        assert str(found).startswith("goodput 41.2% of 194 s in 4 starts (startup 20.6%, restore 2.6%, compile 10.3%")

    def test_no_record(self, tmp_path):
        with pytest.raises(ConfigError, match=r"has no attempts\.jsonl"):
            goodput(tmp_path)


class TestAttempts:
    def test_each_start_has_a_line(self, tmp_path, monkeypatch):
        stopwatch = Stopwatch()
        with Attempts(tmp_path, stopwatch):
            pass
        assert read_attempts(tmp_path) == []
        with Attempts(tmp_path, stopwatch) as one:
            one.begin(0)
            one.update(7)
            assert [(line["to_step"], line["ended"]) for line in read_attempts(tmp_path)] == [(7, None)]
            one.update(8, at_once=False)
            assert read_attempts(tmp_path)[0]["to_step"] == 7
            monkeypatch.setattr(module, "UPDATE_SECONDS", 0.0)
            one.update(9, at_once=False)
            assert read_attempts(tmp_path)[0]["to_step"] == 9
            one.ended = "SIGTERM"
        with contextlib.suppress(ValueError), Attempts(tmp_path, stopwatch) as other:
            other.begin(9)
            raise ValueError
        assert [(line["from_step"], line["ended"]) for line in read_attempts(tmp_path)] == [
            (0, "SIGTERM"),
            (9, "ValueError"),
        ]


def test_a_run_accounts_for_its_wall_time(tmp_path):
    config = experiment(tiny_data(tmp_path / "data"))
    stopwatch, start = Stopwatch(), time.perf_counter()
    train(config, tmp_path / "run", stopwatch=stopwatch)
    took = time.perf_counter() - start
    found = goodput(tmp_path / "run")
    assert found.wall == pytest.approx(
        took, rel=0.01, abs=0.1
    )  # after its last line, a run still lets go of its folder
    assert sum(found.parts.values()) == pytest.approx(found.wall, rel=1e-6)
    for phase in ("startup", "restore", "compile", "train", "evaluate", "save"):
        assert found.parts[phase] > 0
    assert (found.starts, found.parts["repeated"], found.parts["down"]) == (1, 0, 0)
