"""Training from a config to a checkpoint: what a run is made of, and its one loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aamoe_jax.bucket import AnyPath, location
from aamoe_jax.config import ConfigError, DataConfig, ExperimentConfig, to_dict
from aamoe_jax.cost import parameter_count
from aamoe_jax.data import dataset_metadata, ensure_prepared, iterate, load_tokenizer, training_batches
from aamoe_jax.data.batches import Batch
from aamoe_jax.files import write_whole
from aamoe_jax.training import distributed
from aamoe_jax.training.checkpoints import FOLDER, CheckpointStore, Meta, Snapshot, unanimous
from aamoe_jax.training.device_check import Speed, speeds, step_twice, stragglers
from aamoe_jax.training.evaluation import Validation
from aamoe_jax.training.goodput import Attempts, Stopwatch
from aamoe_jax.training.interrupt import Interrupt, PreemptionSync
from aamoe_jax.training.local_tier import LocalTier
from aamoe_jax.training.metrics import Clock, MetricsLog, Record, train_record
from aamoe_jax.training.optimizer import build_optimizer
from aamoe_jax.training.owner import Owner
from aamoe_jax.training.profile import Profiler, ProfileWindow
from aamoe_jax.training.progress import Progress, compiling
from aamoe_jax.training.resume import refuse_lost_history, restore_newest, warm_started
from aamoe_jax.training.state import Placement, TrainState, abstract_state, initial_state, place
from aamoe_jax.training.step import Metrics, TrainStep, is_logged, make_train_step
from aamoe_jax.training.watchdog import Watchdog

MAX_CONSECUTIVE_SKIPS = 10
"""So many steps in a row that are not finite end a run that skips them: what is wrong is not in the batches."""
BATCH_FIELDS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")


class DivergedError(RuntimeError):
    """The loss or the gradient is not finite. The message says at which step, and where to go on from."""


class Result(NamedTuple):
    """How a run ended."""

    step: int
    interrupted: signal.Signals | None
    """The signal that stopped it before its last step, on whichever process."""
    validation_loss: float | None
    """At the last step, where the run evaluates."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What the loop works with."""

    config: ExperimentConfig
    datasets: dict[str, Any]
    placement: Placement
    batches: Iterator[Batch]
    train_step: TrainStep
    validate: Callable[[dict[str, Any], int], tuple[list[Record], float]]
    store: CheckpointStore
    local: LocalTier
    recorder: Recorder
    profiler: Profiler
    stopwatch: Stopwatch
    attempts: Attempts
    owner: Owner
    interrupt: Interrupt
    watchdog: Watchdog


