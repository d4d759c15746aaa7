"""A whole training step of every stack of a study: time, memory and FLOPs, side by side.

    python -m benchmarks.steps --study=main --gin_file=quickstart.gin --equal=flops
    python -m benchmarks.steps --study=main --gin_file=quickstart.gin --variant=AA-MoE --variant=transformer

Stacks are those of `experiments.studies`, of equal size. In each round every stack trains for one step, one after the
other, on the next batch of its own. Prints the table; --output writes the record as JSON, and the table beside it as
markdown.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import flags

from aamoe_jax.config import ExperimentConfig
from aamoe_jax.training.goodput import Stopwatch
from aamoe_jax.training.loop import lower_step, set_up
from aamoe_jax.training.step import Metrics
from benchmarks import measure
from benchmarks.report import table
from experiments import studies
from experiments.matching import active_flops, parameters
from experiments.program import command_line, publish, start

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    studies.define_stack_flags()
    flags.adopt_module_key_flags(studies)
    flags.DEFINE_integer("rounds", 40, "Timed steps of each stack.", lower_bound=1)
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")


class Training:
    """A run without a folder: a call trains for one more step."""

    def __init__(self, config: ExperimentConfig):
        setup = set_up(config, Stopwatch())
        began = time.perf_counter()
        self.step = lower_step(setup.step, setup.like, config, setup.placement).compile()
        self.compile_seconds = time.perf_counter() - began
        self.rows, self.place = config.training.batch_size, setup.placement.put
        self.state, self.batches = setup.begin(), iter(setup.batches)

    def __call__(self) -> Metrics:
        self.state, metrics = self.step(self.state, self.place(next(self.batches), self.rows))
        return metrics


def measured(experiments: Mapping[str, ExperimentConfig], rounds: int) -> dict[str, dict[str, Any]]:
    """What a step of every stack takes."""
    runs = {}
    for name, config in experiments.items():
        runs[name] = Training(config)
        print(f"{name}: compiled", file=sys.stderr, flush=True)
    times = measure.interleaved(runs, rounds)
    return {
        name: {
            "parameters": parameters(config),
            "flops_per_token": active_flops(config, config.data.seq_len),
            "tokens": config.training.batch_size * config.data.seq_len,
            "compile_seconds": runs[name].compile_seconds,
            "compiled_bytes": measure.compiled_bytes(runs[name].step),
            "seconds": times[name],
        }
        for name, config in experiments.items()
    }


def report(record: Mapping[str, Any]) -> str:
    """The record as markdown."""
    stacks, machine = record["stacks"], record["machine"]
    first = next(iter(stacks.values()))
    rows = []
    for name, found in stacks.items():
        middle = statistics.median(found["seconds"])
        # Round by round: what disturbs the machine for a while disturbs both.
        ratios = [one / other for one, other in zip(found["seconds"], first["seconds"], strict=True)]
        rows.append(
            [
                name,
                f"{found['parameters'] / 1e6:.2f}",
                f"{found['flops_per_token'] / 1e6:.2f}",
                f"{1e3 * middle:.0f}",
                f"{statistics.median(ratios):.2f}",
                f"{found['tokens'] / middle:,.0f}",
                f"{3 * found['flops_per_token'] * found['tokens'] / middle / 1e9:.0f}",
                f"{found['compiled_bytes'] / 2**20:.0f}",
                f"{found['compile_seconds']:.0f}",
            ]
        )
    heads = ["stack", "M parameters", "MFLOP/token", "ms", "of first", "tokens/s", "GFLOP/s", "MiB", "s to compile"]
    return (
        "\n\n".join(
            [
                "# A training step of every stack",
                f"    {record['command']}",
                f"{machine['device']}, {machine['cores']} cores, JAX {machine['versions']['jax']}; a step is of "
                f"{first['tokens']:,} tokens. Medians of {record['rounds']} rounds; in each round every stack trains "
                "for one step, one after the other; `of first` is the median of the ratios to the first of that round. "
                "FLOPs a token are of a forward pass, in closed form, all budgets spent; GFLOP/s count three times as "
                f"many. Limit: the {record['product_gflops_per_second']:.0f} GFLOP/s of a big matrix product. MiB: "
                "arguments, outputs and temporaries that the compiler lays out for a step.",
                table(heads, rows),
            ]
        )
        + "\n"
    )


def main() -> None:
    """Measures what the flags describe."""
    study = studies.part_of(studies.STUDIES[FLAGS.study], FLAGS.variant)
    experiments = studies.configs(study, FLAGS.gin_file, FLAGS.gin_param, None, FLAGS.equal)
    stacks = measured(experiments, FLAGS.rounds)
    limit = measure.interleaved({"product": measure.product("float32")}, 10)["product"]
    record = {
        "command": command_line("benchmarks.steps"),
        "machine": measure.machine(),
        "rounds": FLAGS.rounds,
        "product_gflops_per_second": measure.product_flops() / min(limit) / 1e9,
        "stacks": stacks,
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
