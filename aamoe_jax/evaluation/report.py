"""Evaluations as text tables, and as JSON that people can read.

A record is JSON-ready: `Evaluation.to_dict()` with `gap_to_row` where row budgets were evaluated too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from aamoe_jax.evaluation.sweeps import rises

Record = dict[str, Any]

FUTURE_LEAK = "future leak: the largest change of any earlier logit when all later tokens are replaced; 0 means causal"
SPENT = f"{'MFLOP/token':>13}{'spent':>7}{'clipped':>9}{'future leak':>13}"
"""The last columns of every table: what an evaluation took, and what its probe saw."""
NOTE = (
    "note: %s; in this arithmetic rounding can depend on what stands beside a token: float32 on a CPU tells a leak "
    "from rounding"
)
FIXED = {"beta": "beta", "B": "B", "none": "-"}


def budget_label(budget: str | None) -> str:
    """How budgets are called in a table: whether they see the future is part of the name."""
    if budget is None:
        return "-"
    return "row (sees the future)" if budget == "row" else f"{budget} (causal)"


def fraction(value: float) -> str:
    """1/4 for 0.25, 2 for 2.0."""
    return f"1/{1 / value:g}" if value < 1 and (1 / value).is_integer() else f"{value:g}"


def as_json(record: Record) -> str:
    """Indented JSON with every list of numbers on one line."""
    text = json.dumps(record, indent=1)
    # A line feed never stands inside a JSON string, so only lists are matched.
    return re.sub(r"\[\n[-+.,\w\s]*\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"


# One model, several budgets.


def budgets_table(results: Sequence[Record]) -> str:
    """Every dataset under its budgets, the baselines below.

    Args:
      results: records with `dataset`, `budgets` (records by name), `baselines` (bits per byte by name).
    """
    width = 2 + max(len("dataset"), *(len(result["dataset"]) for result in results))
    lines = [
        f"{'dataset':<{width}}{'budgets':<29}{'bits/byte':>9}{'to row':>9}{'nats/token':>12}{'perplexity':>12}" + SPENT
    ]
    for result in results:
        names = [result["dataset"], *[""] * (len(result["budgets"]) - 1)]
        rows = zip(names, result["budgets"].values(), strict=True)
        lines += [f"{name:<{width}}{_budget_row(record)}" for name, record in rows]
        lines += [f"{'':<{width}}{name:<29}{bits:>9.3f}" for name, bits in result["baselines"].items()]
    lines += ["", FUTURE_LEAK]
    if any("gap_to_row" in record for result in results for record in result["budgets"].values()):
        lines += ["to row: the leakage gap, bits per byte that row budgets gain by seeing the future"]
    return "\n".join(lines)


def _budget_row(record: Record) -> str:
    gap = _cell(record.get("gap_to_row"), "+.4f")
    figures = f"{gap:>9}{record['nats_per_token']:>12.3f}{record['perplexity']:>12.2f}{_spent(record)}"
    return f"{budget_label(record['budget']):<29}{record['bits_per_byte']:>9.3f}{figures}"


def _spent(record: Record) -> str:
    spent, clipped = _cell(record["spent"], ".2f"), _cell(record["clip_rate"], ".1%")
    flops, leak = record["flops_per_token"] / 1e6, record["causality"]["largest"]
    return f"{flops:>13.2f}{spent:>7}{clipped:>9}{leak:>13.2g}"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def predictor_table(figures: Record, flip_rate: float) -> str:
    """What `perplexity.predictor_figures` says, a line per layer; of the accuracies of [B_i >= k] the first eight."""
    ranks = range(1, min(8, len(figures["affords"][0])) + 1)
    header = f"{'layer':<7}{'exact':>7}{'within 1':>10}{'|error|':>9}{'total/B':>9}  "
    lines = [
        f"predictor of row budgets, flip rate {flip_rate:.3f}; k: on how many tokens it is right about [B_i >= k]",
        header + "".join(f"{f'k={k}':>7}" for k in ranks),
    ]
    columns = zip(*(figures[name] for name in ("exact", "within_one", "error", "total", "affords")), strict=True)
    for layer, (exact, within_one, error, total, affords) in enumerate(columns):
        accuracies = "".join(f"{accuracy:>7.3f}" for accuracy in affords[: len(ranks)])
        lines.append(f"{layer:<7}{exact:>7.3f}{within_one:>10.3f}{error:>9.3f}{total:>9.3f}  {accuracies}")
    return "\n".join(lines)


def causality_warnings(records: Iterable[Record], *, exact: bool) -> list[str]:
    """Warnings of causal budgets under which earlier logits changed with later tokens.

    Args:
      exact: the arithmetic gives a token the same bits whatever stands beside it (float32 on a CPU); elsewhere rounding
        alone can change earlier logits a little.
    """
    warnings = []
    for record in records:
        leak = record["causality"]["largest"]
        if record["budget"] == "row" or leak == 0:
            continue
        name = "without budgets" if record["budget"] is None else f"under {record['budget']} budgets"
        found = f"{name} earlier logits changed by {leak:.2g}"
        warnings.append(f"warning: {found}: the future leaks, no figure of it is honest" if exact else NOTE % found)
    return list(dict.fromkeys(warnings))


# Sweeps.


def budget_sweep_table(points: Sequence[Record]) -> str:
    """Bits per byte over the budget scale, and whether they fall.

    Args:
      points: records by ascending `budget_scale`.
    """
    lines = [f"{'scale':<8}{'bits/byte':>10}{'step':>9}{SPENT}"]
    for previous, point in zip([None, *points], points, strict=False):
        bits = point["bits_per_byte"]
        step = "" if previous is None else f"{bits - previous['bits_per_byte']:+.4f}"
        lines.append(f"{fraction(point['budget_scale']):<8}{bits:>10.4f}{step:>9}{_spent(point)}")
    return "\n".join([*lines, monotone_line(points)])


def monotone_line(points: Sequence[Record]) -> str:
    """Whether bits per byte fall with every step of the budget, and where they do not."""
    bits = [point["bits_per_byte"] for point in points]
    scales = [fraction(point["budget_scale"]) for point in points]
    up = [f"from {scales[i - 1]} to {scales[i]} by {bits[i] - bits[i - 1]:.4f}" for i in rises(bits)]
    if up:
        return f"bits per byte do not fall monotonically with the budget: they rise {', '.join(up)}"
    return "bits per byte fall monotonically with the budget"


def length_sweep_table(points: Sequence[Record]) -> str:
    """Bits per byte in rows of every length, with beta fixed and with B fixed; skipped lengths with their reason.

    Args:
      points: `LengthPoint.to_dict()`.
    """
    lines = [f"{'length':<8}{'factor':<8}{'fixed':<7}{'scale':<7}{'bits/byte':>10}{SPENT}"]
    for point in points:
        start = f"{point['length']:<8.10g}{fraction(point['factor']):<8}"
        if point["skipped"]:
            lines.append(f"{start}skipped: {point['skipped']}")
        for fixed, record in point["fixed"].items():
            scale = fraction(record["budget_scale"]) if record["budget"] else "-"
            lines.append(f"{start}{FIXED[fixed]:<7}{scale:<7}{record['bits_per_byte']:>10.4f}{_spent(record)}")
            start = " " * 16
    return "\n".join(lines)
