"""What a run writes down: one JSON object per line, and what trackers show by choice.

`metrics.jsonl` is always written. A line is of `kind` "train", "validation" or "skipped". Lines depend on the run
alone, but for the fields in TIMING_FIELDS: a run that was interrupted and resumed leaves the file that it would have
left anyway.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from aamoe_jax.bucket import AnyPath, BucketPath
from aamoe_jax.config import ExperimentConfig, to_dict
from aamoe_jax.cost import training_flops
from aamoe_jax.files import Lines, SaveError, open_lines, read_lines
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.training import distributed
from aamoe_jax.training.auxiliary import LOSSES
from aamoe_jax.training.goodput import Stopwatch
from aamoe_jax.training.trackers import Trackers
from pallas_kernels.chips import peak_flops

FILE = "metrics.jsonl"
DAMAGED = "metrics.damaged"
TIMING_FIELDS = ("time", "steps_per_second", "tokens_per_second", "mfu", "data_wait")

Record = dict[str, Any]


class Timing(NamedTuple):
    """How fast a stretch of steps was."""

    seconds_per_step: float
    data_wait: float
    """Share of the time that the loop waited for batches."""


class Clock:
    """Times stretches of steps: of a stopwatch, what was training or waiting for data."""

    def __init__(self, stopwatch: Stopwatch, step: int):
        self._stopwatch = stopwatch
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._step, self._start = step, self._stopwatch.read()

    def read(self, step: int) -> Timing:
        """The stretch since the last reading, which ends with `step`; begins the next one."""
        now = self._stopwatch.read()
        train, data = (now[phase] - self._start[phase] for phase in ("train", "data"))
        seconds = max(train + data, 1e-9)
        timing = Timing(seconds / max(step - self._step, 1), min(data / seconds, 1.0))
        self._begin(step)
        return timing


def train_record(step: int, metrics: dict[str, Any], timing: Timing, config: ExperimentConfig) -> Record:
    """The line of a training step, from its metrics on the host."""
    rows, length = config.training.batch_size, config.data.seq_len
    statistics = metrics["statistics"]
    flops = training_flops(config.model, rows, length, statistics)
    record = {
        "kind": "train",
        "step": step,
        "tokens": step * rows * length,
        **loss_fields(metrics),
        "learning_rate": float(metrics["learning_rate"]),
        "grad_norm": float(metrics["grad_norm"]),
        "flops": flops,
        "steps_per_second": 1 / timing.seconds_per_step,
        "tokens_per_second": rows * length / timing.seconds_per_step,
        "data_wait": timing.data_wait,
    }
    peak = peak_flops(jax.local_devices()[0].device_kind)
    if peak is not None:
        record["mfu"] = flops / (timing.seconds_per_step * peak * jax.device_count())
    for name in LOSSES:
        if name in statistics:
            record[name] = float(statistics[name].mean() / max(metrics["tokens"], 1))
    layers = summarize(statistics)
    if len(metrics["sparsity_weight"]):
        layers["sparsity_weight"] = metrics["sparsity_weight"].tolist()
    return record | ({"layers": layers} if layers else {})


def loss_fields(sums: dict[str, Any]) -> Record:
    """Nats per target and bits per byte, from sums over targets. Text without a byte has no bits per byte."""
    nll, count, size = float(sums["nll"]), int(sums["count"]), int(sums["bytes"])
    fields = {"loss": nll / max(count, 1)}
    return fields | ({"bits_per_byte": nll / math.log(2) / size} if size else {})


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """Writes records, if this is process 0; on resume first drops those of steps that will be done again.

    Lines that cannot be read are moved to `metrics.damaged`; in a bucket they stay where they are. A warning says how
    many, and how many are missing.

    Args:
      config: names the trackers that are told too; None: none is.
      expected: so many records were there when the checkpoint of `resume_step` was made; None: not known.
    """

    def __init__(
        self, run_dir: AnyPath, *, resume_step: int, config: ExperimentConfig | None = None, expected: int | None = None
    ):
        self.count = 0
        """Records of the run so far, with those that are missing. On process 0."""
        self._path = run_dir / FILE
        self._file: Lines | None = None
        self._trackers: Trackers | None = None
        if not distributed.is_first():
            return
        lines = read_lines(self._path)
        records, damaged = _parse(lines)
        if damaged:
            done = "left there" if isinstance(run_dir, BucketPath) else _set_aside(damaged, run_dir / DAMAGED)
            numbers = ", ".join(map(str, list(damaged)[:5])) + (", ..." if len(damaged) > 5 else "")
            distributed.warn(f"{self._path}: {len(damaged)} lines cannot be read (line {numbers}); {done}")
        kept = [number for number, record in records.items() if record["step"] <= resume_step]
        if expected is not None and len(kept) < expected:
            distributed.warn(
                f"{self._path}: {expected - len(kept)} of {expected} records up to step {resume_step} are missing"
            )
        self.count = max(len(kept), expected or 0)
        head = lines[: kept[-1]] if kept else []
        intact = head if isinstance(run_dir, BucketPath) else [lines[number - 1] for number in kept]
        self._file = open_lines(self._path, intact)
        if config is not None:
            self._trackers = Trackers(config.training.trackers, run_dir, resume_step, to_dict(config))

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if self._file is not None:
                with self._saving() if kind is None else contextlib.suppress(OSError):  # which would hide that error
                    self._file.close()
        finally:
            if self._trackers is not None:
                self._trackers.close()

    def write(self, record: Record) -> None:
        """One record and the time, at once: a run that is killed has its lines."""
        self.count += 1
        if self._file is None:
            return
        with self._saving():
            self._file.write((json.dumps(record | {"time": round(time.time(), 3)}) + "\n").encode())
        if self._trackers is not None:
            scope = "/".join(record[name] for name in ("kind", "dataset") if name in record)
            self._trackers.log({f"{scope}/{name}": value for name, value in _scalars(record)}, record["step"])

    def sync(self) -> None:
        """Until all records are on disk: no checkpoint outlasts the metrics of its steps."""
        if self._file is not None:
            with self._saving():
                self._file.sync()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SaveError(f"{self._path} could not be written: {error.strerror}") from error


def read_metrics(run_dir: AnyPath) -> list[Record]:
    """The records of a run, oldest first; lines that cannot be read, such as one that was cut off, are left out."""
    return list(_parse(read_lines(run_dir / FILE))[0].values())


def _parse(lines: list[bytes]) -> tuple[dict[int, Record], dict[int, bytes]]:
    """By number, counted from 1: the records, and the lines that are none."""
    records, damaged = {}, {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not {"kind", "step"} <= record.keys():
                raise ValueError
        except (ValueError, AttributeError):
            damaged[number] = line
        else:
            records[number] = record
    return records, damaged


def _set_aside(damaged: Mapping[int, bytes], path: Path) -> str:
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in damaged.values())
    return f"moved to {path.name}"


def _scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The figures of a record by name; those of a layer, or of one of its experts, end with its number."""
    for name, value in record.items():
        if name == "layers":
            yield from _numbered(value.items())
        elif name not in ("kind", "dataset", "step"):
            yield from _numbered([(name, value)])


def _numbered(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    for name, value in named:
        if isinstance(value, list):
            yield from _numbered((f"{name}/{index}", part) for index, part in enumerate(value))
        elif value is not None:
            yield name, float(value)
