r"""Evaluates every stack of a study at other budgets, or in rows of other lengths.

    aamoe sweeps --study=main --sweep=length --gin_file=quickstart.gin --variant=AA-MoE --variant='context alone' \
        --seeds=0,1,2 --output=experiments/results/main_length

Models were not trained for it (AA-34, AA-35, DEC-18): `budget` multiplies the budget of every token, `length` cuts the
same text into longer or shorter rows, with the same beta. A stack without budgets is evaluated once by `budget`. Test
split, causal budgets.

Variants and runs are those of experiments.studies: with the same --work_dir, its runs are not trained again. Writes
OUTPUT.json, OUTPUT.md and OUTPUT.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from aamoe_jax.analysis.pictures import RUN_COLOURS, picture
from aamoe_jax.config import ConfigError, ExperimentConfig
from aamoe_jax.data import ensure_prepared, load_tokenizer
from aamoe_jax.evaluation.perplexity import Evaluator, causal_budget
from aamoe_jax.evaluation.sweeps import BUDGET_SCALES, LENGTH_FACTORS, held_out
from aamoe_jax.markdown import table
from aamoe_jax.model import Skipped, structure
from aamoe_jax.training.checkpoints import Checkpoint
from experiments import studies
from experiments.judge import FEWEST_SEEDS
from experiments.program import command_line, publish, start
from experiments.runs import Result, by_document, comparison, once, positive_numbers, seeds_of
from experiments.studies import (
    STUDIES,
    Study,
    configs,
    define_run_flags,
    define_stack_flags,
    differ,
    part_of,
    planned,
)

FLAGS = flags.FLAGS
Sweep = Literal["budget", "length"]
POINTS: Mapping[Sweep, Sequence[float]] = {"budget": BUDGET_SCALES, "length": LENGTH_FACTORS}
BATCH_SIZE = 8
FIGURES = ("bits_per_byte", "flops_per_token", "spent", "tokens")


def define_flags() -> None:
    """The flags of this program."""
    define_stack_flags()
    define_run_flags()
    flags.adopt_module_key_flags(studies)
    flags.DEFINE_enum("sweep", None, get_args(Sweep), "What is changed after training.", required=True)
    defaults = "; ".join(f"of `{sweep}` {','.join(map(str, points))}" for sweep, points in POINTS.items())
    flags.DEFINE_list("sweep_points", [], f"Multiples of what it was in training; if not given, {defaults}.")
    flags.DEFINE_integer("eval_batches", 0, "Only the text of so many batches of 8 rows; 0: all.", lower_bound=0)


def measure(
    config: ExperimentConfig,
    folder: Path,
    sweep: Sweep,
    points: Sequence[float],
    eval_batches: int,
    skipped: frozenset[Skipped] = frozenset(),
) -> Result:
    """A run at every point, trained if it has not been, or what an earlier call has left.

    Args:
      eval_batches: of the test split at the training length; 0: all.
      skipped: layers or mixers to leave out.

    Raises:
      ConfigError: what lies in `folder` is of another experiment, or the text cannot be cut into such rows.
      StoppedError: a signal stopped the training.
    """
    if sweep == "budget" and not config.model.layers_of("aamoe"):
        points = (1.0,)
    tokenizer = load_tokenizer(config.data.tokenizer)
    ((dataset, _),) = config.data.mixture

    def swept(checkpoint: Checkpoint) -> Result:
        largest = max(points) if sweep == "budget" else 1.0
        graphdef, budget = structure(config.model, skipped), causal_budget(config.model)
        evaluate = Evaluator(graphdef, config.model, budget=budget, max_budget_scale=largest)
        found = []
        for point in points:
            scale, factor = (point, 1.0) if sweep == "budget" else (1.0, point)
            length, part = factor * config.data.seq_len, eval_batches or None
            batches = held_out(config.data, dataset, "test", length=length, batch_size=BATCH_SIZE, max_batches=part)
            evaluation = evaluate(checkpoint.params, batches, tokenizer.byte_lengths, budget_scale=scale)
            documents = by_document(np.asarray(evaluation.nll_by_target), batches, tokenizer)
            figures = {name: getattr(evaluation, name) for name in FIGURES}
            found.append({"point": point, **figures, "documents": documents})
            print(f"   {point:g} times the {sweep}: {evaluation.bits_per_byte:.4f} bits per byte", flush=True)
        return {"points": found, "documents": len(found[0]["documents"])}

    name = f"{sweep}_sweep_{'_'.join(f'{point:g}' for point in points)}"
    return once(config, folder, name, swept, eval_batches=eval_batches, skipped=skipped)


def conduct(
    study: Study,
    experiments: Mapping[str, ExperimentConfig],
    sweep: Sweep,
    points: Sequence[float],
    seeds: Sequence[int],
    work_dir: Path,
    eval_batches: int,
) -> dict[str, list[Result]]:
    """Every variant at every point, one result per seed.

    Raises:
      ConfigError: what lies in `work_dir` is of another experiment, or the text cannot be cut into such rows.
      StoppedError: a signal stopped a training.
    """
    found: dict[str, list[Result]] = {name: [] for name in study.variants}
    for name, config, folder in planned(study, experiments, seeds, work_dir):
        skipped = study.variants[name].without
        found[name].append(measure(config, folder, sweep, points, eval_batches, skipped))
    return found


def by_point(runs: Sequence[Result]) -> dict[float, list[Result]]:
    """The results of one variant's runs, point by point."""
    points = (point["point"] for point in runs[0]["points"])
    return {at: [run["points"][place] for run in runs] for place, at in enumerate(points)}


