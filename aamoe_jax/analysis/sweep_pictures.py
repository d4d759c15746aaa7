"""Pictures of a model at budgets and lengths that it was not trained for. They are drawn from the records that
`launch.evaluate --sweep` writes, and look like those of `pictures`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from aamoe_jax.analysis.pictures import BLUE, KINDS, VERMILION, layer_colours, picture
from aamoe_jax.bucket import AnyPath
from aamoe_jax.evaluation.report import fraction

Record = Mapping[str, Any]

KIND_COLOURS = {"local": "#B3B3B3", "context": BLUE, "expert": "#E69F00"}
FIXED = {
    "beta": ("β fixed: the same per token", BLUE, "o-"),
    "B": ("B fixed: the same per row", VERMILION, "s--"),
    "none": ("without budgets", BLUE, "o-"),
}
FIRST_BIN = 16
"""Positions in the first bin of a curve by position; bins widen by half an octave from there."""


def _fitted(axes: Axes, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """A logarithmic axis whose ticks are the points of the sweep."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels)
    axes.xaxis.set_minor_locator(NullLocator())


# The budget.


def budget_sweep(points: Sequence[Record], path: str | AnyPath) -> Figure:
    """Left: bits per byte over the budget scale. Right: what a token spends, and on what, mean over layers.

    Args:
      points: `Evaluation.to_dict()` by ascending `budget_scale`.
    """
    scales, bits = ([point[name] for point in points] for name in ("budget_scale", "bits_per_byte"))
    labels = [fraction(scale) for scale in scales]
    with picture(path, 8.4, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(scales, bits, "o-", color=BLUE, markersize=4.5, linewidth=1.5)
        for scale, value in zip(scales, bits, strict=True):
            left.annotate(f"{value:.3f}", (scale, value), (4, 4), textcoords="offset points")
        _fitted(left, scales, labels)
        left.margins(x=0.16, y=0.1)
        left.set(title="Held-out bits per byte", xlabel="budget, that of training = 1", ylabel="bits per byte")
        _draw_spent(right, points, labels)
    return figure


def _draw_spent(axes: Axes, points: Sequence[Record], labels: Sequence[str]) -> None:
    """Resources per token as bars, one part for every kind."""
    bottom = np.zeros(len(points))
    for kind, title in KINDS.items():
        statistics = (point["statistics"] for point in points)
        height = np.array([np.mean(np.multiply(each["spent"], each[f"pairs_{kind}"])) for each in statistics])
        axes.bar(labels, height, bottom=bottom, color=KIND_COLOURS[kind], width=0.62, label=title)
        bottom += height
    for place, total in enumerate(bottom):
        axes.annotate(f"{total:.2f}", (place, total), (0, 3), textcoords="offset points", ha="center")
    axes.set_axisbelow(True)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    axes.legend(frameon=False, loc="upper left")
    axes.set(title="What a token spends", xlabel="budget, that of training = 1", ylabel="resources, mean over layers")


# The length.


def length_sweep(points: Sequence[Record], path: str | AnyPath) -> Figure:
    """Left: bits per byte by length of row. Then, for beta and for B fixed, the loss by position in the row.

    Args:
      points: `LengthPoint.to_dict()` by ascending length; skipped ones are left out.

    Raises:
      ValueError: every point was skipped.
    """
    points = [point for point in points if point["fixed"]]
    if not points:
        raise ValueError("every length was skipped: there is nothing to draw")
    kinds = list(points[0]["fixed"])
    with picture(path, 4.6 + 3.1 * len(kinds), 3.6) as figure:
        left, *panels = figure.subplots(1, 1 + len(kinds), width_ratios=[1.15, *[1] * len(kinds)])
        _draw_lengths(left, points, kinds)
        for axes, fixed in zip(panels, kinds, strict=True):
            _draw_positions(axes, points, fixed)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, title="tokens per row", loc="outside right center", frameon=False)
    return figure


def _draw_lengths(axes: Axes, points: Sequence[Record], kinds: Sequence[str]) -> None:
    lengths = [point["length"] for point in points]
    trained = points[0]["length"] / points[0]["factor"]
    for fixed in kinds:
        label, colour, form = FIXED[fixed]
        bits = [point["fixed"][fixed]["bits_per_byte"] for point in points]
        axes.plot(lengths, bits, form, color=colour, markersize=4.5, linewidth=1.5, label=label)
        for length, value in zip(lengths, bits, strict=True):
            left_of_rise = fixed == "B" and length > trained
            offset, side = ((-5, 5), "right") if left_of_rise else ((0, 6 if fixed == "B" else -13), "center")
            # Where both are one point, one label is enough.
            if fixed != "B" or length != trained:
                place = (length, value)
                axes.annotate(f"{value:.3f}", place, offset, textcoords="offset points", ha=side, color=colour)
    axes.axvline(trained, color="#999999", linewidth=0.8, linestyle=":")
    # Left of the line at the top nothing is drawn: rows shorter than in training cost little.
    place, at = (trained, 1), ("data", "axes fraction")
    axes.annotate("trained", place, (-3, -9), xycoords=at, textcoords="offset points", ha="right")
    _fitted(axes, lengths, [f"{length:g}" for length in lengths])
    axes.margins(x=0.14, y=0.16)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16))  # inside, a curve or a label is under it
    axes.set(title="Held-out bits per byte", xlabel="tokens per row", ylabel="bits per byte")


def _draw_positions(axes: Axes, points: Sequence[Record], fixed: str) -> None:
    """One curve per length, the longest the lightest."""
    longest = max(point["length"] for point in points)
    for point, colour in zip(points, layer_colours(len(points)), strict=True):
        nll = np.array(point["fixed"][fixed]["nll_by_position"], float)
        centre, mean = by_octave(nll)
        axes.plot(centre, mean, color=colour, linewidth=1.5, label=f"{point['length']:g}")
    ticks = [2.0**power for power in range(3, int(np.log2(longest)) + 1, 2)]
    _fitted(axes, ticks, [f"{tick:g}" for tick in ticks])
    title = f"Loss by position, {FIXED[fixed][0].split(':')[0]}"
    axes.set(title=title, xlabel="position in the row", ylabel="nats per token")


def by_octave(nll: Float[np.ndarray, "L"]) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Mean loss in bins of positions that widen by half an octave, and the middle of each; NaN marks no target."""
    length = len(nll)
    steps = np.arange(0, max(1, 2 * np.ceil(np.log2(max(length, FIRST_BIN) / FIRST_BIN))) + 1)
    edges = np.unique([0, *np.minimum(np.round(FIRST_BIN * 2 ** (steps / 2)), length)]).astype(int)
    centres, means = [], []
    for first, last in itertools.pairwise(edges):
        values = nll[first:last]
        values = values[~np.isnan(values)]
        if len(values):
            centres.append((first + last) / 2)
            means.append(float(values.mean()))
    return np.array(centres, float), np.array(means, float)
