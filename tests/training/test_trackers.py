"""Trackers, each by its own library and without network: they get the figures of a run, and cannot end it."""

import importlib.util
import json
import struct
import sys
import time
from pathlib import Path

import pytest

from aamoe_jax.config import TRACKERS, ConfigError
from aamoe_jax.training import trackers
from aamoe_jax.training.metrics import MetricsLog, read_metrics
from tests.training.helpers import experiment, model_config, replace, tiny_data

LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
BLOCK = 2**15
RECORDS = [
    {"kind": "train", "step": step, "loss": 1.0 / step, "layers": {"spent": [1.0, 2.0 * step]}} for step in (1, 2, 3)
]


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(LIBRARIES[name]) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed: pip install -e '.[{name}]'")


def config_of(tmp_path, *names: str):
    return replace(experiment(tiny_data(tmp_path / "data"), model_config(num_layers=1)), "training", trackers=names)


def write(config, run_dir, records, resume_step: int = 0) -> None:
    run_dir.mkdir(exist_ok=True)
    with MetricsLog(run_dir, resume_step=resume_step, config=config) as log:
        for record in records:
            log.write(record)


def test_figures_of_layers_and_of_parts_of_them_are_numbered(tmp_path, monkeypatch):
    class Kept:
        def __init__(self, *given):
            self.log = lambda values, step: told.append((dict(values), step))
            self.close = lambda: None

    told: list = []
    monkeypatch.setattr(trackers, "KINDS", {"mlflow": Kept})
    record = {"kind": "validation", "dataset": "code", "step": 7, "tokens": 3}
    write(config_of(tmp_path, "mlflow"), tmp_path / "run", [record | {"layers": {"a": [1.0, None], "b": [[2.0, 3.0]]}}])
    figures = {"tokens": 3.0, "a/0": 1.0, "b/0/0": 2.0, "b/0/1": 3.0}
    assert told == [({f"validation/code/{name}": value for name, value in figures.items()}, 7)]


def test_every_name_has_a_tracker():
    assert tuple(trackers.KINDS) == TRACKERS


def history(path: Path) -> list[tuple[int, float, float]]:
    """Step, loss and spent/1 of every record of figures in a file of wandb, which has the format of LevelDB's logs."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:  # what is left of a block is too short for a head
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):  # it is still being written
            break
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its end
            record = wandb_internal_pb2.Record.FromString(whole)
            whole = b""
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = record.history.step.num or int(items["_step"])
                found.append((step, float(items["train/loss"]), float(items["train/spent/1"])))
    return found


@needs("tensorboard")
def test_tensorboard(tmp_path):
    run = tmp_path / "run"
    write(config_of(tmp_path, "tensorboard"), run, RECORDS)
    (events,) = (run / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content
    assert b"train/spent/1" in content


@needs("mlflow")
def test_mlflow_goes_on_in_the_same_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config, run = config_of(tmp_path, "mlflow"), tmp_path / "run"
    write(config, run, RECORDS[:2])
    write(config, run, RECORDS[2:], resume_step=2)
    client = mlflow.MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("aamoe_jax").experiment_id])
    assert found.info.run_name == "run"
    assert found.info.status == "FINISHED"
    assert found.data.params["model.num_layers"] == "1"
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert found.data.metrics["train/spent/1"] == 6.0


@needs("wandb")
def test_wandb_offline_goes_on_in_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for kind in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / kind))
    config, run = config_of(tmp_path, "wandb"), tmp_path / "run"
    write(config, run, RECORDS[:2])
    write(config, run, RECORDS[2:], resume_step=2)
    folders = sorted(path for path in (run / "wandb").iterdir() if path.name.startswith("offline-run"))
    kept = json.loads((run / "trackers.json").read_text())["wandb"]
    assert all((folder / f"run-{kept}.wandb").is_file() for folder in folders)
    deadline = time.monotonic() + 30
    rows: list = []
    while len(rows) < 3 and time.monotonic() < deadline:  # wandb returns from `finish` before all of it is in the file
        rows = [row for folder in folders for row in history(folder / f"run-{kept}.wandb")]
        time.sleep(0.1)
    assert sorted(rows) == [(1, 1.0, 2.0), (2, 0.5, 4.0), (3, 1 / 3, 6.0)]


@pytest.mark.parametrize("name", TRACKERS)
def test_one_that_is_not_installed_names_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, LIBRARIES[name], None)
    with pytest.raises(
        ConfigError,
        match=rf"TrainingConfig.trackers: '{name}' needs .*pip install -c constraints.txt -e '\.\[{name}\]'",
    ):
        write(config_of(tmp_path, name), tmp_path / "run", [])


def test_one_that_fails_is_left_out_and_the_others_go_on(tmp_path, monkeypatch, capfd):
    class Good:
        def __init__(self, *given):
            self.steps = []
            told.append(self)

        def log(self, values, step):
            self.steps.append(step)

        def close(self):
            self.steps.append("closed")

    class Failing(Good):
        def log(self, values, step):
            raise ConnectionError("the server is away\nand more")

    class Never(Good):
        def __init__(self, *given):
            raise ConnectionError("no route")

    told: list = []
    monkeypatch.setattr(trackers, "KINDS", {"tensorboard": Failing, "wandb": Never, "mlflow": Good})
    write(config_of(tmp_path, *TRACKERS), tmp_path / "run", RECORDS)
    failing, good = told
    assert good.steps == [1, 2, 3, "closed"]
    assert failing.steps == []
    warnings = capfd.readouterr().err.splitlines()
    assert warnings == [
        "warning: tracker 'wandb' failed (no route): the run goes on without it",
        "warning: tracker 'tensorboard' failed (the server is away): the run goes on without it",
    ]
    assert len(read_metrics(tmp_path / "run")) == 3