def mean(results: Sequence[Result], name: str) -> float:
    """A figure's mean over seeds."""
    return statistics.mean(result[name] for result in results)


def report(found: Mapping[str, Sequence[Result]], sweep: Sweep, command: str, drawn: str) -> str:
    """Every variant at every point: how far it is from itself as trained, and from the first variant, as Markdown."""
    first_name, first = next(iter(found.items()))
    one, reference = first[0], by_point(first)
    length = one["config"]["data"]["seq_len"]
    rows = []
    for name, runs in found.items():
        points = by_point(runs)
        for at, results in points.items():
            spent = "" if results[0]["spent"] is None else f"{mean(results, 'spent'):.2f}"
            rows.append(
                [
                    name,
                    f"{at:g}" if sweep == "budget" else f"{at * length:g}",
                    spent,
                    f"{mean(results, 'flops_per_token'):,.0f}",
                    f"{mean(results, 'bits_per_byte'):.4f}",
                    *(f"{result['bits_per_byte']:.4f}" for result in results),
                    "" if at == 1 else str(differ("bits_per_byte", points[1.0], results)),
                    "" if name == first_name else str(differ("bits_per_byte", reference[at], results)),
                ]
            )
    changed = "budget, that of training = 1" if sweep == "budget" else "tokens per row"
    parts = [
        f"# Other {'budgets' if sweep == 'budget' else 'lengths of rows'} than in training",
        f"    {command}",
        f"Trained on rows of {length} tokens; {one['points'][0]['tokens']:,} tokens of the test split, causal budgets. "
        f"Spent are resources a token, mean over layers, and FLOPs of a forward pass, as evaluated. Intervals are 95 % "
        f"of a paired bootstrap over seeds and {one['documents']} documents; fewer than {FEWEST_SEEDS} seeds decide "
        f"nothing. Corpus {one['corpus_digest'][:16]}, JAX {one['versions']['jax']}, {one['device']}.",
        table(
            [
                "variant",
                changed,
                "spent",
                "FLOPs a token",
                "bits/byte",
                *(f"seed {run['seed']}" for run in first),
                "more than as trained",
                f"more than {first_name}",
            ],
            rows,
        ),
        f"![Held-out bits per byte]({drawn})",
    ]
    return "\n\n".join(parts) + "\n"


def draw(found: Mapping[str, Sequence[Result]], sweep: Sweep, path: str | Path) -> Figure:
    """A line for every variant, a small dot for every seed: over FLOPs where budgets change, else over lengths."""
    with picture(path, 5.6, 3.8) as figure:
        axes = figure.subplots()
        ticks = set()
        for (name, runs), colour in zip(found.items(), RUN_COLOURS, strict=False):
            places, length = [], runs[0]["config"]["data"]["seq_len"]
            for at, results in by_point(runs).items():
                place = mean(results, "flops_per_token") / 1e6 if sweep == "budget" else at * length
                places.append((place, mean(results, "bits_per_byte")))
                seeds = [result["bits_per_byte"] for result in results]
                axes.plot([place] * len(seeds), seeds, "o", color=colour, markersize=2.5, alpha=0.6)
                if at == 1:
                    axes.plot(*places[-1], "o", color=colour, markersize=9, fillstyle="none")
            axes.plot(*zip(*places, strict=True), "-o", color=colour, markersize=4.5, label=name)
            ticks |= {place for place, _ in places} if sweep == "length" else set()
        if ticks:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
        axes.legend(frameon=False)
        axes.set(
            title="Held-out bits per byte; circles: as trained",
            xlabel="MFLOPs a token, forward pass" if sweep == "budget" else "tokens per row",
            ylabel="bits per byte",
        )
    return figure


def points_of(sweep: Sweep, values: Sequence[str]) -> list[float]:
    """The multiples that --sweep_points lists, in ascending order, and 1.

    Raises:
      ConfigError: one is no positive number.
    """
    return sorted({1.0, *(positive_numbers("sweep_points", values) or POINTS[sweep])})


@comparison
def main() -> None:
    """Sweeps what the flags describe."""
    seeds, work_dir = seeds_of(FLAGS.seeds), Path(FLAGS.work_dir) / FLAGS.study
    study, points = part_of(STUDIES[FLAGS.study], FLAGS.variant), points_of(FLAGS.sweep, FLAGS.sweep_points)
    if len(study.variants) > len(RUN_COLOURS):
        raise ConfigError(f"--variant: {len(study.variants)} stacks; at most {len(RUN_COLOURS)} can be drawn")
    experiments = configs(study, FLAGS.gin_file, FLAGS.gin_param, FLAGS.steps, FLAGS.equal)
    ensure_prepared(next(iter(experiments.values())).data)
    found = conduct(study, experiments, FLAGS.sweep, points, seeds, work_dir, FLAGS.eval_batches)
    command, drawn = command_line("experiments.sweeps"), f"{FLAGS.output}.png"
    text = report(found, FLAGS.sweep, command, Path(drawn).name)
    publish({"command": command, "results": found}, text, f"{FLAGS.output}.json", indent=None)
    draw(found, FLAGS.sweep, drawn)


if __name__ == "__main__":
    start(define_flags, main)
