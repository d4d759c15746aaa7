"""Trains and compares the four choices of AAMoEConfig.local.

    aamoe local_context --gin_file=quickstart.gin --gin_file=learned_router.gin --steps=600 \
        --seeds=0,1 --output=experiments/results/local_context

Pooled keys have none of an unfinished chunk, so that `routed` asks for a learned router.

Every reading of `AAMoEConfig.local` trains the same model, for the same steps on the same data, once per seed, and is
evaluated on held-out text under causal budgets. A run lies in WORK_DIR/MODE-SEED and goes on from its last checkpoint;
one that has a result.json there is not repeated: after an interruption the same command does what is left. Writes
OUTPUT.json, OUTPUT.md and OUTPUT.png.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from absl import app, flags, logging
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aamoe_jax.analysis.pictures import BLUE, STYLE, VERMILION
from aamoe_jax.config import ExperimentConfig, Local
from aamoe_jax.data import ensure_prepared
from aamoe_jax.evaluation.perplexity import Evaluation
from experiments.binding import load_experiment
from experiments.runs import Result, exit_code, require_one_dataset, run, with_steps

FLAGS = flags.FLAGS
MODES: tuple[Local, ...] = ("window", "chunk", "routed", "none")
COLOURS = {"window": BLUE, "chunk": VERMILION, "routed": "#009E73", "none": "#CC79A7"}
MEANINGS = {
    "window": "the last m tokens, as every token's first resource",
    "chunk": "the own chunk up to the token, as its first resource",
    "routed": "the own chunk competes like any other",
    "none": "nothing of the own chunk: the paper's example",
}


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_multi_string("gin_file", [], "Path of a gin file, or the name of a shipped config. Repeat it.")
    flags.DEFINE_multi_string("gin_param", [], "One binding, such as 'ModelConfig.d_model = 128'. Repeat it.")
    flags.DEFINE_integer("steps", None, "Steps of every run; those of the config if not given.", lower_bound=1)
    flags.DEFINE_multi_enum("local", list(MODES), list(MODES), "Readings to compare with the first. Repeat it.")
    flags.DEFINE_list("seeds", ["0", "1"], "One run per seed and reading. A seed fixes parameters and order of data.")
    flags.DEFINE_string("work_dir", "runs/local_context", "Where the runs lie.")
    flags.DEFINE_string("output", None, "Path of the report without its suffix.", required=True)
    flags.DEFINE_integer("eval_batches", 0, "Batches of the test split to evaluate on; 0: all.", lower_bound=0)


# Running.


def experiment(config: ExperimentConfig, mode: Local, seed: int) -> ExperimentConfig:
    """The config with one reading of the own neighbourhood, and one seed."""
    layer = dataclasses.replace(config.model.aamoe, local=mode)
    model = dataclasses.replace(config.model, aamoe=layer)
    return dataclasses.replace(config, model=model, training=dataclasses.replace(config.training, seed=seed))


def compare(
    config: ExperimentConfig, modes: Sequence[Local], seeds: Sequence[int], work_dir: Path, *, eval_batches: int
) -> list[Result]:
    """The results of every reading and seed: all seeds of the first reading, then those of the next.

    Raises:
      ConfigError: a run in `work_dir` is of another experiment.
      StoppedError: a signal stopped a run.
    """
    require_one_dataset(config)
    results = {}
    # Seed after seed, so that a comparison of all readings exists as early as it can.
    for seed in seeds:
        for mode in modes:
            print(f"== local = {mode!r}, seed {seed}", flush=True)
            one = experiment(config, mode, seed)
            results[mode, seed] = run(one, work_dir / f"{mode}-{seed}", eval_batches, more=about_positions)
    return [results[mode, seed] for mode in modes for seed in seeds]


def about_positions(config: ExperimentConfig, evaluation: Evaluation, counts: Int[np.ndarray, "L"]) -> Result:
    """What this comparison asks of a finished run beside what every one does."""
    layer = config.model.aamoe
    folded = fold(evaluation.nll_by_position, counts, layer.chunk_size)
    return {
        "mode": layer.local,
        "nll_by_position_in_chunk": folded.tolist(),
        "first_position_excess": float(folded[0]) - evaluation.nats_per_token,
        "utilisation": statistics.mean(evaluation.statistics["utilisation"]),
    }


def fold(
    nll_by_position: Float[np.ndarray, "L"], counts: Int[np.ndarray, "L"], chunk_size: int
) -> Float[np.ndarray, "m"]:
    """Mean loss at every position of a chunk. Rows start with a chunk, so it is the position in the row modulo m."""
    position = np.arange(len(counts)) % chunk_size
    total = np.bincount(position, np.where(counts > 0, nll_by_position * counts, 0.0), chunk_size)
    count = np.bincount(position, counts, chunk_size)
    return np.divide(total, count, out=np.full(chunk_size, np.nan), where=count > 0)


# Reporting.


def by_mode(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results of every reading, in the order in which they come."""
    modes = dict.fromkeys(result["mode"] for result in results)
    return {mode: [result for result in results if result["mode"] == mode] for mode in modes}


