"""Forward and backward pass of every mixer against standard attention, or another one, over sequence lengths.

    python -m benchmarks.mixers --output=experiments/results/mixers.json
    python -m benchmarks.mixers --lengths=64,128 --rounds=2 --mixers=aamoe,moe
    python -m benchmarks.mixers --mixers=clustered_attention --gin_param='ClusteredAttentionConfig.clusters_kept = 2'
    python -m benchmarks.mixers --chip=v5e --lengths=32768 --width=2048 --heads=16 --dtype=bfloat16

At each length all mixers take turns, with a big matrix product as the machine's limit. What the compiler lays out in
more than half of the machine's memory is not run, and the table says so. Beside time and memory stands what the ledger
says of FLOPs and of the cache. With --chip they are compiled for a TPU that is not there, by its own compiler (extra
`aot`), each in a process of its own; then nothing is run. Prints the tables; --output writes the record as JSON, and
the tables beside it as markdown.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from absl import app, flags
from jax.stages import Compiled
from jaxtyping import Array

from aamoe_jax.config import ModelConfig
from aamoe_jax.ledger.compiled import Inputs, Row, Trial
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import costs
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Setting, key_value_cache, projections, rotated
from aamoe_jax.registry import MIXERS, register
from benchmarks import measure
from benchmarks.report import table
from experiments.binding import load_experiment
from experiments.program import command_line, publish, start
from pallas_kernels import aot
from pallas_kernels.chips import TPUS

FLAGS = flags.FLAGS
STANDARD: str = "attention"
NAMES = {
    STANDARD: "standard attention, which is computed block by block (`masked_attention` is the same in whole squares)",
    "feed_forward": "a feed-forward",
}


class MaskedAttention(CausalAttention):
    """Standard attention that lays out the square of scores, and hides what is not seen: what `flash` replaces."""

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Whole squares: mask, scores, weights in float32 and as they are multiplied."""
        maps = at.config.num_heads * at.length * (1 + 2 * FLOAT + at.size)
        visible = 2 * at.width * (at.length + 1)
        square = at.per_token(4 * at.width * at.length, maps + at.size * at.kv_width, model_flops=visible)
        return projections(at) + rotated(at) + square + key_value_cache(at)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        return ()

    def _attend(self, query: Array, key: Array, value: Array, context: Context) -> Array:
        return jax.nn.dot_product_attention(query, key, value, mask=self._visible(context)[:, None])


def define_flags() -> None:
    """The flags of this program, which has one mixer more than the library."""
    register("masked_attention", "attention in whole squares", heads="softmax")(MaskedAttention)
    flags.DEFINE_list("lengths", ["1024", "4096", "16384"], "L: tokens of the one row, ascending.")
    flags.DEFINE_integer("rounds", 5, "Timed runs of each mixer at each length; 0: compile it only.", lower_bound=0)
    flags.DEFINE_list("mixers", sorted(MIXERS), "Which mixers, beside the one of --against.")
    flags.DEFINE_enum("against", STANDARD, sorted(MIXERS), "The mixer that ratios are to.")
    flags.DEFINE_multi_string("gin_param", [], "A field of a mixer's own config, as in gin; repeatable.")
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations and products.")
    flags.DEFINE_enum("chip", None, sorted(TPUS), "The TPU to compile for; none: this machine, which runs them.")
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")
    measure.define_model_flags()
    flags.adopt_module_key_flags(measure)


def chosen(wanted: list[str], standard: str = STANDARD) -> list[str]:
    """Those that are wanted in alphabetical order, the standard among them."""
    unknown = sorted(set(wanted) - set(MIXERS))
    if unknown:
        raise app.UsageError(f"--mixers: there is no {', '.join(unknown)}; there are {', '.join(sorted(MIXERS))}")
    return [name for name in sorted(MIXERS) if name in wanted or name == standard]


def own_configs(bindings: list[str]) -> tuple[Any, ...]:
    """The configs of mixers with these bindings, which may have no other fields."""
    default, given = load_experiment().model, load_experiment(gin_params=bindings).model
    if dataclasses.replace(given, own=default.own) != default:
        raise app.UsageError(f"--gin_param: {', '.join(bindings)}: wanted fields of configs that one mixer has alone")
    return given.own


def both_passes(trial: Trial) -> Callable[..., tuple[Any, Any]]:
    """Parameters, inputs, row, cotangent -> output and gradients."""

    def step(params: Any, inputs: Inputs, row: Row, cotangent: Any) -> tuple[Any, Any]:
        output, pull_back = trial.vjp(params, inputs, row)
        return output, pull_back(cotangent)

    return step


def compile_step(trial: Trial, length: int) -> Compiled:
    """The step for one row as one executable."""
    params, inputs, row = trial.shapes(1, length)
    return jax.jit(both_passes(trial)).lower(params, inputs, row, inputs.h).compile()


def prepared(trial: Trial, compiled: Compiled, length: int) -> Callable[[], Any]:
    """The step with its arguments; the cotangent is as random as h, and another."""
    params, inputs, row = trial.arguments(1, length)
    return functools.partial(compiled, params, inputs, row, inputs.h[:, ::-1])


def flagged_config() -> ModelConfig:
    """One layer as the flags describe it."""
    return measure.model_config(num_layers=1, dtype=FLAGS.dtype, own=own_configs(FLAGS.gin_param))


def chip_case(name: str, length: int, arguments: list[str]) -> tuple[Callable[..., Any], Any]:
    """The step of one mixer and the shapes that it takes, for `compile_apart`.

    Args:
      arguments: the command line of this program.
    """
    define_flags()
    FLAGS(["benchmarks.mixers", *arguments], known_only=True)
    trial = Trial(name, flagged_config())
    params, inputs, row = trial.shapes(1, length)
    return both_passes(trial), (params, inputs, row, inputs.h)


