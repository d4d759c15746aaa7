"""The record of the layer benchmark as tables for people."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from aamoe_jax import markdown

Row = Mapping[str, Any]
table = functools.partial(markdown.table, numbers=True)

EFFICIENCY_WANTED, EFFICIENCY_FROM = 0.85, 4096
OWN = ("masked", "causal")
"""The candidates that are `jax.nn.dot_product_attention`."""
GROWTH_WANTED, GROWTH_FROM, GROWTH_TO = 5.0, 4096, 16384


def report(record: Mapping[str, Any]) -> str:
    """The whole record as markdown."""
    machine, limit = record["machine"], record["product_gflops_per_second"]
    rows = record["rows"]
    sections = [
        "# One AA-MoE layer against one dense layer, forward and backward",
        f"    {record['command']}",
        f"{machine['device']}, {machine['cores']} cores, JAX {machine['versions']['jax']}; {record['setting']}. "
        f"Median of {record['rounds']} rounds; in each round every layer runs once, one after the other.",
        "\n".join(f"* {line}" for line in verdicts(rows)),
        "## Time\n\n" + time_table(rows, limit),
        "`dense` is the parallel transformer layer with the fastest causal attention at that length. Speed-up: its "
        "time over AA-MoE's. FLOP ratio: its FLOPs over AA-MoE's, in closed form with the pairs really spent. "
        "Efficiency: speed-up over FLOP ratio. JAX's own: the same layer with `jax.nn.dot_product_attention`, the "
        "faster of `masked` and `causal` below, and the efficiency against it. GFLOP/s: closed form over time. "
        f"Limit: the {limit:.0f} GFLOP/s that a big matrix product reached in this run.",
        "## Memory\n\n" + memory_table(rows),
        "Compiled: arguments, outputs and temporaries in the compiler's layout; the other columns follow from it. "
        "Process: peak resident memory that a process of its own needed beyond what it held before. Growth: bytes per "
        "token over those at the length before. KiB/further token: bytes beyond those of the length before, per token "
        "beyond it; memory is linear where this stays the same.",
        "## FLOPs\n\n" + flops_table(rows),
        "The compiler counts the body of a loop once, however often it runs, so its figure is low for everything that "
        "loops over blocks, as AA-MoE's attention does.",
        "## Dense attention\n\n" + candidate_table(rows),
        "Milliseconds of the whole layer; `-`: it did not fit into memory.",
    ]
    return "\n\n".join(sections) + "\n"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What was wanted and what was reached, as far as the lengths show it."""
    lines = []
    long = [row for row in rows if row["length"] >= EFFICIENCY_FROM]
    own = [efficiency for row in long if (efficiency := own_efficiency(row)) is not None]
    rivals = {"the fastest attention here": [row["efficiency"] for row in long]}
    for rival, found in (rivals | {"JAX's own attention, where it fits": own}).items():
        if found:
            reached = f"{_wanted(min(found) >= EFFICIENCY_WANTED)} >= {EFFICIENCY_WANTED}"
            lines.append(f"Efficiency at L >= {EFFICIENCY_FROM} against {rival}: at least {min(found):.2f} ({reached})")
    times = {row["length"]: row["aamoe"]["milliseconds"] for row in rows}
    if {GROWTH_FROM, GROWTH_TO} <= set(times):
        growth = times[GROWTH_TO] / times[GROWTH_FROM]
        lines.append(
            f"AA-MoE's time from L = {GROWTH_FROM} to {GROWTH_TO}: {growth:.2f} x "
            f"({_wanted(growth <= GROWTH_WANTED)} <= {GROWTH_WANTED})"
        )
    first, last = rows[0], rows[-1]
    if last is not first:
        growth = _per_token(last, "aamoe") / _per_token(first, "aamoe")
        lines.append(
            f"AA-MoE's bytes per token from L = {first['length']} to {last['length']}: {growth:.2f} x "
            "(at most 1.00 where memory grows linearly)"
        )
    return lines