def _mean(runs: Sequence[Mapping[str, Any]], key: str) -> float:
    return statistics.mean(run[key] for run in runs)


def report(results: Sequence[Result], command: str, picture: str) -> str:
    """The comparison as markdown."""
    groups, first = by_mode(results), results[0]
    seeds = [run["seed"] for run in groups[first["mode"]]]
    config = first["config"]
    lines = [
        "# What a token should see of its own neighbourhood",
        "",
        f"    {command}",
        "",
        f"{first['steps']} steps of {config['training']['batch_size']} x {config['data']['seq_len']} tokens, "
        f"d = {config['model']['d_model']}, {config['model']['num_layers']} layers, "
        f"m = {config['model']['aamoe']['chunk_size']}, E = {config['model']['aamoe']['num_experts']}, "
        f"beta = {config['model']['aamoe']['budget']['beta']}; the same data in the same order for every reading. "
        f"{first['evaluation']['tokens']:,} tokens of held-out text, {first['evaluation']['budget']} budgets (causal). "
        f"Corpus {first['corpus_digest'][:16]}, JAX {first['versions']['jax']}, {first['device']}.",
        "",
        "| local | bits/byte, mean | " + " | ".join(f"seed {seed}" for seed in seeds) + f" | to {first['mode']} | "
        "first position of a chunk, nats above the mean | utilisation | tokens/s |",
        "|---" + "|--:" * (len(seeds) + 5) + "|",
    ]
    reference = _mean(groups[first["mode"]], "bits_per_byte")
    for mode, runs in groups.items():
        mean = _mean(runs, "bits_per_byte")
        cells = [
            f"{mode}: {MEANINGS[mode]}",
            f"{mean:.4f}",
            *(f"{run['bits_per_byte']:.4f}" for run in runs),
            f"{mean - reference:+.4f}",
            f"{_mean(runs, 'first_position_excess'):+.3f}",
            f"{_mean(runs, 'utilisation'):.2f}",
            f"{_mean(runs, 'tokens_per_second'):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"![Bits per byte, and loss by position in the chunk]({picture})"]
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], path: str | Path) -> Figure:
    """Left: bits per byte of every reading, a dot per seed. Right: loss by position in the chunk."""
    groups = by_mode(results)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.6))
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
        _draw_bits(left, groups)
        _draw_positions(right, groups)
        figure.savefig(path)
    return figure


def _draw_bits(axes: Axes, groups: Mapping[str, Sequence[Result]]) -> None:
    for place, (mode, runs) in enumerate(groups.items()):
        bits = [run["bits_per_byte"] for run in runs]
        axes.plot([place] * len(bits), bits, "o", color=COLOURS[mode], markersize=5, alpha=0.75, markeredgewidth=0)
        axes.hlines(statistics.mean(bits), place - 0.25, place + 0.25, color=COLOURS[mode], linewidth=1.6)
        axes.annotate(
            f"{statistics.mean(bits):.3f}", (place, max(bits)), (0, 6), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(len(groups)), list(groups))
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.12, y=0.15)
    axes.set(title="Held-out bits per byte", ylabel="bits per byte")


def _draw_positions(axes: Axes, groups: Mapping[str, Sequence[Result]]) -> None:
    for mode, runs in groups.items():
        curves = np.array([run["nll_by_position_in_chunk"] for run in runs])
        for curve in curves:
            axes.plot(curve, color=COLOURS[mode], linewidth=0.6, alpha=0.4)
        axes.plot(curves.mean(0), color=COLOURS[mode], linewidth=1.6, label=mode)
    chunk_size = curves.shape[1]
    axes.set_xticks(range(0, chunk_size, max(chunk_size // 8, 1)))
    axes.legend(frameon=False, ncols=len(groups), loc="upper right")
    axes.margins(x=0.01, y=0.1)
    axes.set(title="Loss by position in the chunk", xlabel="position in the chunk", ylabel="nats per token")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; inputs are given as --flag=value")
    logging.set_verbosity(logging.WARNING)  # TFDS and Orbax report every file
    command = shlex.join(["python", "-m", "experiments.local_context", *sys.argv[1:]])

    def compare_all() -> None:
        config = with_steps(load_experiment(FLAGS.gin_file, FLAGS.gin_param), FLAGS.steps)
        ensure_prepared(config.data)
        seeds = [int(seed) for seed in FLAGS.seeds]
        results = compare(config, FLAGS.local, seeds, Path(FLAGS.work_dir), eval_batches=FLAGS.eval_batches)
        write(results, Path(FLAGS.output), command)

    return exit_code(compare_all)


def write(results: Sequence[Result], output: Path, command: str) -> None:
    """OUTPUT.json, OUTPUT.md and OUTPUT.png; prints the table."""
    output.parent.mkdir(parents=True, exist_ok=True)
    picture = output.with_name(output.name + ".png")
    record = {"command": command, "results": list(results)}
    output.with_name(output.name + ".json").write_text(json.dumps(record, indent=1) + "\n")
    text = report(results, command, picture.name)
    output.with_name(output.name + ".md").write_text(text)
    draw(results, picture)
    print(text, end="")


if __name__ == "__main__":
    define_flags()
    app.run(main)
