"""The schedule benchmark as markdown: every row, and the targets with what binds where one is missed."""

from __future__ import annotations

from typing import Any

from benchmarks import measure
from experiments.program import plain_table
from pallas_kernels.chips import TPUS

SLOTS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "SALU")
BEFORE_PIPELINING = {"forward": 12.0, "backward": 18.0}
"""Bundles a pair at the headline shape, on v5e and v5p."""
AFTER_PIPELINING = {chip: 0.7 * both for chip, both in {"v5e": 27.6, "v5p": 27.9, "v6e": 24.6, "tpu7x": 24.2}.items()}
"""Forward and backward together: 70 % of what plain stages one after the other were designed to take."""
GOALS = {"v5e": 17.5, "v5p": 17.5, "v6e": 14.0, "tpu7x": 14.0}
"""The same, where one would like to be."""
WIDE_SHARE = 0.35
"""Of peak, with m = 256 and d = 256, forward and backward together, on v6e and tpu7x."""

Row = dict[str, Any]


def report(record: dict[str, Any]) -> str:
    """The record as markdown."""
    parts = [
        "# The TPU compilers' schedules",
        "Modelled, not measured: no chip was there. A core issues one bundle a cycle; the bundles of a steady step "
        "of the grid are its cycles, without memory stalls. Slots: the share that those bundles fill. The busiest "
        "kind of slot is a limit: the step cannot take fewer bundles than it needs, given in brackets. "
        "ns: issue or HBM, whichever takes longer, and before and after `gathered` what XLA moves; beside it the two "
        "limits, FLOPs at the matrix units' peak and bytes at HBM's bandwidth. What binds is HBM where bytes take "
        "longer than bundles, else the busiest kind of slot. Splash attention is counted in the same FLOPs. `dense` "
        "meets every pair, chosen or not. One core, bfloat16.",
        table(record["rows"]),
    ]
    if record.get("operation"):
        heads = ["chip", "kernels, forward + backward", "all that surrounds them", "together", "around, share"]
        parts += [
            "## The whole operation",
            "Bundles a pair of one core, both passes of 8,192 tokens with 8 of 128 resources each, tables included. "
            "Operations that wait for HBM take longer than that: [whole layers](compiled_layer.md) count it.",
            plain_table(heads, "lrrrr", operation(record)),
        ]
    if found := targets(record["rows"]):
        heads = ["target", "chip", "wanted", "found", "", "what binds"]
        parts += ["## Targets", plain_table(heads, "llllll", found)]
    parts += [f"Refused by the compiler: {each['what']}: {each['why']}" for each in record["refused"]]
    return "\n\n".join([*parts, measure.closing(record["command"], record["versions"])])


def table(rows: list[Row]) -> str:
    """One line a kernel, chip, shape and direction."""
    heads = ["chip", "kernel", "pass", "m", "d", "H", "T", "bundles a pair", *SLOTS, "busiest (bundles)", "spills"]
    heads += ["bytes a pair", "ns", "MXU limit", "HBM limit", "TFLOP/s", "of peak", "binds"]
    lines = []
    for row in rows:
        cells = [row[name] for name in ("chip", "kernel", "direction", "m", "d", "heads", "tile")]
        cells += [f"{row['bundles_a_pair']:.2f}", *(f"{row['slots'][slot]:.0%}" for slot in SLOTS)]
        cells += [f"{row['busiest']} ({row['busiest_bundles']:.2f})", row["spills"], f"{row['bytes_a_pair']:.0f}"]
        cells += [f"{row[name]:.2f}" for name in ("nanoseconds", "mxu_nanoseconds", "hbm_nanoseconds")]
        lines.append([*cells, f"{row['teraflops']:.0f}", f"{row['share_of_peak']:.0%}", limit(row)])
    return plain_table(heads, "lll" + "r" * (len(heads) - 4) + "l", lines)


def operation(record: dict[str, Any]) -> list[list[str]]:
    """One line a chip: the `resident` kernels' bundles a pair, and those of all else."""
    lines = []
    for row in record["operation"]:
        pair = chosen(record["rows"], row["chip"], m=128, d=128, heads=8, tile=512)
        if len(pair) < 2:
            continue
        kernels, around = sum(each["bundles_a_pair"] for each in pair.values()), row["bundles_a_pair"]
        both = kernels + around
        lines.append([row["chip"], f"{kernels:.2f}", f"{around:.2f}", f"{both:.2f}", f"{around / both:.0%}"])
    return lines


def targets(rows: list[Row]) -> list[list[str]]:
    """One line a target that the rows speak of, with what binds where it is missed."""
    lines = []
    for chip in TPUS:
        pair = chosen(rows, chip, m=128, d=128, heads=8, tile=512)
        found = {direction: row["bundles_a_pair"] for direction, row in pair.items()}
        for direction, row in pair.items() if chip in ("v5e", "v5p") else ():
            wanted = BEFORE_PIPELINING[direction]
            lines.append(_outcome(f"{direction}, bundles a pair", chip, wanted, found[direction], "at most", [row]))
        if len(pair) == 2:
            name, both = "forward + backward, bundles a pair", sum(found.values())
            for wanted in (AFTER_PIPELINING[chip], GOALS[chip]):
                lines.append(_outcome(name, chip, wanted, both, "at most", list(pair.values())))
        wide = chosen(rows, chip, m=256, d=256, heads=4, tile=512)
        if len(wide) == 2 and chip in ("v6e", "tpu7x"):
            name = "m = 256, d = 256: share of peak"
            lines.append(_outcome(name, chip, WIDE_SHARE, share_of_peak(wide), "at least", list(wide.values())))
    return lines


def chosen(rows: list[Row], chip: str, **shape: int) -> dict[str, Row]:
    """The `resident` kernels for one shape, by direction: targets are theirs."""
    of_shape = {"chip": chip, "kernel": "resident", **shape}
    return {row["direction"]: row for row in rows if of_shape.items() <= row.items()}


def share_of_peak(pair: dict[str, Row]) -> float:
    """Of both passes together: the time at the matrix units' peak over the modelled time."""
    return sum(row["mxu_nanoseconds"] for row in pair.values()) / sum(row["nanoseconds"] for row in pair.values())


def _outcome(name: str, chip: str, wanted: float, found: float, sense: str, rows: list[Row]) -> list[str]:
    met = found <= wanted if sense == "at most" else found >= wanted
    binds = "" if met else "; ".join(map(binding, rows))
    return [name, chip, f"{sense} {wanted:.4g}", f"{found:.3g}", "met" if met else "missed", binds]


def limit(row: Row) -> str:
    """HBM, or the kind of slot that the kernel fills most."""
    return "HBM" if row["nanoseconds"] > row["issue_nanoseconds"] else row["busiest"]


def binding(row: Row) -> str:
    """Which limit a kernel is nearest to, and how much of its time that does not explain."""
    if limit(row) == "HBM":
        return f"{row['direction']}: HBM, {row['bytes_a_pair']:.0f} bytes a pair"
    rest = row["bundles_a_pair"] - row["busiest_bundles"]
    return (
        f"{row['direction']}: {row['busiest']}, full in {row['busiest_bundles']:.1f} of {row['bundles_a_pair']:.1f} "
        f"bundles; {rest:.1f} wait for results or for other slots; {row['spills']} spills"
    )
