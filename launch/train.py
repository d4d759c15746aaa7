"""Trains a language model, or resumes a run.

  aamoe train --gin_file=aamoe.gin --run_dir=runs/aamoe
  aamoe train --gin_file=aamoe.gin --gin_param='TrainingConfig.seed = 1' --run_dir=runs/aamoe_1
  aamoe train --gin_file=aamoe.gin --run_dir=runs/aamoe --profile=10:12
  aamoe train --gin_file=aamoe.gin --run_dir=/shared/aamoe --distributed=10.0.0.1:8476,4,0   # ,1 ,2 and ,3

The run folder holds config.gin and config.json (all fields, as they were used), metrics.jsonl and checkpoints/. Where
it has a checkpoint the run resumes there, bit-identical to an uninterrupted run; a config that changed is refused with
what changed, and so is a folder that has lost its checkpoints. The dataset `code` is prepared on first use; others are
by launch.prepare.

SIGTERM and SIGINT (Ctrl-C) stop the run after the step in flight with a complete checkpoint; a second one kills it.

With --distributed the same command runs on every host, on one run folder that all of them see. A signal to any process
stops all of them after the same step; where one is lost, or a step hangs, the others end within a minute. The run goes
on with any number of processes and on any mesh.

Exit codes: 0 finished; 1 the config, the data, the memory or a checkpoint does not fit; 3 the loss is not finite; 4 a
checkpoint could not be read or written, or a metric not written; 5 another process is lost, or a step hung; 7 another
run uses the run folder; 8 a step gave different bits when it was computed again; 70 an unexpected error, with a
traceback; 143 stopped by SIGTERM and 130 by SIGINT: the same command goes on.
"""

from __future__ import annotations

import signal
import sys
import traceback

from absl import flags

from aamoe_jax.bucket import AnyPath, location
from aamoe_jax.config import ConfigError, ExperimentConfig, first_line
from aamoe_jax.files import SaveError
from aamoe_jax.training import distributed
from aamoe_jax.training.checkpoints import InUseError, UnreadableCheckpointError
from aamoe_jax.training.device_check import WrongBitsError
from aamoe_jax.training.goodput import Stopwatch, goodput
from aamoe_jax.training.interrupt import StoppedEarly
from aamoe_jax.training.loop import DivergedError, Result, train
from aamoe_jax.training.metrics import read_metrics
from aamoe_jax.training.profile import ProfileWindow, serve_profiles
from experiments.binding import operative_gin
from launch.program import (
    define_distributed_flag,
    define_experiment_flags,
    experiment_from_flags,
    refuse_arguments,
    run,
    shorten,
)

EXIT_REFUSED = 1
EXIT_DIVERGED = 3
EXIT_NOT_SAVED = 4
EXIT_IN_USE = 7
EXIT_WRONG_BITS = 8
EXIT_UNEXPECTED = 70
"""EX_SOFTWARE of sysexits.h. Python's own code for an exception is 1, which here is a refusal."""
EXITS = {
    DivergedError: EXIT_DIVERGED,
    WrongBitsError: EXIT_WRONG_BITS,
    InUseError: EXIT_IN_USE,
    SaveError: EXIT_NOT_SAVED,
    UnreadableCheckpointError: EXIT_NOT_SAVED,
    ConfigError: EXIT_REFUSED,
}
"""The first that fits: those above ConfigError are ConfigErrors too."""
GO_ON = "the same command goes on from there"
EXIT_SIGNAL = 128
"""Plus the number of the signal, as shells do."""


def define_flags() -> None:
    """The flags of this program. They are defined when it runs, so that importing it adds none to another program."""
    define_experiment_flags()
    flags.DEFINE_string(
        "run_dir", None, "Run folder, or gs://BUCKET/FOLDER: made if missing, resumed if it holds a checkpoint."
    )
    flags.DEFINE_bool(
        "allow_restart",
        False,
        "Begin again at step 0 if the run folder has lost its checkpoints; else that is refused.",
    )
    flags.DEFINE_string("profile", None, "START:STOP: profiler traces of these steps, into the run folder.")
    flags.DEFINE_integer(
        "profiler_port", None, "Port of JAX's profiler server; the n-th process listens on the n-th after it."
    )
    define_distributed_flag()
    flags.mark_flag_as_required("run_dir")


