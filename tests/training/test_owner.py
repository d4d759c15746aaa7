"""One owner for a run folder: who may take it, when, and what becomes of one that was thought dead."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.files import SaveError
from aamoe_jax.training import owner
from aamoe_jax.training.checkpoints import InUseError
from aamoe_jax.training.owner import FILE, Owner

ELSEWHERE = {"id": "other", "where": "another machine", "host": "far", "pid": 7, "born": 0.0, "beat": 3}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Signs of life every few milliseconds."""
    for name, seconds in {"BEAT_SECONDS": 0.01, "DEAD_SECONDS": 0.3, "SETTLE_SECONDS": 0.05}.items():
        monkeypatch.setattr(owner, name, seconds)


def left_by(record: dict, folder: Path) -> None:
    (folder / FILE).write_text(json.dumps(record))


def wait_until(condition) -> None:
    assert any(condition() or threading.Event().wait(0.01) for _ in range(1000))


def test_the_folder_is_made_and_left_without_a_trace(tmp_path):
    with Owner(tmp_path / "a" / "b"):
        assert json.loads((tmp_path / "a" / "b" / FILE).read_text())["pid"] == os.getpid()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_it_gives_signs_of_life(tmp_path):
    with Owner(tmp_path):
        wait_until(lambda: owner._read(tmp_path / FILE).get("beat", 0) > 2)


def test_a_second_one_is_refused_and_the_first_stays(tmp_path):
    with Owner(tmp_path) as first:
        with pytest.raises(InUseError, match=rf"in use by process {os.getpid()} on .*, which is alive: stop it, or"):
            Owner(tmp_path).__enter__()
        first.confirm()
    with Owner(tmp_path):
        pass


@pytest.mark.parametrize("record", [{"id": "x"}, ELSEWHERE])
def test_whoever_gives_signs_of_life_elsewhere_is_alive(tmp_path, monkeypatch, record):
    left_by(record, tmp_path)
    monkeypatch.setattr(owner, "DEAD_SECONDS", 30.0)
    beat = threading.Timer(0.2, left_by, [ELSEWHERE | {"beat": 4}, tmp_path])
    beat.start()
    with pytest.raises(InUseError, match="in use by process 7 on far, which is alive"):
        Owner(tmp_path).__enter__()
    beat.join()
    assert json.loads((tmp_path / FILE).read_text()) == ELSEWHERE | {"beat": 4}


@pytest.mark.parametrize("text", [json.dumps(ELSEWHERE), "", '{"id": "a', "[]"])
def test_one_without_a_sign_of_life_is_dead(tmp_path, text, capfd):
    (tmp_path / FILE).write_text(text)
    with Owner(tmp_path) as taken:
        taken.confirm()
    assert "ended without releasing" in capfd.readouterr().err
    assert not (tmp_path / FILE).exists()


def test_a_process_of_this_machine_that_is_gone_is_dead_at_once(tmp_path, monkeypatch):
    """Also one whose number another process has now, and one that nobody has waited for."""
    monkeypatch.setattr(owner, "DEAD_SECONDS", 1e9)
    code = "import os, pathlib, sys; from aamoe_jax.training.owner import Owner"
    code += "; Owner(pathlib.Path(sys.argv[1])).__enter__(); os._exit(0)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        record = json.loads((tmp_path / FILE).read_text())
        assert record["pid"] == process.pid
        with Owner(tmp_path):
            pass
    me = {"pid": os.getpid(), "born": psutil.Process().create_time()}  # of a run that this process gave up
    for changed in ({}, me | {"born": 0.0}, me):
        left_by(record | changed, tmp_path)
        with Owner(tmp_path):
            pass


def test_an_owner_that_leaves_while_it_is_watched(tmp_path, monkeypatch):
    left_by(ELSEWHERE, tmp_path)
    monkeypatch.setattr(owner, "DEAD_SECONDS", 30.0)
    threading.Timer(0.2, (tmp_path / FILE).unlink).start()
    with Owner(tmp_path) as taken:
        taken.confirm()


def test_one_of_many_takes_over(tmp_path, monkeypatch):
    """Also where all of them look before the first one writes."""
    monkeypatch.setattr(owner, "SETTLE_SECONDS", 0.5)
    left_by(ELSEWHERE, tmp_path)
    chance, read = random.Random(0), owner._read

    def slowly(path: Path) -> dict:
        found = read(path)
        time.sleep(chance.uniform(0.0, 0.1))
        return found

    monkeypatch.setattr(owner, "_read", slowly)
    entered, refused = [], []

    def take() -> None:
        candidate = Owner(tmp_path)
        try:
            entered.append(candidate.__enter__())
        except InUseError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(entered), len(refused)) == (1, 7)
    entered[0].confirm()
    entered[0].__exit__(None, None, None)


def test_one_that_was_taken_for_dead_writes_no_more(tmp_path):
    with Owner(tmp_path) as frozen:
        left_by(ELSEWHERE, tmp_path)
        with pytest.raises(InUseError, match=r"process 7 on far has taken .*: nothing more is written by this one"):
            frozen.confirm()
        with pytest.raises(InUseError):
            frozen.poll()
    assert json.loads((tmp_path / FILE).read_text()) == ELSEWHERE


def test_a_path_that_can_be_no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(ConfigError, match=r"cannot be a run folder: .*; take another path") as caught:
            Owner(path).__enter__()
        assert not isinstance(caught.value, SaveError)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(SaveError, match="cannot be written: No space left on device"):
        Owner(tmp_path / "run").__enter__()
