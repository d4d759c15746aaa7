r"""Trains and compares the four choices of AAMoEConfig.local.

    aamoe local_context --gin_file=quickstart.gin --gin_file=learned_router.gin --steps=600 \
        --seeds=0,1 --output=experiments/results/local_context

Pooled keys have none of an unfinished chunk, so that `routed` asks for a learned router.

Every reading of `AAMoEConfig.local` trains the same model, for the same steps on the same data, once per seed, and is
evaluated on held-out text under causal budgets. A run lies in WORK_DIR/MODE-SEED and goes on from its last checkpoint;
one that has a result.json there is not repeated: after an interruption the same command does what is left. Writes
OUTPUT.json, OUTPUT.md and OUTPUT.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aamoe_jax.analysis.pictures import BLUE, VERMILION, picture
from aamoe_jax.config import ExperimentConfig
from aamoe_jax.data import ensure_prepared
from aamoe_jax.evaluation.perplexity import Evaluation
from experiments.program import command_line, plain_table, publish, start
from experiments.runs import Result, comparison, seeds_of
from experiments.studies import Study, Variant, conduct, configs

FLAGS = flags.FLAGS
COLOURS = {"window": BLUE, "chunk": VERMILION, "routed": "#009E73", "none": "#CC79A7"}
MEANINGS = {
    "window": "the last m tokens, as every token's first resource",
    "chunk": "the own chunk up to the token, as its first resource",
    "routed": "the own chunk competes like any other",
    "none": "nothing of the own chunk: the paper's example",
}
TITLE = "What a token should see of its own neighbourhood"
VARIANTS = {mode: Variant((f"AAMoEConfig.local = {mode!r}",), matched=False) for mode in MEANINGS}
Results = Mapping[str, Sequence[Result]]
"""One per seed, by reading."""


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_multi_string("gin_file", [], "Path of a gin file, or the name of a shipped config. Repeat it.")
    flags.DEFINE_multi_string("gin_param", [], "One binding, such as 'ModelConfig.d_model = 128'. Repeat it.")
    flags.DEFINE_integer("steps", None, "Steps of every run; those of the config if not given.", lower_bound=1)
    flags.DEFINE_multi_enum("local", list(MEANINGS), list(MEANINGS), "Readings to compare with the first. Repeat it.")
    flags.DEFINE_list("seeds", ["0", "1"], "One run per seed and reading. A seed fixes parameters and order of data.")
    flags.DEFINE_string("work_dir", "runs/local_context", "Where the runs lie.")
    flags.DEFINE_string("output", None, "Path of the report without its suffix.", required=True)
    flags.DEFINE_integer("eval_batches", 0, "Batches of the test split to evaluate on; 0: all.", lower_bound=0)


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


def _mean(runs: Sequence[Result], key: str) -> float:
    return statistics.mean(run[key] for run in runs)


def report(results: Results, command: str, picture: str) -> str:
    """The comparison as markdown."""
    first_mode, runs_of_first = next(iter(results.items()))
    first = runs_of_first[0]
    config = first["config"]
    heads = ["local", "bits/byte, mean", *(f"seed {run['seed']}" for run in runs_of_first), f"to {first_mode}"]
    heads += ["first position of a chunk, nats above the mean", "utilisation", "tokens/s"]
    rows = [
        [
            f"{mode}: {MEANINGS[mode]}",
            f"{_mean(runs, 'bits_per_byte'):.4f}",
            *(f"{run['bits_per_byte']:.4f}" for run in runs),
            f"{_mean(runs, 'bits_per_byte') - _mean(runs_of_first, 'bits_per_byte'):+.4f}",
            f"{_mean(runs, 'first_position_excess'):+.3f}",
            f"{_mean(runs, 'utilisation'):.2f}",
            f"{_mean(runs, 'tokens_per_second'):.0f}",
        ]
        for mode, runs in results.items()
    ]
    parts = [
        f"# {TITLE}",
        f"    {command}",
        f"{first['steps']} steps of {config['training']['batch_size']} x {config['data']['seq_len']} tokens, "
        f"d = {config['model']['d_model']}, {config['model']['num_layers']} layers, "
        f"m = {config['model']['aamoe']['chunk_size']}, E = {config['model']['aamoe']['num_experts']}, "
        f"beta = {config['model']['aamoe']['budget']['beta']}; the same data in the same order for every reading. "
        f"{first['evaluation']['tokens']:,} tokens of held-out text, {first['evaluation']['budget']} budgets (causal). "
        f"Corpus {first['corpus_digest'][:16]}, JAX {first['versions']['jax']}, {first['device']}.",
        plain_table(heads, "l" + "r" * (len(heads) - 1), rows),
        f"![Bits per byte, and loss by position in the chunk]({picture})",
    ]
    return "\n\n".join(parts) + "\n"


def draw(results: Results, path: str | Path) -> Figure:
    """Left: bits per byte of every reading, a dot per seed. Right: loss by position in the chunk."""
    with picture(path, 8.4, 3.6) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.9))
        _draw_bits(left, results)
        _draw_positions(right, results)
    return figure


def _draw_bits(axes: Axes, results: Results) -> None:
    for place, (mode, runs) in enumerate(results.items()):
        bits = [run["bits_per_byte"] for run in runs]
        axes.plot([place] * len(bits), bits, "o", color=COLOURS[mode], markersize=5, alpha=0.75, markeredgewidth=0)
        axes.hlines(statistics.mean(bits), place - 0.25, place + 0.25, color=COLOURS[mode], linewidth=1.6)
        axes.annotate(
            f"{statistics.mean(bits):.3f}", (place, max(bits)), (0, 6), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(len(results)), list(results))
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.12, y=0.15)
    axes.set(title="Held-out bits per byte", ylabel="bits per byte")


def _draw_positions(axes: Axes, results: Results) -> None:
    for mode, runs in results.items():
        curves = np.array([run["nll_by_position_in_chunk"] for run in runs])
        for curve in curves:
            axes.plot(curve, color=COLOURS[mode], linewidth=0.6, alpha=0.4)
        axes.plot(curves.mean(0), color=COLOURS[mode], linewidth=1.6, label=mode)
    chunk_size = curves.shape[1]
    axes.set_xticks(range(0, chunk_size, max(chunk_size // 8, 1)))
    axes.legend(frameon=False, ncols=len(results), loc="upper right")
    axes.margins(x=0.01, y=0.1)
    axes.set(title="Loss by position in the chunk", xlabel="position in the chunk", ylabel="nats per token")


@comparison
def main() -> None:
    """Makes the comparison that the flags describe."""
    seeds = seeds_of(FLAGS.seeds)
    study = Study(TITLE, {mode: VARIANTS[mode] for mode in FLAGS.local}, ())
    experiments = configs(study, FLAGS.gin_file, FLAGS.gin_param, FLAGS.steps)
    ensure_prepared(next(iter(experiments.values())).data)
    results = conduct(study, experiments, seeds, Path(FLAGS.work_dir), FLAGS.eval_batches, about_positions)
    write(results, Path(FLAGS.output), command_line("experiments.local_context"))


def write(results: Results, output: Path, command: str) -> None:
    """OUTPUT.json, OUTPUT.md and OUTPUT.png; prints the table."""
    record = {"command": command, "results": [result for runs in results.values() for result in runs]}
    publish(record, report(results, command, f"{output.name}.png"), f"{output}.json")
    draw(results, f"{output}.png")


if __name__ == "__main__":
    start(define_flags, main)
