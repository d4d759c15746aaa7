"""Programs that load a checkpoint, divided over devices and over processes: they tell what one device tells."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.jobs import free_port
from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import experiment, model_config, tiny_data

pytestmark = pytest.mark.distributed
MESH = "--mesh=1x2x2x2"
CALLS = {
    "generate": ("generate", "--prompt=def ", "--prompt=class A", "--tokens=12", "--seed=1"),
    "choose": ("choose", "--items={folder}/items.jsonl", "--output={output}.json"),
    "page": ("inspect", "--text={folder}/text", "--output={output}.json"),
    "maps": ("inspect", "--text={folder}/text", "--maps"),
    "copies": ("inspect", "--copies", "--output={output}.json"),
    "evaluate": ("evaluate", "--max_batches=2", "--output={output}.json"),
    "sweep": ("evaluate", "--sweep=length", "--sweep_points=1,2", "--max_batches=1", "--output={output}.json"),
}
ITEMS = (
    {"context": "def ", "choices": ["f(x)", "12"], "answer": 0},
    {"context": "a longer text ", "choices": ["of words", "or none at all"], "answer": 1},
)


class Told:
    """What one call printed and wrote."""

    def __init__(self, code: int, stdout: str, stderr: str, output: Path):
        assert code == 0, stderr
        self.stdout = stdout.replace(str(output.with_suffix("")), "OUTPUT")
        text = output.read_text() if output.exists() else "{}"
        page = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
        self.record = json.loads(page[1] if page else text)


def arguments(name: str, folder: Path, output: Path) -> list[str]:
    """Of a call that writes to `output`.json."""
    return [f"--checkpoint={folder / 'run'}", *(part.format(folder=folder, output=output) for part in CALLS[name][1:])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run, questions and a text."""
    folder = tmp_path_factory.mktemp("mesh")
    save_run(folder / "run", experiment(tiny_data(folder / "data"), model_config("aamoe", "prefix", num_layers=2)))
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (folder / "text").write_text("def main(argument):\n    return argument + 1\n")
    return folder


@pytest.fixture(scope="module")
def here(folder) -> dict[tuple[str, bool], Told]:
    """Every call in one process with eight devices, on the first of them and on the mesh."""
    calls = {(name, mesh): folder / f"{name}-{mesh}" for name in CALLS for mesh in (False, True)}
    programs = [
        (CALLS[name][0], [*arguments(name, folder, output), *([MESH] if mesh else [])])
        for (name, mesh), output in calls.items()
    ]
    ended = session.calls_of(programs, XLA_FLAGS=devices(8))
    return {
        call: Told(*outcome, output.with_suffix(".json"))
        for (call, output), outcome in zip(calls.items(), ended, strict=True)
    }


def devices(count: int) -> str:
    """XLA_FLAGS for so many CPU devices."""
    return f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"


def assert_close(found: Any, wanted: Any, where: str = "") -> None:
    """Equal, but for the command and the rounding of numbers."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted.keys() - {"command"}:
            assert_close(found[name], wanted[name], f"{where}/{name}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for at, pair in enumerate(zip(found, wanted, strict=True)):
            assert_close(*pair, f"{where}/{at}")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-4, abs=2e-4), where
    else:
        assert found == wanted, where


@pytest.mark.parametrize("name", CALLS)
def test_a_mesh_tells_what_one_device_tells(here, name):
    whole, divided = here[name, False], here[name, True]
    assert divided.stdout == whole.stdout
    if name == "evaluate":  # statistics of attention are means of means over heads that lie apart: docs/meshes.md
        figures = ("nats_per_token", "bits_per_byte", "tokens", "spent", "nll_by_position")
        (found,), (wanted,) = (told.record["results"] for told in (divided, whole))
        for figure in figures:
            assert_close(found["budgets"]["prefix"][figure], wanted["budgets"]["prefix"][figure])
    else:
        assert_close(divided.record, whole.record)


@pytest.mark.parametrize("name", ["generate", "choose", "page", "evaluate", "sweep"])
def test_two_processes_tell_what_one_tells(folder, here, name):
    address, wanted = f"127.0.0.1:{free_port()}", here[name, True]
    outputs = [folder / f"{name}-process{index}" for index in range(2)]
    command = [sys.executable, "-m", f"launch.{CALLS[name][0]}", MESH]
    started = [
        subprocess.Popen(
            [*command, f"--distributed={address},2,{index}", *arguments(name, folder, output)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": devices(4)},
        )
        for index, output in enumerate(outputs)
    ]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    first, second = (
        Told(code, out, err, output.with_suffix(".json"))
        for (out, err, code), output in zip(ended, outputs, strict=True)
    )
    lines = [line for line in wanted.stdout.splitlines() if line]  # CPU collectives print their own between them
    assert lines
    assert [line for line in lines if line not in first.stdout] == []
    assert [line for line in lines if line in second.stdout] == []
    assert_close(first.record, wanted.record)
    assert second.record == {}


@pytest.mark.parametrize(
    ("mesh", "runs", "message"),
    [
        ("1x3x1x1", ("run", "run"), "MeshConfig: data 1 x fsdp 3"),
        ("1x2x1x1", ("run", "nowhere"), "there is no checkpoint in"),  # one process does not see the folder
    ],
)
def test_what_is_refused_ends_every_process(folder, mesh, runs, message):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "launch.generate", "--prompt=a", f"--mesh={mesh}"]
    started = [
        subprocess.Popen(
            [*command, f"--checkpoint={folder / run}", f"--distributed={address},2,{index}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, run in enumerate(runs)
    ]
    for index, process in enumerate(started):
        _, error = process.communicate(timeout=120)
        assert process.returncode == 1
        assert f"error: process {index} of 2: " in error
        assert message in error
        assert "Traceback" not in error
