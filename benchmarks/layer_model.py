"""The whole AA-MoE layer against dense flash attention and a feed-forward, on chips that are not there.

    python -m benchmarks.layer_model --output=experiments/results/layer_model.json

Modelled nanoseconds a token of one layer, forward and backward, on one core, from the committed schedule table
(`benchmarks.tpu_schedule`) and the chips' limits. Nothing was measured. Attention in both layers is the kernels' own
schedule times CALIBRATION, AA-MoE's over the fill of its tiles besides; matrix products run at PRODUCT_EFFICIENCY of
peak; tables, scores and keys move at HBM's bandwidth. The layers are not of equal quality: `beta` resources of m keys
or neurons a token stand beside all earlier tokens and 4 D neurons.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from benchmarks import measure
from experiments.program import command_line, plain_table, publish, start
from pallas_kernels.chips import TPUS, Chip

FLAGS = flags.FLAGS
SCHEDULE = Path(__file__).parents[1] / "experiments" / "results" / "tpu_schedule.json"

CALIBRATION = 1.35
"""What a chip takes over what its schedule says: an assumption, from one kernel. Splash attention's forward pass was
measured at 257 TFLOP/s on a tpu7x core (8192 tokens, d = 128) by its authors; schedules of it say 1.35 to 1.4 times."""
FILL = 0.8
"""Share of a tile's rows that are pairs, at best: budgets leave slots unused, groups end inside a tile."""
PRODUCT_EFFICIENCY = 0.575
"""Share of peak that plain matrix products reach: 55 to 60 % in training."""
PASSES = 6
"""The router's products are float32 at highest precision: six bfloat16 ones."""
SCORE_SWEEPS = 6
"""Times that float32 scores [T, R] move: written, read by selection and by log P; their gradient likewise."""
WINDOW = {"v5e": 8192, "v5p": 4096, "v6e": 8192, "tpu7x": 4096}
"""Tokens whose queries and sums stay in VMEM; keys and values are read again for each window."""

M, D_HEAD, HEADS, EXPERTS, BETA = 128, 128, 8, 64, 8
WIDTH = D_HEAD * HEADS
HIDDEN = 4 * WIDTH


class Attention(NamedTuple):
    """Modelled nanoseconds a pair, both passes, of a kernel with this tile."""

    tile: int
    issue: float


def attention(rows: list[dict[str, Any]], chip: str, kernel: str) -> list[Attention]:
    """One entry per tile for which both passes are in the table."""
    sums: dict[int, list[float]] = {}
    for row in rows:
        if (row["chip"], row["kernel"], row["m"], row["d"], row["heads"]) == (chip, kernel, M, D_HEAD, HEADS):
            sums.setdefault(row["tile"], []).append(row["issue_nanoseconds"])
    return [Attention(tile, sum(both)) for tile, both in sums.items() if len(both) == 2]


def products(chip: Chip, flops: float) -> float:
    """Nanoseconds of matrix products, forward FLOPs given: the backward pass takes twice as many."""
    return 1e9 * 3 * flops / (PRODUCT_EFFICIENCY * chip.flops)


def movement(chip: Chip, moved: float) -> float:
    """Nanoseconds of bytes at HBM's bandwidth."""
    return 1e9 * moved / chip.bandwidth


def fill(tile: int, pairs: float, resources: float) -> float:
    """Of the tiles of one window, its pairs spread evenly: every resource leaves half a tile empty on average."""
    rows = pairs / resources
    return min(FILL, rows / (rows + tile / 2))


def routed(chip: str, length: int, kernels: list[Attention]) -> float:
    """Attention over the chosen pairs, with the best tile: issue or HBM.

    A window holds several short rows, or sees half of the chunks before it in a long one, and its own.
    """
    window = WINDOW[chip]
    resources = EXPERTS + max(window, (length + window) / 2) / M
    issue = min(kernel.issue / fill(kernel.tile, BETA * window, resources) for kernel in kernels)
    # bfloat16 keys and values in both passes; their float32 gradients are read and written.
    table = resources * M * WIDTH * (2 * 4 + 2 * 8)
    # Float32 queries in, sums in and out; packed queries and gradients in, gradients of queries in and out. There are
    # two kinds of query.
    rows = window * WIDTH * (2 * 4 + 2 * 4 + 2 * 4 + 2 * 2 * 4)
    return max(BETA * CALIBRATION * issue, movement(TPUS[chip], (table + rows) / window))


