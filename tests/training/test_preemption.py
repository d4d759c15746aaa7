"""How processes find each other and agree on the last step, without any: threads in place of processes."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time

import jax
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.training import distributed
from aamoe_jax.training.interrupt import Interrupt, PreemptionSync


class Bulletin:
    """The coordination service, in memory."""

    def __init__(self, count: int):
        self.count, self.said, self.answers = count, {}, {}
        self._changed = threading.Condition()

    def announce(self, name: str, value: str) -> None:
        with self._changed:
            self.said.setdefault(name, value)

    def gather(self, name: str, value: str) -> list[str]:
        with self._changed:
            self.answers.setdefault(name, []).append(value)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self.answers[name]) == self.count, timeout=30)
            return self.answers[name]


def run_together(monkeypatch, seed: int, count: int, steps: int, signals: dict[int, int]) -> list[tuple[int, object]]:
    """(last step made, signal) of every process.

    A step ends when all processes are in it, as a collective does. `signals`: SIGTERM for a process at a step.
    """
    board, chance = Bulletin(count), random.Random(seed)
    collective = threading.Barrier(count, timeout=30)
    monkeypatch.setattr(jax, "process_count", lambda: count)
    monkeypatch.setattr(distributed, "unique", lambda name: name)
    monkeypatch.setattr(distributed, "announce", board.announce)
    monkeypatch.setattr(distributed, "announced", board.said.get)
    monkeypatch.setattr(distributed, "gather", board.gather)
    monkeypatch.setattr("aamoe_jax.training.interrupt.POLL_SECONDS", 0.002)
    results: list = [None] * count

    def process(index: int, delays: list[float]) -> None:
        interrupt, step = Interrupt(), 0  # not entered: threads cannot handle signals
        with PreemptionSync(interrupt, 0) as sync:
            while step < steps and sync.allows(step + 1):
                step += 1
                time.sleep(delays[step])
                if signals.get(index) == step:
                    interrupt.requested = signal.SIGTERM
                if step > 1:
                    collective.wait()  # the metrics of the step before, which need all processes
            results[index] = (step, sync.signal)

    threads = [
        threading.Thread(target=process, args=(index, [chance.random() * 0.004 for _ in range(steps + 1)]))
        for index in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class TestPreemptionSync:
    @pytest.mark.parametrize("seed", range(12))
    def test_all_make_the_same_last_step(self, monkeypatch, seed):
        asked = random.Random(100 + seed).randrange(1, 18)
        results = run_together(monkeypatch, seed, 3, 30, {seed % 3: asked})
        assert len(set(results)) == 1, results
        step, wish = results[0]
        assert asked <= step <= asked + 2
        assert wish == signal.SIGTERM

    def test_two_signals_are_one_stop(self, monkeypatch):
        (result,) = set(run_together(monkeypatch, 0, 4, 30, {1: 7, 2: 8}))
        assert 7 <= result[0] <= 10

    def test_nobody_asks(self, monkeypatch):
        assert set(run_together(monkeypatch, 0, 2, 5, {})) == {(5, None)}

    def test_one_process_stops_after_its_step_in_flight(self):
        interrupt = Interrupt()
        with PreemptionSync(interrupt, 3) as sync:
            assert sync.allows(4)
            interrupt.requested = signal.SIGINT
            assert not sync.allows(5)
            assert sync.signal == signal.SIGINT


class TestParse:
    def test_parse(self):
        assert distributed.parse("10.0.0.1:8476,4,3") == ("10.0.0.1:8476", 4, 3)
        assert distributed.parse("[::1]:80,1,0")[0] == "[::1]:80"

    @pytest.mark.parametrize("text", ["", "host,2,0", "host:1,2", "host:1,2,2", "host:1,2,-1", "host:x,2,0", "AUTO"])
    def test_refuses(self, text):
        with pytest.raises(ConfigError, match=r"--distributed=.*: must be auto, or HOST:PORT,NUM,INDEX"):
            distributed.parse(text)

    def test_a_port_that_is_taken(self):
        with socket.socket() as taken:
            taken.bind(("", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"process 0 cannot listen on port {port}: Address already in use"):
                distributed._require_free(f"localhost:{port}")

    def test_alone_everything_is_agreed(self):
        assert distributed.gather(distributed.unique("x"), "mine") == ["mine"]
        assert distributed.is_first()
        assert distributed.this_process() == ""
        assert not distributed.is_loss(RuntimeError("Gloo"))
