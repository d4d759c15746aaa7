"""What follows a training run, as people call it: draw."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.training.loop import train
from launch import draw
from tests.training.helpers import SEQ_LEN, experiment, model_config, tiny_data

pytestmark = pytest.mark.slow

KERNEL = {"num_layers": 1, "kernel": "reference"}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", f"launch.{program}", *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on row budgets."""
    folder = tmp_path_factory.mktemp("runs")
    train(experiment(tiny_data(folder / "data"), model_config("aamoe", "row", **KERNEL)), folder / "row")
    return folder / "row"


@pytest.fixture
def call_draw(monkeypatch):
    """Calls launch.draw in this process: the flags that it reads, and their values when nothing is said."""

    def call(*run_dir: Path, **values) -> None:
        defaults = dict.fromkeys(("output", "text", "window", "tokens", "data_dir"))
        flags = {"run_dir": list(map(str, run_dir)), "smooth": 0} | defaults | values
        monkeypatch.setattr(draw, "FLAGS", SimpleNamespace(**flags))
        draw.main(["launch.draw"])

    return call


def test_draw_draws_what_the_stack_has(trained):
    drawn = run("draw", f"--run_dir={trained}")
    assert drawn.returncode == 0, drawn.stderr
    for name in ("loss.png", "shares.png", "budget_map.png"):
        assert (trained / name).read_bytes().startswith(b"\x89PNG"), name
    nothing = run("draw", f"--run_dir={trained.parent}")
    assert (nothing.returncode, nothing.stderr.count("\n")) == (1, 1)


def test_draw_maps_a_text_or_a_window(call_draw, trained, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(draw.pictures, "budget_map", lambda text, *_, parts, **__: drawn.append(("".join(text), parts)))
    (tmp_path / "text").write_text("another passage")
    call_draw(trained, output=str(tmp_path), text=str(tmp_path / "text"), tokens=10)
    call_draw(trained, output=str(tmp_path), window=0)
    call_draw(trained, output=str(tmp_path), tokens=1000)
    (text, no_parts), (window, none_either), (passage, parts) = drawn
    assert (text, no_parts, none_either) == ("another pa", {}, {})
    assert 0 < len(window) <= SEQ_LEN
    assert window != passage[: len(window)]
    assert passage == "".join(draw.PASSAGE.values())
    assert parts == {name: len(part) for name, part in draw.PASSAGE.items()}
    with pytest.raises(ConfigError, match="--window=9999: the split has"):
        call_draw(trained, window=9999)
    with pytest.raises(ConfigError, match="--text or --window"):
        call_draw(trained, window=0, text="README.md")
    with pytest.raises(ConfigError, match="--data_dir=x: is read with --window alone"):
        call_draw(trained, data_dir="x")


def test_draw_compares_runs(call_draw, trained, tmp_path):
    copied = shutil.copytree(trained, tmp_path / "other")
    with pytest.raises(ConfigError, match="several --run_dir: give --output=FOLDER"):
        call_draw(trained, copied)
    with pytest.raises(ConfigError, match="--tokens=8: no budget map"):
        call_draw(trained, copied, output=str(tmp_path / "pictures"), tokens=8)
    call_draw(trained, copied, output=str(tmp_path / "pictures"), smooth=2)
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["loss.png"]


def test_draw_calls_runs_by_what_differs():
    base = experiment(DataConfig(), model_config("aamoe", "row", **KERNEL))
    training = dataclasses.replace(base.training, seed=7, log_every=3)
    model = dataclasses.replace(base.model, d_model=64, num_heads=4, num_layers=3)
    seeded, other = dataclasses.replace(base, training=training), dataclasses.replace(base, model=model)
    first, second, old = Path("runs/a"), Path("runs/b"), Path("old/b")
    assert draw.names_of({first: base, second: seeded}) == [f"seed = {base.training.seed}", "seed = 7"]
    assert draw.names_of({first: base, second: other}) == ["a", "b"]
    assert draw.names_of({second: base, old: base}) == ["runs/b", "old/b"]


def test_draw_weighs_the_datasets_of_a_validation(tmp_path):
    lines = [
        {"kind": "train", "step": 1, "bits_per_byte": 4.0, "layers": {"spent": [3.0]}},
        {"kind": "validation", "step": 1, "dataset": "code", "bits_per_byte": 1.0},
        {"kind": "validation", "step": 1, "dataset": "books", "bits_per_byte": 5.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    train, validation = draw.records_of(draw.read_run(tmp_path), {"code": 3.0, "books": 1.0})
    assert (train["bits_per_byte"], train["spent"]) == (4.0, [3.0])
    assert validation == {"step": 1, "validation_bits_per_byte": 2.0}