def own_milliseconds(row: Row) -> float | None:
    """The dense layer with the faster of the attentions that JAX itself has; None where neither fits into memory."""
    times = [time for name in OWN if (time := row["candidates"].get(name)) is not None]
    return min(times, default=None)


def own_efficiency(row: Row) -> float | None:
    """Efficiency against `own_milliseconds`."""
    own = own_milliseconds(row)
    return None if own is None else own / row["aamoe"]["milliseconds"] / row["flop_ratio"]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _wanted(reached: bool) -> str:
    return "reached; wanted" if reached else "NOT reached; wanted"


def _per_token(row: Row, kind: str) -> float:
    return row[kind]["compiled_bytes"] / row["length"]


def time_table(rows: Sequence[Row], limit: float) -> str:
    """Times and what they are over; `limit` is in GFLOP/s."""
    heads = ["L", "AA-MoE ms", "dense ms", "dense attention", "speed-up", "FLOP ratio", "efficiency", "JAX's own ms"]
    heads += ["efficiency", "AA-MoE GFLOP/s", "of limit", "dense GFLOP/s", "pairs/token", "clipped"]
    lines = []
    for row in rows:
        aamoe, dense = row["aamoe"], row["dense"]
        cells = [str(row["length"]), f"{aamoe['milliseconds']:.1f}", f"{dense['milliseconds']:.1f}", dense["layer"]]
        cells += [f"{row[name]:.2f}" for name in ("speed_up", "flop_ratio", "efficiency")]
        cells += [_or_dash(own_milliseconds(row), ".0f"), _or_dash(own_efficiency(row), ".2f")]
        speeds = (aamoe["gflops_per_second"], dense["gflops_per_second"])
        cells += [f"{speeds[0]:.0f}", f"{speeds[0] / limit:.0%}", f"{speeds[1]:.0f}"]
        lines.append([*cells, f"{row['pairs_per_token']:.2f}", f"{row['clip_rate']:.1%}"])
    return table(heads, lines)


def memory_table(rows: Sequence[Row]) -> str:
    """Bytes of both layers, and how they grow from one length to the next."""
    heads = ["L"]
    for name in ("AA-MoE", "dense"):
        heads += [f"{name} compiled MiB", "process MiB", "KiB/token", "growth", "KiB/further token"]
    pairs = zip(rows, [None, *rows], strict=False)
    lines = [[str(row["length"]), *_memory(row, last, "aamoe"), *_memory(row, last, "dense")] for row, last in pairs]
    return table(heads, lines)


def _memory(row: Row, previous: Row | None, kind: str) -> list[str]:
    compiled, process, per_token = row[kind]["compiled_bytes"], row[kind]["process_bytes"], _per_token(row, kind)
    held = [f"{compiled / 2**20:.0f}", _or_dash(process and process / 2**20, ".0f"), f"{per_token / 1024:.1f}"]
    if previous is None:
        return [*held, "", ""]
    further = (compiled - previous[kind]["compiled_bytes"]) / (row["length"] - previous["length"])
    return [*held, f"{per_token / _per_token(previous, kind):.2f}", f"{further / 1024:.1f}"]


def flops_table(rows: Sequence[Row]) -> str:
    """In closed form, and as the compiler counts them."""
    pairs = [(kind, count) for kind in ("aamoe", "dense") for count in ("flops", "compiled_flops")]
    lines = [[str(row["length"]), *(f"{row[kind][count] / 1e9:.2f}" for kind, count in pairs)] for row in rows]
    return table(["L", "AA-MoE GFLOP, closed form", "compiler", "dense GFLOP, closed form", "compiler"], lines)


def candidate_table(rows: Sequence[Row]) -> str:
    """A column for every way to attend."""
    lines = [[str(row["length"]), *(_or_dash(time, ".0f") for time in row["candidates"].values())] for row in rows]
    return table(["L", *rows[0]["candidates"]], lines)
