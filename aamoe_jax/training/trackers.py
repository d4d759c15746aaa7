"""Where metrics are shown beside metrics.jsonl: TensorBoard, Weights & Biases, MLflow (`TrainingConfig.trackers`).

A tracker is for looking: where one fails, the run says so once and goes on without it. A run that is resumed goes on in
the same run of the tracker, whose id is in the file `trackers.json` of the run folder.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aamoe_jax.bucket import AnyPath, BucketPath
from aamoe_jax.config import ConfigError, first_line
from aamoe_jax.files import write_whole
from aamoe_jax.training import distributed

IDS = "trackers.json"
PROJECT = "aamoe_jax"
"""Where runs are listed, unless the environment says (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME)."""


class Tracker(Protocol):
    """What shows metrics."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The figures of one record, by name."""

    def close(self) -> None:
        """No more will come."""


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, run_dir: AnyPath, resume_step: int, config: Mapping[str, Any]):
        if isinstance(run_dir, BucketPath):
            raise ConfigError("TrainingConfig.trackers: 'tensorboard' writes into no bucket; leave it out")
        library = _library("tensorboardX", "tensorboard")
        self._writer = library.SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The figures of one record, by name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """No more will come."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, whose files lie in RUN/wandb, or, of a run in a bucket, where wandb has them by default
    (WANDB_DIR). WANDB_MODE=offline keeps them there."""

    def __init__(self, run_dir: AnyPath, resume_step: int, config: Mapping[str, Any]):
        library = _library("wandb", "wandb")
        self._run = library.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_dir.absolute().name,
            id=_id(run_dir, "wandb", lambda: secrets.token_hex(4)),
            resume="allow",
            dir=None if isinstance(run_dir, BucketPath) else str(run_dir),
            config=dict(config),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The figures of one record, by name."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """No more will come."""
        self._run.finish()


class MLflow:
    """A run of MLflow, in the store that MLFLOW_TRACKING_URI names, or in RUN/mlflow.db."""

    def __init__(self, run_dir: AnyPath, resume_step: int, config: Mapping[str, Any]):
        library = _library("mlflow", "mlflow")
        self._metric = library.entities.Metric
        if isinstance(run_dir, BucketPath) and "MLFLOW_TRACKING_URI" not in os.environ:
            raise ConfigError("TrainingConfig.trackers: of a run in a bucket 'mlflow' needs MLFLOW_TRACKING_URI")
        own = f"sqlite:///{(run_dir / 'mlflow.db').absolute()}"
        self._client = library.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or own)

        def begin() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            run = self._client.create_run(experiment, run_name=run_dir.absolute().name).info.run_id
            for field, value in _flat(config):
                self._client.log_param(run, field, value)
            return str(run)

        self._id = _id(run_dir, "mlflow", begin)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The figures of one record, by name."""
        now = int(1000 * time.time())
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        """No more will come."""
        self._client.set_terminated(self._id)


KINDS: Mapping[str, Callable[[AnyPath, int, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
"""By the names of `TrainingConfig.trackers`; from the run folder, the step that it goes on from, and the config."""


class Trackers:
    """All trackers of a run, until each of them fails."""

    def __init__(self, names: tuple[str, ...], run_dir: AnyPath, resume_step: int, config: Mapping[str, Any]):
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            self._guarded(name, functools.partial(self._begin, name, run_dir, resume_step, config))

    def _begin(self, name: str, *given: Any) -> None:
        self._trackers[name] = KINDS[name](*given)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The figures of one record, by name."""
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, functools.partial(tracker.log, values, step))

    def close(self) -> None:
        """No more will come."""
        for name, tracker in list(self._trackers.items()):
            self._guarded(name, tracker.close)

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except ConfigError:
            raise
        except Exception as error:  # of a library, or of its network: no training ends for it
            self._trackers.pop(name, None)
            distributed.warn(f"tracker {name!r} failed ({first_line(error)}): the run goes on without it")


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"TrainingConfig.trackers: {extra!r} needs {name}: pip install -c constraints.txt -e '.[{extra}]', "
            "or leave it out"
        ) from error


def _id(run_dir: AnyPath, tracker: str, begin: Callable[[], str]) -> str:
    """The tracker's id of the run, or a new one, which is kept."""
    path = run_dir / IDS
    ids = json.loads(path.read_text()) if path.exists() else {}
    if tracker not in ids:
        ids[tracker] = begin()
        write_whole(path, json.dumps(ids) + "\n")
    return str(ids[tracker])


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Fields by their path."""
    found = []
    for name, value in config.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
        found += inner
    return found