def train(
    config: ExperimentConfig,
    run_dir: str | AnyPath,
    *,
    profile: ProfileWindow | None = None,
    notes: Mapping[str, str] | None = None,
    allow_restart: bool = False,
    stopwatch: Stopwatch | None = None,
) -> Result:
    """Trains a model, or resumes the run in `run_dir`, up to the last step or the first SIGTERM or SIGINT.

    The dataset `code` is prepared if it is missing. Progress is printed; config.json, metrics.jsonl and checkpoints are
    written to `run_dir`. A resumed run is bit-identical to an uninterrupted one. Where several processes train one
    model, each calls this with the same arguments.

    Args:
      run_dir: created if missing; resumed if it holds a checkpoint. A folder, or gs://BUCKET/FOLDER.
      profile: the steps to trace with the JAX profiler, on every process, into `run_dir`.
      notes: texts to put into the run folder beside config.json, by file name.
      allow_restart: begins at step 0 in a folder whose checkpoints were lost, where that is otherwise refused.
      stopwatch: running since the program began; None: time counts from here.

    Returns:
      The last step, the signal that ended the run before TrainingConfig.steps (else None), and the validation loss.

    Raises:
      ConfigError: the experiment cannot work, or is not the one in `run_dir`.
      DataError: a dataset other than `code` is not prepared. The message has the command that prepares it.
      DivergedError: the loss or the gradient is not finite. Nothing of that state was saved.
      InUseError: another process trains in `run_dir`.
      SaveError: a checkpoint could not be written.
      WrongBitsError: a step gave different bits when it was computed again, as TrainingConfig.check_every asks for.
      StoppedEarly: a signal came before the first step, and this is the only process.
    """
    run_dir, training, stopwatch = location("run_dir", run_dir), config.training, stopwatch or Stopwatch()
    setup = set_up(config, stopwatch)
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())  # outermost: no signal cuts off the way out of the others
        owner = stack.enter_context(Owner(run_dir))
        attempts = stack.enter_context(Attempts(run_dir, stopwatch))
        watchdog = stack.enter_context(Watchdog(run_dir, jax.process_index()))
        store = stack.enter_context(CheckpointStore(run_dir / FOLDER, keep_last=training.keep_last))
        local = stack.enter_context(LocalTier(training.local_dir, run_dir))
        with stopwatch.during("restore"):
            state, meta = interrupt.before_steps(lambda: first_state(setup, config, store, local, allow_restart))
        start = int(jax.device_get(state.step))
        _write_down(config, run_dir, notes or {})  # only now: a refused config leaves no trace in another's folder
        log = stack.enter_context(MetricsLog(run_dir, resume_step=start, config=config, expected=meta.get("records")))
        if start >= training.steps:
            local.clear()
            return Result(start, None, meta.get("validation_loss"))
        attempts.begin(start)
        progress = stack.enter_context(Progress(start, training.steps))
        progress.say(_opening(config, setup.like, start))
        with stopwatch.during("compile"):
            train_step = interrupt.before_steps(lambda: compile_step(setup, config, progress))
        run = Run(
            config=config,
            datasets=setup.datasets,
            placement=setup.placement,
            batches=iterate(setup.batches, start),
            train_step=train_step,
            validate=setup.validate,
            store=store,
            local=local,
            recorder=Recorder(config, log, progress, store, Clock(stopwatch, start), skipped=meta.get("skipped", 0)),
            profiler=stack.enter_context(Profiler(profile, run_dir)),
            stopwatch=stopwatch,
            attempts=attempts,
            owner=owner,
            interrupt=interrupt,
            watchdog=watchdog,
        )
        with stopwatch.during("train"):
            result = run_steps(run, state, start)
        attempts.ended = result.interrupted.name if result.interrupted is not None else "finished"
        return result


class Setup(NamedTuple):
    """What a run is made of before it has a folder."""

    datasets: dict[str, Any]
    """What was prepared, by name."""
    placement: Placement
    like: TrainState
    """The state as shapes with shardings."""
    begin: Callable[[], TrainState]
    """The state at step 0."""
    step: TrainStep
    batches: Sequence[Batch]
    validate: Validation


def set_up(config: ExperimentConfig, stopwatch: Stopwatch) -> Setup:
    """Reads the data and builds the functions of a run; whatever does not fit is refused here."""
    training = config.training
    _prepare(config.data)
    byte_lengths = load_tokenizer(config.data.tokenizer).byte_lengths
    datasets = {name: dataset_metadata(config.data, name) for name, _ in config.data.mixture}
    _require_vocabulary(config, datasets)
    placement = place(config)
    optimizer = build_optimizer(config.optimizer, training.steps)
    graphdef, like = abstract_state(config.model, optimizer, placement)
    index, count = placement.shard(training.batch_size)
    return Setup(
        datasets,
        placement,
        like,
        functools.partial(initial_state, config.model, optimizer, training.seed, placement),
        make_train_step(config, graphdef, optimizer, byte_lengths, placement),
        training_batches(
            config.data, batch_size=training.batch_size, seed=training.seed, shard_index=index, shard_count=count
        ),
        Validation(config, graphdef, byte_lengths, placement, stopwatch),
    )


def first_state(
    setup: Setup, config: ExperimentConfig, store: CheckpointStore, local: LocalTier, allow_restart: bool
) -> tuple[TrainState, Meta]:
    """The state to begin from and its metadata: the newest checkpoint's, or that of step 0 and none."""
    restored = restore_newest(store, local, setup.like, config, setup.datasets)
    if restored is not None:
        return restored
    if not allow_restart:
        unanimous(lambda: refuse_lost_history(store.folder.parent, store, config.training.checkpoint_every))
    return warm_started(setup.begin(), setup.like, config, setup.datasets), {}