def main(argv: list[str]) -> int:
    refuse_arguments(argv)
    several = flags.FLAGS.distributed is not None
    if several:
        distributed.initialize(flags.FLAGS.distributed)
    try:
        code = run_training()
    except StoppedEarly as error:
        print(f"{error}: nothing to save; the same command starts again")
        distributed.leave_at_once(EXIT_SIGNAL + error.signal)  # the compiler may be at work in another thread
    except KeyboardInterrupt:
        print("ended by SIGINT; the same command goes on from the newest checkpoint", file=sys.stderr)
        distributed.leave_at_once(EXIT_SIGNAL + signal.SIGINT)
    except (DivergedError, WrongBitsError, ConfigError) as error:
        print(f"error: {shorten(f'{distributed.this_process()}{error}')}", file=sys.stderr)
        code = next(code for kind, code in EXITS.items() if isinstance(error, kind))
    except Exception as error:
        if distributed.is_loss(error):
            distributed.end_lost(error)
        code = unexpected(error)
    if several and 0 < code < EXIT_SIGNAL:
        distributed.leave(code)  # Python's own way out would wait for the others
    return code


def unexpected(error: Exception) -> int:
    """Says what is known of an error that is not of the config; returns the exit code."""
    if "RESOURCE_EXHAUSTED" in str(error):
        print(
            f"error: {distributed.this_process()}out of memory ({first_line(error)}): lower "
            "TrainingConfig.batch_size, raise TrainingConfig.accumulate, or spread the model over more devices "
            "(MeshConfig.fsdp)",
            file=sys.stderr,
        )
        return EXIT_REFUSED
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename.startswith("gs://"):
        print(f"error: {distributed.this_process()}{error.filename}: {error.strerror}; {GO_ON}", file=sys.stderr)
        return EXIT_NOT_SAVED
    traceback.print_exc()
    print(f"error: {distributed.this_process()}unexpected, see above; what was saved is as it was", file=sys.stderr)
    return EXIT_UNEXPECTED


def run_training() -> int:
    """Trains as the flags say; returns the exit code."""
    run_dir, config = location("--run_dir", flags.FLAGS.run_dir), experiment_from_flags()
    profile = ProfileWindow.parse(flags.FLAGS.profile) if flags.FLAGS.profile is not None else None
    if flags.FLAGS.profiler_port is not None:
        serve_profiles(flags.FLAGS.profiler_port)
    result = train(
        config,
        run_dir,
        profile=profile,
        notes={"config.gin": operative_gin(config)},
        allow_restart=flags.FLAGS.allow_restart,
        stopwatch=Stopwatch(whole_process=True),
    )
    if result.interrupted is not None:
        if distributed.is_first():
            print(f"stopped by {result.interrupted.name} after step {result.step}, saved; {GO_ON}")
        return EXIT_SIGNAL + result.interrupted
    if distributed.is_first():
        print(summary(config, run_dir, result))
    return 0


def summary(config: ExperimentConfig, run_dir: AnyPath, result: Result) -> str:
    """The run in two lines."""
    trained = [record for record in read_metrics(run_dir) if record["kind"] == "train"]
    parts = [f"{result.step} steps, {trained[-1]['tokens']:,} tokens", f"loss {trained[-1]['loss']:.4f}"]
    if result.validation_loss is not None:
        parts.append(f"validation loss {result.validation_loss:.4f}")
    return f"{goodput(run_dir)}\ndone: {', '.join(parts)}; {run_dir}"


if __name__ == "__main__":
    define_flags()
    run(main)
