"""The log of a run: what a line says, and that a resumed run leaves the file it would have left anyway."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

from aamoe_jax.config import DataConfig
from aamoe_jax.files import SaveError
from aamoe_jax.training.goodput import Stopwatch
from aamoe_jax.training.metrics import FILE, Clock, MetricsLog, Timing, loss_fields, read_metrics, train_record
from tests.training.helpers import experiment, model_config, untimed


def write(run_dir, records, resume_step=0):
    with MetricsLog(run_dir, resume_step=resume_step) as log:
        for record in records:
            log.write(record)


SUMS = {"nll": np.float32(8.0), "count": np.int32(4), "bytes": np.int32(10)}


class TestLog:
    def test_resuming_drops_what_will_be_done_again(self, tmp_path):
        records = [{"kind": "train", "step": step, "loss": step / 10} for step in range(1, 7)]
        write(tmp_path, records)
        write(tmp_path, records[3:], resume_step=3)
        assert untimed(tmp_path) == records

    def test_every_record_has_its_time(self, tmp_path):
        before = time.time()
        write(tmp_path, [{"kind": "train", "step": 1}, {"kind": "validation", "step": 1}])
        first, second = (record["time"] for record in read_metrics(tmp_path))
        assert before - 0.001 <= first <= second <= time.time() + 0.001
        write(tmp_path, [], resume_step=1)
        assert [record["time"] for record in read_metrics(tmp_path)] == [first, second]

    def test_a_line_that_was_cut_off_is_dropped(self, tmp_path):
        record = {"kind": "train", "step": 1, "loss": 1.0}
        (tmp_path / FILE).write_text(json.dumps(record) + '\n{"kind": "tr')
        assert read_metrics(tmp_path) == [record]
        write(tmp_path, [record | {"step": 2}], resume_step=1)
        assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]

    def test_lines_that_cannot_be_read_are_set_aside_wherever_they_are(self, tmp_path, capfd):
        records = [{"kind": "train", "step": step, "loss": step / 10} for step in range(1, 7)]
        write(tmp_path, records)
        lines = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
        bad = [b'{"kind": "tr' + lines[1], b"\xff" + lines[2], b'{"step": 3}\n', b"[1]\n", b"7\n", b"\n"]
        (tmp_path / FILE).write_bytes(lines[0] + b"".join(bad) + b"".join(lines[3:]))
        assert untimed(tmp_path) == records[:1] + records[3:]
        with MetricsLog(tmp_path, resume_step=4, expected=4) as log:
            assert log.count == 4
        assert untimed(tmp_path) == [records[0], records[3]]
        assert (tmp_path / "metrics.damaged").read_bytes() == b"".join(bad)
        warnings = capfd.readouterr().err.splitlines()
        assert "6 lines cannot be read (line 2, 3, 4, 5, 6, ...); moved to metrics.damaged" in warnings[0]
        assert "2 of 4 records up to step 4 are missing" in warnings[1]

    def test_records_are_counted(self, tmp_path):
        with MetricsLog(tmp_path, resume_step=0) as log:
            for step in range(1, 4):
                log.write({"kind": "train", "step": step})
            log.sync()
            assert log.count == 3
        with MetricsLog(tmp_path, resume_step=2, expected=2) as log:
            assert log.count == 2

    def test_starting_anew_starts_an_empty_file(self, tmp_path):
        write(tmp_path, [{"kind": "train", "step": 1}])
        write(tmp_path, [])
        assert read_metrics(tmp_path) == []

    def test_no_room_is_one_clear_error(self, tmp_path):
        class Full:
            def write(self, data: bytes) -> None:
                raise OSError(28, "No space left on device")

            def sync(self) -> None:
                raise OSError(28, "No space left on device")

            def close(self) -> None: ...

        with MetricsLog(tmp_path, resume_step=0) as log:
            log._file.close()
            log._file = Full()
            for save in (lambda: log.write({"kind": "train", "step": 1}), log.sync):
                with pytest.raises(SaveError, match=r"metrics\.jsonl could not be written: No space left on device"):
                    save()


class TestRecords:
    def test_loss(self):
        assert loss_fields(SUMS) == {"loss": 2.0, "bits_per_byte": pytest.approx(0.8 / math.log(2))}
        assert loss_fields(SUMS | {"bytes": np.int32(0)}) == {"loss": 2.0}

    def test_a_step(self):
        layers = {
            "tokens": [100, 100],
            "capacity": [200, 200],
            "pairs_local": [50, 50],
            "pairs_context": [20, 60],
            "pairs_expert": [30, 40],
            "mass_local": [50, 50],
            "mass_context": [25, 25],
            "mass_expert": [25, 25],
            "zero": [3, 0],
            "one": [3, 0],
            "clipped": [0, 0],
            "overflow": [0, 10],
            "max_budget": [5, 6],
            "expert_load": [[1, 1, 1, 1], [4, 0, 0, 0]],
            "predictor_loss": [10, 30],
        }
        statistics = {name: np.asarray(value, np.float32) for name, value in layers.items()}
        metrics = SUMS | {"learning_rate": 0.1, "grad_norm": 2.0, "statistics": statistics}
        metrics |= {"tokens": np.float32(100), "sparsity_weight": np.zeros(0)}
        config = experiment(DataConfig(seq_len=64, document_align=8), model_config())
        record = train_record(5, metrics, Timing(0.5, 0.25), config)
        assert record["tokens"] == 5 * 4 * 64
        assert record["tokens_per_second"] == 4 * 64 / 0.5
        assert record["data_wait"] == 0.25
        assert record["predictor_loss"] == pytest.approx(0.2)
        assert record["layers"]["spent"] == [1.0, 1.5]
        assert record["layers"]["dead_experts"] == [0.0, 0.75]
        assert record["flops"] > 0
        assert json.loads(json.dumps(record)) == record


class TestClock:
    def test_waiting_counts_and_pauses_do_not(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr("aamoe_jax.training.goodput.time.perf_counter", lambda: now[0])
        stopwatch = Stopwatch()
        clock = Clock(stopwatch, 10)
        with stopwatch.during("train"):
            with stopwatch.during("data"):
                now[0] += 1
            now[0] += 3
            with stopwatch.during("save"):
                now[0] += 100
            assert clock.read(12) == Timing(2.0, 0.25)
            now[0] += 5
            assert clock.read(17) == Timing(1.0, 0.0)
