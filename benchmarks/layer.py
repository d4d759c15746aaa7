"""Forward and backward pass of one AA-MoE layer against one parallel transformer layer, over sequence lengths.

    python -m benchmarks.layer --output=experiments/results/layer_cpu.json
    python -m benchmarks.layer --lengths=256,512 --rounds=2 --memory=compiler

Dense attention is done in every way that benchmarks/dense.py knows, and the fastest at each length is the one that
AA-MoE has to beat. Both layers, and a big matrix product as the machine's limit, then take turns. Prints the tables;
--output writes the record as JSON, and the tables beside it as markdown.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any, Literal

import jax
from absl import flags
from jax.stages import Compiled

from aamoe_jax.aamoe.statistics import summarize
from aamoe_jax.config import ModelConfig
from benchmarks import measure
from benchmarks.cases import AAMOE, Case
from benchmarks.dense import CANDIDATES
from benchmarks.report import report
from experiments.program import command_line, publish, start

FLAGS = flags.FLAGS
Memory = Literal["compiler", "process"]
TRIES = 2
"""Timed runs per dense candidate, after a first one; candidates that are far behind then get none."""


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_list("lengths", ["1024", "2048", "4096", "8192", "16384"], "L: tokens of the one row, ascending.")
    flags.DEFINE_integer("rounds", 7, "Timed runs of each layer at each length.", lower_bound=1)
    flags.DEFINE_float(
        "importance", 1.0, "How much budgets vary: standard deviation of w_B . h / sqrt(d). 0: alike.", 0.0
    )
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations and products.")
    flags.DEFINE_enum(
        "memory",
        "process",
        ["compiler", "process"],
        "`compiler`: its own layout. `process`: also the peak of a process per layer and length (Linux, on a CPU).",
    )
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")
    measure.define_model_flags()
    flags.adopt_module_key_flags(measure)


def dense_candidates(case: Callable[[str], Case]) -> dict[str, float | None]:
    """Milliseconds of every dense candidate at its best; None for one that does not fit into half of the memory."""
    times: dict[str, float | None] = {}
    # The leanest first, so that one far behind them is not run more than once.
    for name in reversed(CANDIDATES):
        compiled = measure.compile_case(case(name))
        if measure.compiled_bytes(compiled) > measure.available_bytes() / 2:
            times[name] = None
            continue
        call = functools.partial(compiled, *case(name).arguments())
        taken = [measure.seconds(call)]
        behind = any(time is not None and 1e3 * taken[0] > 3 * time for time in times.values())
        taken += [measure.seconds(call) for _ in range(0 if behind else TRIES)]
        times[name] = 1e3 * min(taken)
    return {name: times[name] for name in CANDIDATES}


def measure_length(config: ModelConfig, length: int, importance: float, rounds: int, memory: Memory) -> dict[str, Any]:
    """The row of one length."""
    case = functools.partial(Case, config=config, length=length, importance=importance)
    candidates = dense_candidates(case)
    best = min((name for name in candidates if candidates[name] is not None), key=candidates.__getitem__)
    cases = {"aamoe": case(AAMOE), "dense": case(best)}
    compiled = {kind: measure.compile_case(one) for kind, one in cases.items()}
    calls = {kind: functools.partial(compiled[kind], *one.arguments()) for kind, one in cases.items()}
    times = measure.interleaved(calls | {"product": measure.product(config.dtype)}, rounds)

    *_, spent = jax.device_get(calls["aamoe"]())
    figures = {name: values[0] for name, values in summarize({key: [x] for key, x in spent.items()}).items()}
    row = {
        "length": length,
        "candidates": candidates,
        "pairs_per_token": figures["spent"],
        **{name: figures[name] for name in ("utilisation", "clip_rate")},
        "product_gflops_per_second": measure.product_flops() / min(times["product"]) / 1e9,
    }
    for kind, one in cases.items():
        flops = one.training_flops(spent if kind == "aamoe" else {})
        row[kind] = layer_figures(one, compiled[kind], flops, times[kind], memory)
    row["speed_up"] = row["dense"]["milliseconds"] / row["aamoe"]["milliseconds"]
    row["flop_ratio"] = row["dense"]["flops"] / row["aamoe"]["flops"]
    row["efficiency"] = row["speed_up"] / row["flop_ratio"]
    return row


def layer_figures(case: Case, compiled: Compiled, flops: float, times: list[float], memory: Memory) -> dict[str, Any]:
    """Time, work and memory of one layer."""
    median = statistics.median(times)
    return {
        "layer": case.layer,
        "milliseconds": 1e3 * median,
        "all_milliseconds": [1e3 * time for time in times],
        "flops": flops,
        "compiled_flops": measure.compiled_flops(compiled),
        "gflops_per_second": flops / median / 1e9,
        "compiled_bytes": measure.compiled_bytes(compiled),
        "process_bytes": measure.process_peak_bytes(case) if memory == "process" else None,
    }


def main() -> None:
    config = measure.model_config(num_layers=1, dtype=FLAGS.dtype)
    rows = []
    for length in map(int, FLAGS.lengths):
        rows.append(measure_length(config, length, FLAGS.importance, FLAGS.rounds, FLAGS.memory))
        print(f"L = {length}: speed-up {rows[-1]['speed_up']:.2f}", file=sys.stderr, flush=True)
    record = {
        "command": command_line("benchmarks.layer"),
        "machine": measure.machine(),
        "setting": f"{measure.sizes(config)}, K_max = {config.aamoe.max_resources}, importance {FLAGS.importance:g}, "
        f"one row, {config.dtype}",
        "rounds": FLAGS.rounds,
        "product_gflops_per_second": max(row["product_gflops_per_second"] for row in rows),
        "rows": rows,
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