def aamoe(chip: str, length: int, kernels: list[Attention]) -> dict[str, float]:
    """Nanoseconds a token of everything in the layer."""
    limits, resources = TPUS[chip], EXPERTS + length / M
    slots = BETA * length
    stages = math.log2(slots) * (math.log2(slots) + 1) / 2
    return {
        "projections": products(limits, 2 * 4 * WIDTH**2),
        "router": products(limits, PASSES * (2 * WIDTH**2 + 2 * WIDTH * resources)),
        "scores": movement(limits, 4 * SCORE_SWEEPS * resources),
        # A bitonic network reads and writes every int32 key at every stage; rows and biases are then gathered.
        "tables": movement(limits, BETA * (8 * stages + 2 * 12)),
        "attention": routed(chip, length, kernels),
    }


def dense(chip: str, length: int, kernels: list[Attention]) -> dict[str, float]:
    """The same for causal attention of half the row on average, and two matrices of width 4 D."""
    issue = min(kernel.issue for kernel in kernels)
    return {
        "projections": products(TPUS[chip], 2 * 4 * WIDTH**2),
        "feed-forward": products(TPUS[chip], 2 * 2 * WIDTH * HIDDEN),
        "attention": CALIBRATION * issue * length / M / 2,
    }


def model(schedule: dict[str, Any], lengths: list[int]) -> list[dict[str, Any]]:
    """One row per chip and length."""
    rows = []
    for chip in TPUS:
        kernels = {name: attention(schedule["rows"], chip, name) for name in ("resident", "splash")}
        for length in lengths if all(kernels.values()) else ():
            ours, theirs = aamoe(chip, length, kernels["resident"]), dense(chip, length, kernels["splash"])
            speed_up = sum(theirs.values()) / sum(ours.values())
            rows.append({"chip": chip, "length": length, "aamoe": ours, "dense": theirs, "speed_up": speed_up})
    return rows


def report(record: dict[str, Any]) -> str:
    """The record as markdown."""
    rows = []
    for row in record["rows"]:
        ours, theirs = row["aamoe"], row["dense"]
        cells = [sum(ours.values()), *ours.values(), sum(theirs.values()), theirs["attention"]]
        rows.append([row["chip"], row["length"], *(f"{cell:.0f}" for cell in cells), f"{row['speed_up']:.1f}"])
    heads = ["chip", "L", "AA-MoE", "projections", "router", "scores", "tables", "attention", "dense", "attention"]
    parts = [
        "# One layer on TPUs, modelled",
        f"Nanoseconds a token, forward and backward, on one core: AA-MoE (D = {WIDTH}, H = {HEADS}, m = {M}, E = "
        f"{EXPERTS}, beta = {BETA}) against dense flash attention and a feed-forward of width {HIDDEN}. Modelled from "
        f"the compilers' schedules, not measured: kernels times {CALIBRATION:g}, tiles filled to {FILL:g} at most, "
        f"products at {PRODUCT_EFFICIENCY:.1%} of peak, everything else at HBM's bandwidth. The two layers are not of "
        "equal quality.",
        plain_table([*heads, "speed-up"], "l" + "r" * 10, rows),
        measure.closing(record["command"], f"From: `{record['schedule']}`"),
    ]
    return "\n\n".join(parts)


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("schedule", str(SCHEDULE), "The table of benchmarks.tpu_schedule.")
    flags.DEFINE_list("lengths", [str(2**k) for k in range(11, 18)], "L: tokens of a row.")
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")


def main() -> None:
    schedule = json.loads(Path(FLAGS.schedule).read_text())
    record = {
        "command": command_line("benchmarks.layer_model"),
        "schedule": schedule["command"],
        "rows": model(schedule, [int(length) for length in FLAGS.lengths]),
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
