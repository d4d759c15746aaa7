"""Compiles a training step for TPUs you do not have: memory, collectives, time.

  aamoe compile --gin_file=aamoe_1b.gin --topology=v5p:4x4x4
  aamoe compile --gin_file=aamoe_8b.gin --topology=v5p:8x8x8 --topology=v6e:16x16 --output=preflight_8b
  aamoe compile --gin_file=aamoe_1b.gin --topology=v5p:4x4x4 --save=step.pickle
  aamoe compile --gin_file=aamoe_1b.gin --topology=2xv5p:4x4x4 --gin_param='TrainingConfig.batch_size = 128'

Memory by kind and its biggest buffers, FLOPs, collectives with their bytes and axes, and a step time modelled from the
chip's limits. The compiler is libtpu's, on any machine: extra `aot`, in an environment of its own (BUILD.md). A step
takes minutes to compile, however many layers and devices; --depth=placed stops the compiler, within about a minute,
when every buffer has its place: code is not generated, which for a kernel could still fail.

Exit codes: 0 fits everywhere; 1 the config does not fit the slice, or there is no compiler; 2 too big for at least one
slice: the message says which buffers break it and what to change.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

from absl import flags

from aamoe_jax.config import ConfigError, ExperimentConfig
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.program import Depth, PreflightError, compile_apart
from aamoe_jax.preflight.report import MODEL_NOTE, details, overview, too_big
from aamoe_jax.preflight.summary import Summary
from launch.program import command_line, define_experiment_flags, experiment_from_flags, refuse_arguments, run

EXIT_NOT_COMPILED = 1
EXIT_TOO_BIG = 2


def define_flags() -> None:
    """The flags of this program. They are defined when it runs, so that importing it adds none to another program."""
    define_experiment_flags()
    flags.DEFINE_multi_string(
        "topology", None, "A slice such as v5p:8x8x8, v5e:16x16, v6e:16x16, tpu7x:4x4x4; 2xv5p:8x8x8 is two."
    )
    flags.DEFINE_enum("mode", "train", ["train", "eval"], "Which step.")
    flags.DEFINE_enum("depth", "compiled", get_args(Depth), "How far the compiler goes.")
    flags.DEFINE_string("save", None, "Where the compiled executable goes, pickled; with one --topology.")
    flags.DEFINE_string("output", None, "Stem of a .md and a .json file with all of it.")
    flags.mark_flag_as_required("topology")


def report(summaries: list[Summary], config: ExperimentConfig) -> str:
    """All of it as Markdown."""
    sections = [MODEL_NOTE, overview(summaries), *(details(summary) for summary in summaries)]
    sections += [too_big(summary, config) for summary in summaries if not summary.fits]
    return "\n\n".join(sections) + "\n"


def write(output: Path, text: str, summaries: list[Summary]) -> None:
    """The report, under the command that made it, and the figures."""
    output.with_suffix(".md").write_text(f"`{command_line('launch.compile')}`\n\n{text}", encoding="utf-8")
    entries = ",\n".join(summary.to_json() for summary in summaries)
    output.with_suffix(".json").write_text(f"[\n{entries}\n]\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    refuse_arguments(argv)
    values, config = flags.FLAGS, experiment_from_flags()
    slices = [Slice.parse(topology) for topology in values.topology]
    if values.save is not None and len(slices) > 1:
        raise ConfigError(f"--save={values.save} takes one --topology: there are {len(slices)}")
    if values.save is not None and values.depth != "compiled":
        raise ConfigError(f"--save={values.save} needs --depth=compiled")
    save = None if values.save is None else Path(values.save)
    try:
        summaries = [compile_apart(config, piece.topology, values.mode, values.depth, save) for piece in slices]
    except PreflightError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_COMPILED
    text = report(summaries, config)
    print(text, end="")
    if values.output is not None:
        write(Path(values.output), text, summaries)
    refused = [summary for summary in summaries if not summary.fits]
    for summary in refused:
        print(f"error: {too_big(summary, config)}", file=sys.stderr)
    return EXIT_TOO_BIG if refused else 0


if __name__ == "__main__":
    define_flags()
    run(main)