def run_steps(run: Run, state: TrainState, start: int) -> Result:
    """Steps start + 1, start + 2, ...: step n learns from batch n - 1."""
    training, recorder = run.config.training, run.recorder
    step, loss = start, None
    with PreemptionSync(run.interrupt, start) as sync:
        running = start < training.steps and sync.allows(start + 1)
        while running:
            step += 1
            with run.watchdog.step(step):
                with run.stopwatch.during("data"):
                    batch = next(run.batches)
                run.profiler.before(step)
                with jax.transfer_guard("disallow"):
                    device_batch = run.placement.put(batch, training.batch_size)
                    if checks := _due(step, training.check_every, training.steps):
                        state, metrics = step_twice(run.train_step, state, device_batch)
                    else:
                        state, metrics = run.train_step(state, device_batch)
                recorder.receive(step, metrics)  # reads those of step n - 1, while the device computes step n
                run.profiler.after(step, metrics)
                run.store.poll()
                run.owner.poll()
                running = step < training.steps and sync.allows(step + 1)
                evaluates = _due(step, training.eval_every, training.steps)
                saves = not running or _due(step, training.checkpoint_every, training.steps)
                saves_locally = not saves and training.local_dir is not None and _due(step, training.local_every, 0)
                if evaluates or saves or saves_locally:
                    recorder.flush()  # raises unless this step's state is finite too: no other is evaluated or saved
            if checks:
                recorder.speeds(step, speeds())
            loss = None
            if evaluates:
                with run.stopwatch.during("evaluate"):
                    records, loss = run.validate(state.params, step)
                    recorder.validation(records)
            if saves or saves_locally:
                with run.stopwatch.during("save"):
                    if saves:
                        run.owner.confirm()
                    snapshot = Snapshot(state, run.config, run.datasets, loss, **recorder.sync())
                    (run.store if saves else run.local).save(snapshot)
            run.attempts.update(step, at_once=saves)
        with run.stopwatch.during("save"):
            run.store.wait()
            run.local.clear()
    return Result(step, sync.signal if step < training.steps else None, loss)


class Recorder:
    """Metrics from the device to the log, one step behind, so that the host never waits for the step in flight."""

    def __init__(
        self,
        config: ExperimentConfig,
        log: MetricsLog,
        progress: Progress,
        store: CheckpointStore,
        clock: Clock,
        *,
        skipped: int = 0,
    ):
        self._config, self._log, self._progress, self._store = config, log, progress, store
        self._pending: tuple[int, Metrics] | None = None
        self._consecutive_skips = skipped
        self._clock = clock

    def receive(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of the step in flight, and records those of the one before."""
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Records those of the step in flight: waits for it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._record(*pending)

    def sync(self) -> dict[str, int]:
        """Until all records are on disk. Returns what the checkpoint of this step notes of them."""
        self._log.sync()
        return {"skipped": self._consecutive_skips, "records": self._log.count}

    def speeds(self, step: int, found: list[Speed]) -> None:
        """Says how fast the processes are, and which are slow."""
        slowest = max(speed.seconds for speed in found)
        self._progress.say(f"step {step} computed twice: equal; {1e3 * slowest:.1f} ms for the probe of devices")
        for slow in stragglers(found):
            self._progress.say(f"warning: {slow}")

    def validation(self, records: list[Record]) -> None:
        """Records an evaluation."""
        for record in records:
            self._log.write(record)
        self._log.sync()  # the next line may be long in coming
        self._progress.validation(records)

    def _record(self, step: int, metrics: Metrics) -> None:
        values = jax.device_get(metrics)
        training = self._config.training
        finite = math.isfinite(values["nll"]) and math.isfinite(values["grad_norm"])
        self._consecutive_skips = 0 if finite else self._consecutive_skips + 1
        if not finite and (training.nonfinite == "stop" or self._consecutive_skips == MAX_CONSECUTIVE_SKIPS):
            raise DivergedError(self._divergence(step, values))
        self._progress.advance()
        if not finite:
            self._log.write({"kind": "skipped", "step": step, "batch": step - 1})
            self._progress.say(f"step {step} skipped: {_reason(step, values)}")
            return
        if is_logged(step, training):
            record = train_record(step, values, self._clock.read(step), self._config)
            self._log.write(record)
            self._progress.train(record)

    def _divergence(self, step: int, values: Metrics) -> str:
        self._store.wait()
        skips = self._consecutive_skips
        saved = [number for number in self._store.steps() if number <= step - skips]
        last = f"the last good checkpoint is {self._store.folder / str(saved[-1])}" if saved else "nothing was saved"
        row = f", the {skips}th step in a row" if skips == MAX_CONSECUTIVE_SKIPS else ""
        return (
            f"step {step}, {_reason(step, values)}{row}; {last}. Resuming would repeat these steps: lower "
            "OptimizerConfig.learning_rate or clip_norm in a new run folder, or take TrainingConfig.nonfinite = 'skip' "
            "where single batches are to blame"
        )


def compile_step(setup: Setup, config: ExperimentConfig, progress: Progress) -> TrainStep:
    """The step as one executable. It takes these shapes and no others, so it cannot be compiled again by accident."""
    with compiling("the training step", even_if_quick=True):
        compiled = lower_step(setup.step, setup.like, config, setup.placement).compile()
        distributed.wait_for_all("compiled")  # the first collective has less patience with slow compilers (Gloo: 30 s)
    progress.restart_clock()
    return compiled


def lower_step(step: TrainStep, like: TrainState, config: ExperimentConfig, placement: Placement) -> jax.stages.Lowered:
    """The step for its shapes, ready to be compiled for the devices of the placement, which need not be there.

    Args:
      like: the state as shapes with shardings.
    """
    out = jax.tree.map(lambda leaf: leaf.sharding, like), placement.replicated
    batch = abstract_batch((config.training.batch_size, config.data.seq_len), placement)
    return jax.jit(step, donate_argnums=0, out_shardings=out).lower(like, batch)


def abstract_batch(shape: tuple[int, int], placement: Placement) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of (rows, tokens) as shapes with shardings."""
    return dict.fromkeys(BATCH_FIELDS, jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.batch))


