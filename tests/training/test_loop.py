"""The loop: what happens in which order, what ends it, and that it compiles once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.training.checkpoints import CheckpointStore, InUseError, read_meta, saved_steps
from aamoe_jax.training.goodput import Attempts, Stopwatch
from aamoe_jax.training.interrupt import Interrupt, StoppedEarly
from aamoe_jax.training.local_tier import LocalTier
from aamoe_jax.training.loop import DivergedError, Recorder, Run, _opening, run_steps, train
from aamoe_jax.training.metrics import Clock, MetricsLog, read_metrics
from aamoe_jax.training.owner import Owner
from aamoe_jax.training.profile import Profiler, ProfileWindow
from aamoe_jax.training.progress import Progress
from aamoe_jax.training.state import TrainState, place
from aamoe_jax.training.watchdog import Watchdog
from tests.training.helpers import experiment, random_batch, replace, tiny_data, untimed

CONFIG = experiment(DataConfig(seq_len=64, document_align=8), log_every=2)


def stub_run(run_dir: Path, events: list, *, losses=None, config=CONFIG, interrupt_at=None, taken_at=None, skipped=0):
    """Runs the loop around a step that computes nothing, and notes what it does. Returns its result."""
    losses = losses or {}

    def train_step(state, batch):
        step = int(state.step) + 1
        events.append(("dispatch", step))
        if step == interrupt_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if step == taken_at:
            (run_dir / "owner.json").write_text('{"id": "other", "pid": 7, "host": "far"}')
        metrics = {"nll": np.float32(losses.get(step, 1.0)), "count": 1, "bytes": 1, "grad_norm": np.float32(1)}
        return state._replace(step=jax.device_put(np.int32(step))), metrics | {
            "learning_rate": 0.1,
            "sparsity_weight": np.zeros(0),
            "statistics": {},
            "step": step,
        }

    def validate(params, step):
        events.append(("evaluate", step))
        return [{"kind": "validation", "step": step, "dataset": "tiny", "loss": 1.0}], 1.0

    class NotedRecorder(Recorder):
        def _record(self, step, metrics):
            events.append(("fetch", step))
            super()._record(step, metrics)

    class NotedStore(CheckpointStore):
        def save(self, snapshot):
            events.append(("save", int(snapshot.state.step)))
            super().save(snapshot)

    stopwatch = Stopwatch()
    state = TrainState(jnp.int32(0), {"w": jnp.ones(3)}, {"mu": jnp.ones(3)}, jax.random.key(0), jnp.zeros(0))
    with (
        Interrupt() as interrupt,
        Owner(run_dir) as owner,
        NotedStore(run_dir / "checkpoints", keep_last=2) as store,
        MetricsLog(run_dir, resume_step=0) as log,
        Progress(0, config.training.steps) as progress,
        Profiler(None, run_dir) as profiler,
        Watchdog(run_dir, 0) as watchdog,
    ):
        run = Run(
            config=config,
            datasets={},
            placement=place(config),
            batches=iter([random_batch(step) for step in range(config.training.steps)]),
            train_step=train_step,
            validate=validate,
            store=store,
            local=LocalTier(None, run_dir),
            recorder=NotedRecorder(config, log, progress, store, Clock(stopwatch, 0), skipped=skipped),
            profiler=profiler,
            stopwatch=stopwatch,
            attempts=Attempts(run_dir, stopwatch),
            owner=owner,
            interrupt=interrupt,
            watchdog=watchdog,
        )
        return run_steps(run, state, 0)


class TestOrder:
    def test_metrics_are_fetched_after_the_next_step_is_dispatched(self, tmp_path):
        events = []
        result = stub_run(tmp_path, events)
        assert events[:8] == [
            *[("dispatch", 1), ("dispatch", 2), ("fetch", 1), ("dispatch", 3), ("fetch", 2)],
            # Evaluating and saving need the state anyway, so here the loop waits for it.
            *[("dispatch", 4), ("fetch", 3), ("fetch", 4)],
        ]
        assert events[8:10] == [("evaluate", 4), ("save", 4)]
        assert events[-2:] == [("evaluate", 8), ("save", 8)]
        assert (result.step, result.interrupted, result.validation_loss) == (8, None, 1.0)
        assert [line["step"] for line in read_metrics(tmp_path) if line["kind"] == "train"] == [1, 2, 4, 6, 8]

    def test_a_signal_ends_it_after_the_step_in_flight(self, tmp_path):
        events = []
        result = stub_run(tmp_path, events, interrupt_at=3)
        assert events[-3:] == [("fetch", 2), ("fetch", 3), ("save", 3)]
        assert (result.step, result.interrupted) == (3, signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def test_nothing_is_saved_once_another_process_has_taken_the_folder(self, tmp_path):
        with pytest.raises(InUseError, match="process 7 on far has taken"):
            stub_run(tmp_path, [], taken_at=3)
        assert saved_steps(tmp_path / "checkpoints") == []

    def test_a_signal_in_the_last_step_changes_nothing(self, tmp_path):
        assert stub_run(tmp_path, [], interrupt_at=8).interrupted is None


class TestDivergence:
    @pytest.mark.parametrize(("step", "good"), [(8, 4), (6, 4), (4, None), (1, None)])
    def test_names_step_batch_and_the_last_good_checkpoint(self, tmp_path, step, good):
        events = []
        with pytest.raises(DivergedError) as caught:
            stub_run(tmp_path, events, losses={step: float("nan")})
        message = str(caught.value)
        assert message.startswith(f"step {step}, on batch {step - 1}: the sum of losses is nan")
        assert ("nothing was saved" if good is None else f"checkpoints/{good}") in message
        assert [event for event in events if event[0] == "save"] == ([("save", good)] if good else [])


class TestSkipping:
    def test_steps_that_are_not_finite_are_counted_and_the_run_goes_on(self, tmp_path, capfd):
        config = replace(CONFIG, "training", nonfinite="skip", log_every=1)
        result = stub_run(tmp_path, [], config=config, losses={3: float("nan"), 8: float("inf")})
        assert result.step == 8
        records = untimed(tmp_path)
        assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 4, 5, 6, 7]
        skipped = [record for record in records if record["kind"] == "skipped"]
        assert skipped == [{"kind": "skipped", "step": step, "batch": step - 1} for step in (3, 8)]
        assert "step 3 skipped: on batch 2: the sum of losses is nan, the gradient norm 1.0" in capfd.readouterr().out

    @pytest.mark.parametrize(("bad", "ends"), [(range(2, 12), True), ({*range(2, 11), *range(12, 21)}, False)])
    def test_many_in_a_row_end_it(self, tmp_path, bad, ends):
        config = replace(CONFIG, "training", nonfinite="skip", steps=24, eval_every=0)
        outcome = pytest.raises(DivergedError, match=r"step 11, on batch 10: .*, the 10th step in a row")
        with outcome if ends else contextlib.nullcontext():
            stub_run(tmp_path, [], config=config, losses=dict.fromkeys(bad, float("nan")))

    def test_those_before_a_restart_count(self, tmp_path):
        config = replace(CONFIG, "training", nonfinite="skip")
        with pytest.raises(DivergedError, match=r"step 3, .* the 10th step in a row"):
            stub_run(tmp_path, [], config=config, losses=dict.fromkeys(range(1, 9), float("nan")), skipped=7)

    def test_they_remove_no_checkpoint_from_before(self, tmp_path):
        """What is wrong may be in the parameters of the last finite step."""
        config = replace(CONFIG, "training", nonfinite="skip", steps=24, eval_every=0, checkpoint_every=1)
        with pytest.raises(DivergedError) as caught:
            stub_run(tmp_path, [], config=config, losses=dict.fromkeys(range(6, 24), float("nan")))
        assert saved_steps(tmp_path / "checkpoints")[:3] == [4, 5, 6]
        assert f"the last good checkpoint is {tmp_path / 'checkpoints' / '5'}" in str(caught.value)
        assert read_meta(tmp_path / "checkpoints" / "8")["skipped"] == 3

    def test_older_ones_go_once_a_step_is_finite_again(self, tmp_path):
        config = replace(CONFIG, "training", nonfinite="skip", steps=12, eval_every=0, checkpoint_every=1)
        stub_run(tmp_path, [], config=config, losses=dict.fromkeys(range(4, 9), float("nan")))
        assert saved_steps(tmp_path / "checkpoints") == [11, 12]


class TestTrain:
    def test_a_finished_run_is_not_compiled_again(self, tmp_path, monkeypatch):
        config = experiment(tiny_data(tmp_path / "data"))
        first = train(config, tmp_path / "run")
        monkeypatch.setattr("aamoe_jax.training.loop.compile_step", None)
        assert train(config, tmp_path / "run") == first

    @pytest.mark.parametrize(
        ("kernel", "warns"), [("pallas_gpu", False), ("pallas_tpu", True), ("xla", False), (None, False)]
    )
    def test_a_kernel_of_another_device_is_warned_of(self, kernel, warns):
        state = TrainState(jnp.int32(0), {}, {}, jax.random.key(0), jnp.zeros(0))
        said = _opening(replace(CONFIG, "model", kernel=kernel), state, 0)
        assert said.startswith("warning: ModelConfig.kernel = 'pallas_") == warns

    @pytest.mark.parametrize("address", ["az://bucket/run", "s3://bucket/run", Path("gs://bucket/run")])
    def test_another_address_is_refused(self, tmp_path, monkeypatch, address):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigError, match=r"run_dir = '(az|gs|s3):/.*': must be a path or gs://BUCKET"):
            train(CONFIG, address)
        assert list(tmp_path.iterdir()) == []

    def test_compiles_before_the_first_step_and_at_the_first_evaluation_only(self, tmp_path, monkeypatch):
        compilations, at_step = [], []
        poll = CheckpointStore.poll

        def noted(store):
            at_step.append(len(compilations))
            poll(store)

        def count(name, seconds, **rest):
            if name == "/jax/core/compile/backend_compile_duration":
                compilations.append(seconds)

        monkeypatch.setattr(CheckpointStore, "poll", noted)
        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            config = experiment(tiny_data(tmp_path / "data"), steps=12, eval_every=3, checkpoint_every=3)
            result = train(config, tmp_path / "run", profile=ProfileWindow(2, 3), notes={"note.txt": "kept"})
        finally:
            jax.monitoring.unregister_event_duration_listener(count)
        assert at_step[0] == at_step[2] > 0
        assert at_step[-1] == at_step[4]
        assert result.step == 12
        assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))
        assert (tmp_path / "run" / "note.txt").read_text() == "kept"
        first, last = (record["loss"] for record in (untimed(tmp_path / "run")[0], untimed(tmp_path / "run")[-2]))
        assert last < first
        assert result.validation_loss == pytest.approx(untimed(tmp_path / "run")[-1]["loss"])
        # A run that is complete stays as it is.
        before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        assert train(config, tmp_path / "run").step == 12
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


class TestProfileWindow:
    def test_parse(self):
        assert ProfileWindow.parse("3:5") == ProfileWindow(3, 5)

    @pytest.mark.parametrize("text", ["", "5", "5:3", "0:2", "a:b", "-1:2"])
    def test_refuses(self, text):
        with pytest.raises(ConfigError, match="must be START:STOP"):
            ProfileWindow.parse(text)


class TestInterrupt:
    @pytest.fixture(autouse=True)
    def python_handles_signals(self):
        """Whoever starts the tests in the background of a shell has them ignore SIGINT."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    def test_before_the_first_step_it_ends_at_once(self):
        with Interrupt() as interrupt:
            assert interrupt.before_steps(lambda: 5) == 5
            with pytest.raises(ZeroDivisionError):
                interrupt.before_steps(lambda: 1 // 0)
            ends = threading.Event()
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
            with pytest.raises(StoppedEarly, match="stopped by SIGTERM before the first step"):
                interrupt.before_steps(ends.wait)
            ends.set()

    def test_the_second_signal_does_what_it_always_did(self):
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            deadline = time.monotonic() + 30
            while interrupt.requested is None and time.monotonic() < deadline:
                time.sleep(0.01)  # a busy machine takes its time to deliver a signal
            assert interrupt.requested == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                self.interrupt_and_wait()

    def interrupt_and_wait(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)  # cut short by the signal
