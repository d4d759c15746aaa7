r"""Held-out loss against FLOPs, from the reports of one study at several sizes (AA-33).

    aamoe frontier --report=experiments/results/frontier_64.json --report=experiments/results/main_flops_experts.json \
        --report=experiments/results/frontier_256.json --output=experiments/results/frontier

Every report is of `experiments.studies`; several of one size stand in one flag, with commas between. Stacks that every
size has are compared. Writes OUTPUT.json, OUTPUT.md and OUTPUT.png.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from aamoe_jax.analysis.pictures import picture
from aamoe_jax.config import ConfigError
from aamoe_jax.markdown import table
from experiments.judge import Difference, difference
from experiments.program import command_line, publish, start
from experiments.runs import Result
from experiments.studies import differ

FLAGS = flags.FLAGS
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
Results = Mapping[str, Sequence[Result]]
"""Of one report: one per seed, by variant."""


def define_flags() -> None:
    """The flags of this program."""
    help_text = "JSON of a study at one size; several with commas between. Repeat it."
    flags.DEFINE_multi_string("report", None, help_text, required=True)
    flags.DEFINE_string("output", None, "Path of the report without its suffix.", required=True)


def read(paths: str) -> Results:
    """The results of one size.

    Args:
      paths: of one report, or several with commas between.

    Raises:
      ConfigError: a file is no report of experiments.studies, or two have a variant of one name.
    """
    found: dict[str, Sequence[Result]] = {}
    for path in paths.split(","):
        try:
            results = json.loads(Path(path).read_text(encoding="utf-8"))["results"]
            more = {name: [run for run in runs if run["documents"]] for name, runs in results.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--report={path}: no report of experiments.studies ({error!r})") from error
        if twice := found.keys() & more:
            raise ConfigError(f"--report={paths}: two reports have a variant {min(twice)!r}; leave one out")
        found |= more
    return found


def in_all(reports: Sequence[Results]) -> list[str]:
    """The variants that every size has.

    Raises:
      ConfigError: fewer than two sizes, or one twice; no such variant or seed; reports on different held-out text.
    """
    if len(reports) < 2:
        raise ConfigError("--report: a frontier is of two sizes or more; repeat the flag")
    names = [name for name in reports[0] if all(name in report for report in reports)]
    if not names:
        raise ConfigError("--report: no variant is in all sizes")
    if len({report[name][0]["corpus_digest"] for report in reports for name in names}) > 1:
        raise ConfigError("--report: they are of different corpora")
    if any(len({flops(report[name]) for report in reports}) < len(reports) for name in names):
        raise ConfigError("--report: two of them are of one size")
    seeds = ({run["seed"] for run in report[name]} for report in reports for name in names)
    if not set.intersection(*seeds):
        raise ConfigError("--report: no seed is in all of them")
    return names


def flops(runs: Sequence[Result]) -> float:
    """FLOPs a token of a forward pass, as evaluated."""
    return statistics.mean(run["evaluation"]["flops_per_token"] for run in runs)


def bits(runs: Sequence[Result]) -> float:
    """Bits per byte, mean over seeds."""
    return statistics.mean(run["bits_per_byte"] for run in runs)


def saved(
    sizes: Sequence[Sequence[Result]],
    seeds: Sequence[int],
) -> tuple[Float[np.ndarray, "seeds documents"], Float[np.ndarray, "documents"]]:
    """Bits that twice the FLOPs save of every document, run by run: a least-squares line through all sizes, of the
    runs with one seed; and the bytes of the documents."""
    doublings = np.log2([flops(runs) for runs in sizes])
    doublings -= doublings.mean()
    by_seed = [{run["seed"]: np.asarray(run["documents"]) for run in runs} for runs in sizes]
    totals = np.array([[runs[seed] for seed in seeds] for runs in by_seed])
    weights = -doublings / (doublings**2).sum()
    return np.einsum("z,zsd->sd", weights, totals[..., 0] / np.log(2)), totals[0, 0, :, 1]


def slope(sizes: Sequence[Sequence[Result]], other: Sequence[Sequence[Result]] | None = None) -> Difference:
    """Bits per byte that twice the FLOPs save, and its 95 % over seeds and documents; less what they save `other`."""
    seeds = sorted(set.intersection(*({run["seed"] for run in runs} for runs in (*sizes, *(other or ())))))
    found, size = saved(sizes, seeds)
    return difference(np.zeros_like(found) if other is None else saved(other, seeds)[0], found, size)


def paired(one: Sequence[Result], other: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """The runs with seeds that both have, in the same order."""
    found = [{run["seed"]: run for run in runs} for runs in (one, other)]
    seeds = sorted(found[0].keys() & found[1])
    return [found[0][seed] for seed in seeds], [found[1][seed] for seed in seeds]


def report(reports: Sequence[Results], names: Sequence[str], command: str, drawn: str) -> str:
    """Every size of every stack, how far it is from the first stack of that size, and the slopes, as Markdown."""
    first, sizes = names[0], {name: [size[name] for size in reports] for name in names}
    rows = []
    for name in names:
        for size in reports:
            gap = differ("bits_per_byte", *paired(size[first], size[name]))
            figures = f"{flops(size[name]):,.0f}", str(len(size[name])), f"{bits(size[name]):.4f}"
            rows.append([name, *figures, "" if name == first else str(gap)])
    parts = [
        "# Held-out loss against FLOPs",
        f"    {command}",
        "FLOPs a token are of a forward pass, as evaluated. Intervals are 95 % of a paired bootstrap over held-out "
        "documents and the seeds that both variants have; slopes are of the seeds that all sizes have.",
        table(["variant", "FLOPs a token", "seeds", "bits/byte", f"more than {first}"], rows),
        table(
            ["variant", "bits per byte saved by twice the FLOPs", f"more than {first}"],
            [
                [name, str(slope(sizes[name])), "" if name == first else str(slope(sizes[name], sizes[first]))]
                for name in names
            ],
        ),
        f"![Bits per byte against FLOPs a token]({drawn})",
    ]
    return "\n\n".join(parts) + "\n"


def draw(reports: Sequence[Results], names: Sequence[str], path: str | Path) -> Figure:
    """A line for every stack, a small dot for every seed."""
    with picture(path, 5.6, 3.8) as figure:
        axes = figure.subplots()
        for name, colour in zip(names, COLOURS, strict=False):
            sizes: list[Sequence[Result]] = sorted((size[name] for size in reports), key=flops)
            megaflops = [flops(runs) / 1e6 for runs in sizes]
            axes.plot(megaflops, [bits(runs) for runs in sizes], "-o", color=colour, label=name)
            for place, runs in zip(megaflops, sizes, strict=True):
                seeds = [run["bits_per_byte"] for run in runs]
                axes.plot([place] * len(seeds), seeds, "o", color=colour, markersize=2.5, alpha=0.6)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(base=2))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.legend(frameon=False)
        axes.set(title="Held-out bits per byte", xlabel="MFLOPs a token, forward pass", ylabel="bits per byte")
    return figure


def main() -> None:
    """Makes the comparison that the flags describe."""
    reports = sorted(map(read, FLAGS.report), key=lambda found: flops(next(iter(found.values()))))
    names = in_all(reports)
    if len(names) > len(COLOURS):
        raise ConfigError(f"--report: {len(names)} variants are in all sizes; at most {len(COLOURS)} can be drawn")
    command = command_line("experiments.frontier")
    record = {
        "command": command,
        "slopes": {name: slope([size[name] for size in reports])._asdict() for name in names},
        "points": {name: [[flops(size[name]), bits(size[name])] for size in reports] for name in names},
    }
    publish(record, report(reports, names, command, f"{Path(FLAGS.output).name}.png"), f"{FLAGS.output}.json")
    draw(reports, names, f"{FLAGS.output}.png")


if __name__ == "__main__":
    start(define_flags, main)