def _write_down(config: ExperimentConfig, run_dir: AnyPath, notes: Mapping[str, str]) -> None:
    if distributed.is_first():
        for name, text in {"config.json": json.dumps(to_dict(config), indent=1) + "\n", **notes}.items():
            write_whole(run_dir / name, text)


def _prepare(data: DataConfig) -> None:
    """Prepares missing datasets: process 0 first, so that the others find them where they share a folder."""
    unanimous(lambda: ensure_prepared(data) if distributed.is_first() else None)
    unanimous(lambda: ensure_prepared(data))


def _reason(step: int, values: Metrics) -> str:
    return f"on batch {step - 1}: the sum of losses is {values['nll']}, the gradient norm {values['grad_norm']}"


def _require_vocabulary(config: ExperimentConfig, datasets: Mapping[str, Any]) -> None:
    """A token without a row in the embedding table would be read as some other token, silently."""
    for name, dataset in datasets.items():
        if dataset["vocab_size"] > config.model.vocab_size:
            raise ConfigError(
                f"ModelConfig.vocab_size = {config.model.vocab_size}: the tokenizer of dataset {name!r} has "
                f"{dataset['vocab_size']} tokens; set it to at least that"
            )


def _due(step: int, every: int, last: int) -> bool:
    """Whether something happens at this step that happens every so often (0: never) and at the end."""
    return every > 0 and (step % every == 0 or step == last)


def _opening(config: ExperimentConfig, like: TrainState, start: int) -> str:
    devices = jax.devices()
    hosts = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    begins = f"resuming at step {start}" if start else "starting"
    if config.training.init_from and not start:
        begins += f" with the parameters of {config.training.init_from}"
    kernel, platform = config.model.kernel or "", devices[0].platform
    foreign = kernel.startswith("pallas_tpu") and platform != "tpu"  # those for GPUs refuse other devices
    warning = (
        f"warning: ModelConfig.kernel = {kernel!r} is slow on a {platform}, where it is only tested; leave it out\n"
    )
    return (
        f"{warning if foreign else ''}{begins}: {parameter_count(like.params):,} parameters, "
        f"{config.training.batch_size} x {config.data.seq_len} tokens per step, {len(devices)} x "
        f"{devices[0].device_kind}{hosts}"
    )
