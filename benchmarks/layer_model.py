"""The whole AA-MoE layer against dense flash attention and a feed-forward, on chips that are not there.

    python -m benchmarks.layer_model --output=experiments/results/layer_model.json

Modelled nanoseconds a token of one layer, forward and backward, on one device. Nothing was measured. Most of it is
what the TPU compilers made of both layers (`benchmarks.compiled_layer`); splash attention and the kernel of chosen
resources are their own schedule (`benchmarks.tpu_schedule`) times OVER_SCHEDULE, the latter over the fill of its tiles
besides, and what it does around a window of tokens, its copies to and from fast memory among it, is added in full:
nothing runs beside that. The two cores of a v5p device divide what DIVIDED says. The layers are not of equal quality:
`beta` resources of m keys or neurons a token, the first of them its local window, stand beside all earlier tokens and
4 D neurons.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl import flags

from aamoe_jax.preflight.closed_form import OVER_SCHEDULE, routed_problem
from benchmarks import measure
from benchmarks.compiled_layer import config
from benchmarks.tpu_schedule import RESULTS
from experiments.program import command_line, plain_table, publish, start
from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.tpu import resident
from pallas_kernels.chips import TPUS, Chip

FLAGS = flags.FLAGS

DIVIDED = {"resident": ("forward", "backward"), "splash": ("forward",)}
"""Passes that the cores of a device divide. The grid of splash attention's backward pass has no parallel dimension."""
GROUPS = {
    "products": ("products",),
    "tables": ("tables",),
    "choice": ("router products", "router", "selection", "budget"),
    "window": ("window",),
}
"""Parts of the compiled layer that stand together; all others are the rest."""

AROUND = 12.7
"""Bundles a token beside its pairs, 8 heads of 128: outputs times totals where a window begins, over them where it ends
(3.5 and 3.8), gradients cleared (1.0) and converted (twice 2.2). From the listings of both kernels on a v5e."""

WIDTH, HEADS, D_HEAD = config().d_model, config().num_heads, config().head_dim
SPLASH_KEYS = 128
"""Of a pair, as splash attention is tabled: it has no resources."""


def attention(rows: list[dict[str, Any]], chip: str, kernel: str, m: int) -> dict[int, float]:
    """Modelled nanoseconds a pair on one device, both passes, by tile: of those for which both are in the table."""
    sums: dict[int, list[float]] = {}
    for row in rows:
        if (row["chip"], row["kernel"], row["m"], row["d"], row["heads"]) == (chip, kernel, m, D_HEAD, HEADS):
            cores = TPUS[chip].device_cores if row["direction"] in DIVIDED[kernel] else 1
            sums.setdefault(row["tile"], []).append(row["issue_nanoseconds"] / cores)
    return {tile: sum(both) for tile, both in sums.items() if len(both) == 2}


def movement(chip: Chip, moved: float) -> float:
    """Nanoseconds of bytes at the bandwidth of a device's HBM."""
    return 1e9 * moved / (chip.bandwidth * chip.device_cores)


def plan(chip: str, m: int, length: int, rows: int = 1) -> resident.Path:
    """The tiles and windows of rows that lie flat."""
    with chips.assume(chip):
        return resident.plan(routed_problem(config(m), length, rows))


def fill(tile: int, pairs: float, resources: float) -> float:
    """Of the tiles of one window, its pairs spread evenly: every resource leaves half a tile empty on average."""
    rows = pairs / resources
    return rows / (rows + tile / 2)


def routed(chip: str, m: int, length: int, kernel: dict[int, float], rows: int = 1) -> float | None:
    """Attention over the chosen pairs: issue or the keys and values from HBM, and after that what comes and goes around
    a window. None: the tile of such rows is not tabled.
    """
    problem, layout = plan(chip, m, length, rows)
    pairs = config(m).aamoe.budget.beta - 1  # the first that a token buys is its local window, which has its own kernel
    if layout.tile not in kernel:
        return None
    window, resources = rows * length / layout.windows, problem.met(layout.windows) / layout.windows
    issue = kernel[layout.tile] / fill(layout.tile, pairs * window, resources)
    # bfloat16 keys and values in both passes; their float32 gradients are read and written.
    table = resources * m * WIDTH * (2 * 4 + 2 * 8)
    # Both kinds of query in, the output in and out in float32; both with the output's gradient in, the local window's
    # gradient of the query in, in float32, and those of both out.
    moved = WIDTH * (2 * 2 + 2 * 4 + 2 * 2 * 2 + 4 + 2 * 2)
    around = movement(TPUS[chip], moved) + OVER_SCHEDULE * 1e9 * AROUND / (TPUS[chip].clock * TPUS[chip].device_cores)
    return max(pairs * OVER_SCHEDULE * issue, movement(TPUS[chip], table / window)) + around


