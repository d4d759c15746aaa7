"""launch.inspect, as people call it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.training.checkpoints import CheckpointStore, Snapshot
from aamoe_jax.training.optimizer import build_optimizer
from aamoe_jax.training.state import TrainState
from launch import inspect, program
from tests.analysis.helpers import TEXT, params_of
from tests.data.helpers import prepared
from tests.training.helpers import SEQ_LEN, experiment, model_config


def saved_run(folder: Path, model: ModelConfig, data) -> Path:
    """A run that was never trained."""
    config = experiment(data, model)
    params = params_of(model)
    optimizer = build_optimizer(config.optimizer, 1).init(params)
    state = TrainState(jnp.asarray(0, jnp.int32), params, optimizer, jax.random.key(0), jnp.zeros(0))
    with CheckpointStore(folder / "checkpoints", keep_last=1) as store:
        store.save(Snapshot(state, config, datasets={}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inspect")
    documents = {
        split: [(f"{split}/0", f"{split} ".encode() + TEXT[:150])] for split in ("train", "validation", "test")
    }
    data = prepared(folder / "data", documents, seq_len=SEQ_LEN)
    models = {
        "aamoe": model_config(num_layers=1, kernel="reference"),
        "dense": model_config("parallel", num_layers=1),
        "experts": model_config("moe", num_layers=1),
    }
    return {name: str(saved_run(folder / name, model, data)) for name, model in models.items()}


def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "launch.inspect", *arguments], input=stdin, capture_output=True)


@pytest.fixture
def flags(monkeypatch, runs):
    """Calls the program in this process: the flags that it reads, and their values when nothing is said."""

    def call(**values) -> None:
        defaults = {"checkpoint": runs["aamoe"], "text": None, "copies": False, "tokens": None, "budget_scale": 1.0}
        defaults |= {
            "maps": False,
            "output": None,
            "datasets": [],
            "split": "test",
            "batch_size": 2,
            "max_batches": 0,
            "data_dir": None,
        }
        monkeypatch.setattr(program, "mesh", lambda: None)
        monkeypatch.setattr(inspect, "FLAGS", SimpleNamespace(**defaults | values))
        inspect.main(["launch.inspect"])

    return call


def test_a_page_of_any_bytes_from_standard_input(runs):
    done = run(f"--checkpoint={runs['aamoe']}", "--text=-", stdin=b"\xff\x00" + TEXT[: 2 * SEQ_LEN])
    assert done.returncode == 0, done.stderr
    cut = f"Cut: the first {SEQ_LEN} of {2 * SEQ_LEN + 2} tokens are shown (--tokens sets how many)."
    assert done.stderr.decode() == f"note: {cut}\n"
    page = (Path(runs["aamoe"]) / "inspect-stdin.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["notes"] == [cut]
    assert (len(data["text"]), data["forms"][:3]) == (SEQ_LEN, "xtt")
    assert ["model", "aamoe, step 0"] in data["facts"]


def test_a_file_longer_than_the_rows_of_training(flags, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(TEXT[:100])
    flags(text=str(tmp_path / "a.txt"), tokens=SEQ_LEN + 10, output=str(tmp_path / "new" / "a.html"), budget_scale=0.5)
    printed = capsys.readouterr()
    assert printed.out == f"written to {tmp_path / 'new' / 'a.html'}\n"
    assert f"note: Longer than the rows of training, which had {SEQ_LEN} tokens." in printed.err
    page = (tmp_path / "new" / "a.html").read_text(encoding="utf-8")
    assert "prefix × 0.5" in page
    assert "a.txt · where the budget went" in page


def test_copies_of_the_held_out_split(flags, runs, capsys):
    flags(copies=True)
    printed = capsys.readouterr().out
    assert "checkpoint of step 0, test split, prefix budgets" in printed
    assert "copied - novel" in printed
    record = json.loads((Path(runs["aamoe"]) / "copying.json").read_text())
    (result,) = record["results"]
    assert (result["dataset"], result["documents"], record["layers"]) == ("tiny", 1, [0])
    assert [entry["n"] for entry in result["n"]] == [4, 8, 16, 32]
    for entry in result["n"]:
        # In rows of their own: the first n tokens of each of the row's documents are left out.
        assert entry["copied"]["tokens"] + entry["novel"]["tokens"] < result["tokens"]


def test_dec_17_indicators_of_the_maps_of_a_passage(flags, runs, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(TEXT)
    flags(checkpoint=runs["dense"], text=str(tmp_path / "a.txt"), maps=True, tokens=12)
    head, names, row = capsys.readouterr().out.splitlines()
    assert head == "checkpoint of step 0, 12 tokens"
    found = dict(zip(names.split(), row.split(), strict=True))
    assert (found["layer"], found["mixer"]) == ("0", "parallel")
    assert 0 < float(found["entropy"]) < np.log(12)
    flags(text=str(tmp_path / "a.txt"), maps=True)
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["0", "aamoe"]
    with pytest.raises(ConfigError, match="no mixer of it has an attention map"):
        flags(checkpoint=runs["experts"], text=str(tmp_path / "a.txt"), maps=True)


def test_what_cannot_work_is_one_line(flags, runs, tmp_path):
    dense = run(f"--checkpoint={runs['dense']}", "--text=README.md")
    assert (dense.returncode, dense.stdout) == (1, b"")
    wanted = "error: ModelConfig.pattern = ('parallel',): no AA-MoE layer, so no budget to inspect\n"
    assert dense.stderr.decode() == wanted
    (tmp_path / "empty").touch()
    for values, message in (
        ({"text": str(tmp_path / "none")}, "none: cannot be read: No such file"),
        ({"text": str(tmp_path)}, "cannot be read: Is a directory"),
        ({"text": str(tmp_path / "empty")}, "is empty"),
        ({}, "either --text=FILE"),
        ({"text": "README.md", "copies": True}, "either --text=FILE"),
        ({"maps": True, "copies": True}, "--maps: give --text=FILE with it, and neither --copies"),
        ({"maps": True, "text": "README.md", "budget_scale": 0.5}, "nor --budget_scale"),
        ({"checkpoint": str(tmp_path), "copies": True}, "there is no checkpoint"),
        ({"text": "README.md", "budget_scale": 0.0}, "budget_scale = 0.0: must be a positive number"),
    ):
        with pytest.raises(ConfigError, match=message):
            flags(**values)