def compile_length(config: ModelConfig, names: list[str], length: int, chip: str) -> dict[str, Any]:
    """Memory, by the compiler of a chip, and FLOPs of every mixer at one length. What does not fit has no memory."""
    figures: dict[str, Any] = {}
    for name in names:
        cost = costs(name, Setting(config, 1, length))
        figures[name] = {"flops": 3 * cost.prefill_flops, "cache_bytes": cost.cache_bytes, "milliseconds": None}
        options = {"name": name, "length": length, "arguments": sys.argv[1:]}
        try:
            found = aot.compile_apart(chip, "benchmarks.mixers:chip_case", options)
            size = found.argument_bytes + found.output_bytes + found.temporary_bytes - found.alias_bytes
        except aot.CompileError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            size = None
        figures[name]["compiled_bytes"] = size
        print(f"L = {length}, {name}: {'too big' if size is None else 'compiled'}", file=sys.stderr, flush=True)
    return {"length": length, "product_gflops_per_second": None, "mixers": figures}


def measure_length(config: ModelConfig, names: list[str], length: int, rounds: int, room: float) -> dict[str, Any]:
    """Time, memory and FLOPs of every mixer at one length.

    Args:
      rounds: 0: none is run.
      room: bytes that a mixer may take; one that takes more is not run, and has no time.
    """
    calls, figures = {}, {}
    for name in names:
        trial = Trial(name, config)
        compiled = compile_step(trial, length)
        size = measure.compiled_bytes(compiled)
        cost = costs(name, Setting(config, 1, length))
        figures[name] = {"compiled_bytes": size, "flops": 3 * cost.prefill_flops, "cache_bytes": cost.cache_bytes}
        if rounds and size <= room:
            calls[name] = prepared(trial, compiled, length)
    times = measure.interleaved(calls | {"product": measure.product(config.dtype)}, rounds) if rounds else {}
    for name in names:
        milliseconds = [1e3 * time for time in times.get(name, [])]
        figures[name]["all_milliseconds"] = milliseconds
        figures[name]["milliseconds"] = statistics.median(milliseconds) if milliseconds else None
    limit = measure.product_flops() / min(times["product"]) / 1e9 if rounds else None
    return {"length": length, "product_gflops_per_second": limit, "mixers": figures}


def report(record: Mapping[str, Any]) -> str:
    """The whole record as markdown."""
    machine, setting, against = record["machine"], record["setting"], record.get("against", STANDARD)
    chip, where = record.get("chip"), f"{machine['device']}, {machine['cores']} cores"
    left_out = f"A mixer that takes more than {record['room_bytes'] / 2**30:.1f} GiB was not run."
    timing = "Compiled, and not run."
    if chip:
        where, left_out = f"One {chip}, compiled for and not there", "A dash stands for what does not fit into its HBM."
    elif record["rounds"]:
        timing = f"Median of {record['rounds']} rounds; in each round every mixer runs once, one after the other."
    sections = [
        f"# Mixers against {against.replace('_', '-')}, forward and backward",
        f"    {record['command']}",
        f"{where}, JAX {machine['versions']['jax']}; {setting}. {timing}",
        f"Ratios are to {NAMES.get(against, against)} in the same run. "
        "FLOPs are the ledger's in closed form, all budgets spent, the backward pass as twice the forward; "
        "memory is what the compiler has laid out, the cache that of as many tokens. Mixers are as they are "
        "initialised: budgets of AA-MoE are alike, half of the experts of `relu_moe` are on, more than it aims "
        f"at. {left_out}",
    ]
    for row in record["rows"]:
        sections += [f"## L = {row['length']}", length_table(row, against)]
    return "\n\n".join(sections) + "\n"


def length_table(row: Mapping[str, Any], against: str = STANDARD) -> str:
    """One line per mixer."""
    standard = row["mixers"][against]

    def relative(entry: Mapping[str, Any], key: str) -> str:
        return "-" if None in (entry[key], standard[key]) else f"{entry[key] / standard[key]:.2f}"

    lines = []
    for name, entry in row["mixers"].items():
        time = f"{entry['milliseconds']:.1f}" if entry["milliseconds"] else "not run"
        ratios = [relative(entry, key) for key in ("milliseconds", "flops", "compiled_bytes")]
        size = "-" if entry["compiled_bytes"] is None else f"{entry['compiled_bytes'] / 2**20:.0f}"
        line = [name, time, *ratios[:2], size, ratios[2]]
        if cached := standard.get("cache_bytes"):  # older records have none, and neither has a feed-forward
            line.append(f"{entry['cache_bytes'] / cached:.2f}")
        lines.append(line)
    head = ["mixer", "ms", "time", "FLOPs", "MiB", "memory", "cache"]
    return table(head[: len(lines[0])], lines)


def main() -> None:
    config = flagged_config()
    names = chosen(FLAGS.mixers, FLAGS.against)
    room, rows = measure.available_bytes() / 2, []
    for length in map(int, FLAGS.lengths):
        if FLAGS.chip:
            rows.append(compile_length(config, names, length, FLAGS.chip))
        else:
            rows.append(measure_length(config, names, length, FLAGS.rounds, room))
        print(f"L = {length}: done", file=sys.stderr, flush=True)
    record = {
        "command": command_line("benchmarks.mixers"),
        "machine": measure.machine(),
        "setting": f"{measure.sizes(config)}, one row, {config.dtype}",
        "against": FLAGS.against,
        "chip": FLAGS.chip,
        "rounds": FLAGS.rounds,
        "room_bytes": room,
        "rows": rows,
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
