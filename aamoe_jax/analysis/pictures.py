"""Pictures of a run: what it learnt, what it spent where, and on what.

Every function writes one PNG and returns the figure. Colours are told apart by colour-blind readers too (Okabe and
Ito's palette; maps that grow darker one way). No global state of matplotlib is touched, and no window is ever opened.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, Int, Num
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from aamoe_jax.bucket import AnyPath, BucketPath

Record = Mapping[str, Any]
Series = tuple[Num[np.ndarray, "n"], Float[np.ndarray, "n *layers"]]
Cells = list[tuple[int, int, str, int]]

BLUE, VERMILION = "#0072B2", "#D55E00"
RUN_COLOURS = (BLUE, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", VERMILION, "#000000")
"""One per run. Yellow, the eighth of the palette, does not show on white."""
DASHES = ("-", "--", ":")
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "axes.labelcolor": "#333333",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "savefig.dpi": 160,
    "text.color": "#333333",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
}
SPENT_COLOURS = LinearSegmentedColormap.from_list(
    "spent", ["#FFFFFF", "#DCEAF5", "#9CC7E2", "#3F8FC4", "#0B559F", "#08264F"]
)
"""White for a token that was given nothing; where there is no token the ground is PAPER."""
PAPER = "#F1F0EE"
MOST_PANELS, MOST_TONES, ALMOST_NOTHING = 6, 8, 0.01
KINDS = {"local": "own neighbourhood", "context": "routed context", "expert": "experts"}
MEASURES = {"pairs": "share of pairs", "mass": "share of attention"}
MARKS = {"\n": "↵", "\t": "→", "\r": "←"}


@contextlib.contextmanager
def picture(path: str | AnyPath, width: float, height: float, **style: Any) -> Iterator[Figure]:
    """A figure of so many inches to draw on, which is then written."""
    with mpl.rc_context(STYLE | style):
        figure = Figure(figsize=(width, height))
        yield figure
        if isinstance(path, BucketPath):
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png")
            path.write_bytes(drawn.getvalue())
        else:
            figure.savefig(path)


def series(records: Sequence[Record], key: str) -> Series:
    """Steps and values of the records that have `key`, in order of step."""
    found = sorted((record["step"], record[key]) for record in records if record.get(key) is not None)
    return np.array([step for step, _ in found]), np.array([value for _, value in found], float)


# The loss.


def loss_curves(runs: Mapping[str, Sequence[Record]], path: str | AnyPath, *, smooth: int = 0) -> Figure:
    """Training loss over the steps, raw and smoothed, and validation loss: of one run, or of several in one picture.

    The scale is in bits per byte; a second one is in nats per token where the two are in proportion.

    Args:
      runs: by name, metrics with `step`, and `bits_per_byte` and `loss`, or `validation_bits_per_byte`, or all of them.
      smooth: the smoothed loss is the mean over so many steps around each; 0: a tenth of the longest run.
    """
    training = {name: _required(records, "bits_per_byte") for name, records in runs.items()}
    validation = {name: series(records, "validation_bits_per_byte") for name, records in runs.items()}
    smooth = smooth or max(1, round(max(np.ptp(steps) for steps, _ in training.values()) / 10))
    means = {name: running_mean(steps, bits, smooth) for name, (steps, bits) in training.items()}
    with picture(path, 6.4, 3.8) as figure:
        axes = figure.subplots()
        for name, (colour, dashes) in zip(runs, run_styles(len(runs)), strict=True):
            steps, bits = training[name]
            label = f"{name}  {means[name][-1]:.3f}"
            axes.plot(steps, bits, color=colour, alpha=0.3, linewidth=0.7, zorder=1)
            (line,) = axes.plot(steps, means[name], color=colour, linestyle=dashes, linewidth=1.6, label=label)
            steps, bits = validation[name]
            if len(steps):
                (points,) = axes.plot(steps, bits, "o:", color=colour, linewidth=0.8, markersize=4.5)
                points.set_markeredgecolor("white")
                if len(runs) == 1:
                    points.set(color=VERMILION, label=f"validation  {bits[-1]:.3f}")
                else:
                    line.set_label(f"{label}, validation {bits[-1]:.3f}")
        raw = [bits for _, bits in training.values()]
        limits = _loss_limits(raw, list(means.values()), [bits for _, bits in validation.values()])
        axes.set(xlabel="step", ylabel="bits per byte", ylim=limits)
        dots = "; dots: validation" if any(len(steps) for steps, _ in validation.values()) else ""
        axes.set_title(f"line: mean over {smooth:,} steps; faint: as recorded{dots}", fontsize=8, color="#666666")
        axes.legend(frameon=False, loc="upper right")
        _add_nats_axis(axes, [record for records in runs.values() for record in records])
    return figure


def run_styles(count: int) -> list[tuple[str, str]]:
    """A colour and dashes for each of so many runs: every colour once before the dashes change."""
    styles = itertools.cycle(itertools.product(DASHES, RUN_COLOURS))
    return [(colour, dashes) for dashes, colour in itertools.islice(styles, count)]


def running_mean(steps: Num[np.ndarray, "n"], values: Float[np.ndarray, "n"], width: int) -> Float[np.ndarray, "n"]:
    """Mean over `width` steps around each: from `width / 2` before it to just short of `width / 2` after it."""
    padded = np.concatenate([[0.0], np.cumsum(values)])
    first = np.searchsorted(steps, steps - width / 2)
    last = np.searchsorted(steps, steps + width / 2)
    return (padded[last] - padded[first]) / (last - first)


def _loss_limits(
    raw: Sequence[Float[np.ndarray, "_"]],
    smooth: Sequence[Float[np.ndarray, "_"]],
    validation: Sequence[Float[np.ndarray, "_"]],
) -> tuple[float, float]:
    """Room for all but the fall of the first tenth, which would flatten everything that follows."""
    late = [values[len(values) // 10 :] for values in smooth]
    shown = np.concatenate([*late, *validation, [values.min() for values in raw]])
    margin = 0.05 * max(np.ptp(shown), 0.1)
    return shown.min() - margin, shown.max() + margin


def _add_nats_axis(axes: Axes, records: Sequence[Record]) -> None:
    """A second scale in nats per token, where tokens have a fixed number of bytes (the byte tokenizer)."""
    ratios = [one["loss"] / one["bits_per_byte"] for one in records if {"loss", "bits_per_byte"} <= set(one)]
    if ratios and np.ptp(ratios) < 1e-3 * np.mean(ratios):
        ratio: Any = float(np.mean(ratios))
        scale = axes.secondary_yaxis("right", functions=(lambda bits: bits * ratio, lambda nats: nats / ratio))
        scale.set_ylabel("nats per token")
        scale.spines["right"].set_visible(False)


# What was spent where.


def budget_map(
    tokens_text: Sequence[str],
    spent: Int[np.ndarray, "layers tokens"],
    path: str | AnyPath,
    *,
    layers: Sequence[int],
    parts: Mapping[str, int] | None = None,
    columns: int = 64,
) -> Figure:
    """A passage in monospaced rows, every token on a ground as dark as the resources that were spent on it.

    One panel shows the mean over the layers; those below it show layers, at most MOST_PANELS of them, evenly spread.
    All share one scale, which is fitted to the passage (`fitted_scale`).

    Args:
      tokens_text: the text of every token. Spaces stay blank, a line feed shows as an arrow and ends the row.
      layers: where in the stack every row of `spent` stands.
      parts: the number of tokens of each part of the passage, by name and in order; means stand beside the text.
      columns: characters per row.
    """
    if len(tokens_text) != spent.shape[1]:
        raise ValueError(f"{len(tokens_text)} tokens of text, but {spent.shape[1]} of spent resources")
    cells = lay_out(tokens_text, columns)
    shown = np.unique(np.linspace(0, len(layers) - 1, min(len(layers), MOST_PANELS)).round().astype(int))
    panels = {"mean over layers": spent.mean(0)} | {f"layer {layers[row]}": spent[row] for row in shown}
    colours, norm = fitted_scale(spent)
    num_rows = cells[-1][0] + 1
    height = len(panels) * (0.155 * num_rows + 0.3) + 0.2
    width = 0.082 * columns + (1.9 if parts else 1.3)
    with picture(path, width, max(1.8, height), **{"axes.grid": False}) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (title, values) in zip(grid, panels.items(), strict=True):
            _draw_passage(axes, cells, values, columns, colours, norm)
            _name_rows(axes, cells, values, parts)
            axes.set_title(f"{title}: {values.mean():.2f} resources per token", fontsize=9)
        _add_scale(figure, colours, norm, list(grid), min(1.0, 3.0 / height))
    return figure


def fitted_scale(spent: Int[np.ndarray, "layers tokens"]) -> tuple[ListedColormap, BoundaryNorm]:
    """A tone for every number of resources that occurs. If these are more than MOST_TONES, there are so many tones,
    each for about as many tokens. White is for none.
    """
    given = spent[spent > 0]
    edges = np.unique(given).tolist()
    if len(edges) > MOST_TONES:
        quantiles = np.quantile(given, np.linspace(0, 1, MOST_TONES + 1)[:-1], method="lower")
        edges = np.unique(quantiles).tolist()
    tones = [SPENT_COLOURS(tone) for tone in np.linspace(0.12, 1.0, len(edges))]
    if (spent == 0).any():
        # A mean of less than one resource is not nothing.
        edges, tones = [0, ALMOST_NOTHING, *edges[1:]][: len(tones) + 1], [SPENT_COLOURS(0.0), *tones]
    return ListedColormap(tones), BoundaryNorm([*edges, int(spent.max()) + 1], len(tones))


def lay_out(tokens_text: Sequence[str], columns: int) -> Cells:
    """(row, column, character, token) of every character of the passage, wrapped at `columns` and after line feeds.

    Rows are wrapped between words; only a word longer than a row is broken.
    """
    characters = [(character, token) for token, text in enumerate(tokens_text) for character in text]
    if not characters:
        raise ValueError("a passage without a character cannot be drawn")
    cells, row, column = [], 0, 0
    for _, group in itertools.groupby(characters, lambda one: one[0].isspace()):
        word = list(group)
        if not word[0][0].isspace() and columns - column < len(word) <= columns:
            row, column = row + 1, 0
        for character, token in word:
            if column == columns:
                row, column = row + 1, 0
            shown = MARKS.get(character, character if character.isprintable() else "·")
            cells.append((row, column, shown, token))
            row, column = (row + 1, 0) if character == "\n" else (row, column + 1)
    return cells


def _draw_passage(
    axes: Axes, cells: Cells, values: Num[np.ndarray, "tokens"], columns: int, colours: Colormap, norm: BoundaryNorm
) -> None:
    """The passage on its coloured ground."""
    ground = np.full((cells[-1][0] + 1, columns), np.nan)
    for row, column, _, token in cells:
        ground[row, column] = values[token]
    axes.imshow(ground, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    for row, column, character, token in cells:
        if character != " ":
            style: dict[str, Any] = {"fontfamily": "monospace", "fontsize": 8.5, "parse_math": False}
            ink = _ink(colours(norm(values[token])))
            axes.text(column, row, character, ha="center", va="center_baseline", color=ink, **style)
    axes.tick_params(length=0)
    axes.set_facecolor(PAPER)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)


def _name_rows(axes: Axes, cells: Cells, values: Num[np.ndarray, "tokens"], parts: Mapping[str, int] | None) -> None:
    """To the left of the passage: each part with its mean, or the first token of every row."""
    if not parts:
        starts = {row: token for row, _, _, token in reversed(cells)}
        axes.set_yticks(list(starts), [str(token) for token in starts.values()], fontsize=6)
        return
    ends = np.cumsum(list(parts.values()))
    places, labels = [], []
    for name, first, end in zip(parts, [0, *ends[:-1]], ends, strict=True):
        rows = [row for row, _, _, token in cells if first <= token < end]
        places.append((rows[0] + rows[-1]) / 2)
        labels.append(f"{name}\n{values[first:end].mean():.2f}")
        edge: dict[str, Any] = {
            "transform": axes.get_yaxis_transform(),
            "clip_on": False,
            "color": "#999999",
            "linewidth": 0.8,
        }
        axes.plot([-0.006, -0.006], [rows[0] - 0.4, rows[-1] + 0.4], **edge)
    axes.set_yticks(places, labels, fontsize=7.5)


def _add_scale(figure: Figure, colours: Colormap, norm: BoundaryNorm, panels: list[Axes], shrink: float) -> None:
    """The colour bar beside all panels: one field for every tone, of equal size."""
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=panels, shrink=shrink, aspect=20, pad=0.015)
    bar.set_label("resources of a token")
    fields = [(math.ceil(low), math.ceil(high) - 1) for low, high in itertools.pairwise(norm.boundaries)]
    names = [f"{least}" if least == most else f"{least}–{most}" for least, most in fields]
    bar.set_ticks([(low + high) / 2 for low, high in itertools.pairwise(norm.boundaries)], labels=names)
    bar.outline.set(linewidth=0.5, edgecolor="#999999")
    bar.ax.tick_params(length=0)


def _ink(ground: Sequence[float]) -> str:
    """Dark letters on light ground, light letters on dark ground; arithmetic of relative luminance."""
    luminance = np.dot(ground[:3], (0.2126, 0.7152, 0.0722))
    return "#1A1A1A" if luminance > 0.45 else "#FFFFFF"


# What it was spent on.


def context_expert_share(records: Sequence[Record], path: str | AnyPath, *, layers: Sequence[int]) -> Figure:
    """Shares of pairs and of attention that go to the neighbourhood, to context and to experts; one line per layer.

    Args:
      records: metrics with `step` and lists with one share per layer under `pairs_local`, `pairs_context`,
        `pairs_expert`, `mass_local`, `mass_context` and `mass_expert`.
      layers: their places in the stack.
    """
    with picture(path, 8.4, 4.4) as figure:
        grid = figure.subplots(len(MEASURES), len(KINDS), sharex=True, sharey=True)
        for row, (measure, measure_title) in zip(grid, MEASURES.items(), strict=True):
            for axes, kind in zip(row, KINDS, strict=True):
                steps, shares = _required(records, f"{measure}_{kind}")
                colours = layer_colours(shares.shape[1])
                named = np.linspace(0, len(colours) - 1, min(len(colours), 12)).round()
                for i, (layer, colour) in enumerate(zip(layers, colours, strict=True)):
                    label = f"layer {layer}" if i in named else None
                    axes.plot(steps, shares[:, i], color=colour, linewidth=1.5, label=label)
            row[0].set_ylabel(measure_title)
        for axes, title in zip(grid[0], KINDS.values(), strict=True):
            axes.set_title(title)
        for axes in grid[-1]:
            axes.set_xlabel("step")
        grid[0, 0].set_ylim(-0.02, 1.02)
        grid[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def layer_colours(num_layers: int) -> Float[np.ndarray, "layers 4"]:
    """From dark blue at the bottom of the stack to a yellow that still shows on white at its top."""
    return mpl.colormaps["viridis"](np.linspace(0.0, 0.9, num_layers))


def _required(records: Sequence[Record], key: str) -> Series:
    steps, values = series(records, key)
    if not len(steps):
        raise ValueError(f"none of {len(records)} records has {key!r}")
    return steps, values
