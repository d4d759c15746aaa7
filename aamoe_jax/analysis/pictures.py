"""Pictures of a run: what it learnt, what it spent where, and on what.

Every function writes one PNG and returns the figure. Colours are told apart by colour-blind readers too (Okabe and
Ito's palette; maps that grow darker one way). No global state of matplotlib is touched, and no window is ever opened.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float, Int, Num
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import PercentFormatter

from aamoe_jax.bucket import AnyPath, BucketPath

Record = Mapping[str, Any]
Series = tuple[Num[np.ndarray, "n"], Float[np.ndarray, "n *layers"]]
Cells = list[tuple[int, int, str, int]]

BLUE, VERMILION = "#0072B2", "#D55E00"
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


def loss_curve(records: Sequence[Record], path: str | AnyPath) -> Figure:
    """Training and validation loss over the steps, in bits per byte, and in nats per token if in proportion.

    Args:
      records: metrics with `step`, and `bits_per_byte` and `loss`, or `validation_bits_per_byte`, or all of them.
    """
    steps, bits = _required(records, "bits_per_byte")
    validation_steps, validation = series(records, "validation_bits_per_byte")
    with picture(path, 6.4, 3.6) as figure:
        axes = figure.subplots()
        smooth = running_mean(bits, max(1, len(bits) // 40))
        axes.plot(steps, bits, color=BLUE, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth, color=BLUE, linewidth=1.6, label=f"training  {smooth[-1]:.3f}")
        if len(validation):
            label = f"validation  {validation[-1]:.3f}"
            axes.plot(validation_steps, validation, "o-", color=VERMILION, markersize=3.5, linewidth=1.2, label=label)
        axes.set(xlabel="step", ylabel="bits per byte", ylim=_loss_limits(bits, smooth, validation))
        axes.legend(frameon=False, loc="upper right")
        _add_nats_axis(axes, records)
    return figure


def running_mean(values: Float[np.ndarray, "n"], reach: int) -> Float[np.ndarray, "n"]:
    """Mean of the values at most `reach` places away; fewer at the ends."""
    padded = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return (padded[last] - padded[first]) / (last - first)


def _loss_limits(
    bits: Float[np.ndarray, "n"], smooth: Float[np.ndarray, "n"], validation: Float[np.ndarray, "m"]
) -> tuple[float, float]:
    """Room for all but the fall of the first tenth, which would flatten everything that follows."""
    shown = np.concatenate([smooth[len(smooth) // 10 :], validation, [bits.min()]])
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
    layers: Sequence[int] = (),
    columns: int = 88,
) -> Figure:
    """A passage in monospaced rows, every token on a ground as dark as the resources that were spent on it.

    Args:
      tokens_text: the text of every token. Spaces stay blank, a line feed shows as an arrow and ends the row.
      layers: which layers get a panel of their own below that of the mean. All panels share one scale.
      columns: characters per row.
    """
    if len(tokens_text) != spent.shape[1]:
        raise ValueError(f"{len(tokens_text)} tokens of text, but {spent.shape[1]} of spent resources")
    cells = lay_out(tokens_text, columns)
    panels = {"mean over layers": spent.mean(0)} | {f"layer {layer}": spent[layer] for layer in layers}
    # Budgets have long tails: a square root keeps the small ones apart, and the top percent share the darkest tone.
    norm = PowerNorm(0.5, vmin=0, vmax=max(1.0, float(np.percentile(list(panels.values()), 99))))
    num_rows = cells[-1][0] + 1
    height = len(panels) * (0.155 * num_rows + 0.3) + 0.2
    with picture(path, 0.082 * columns + 1.1, max(1.8, height), **{"axes.grid": False}) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (title, values) in zip(grid, panels.items(), strict=True):
            image = _draw_passage(axes, cells, values, columns, norm)
            axes.set_title(f"{title}: {values.mean():.2f} resources per token", fontsize=9)
        _add_scale(figure, image, list(grid), min(1.0, 3.0 / height))
    return figure


def lay_out(tokens_text: Sequence[str], columns: int) -> Cells:
    """(row, column, character, token) of every character of the passage, wrapped at `columns` and after line feeds."""
    cells, row, column = [], 0, 0
    for token, text in enumerate(tokens_text):
        for character in text:
            if column == columns:
                row, column = row + 1, 0
            shown = MARKS.get(character, character if character.isprintable() else "·")
            cells.append((row, column, shown, token))
            row, column = (row + 1, 0) if character == "\n" else (row, column + 1)
    if not cells:
        raise ValueError("a passage without a character cannot be drawn")
    return cells


def _draw_passage(
    axes: Axes, cells: Cells, values: Num[np.ndarray, "tokens"], columns: int, norm: PowerNorm
) -> AxesImage:
    """The passage on its coloured ground. Returns the image, for the colour bar."""
    ground = np.full((cells[-1][0] + 1, columns), np.nan)
    for row, column, _, token in cells:
        ground[row, column] = values[token]
    image = axes.imshow(ground, cmap=SPENT_COLOURS, norm=norm, aspect="auto", interpolation="nearest")
    for row, column, character, token in cells:
        if character != " ":
            style: dict[str, Any] = {"fontfamily": "monospace", "fontsize": 8.5, "parse_math": False}
            ink = _ink(SPENT_COLOURS, float(norm(values[token])))
            axes.text(column, row, character, ha="center", va="center_baseline", color=ink, **style)
    starts = {row: token for row, _, _, token in reversed(cells)}
    axes.set_yticks(list(starts), [str(token) for token in starts.values()], fontsize=6)
    axes.tick_params(length=0)
    axes.set_facecolor(PAPER)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    return image


def _add_scale(figure: Figure, image: AxesImage, panels: list[Axes], shrink: float) -> None:
    """The colour bar beside all panels."""
    bar = figure.colorbar(image, ax=panels, extend="max", shrink=shrink, aspect=25, pad=0.015)
    bar.set_label("resources")
    largest: Any = image.norm.vmax
    bar.set_ticks([tick for tick in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500) if tick <= largest])
    bar.outline.set(linewidth=0.5, edgecolor="#999999")
    bar.ax.tick_params(length=2)
    bar.ax.minorticks_off()


def _ink(colours: Colormap, tone: float) -> str:
    """Dark letters on light ground, light letters on dark ground; arithmetic of relative luminance."""
    luminance = np.dot(colours(tone)[:3], (0.2126, 0.7152, 0.0722))
    return "#1A1A1A" if luminance > 0.45 else "#FFFFFF"


# What it was spent on.


def context_expert_share(records: Sequence[Record], path: str | AnyPath) -> Figure:
    """Shares of pairs and of attention that go to the neighbourhood, to context and to experts; one line per layer.

    Args:
      records: metrics with `step` and lists with one share per layer under `pairs_local`, `pairs_context`,
        `pairs_expert`, `mass_local`, `mass_context` and `mass_expert`.
    """
    with picture(path, 8.4, 4.4) as figure:
        grid = figure.subplots(len(MEASURES), len(KINDS), sharex=True, sharey=True)
        for row, (measure, measure_title) in zip(grid, MEASURES.items(), strict=True):
            for axes, kind in zip(row, KINDS, strict=True):
                steps, shares = _required(records, f"{measure}_{kind}")
                colours = layer_colours(shares.shape[1])
                named = np.linspace(0, len(colours) - 1, min(len(colours), 12)).round()
                for layer, colour in enumerate(colours):
                    label = f"layer {layer}" if layer in named else None
                    axes.plot(steps, shares[:, layer], color=colour, linewidth=1.5, label=label)
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
