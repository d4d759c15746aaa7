"""The record of the layer benchmark as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aamoe_jax import markdown

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]

EFFICIENCY_WANTED, EFFICIENCY_FROM = 0.6, 4096
OWN = ("masked", "causal")
"""The candidates that are `jax.nn.dot_product_attention`."""
GROWTH_WANTED, GROWTH_FROM, GROWTH_TO = 5.0, 4096, 16384


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A Markdown table of these columns of every row."""
    return markdown.table(
        [title for title, _ in columns], [[show(row) for _, show in columns] for row in rows], numbers=True
    )


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
        "## Time\n\n" + table(rows, time_columns(limit)),
        "`dense` is the parallel transformer layer with the fastest causal attention at that length. Speed-up: its "
        "time over AA-MoE's. FLOP ratio: its FLOPs over AA-MoE's, in closed form with the pairs really spent. "
        "Efficiency: speed-up over FLOP ratio. JAX's own: the same layer with `jax.nn.dot_product_attention`, the "
        "faster of `masked` and `causal` below, and the efficiency against it. GFLOP/s: closed form over time. "
        f"Limit: the {limit:.0f} GFLOP/s that a big matrix product reached in this run.",
        "## Memory\n\n" + table(with_previous(rows), MEMORY_COLUMNS),
        "Compiled: arguments, outputs and temporaries in the compiler's layout; the other columns follow from it. "
        "Process: peak resident memory that a process of its own needed beyond what it held before. Growth: bytes per "
        "token over those at the length before. KiB/further token: bytes beyond those of the length before, per token "
        "beyond it; memory is linear where this stays the same.",
        "## FLOPs\n\n" + table(rows, FLOPS_COLUMNS),
        "The compiler counts the body of a loop once, however often it runs, so its figure is low for everything that "
        "loops over blocks, as AA-MoE's attention does.",
        "## Dense attention\n\n" + table(rows, candidate_columns(rows)),
        "Milliseconds of the whole layer; `-`: it did not fit into memory.",
    ]
    return "\n\n".join(sections) + "\n"


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What was wanted and what was reached, as far as the lengths show it."""
    lines = []
    long = [row for row in rows if row["length"] >= EFFICIENCY_FROM]
    if long:
        worst = min(row["efficiency"] for row in long)
        lines.append(
            f"Efficiency at L >= {EFFICIENCY_FROM} against the fastest attention here: at least {worst:.2f} "
            f"({_wanted(worst >= EFFICIENCY_WANTED)} >= {EFFICIENCY_WANTED})"
        )
        own = [efficiency for row in long if (efficiency := own_efficiency(row)) is not None]
        if own:
            lines.append(
                f"Efficiency at L >= {EFFICIENCY_FROM} against JAX's own attention, where it fits: at least "
                f"{min(own):.2f} ({_wanted(min(own) >= EFFICIENCY_WANTED)} >= {EFFICIENCY_WANTED})"
            )
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


def _length(row: Row) -> str:
    return str(row["length"])


def time_columns(limit: float) -> list[Column]:
    """Columns of the table of times; `limit` is in GFLOP/s."""

    def speed(kind: str) -> Callable[[Row], str]:
        return lambda row: f"{row[kind]['gflops_per_second']:.0f}"

    return [
        ("L", _length),
        ("AA-MoE ms", lambda row: f"{row['aamoe']['milliseconds']:.1f}"),
        ("dense ms", lambda row: f"{row['dense']['milliseconds']:.1f}"),
        ("dense attention", lambda row: row["dense"]["layer"]),
        ("speed-up", lambda row: f"{row['speed_up']:.2f}"),
        ("FLOP ratio", lambda row: f"{row['flop_ratio']:.2f}"),
        ("efficiency", lambda row: f"{row['efficiency']:.2f}"),
        ("JAX's own ms", lambda row: _or_dash(own_milliseconds(row), ".0f")),
        ("efficiency", lambda row: _or_dash(own_efficiency(row), ".2f")),
        ("AA-MoE GFLOP/s", speed("aamoe")),
        ("of limit", lambda row: f"{row['aamoe']['gflops_per_second'] / limit:.0%}"),
        ("dense GFLOP/s", speed("dense")),
        ("pairs/token", lambda row: f"{row['pairs_per_token']:.2f}"),
        ("clipped", lambda row: f"{row['clip_rate']:.1%}"),
    ]


def with_previous(rows: Sequence[Row]) -> list[Row]:
    """Every row with the one before it; the first has none."""
    return [dict(row, previous=previous) for row, previous in zip(rows, [None, *rows], strict=False)]


def _mebibytes(kind: str, measure: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[kind][measure] is None else f"{row[kind][measure] / 2**20:.0f}"


def _growth(kind: str) -> Callable[[Row], str]:
    return lambda row: (
        "" if row["previous"] is None else f"{_per_token(row, kind) / _per_token(row['previous'], kind):.2f}"
    )


def _further(kind: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        previous = row["previous"]
        if previous is None:
            return ""
        more = row[kind]["compiled_bytes"] - previous[kind]["compiled_bytes"]
        return f"{more / (row['length'] - previous['length']) / 1024:.1f}"

    return show


def memory_columns(name: str, kind: str) -> list[Column]:
    """Columns of one layer in the table of memory."""
    return [
        (f"{name} compiled MiB", _mebibytes(kind, "compiled_bytes")),
        ("process MiB", _mebibytes(kind, "process_bytes")),
        ("KiB/token", lambda row: f"{_per_token(row, kind) / 1024:.1f}"),
        ("growth", _growth(kind)),
        ("KiB/further token", _further(kind)),
    ]


MEMORY_COLUMNS: list[Column] = [("L", _length), *memory_columns("AA-MoE", "aamoe"), *memory_columns("dense", "dense")]

FLOPS_COLUMNS: list[Column] = [
    ("L", _length),
    ("AA-MoE GFLOP, closed form", lambda row: f"{row['aamoe']['flops'] / 1e9:.2f}"),
    ("compiler", lambda row: f"{row['aamoe']['compiled_flops'] / 1e9:.2f}"),
    ("dense GFLOP, closed form", lambda row: f"{row['dense']['flops'] / 1e9:.2f}"),
    ("compiler", lambda row: f"{row['dense']['compiled_flops'] / 1e9:.2f}"),
]


def candidate_columns(rows: Sequence[Row]) -> list[Column]:
    """One column per way to attend."""

    def show(name: str) -> Callable[[Row], str]:
        return lambda row: "-" if row["candidates"][name] is None else f"{row['candidates'][name]:.0f}"

    return [("L", _length), *((name, show(name)) for name in rows[0]["candidates"])]