def grouped(parts: dict[str, float]) -> dict[str, float]:
    """The parts of a compiled layer, by GROUPS."""
    groups = {name: sum(parts.get(part, 0.0) for part in members) for name, members in GROUPS.items()}
    return groups | {"rest": sum(parts.values()) - sum(groups.values())}


def model(schedule: list[dict[str, Any]], compiled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for everything compiled for which both kernels are tabled, and a dense layer of as many tokens is
    compiled. Splash attention takes the best tile."""
    dense = {(row["chip"], row["length"] * row["rows"]): row["parts"] for row in compiled if row["layer"] == "dense"}
    found = []
    for chip, m, length, rows, parts in (
        [row[name] for name in ("chip", "m", "length", "rows", "parts")] for row in compiled if row["layer"] == "aamoe"
    ):
        splash = attention(schedule, chip, "splash", SPLASH_KEYS)
        chosen = routed(chip, m, length, attention(schedule, chip, "resident", m), rows)
        if (chip, rows * length) not in dense or chosen is None or not splash:
            continue
        ours = grouped(parts) | {"attention": chosen}
        issue = min(splash.values())
        theirs = grouped(dense[chip, rows * length]) | {"attention": OVER_SCHEDULE * issue * length / SPLASH_KEYS / 2}
        speed_up = sum(theirs.values()) / sum(ours.values())
        shape = {"chip": chip, "m": m, "length": length, "rows": rows}
        found.append({**shape, "aamoe": ours, "dense": theirs, "speed_up": speed_up})
    return found


def report(record: dict[str, Any]) -> str:
    """The record as markdown."""
    names, rows = [*GROUPS, "rest", "attention"], []
    for row in record["rows"]:
        ours, theirs = row["aamoe"], row["dense"]
        cells = [sum(ours.values()), *(ours[name] for name in names), sum(theirs.values()), theirs["attention"]]
        shape = [row[name] for name in ("chip", "m", "length", "rows")]
        rows.append([*shape, *(f"{cell:.0f}" for cell in cells), f"{row['speed_up']:.2f}"])
    layer = config().aamoe
    heads = ["chip", "m", "L", "rows", "AA-MoE", *names, "dense", "attention", "speed-up"]
    parts = [
        "# One layer on TPUs, modelled",
        f"Nanoseconds a token, forward and backward, on one device: AA-MoE (D = {WIDTH}, H = {HEADS}; E = "
        f"{layer.num_experts}, beta = {layer.budget.beta:g}, K_max = {layer.max_resources} at m = {layer.chunk_size}, "
        "and scaled with m so that there are as many keys) against dense flash attention and a feed-forward of width "
        f"{4 * WIDTH}, rows of L tokens. Modelled from what the compilers made of both, not "
        "measured: splash attention and the kernel of chosen resources by their schedules times "
        f"{OVER_SCHEDULE:g}, the latter with its tiles as full as pairs that are spread evenly make them, and copies "
        "and loops around a window added in full; everything else by its listing, or at HBM's bandwidth. `tables` is "
        "what surrounds the kernel of chosen resources, `choice` router, selection and budget. A v5p device has two "
        "cores, which divide both kernels, but for splash attention's backward pass. The two layers are not of equal "
        "quality.",
        plain_table(heads, "l" + "r" * (len(heads) - 1), rows),
        measure.closing(record["command"], f"From: {', '.join(f'`{command}`' for command in record['from'])}"),
    ]
    return "\n\n".join(parts)


def define_flags() -> None:
    """The flags of this program."""
    tables = [str(RESULTS / f"tpu_schedule{name}.json") for name in ("", "_tiles", "_tiles_256")]
    flags.DEFINE_list("schedule", tables, "Tables of benchmarks.tpu_schedule.")
    flags.DEFINE_string("compiled", str(RESULTS / "compiled_layer.json"), "The table of benchmarks.compiled_layer.")
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")


def main() -> None:
    *schedules, compiled = (json.loads(Path(path).read_text()) for path in (*FLAGS.schedule, FLAGS.compiled))
    record = {
        "command": command_line("benchmarks.layer_model"),
        "from": [command for found in (*schedules, compiled) for command in found["command"].splitlines()],
        "rows": model([row for found in schedules for row in found["rows"]], compiled["rows"]),
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
