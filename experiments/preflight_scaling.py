"""Scaling on paper: the same work on every chip, from 8 to 8,192 of them, by what the compiler makes of each step.

    .venv-aot/bin/python -m experiments.preflight_scaling --output=experiments/results/preflight_scaling

One row of aamoe_1b.gin for every chip of v5p. Parameters are divided over `fsdp`, up to 64 chips; further chips
repeat them along `data`. FLOPs, bytes and collectives are the compiler's, times are modelled, nothing was measured.
The largest slice is one that the compiler knows, and larger than the 6,144 chips that Google gives to one job.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from aamoe_jax.preflight.hardware import GIB, Slice
from aamoe_jax.preflight.program import compile_apart
from aamoe_jax.preflight.report import MODEL_NOTE, table
from aamoe_jax.preflight.summary import Summary
from experiments.binding import load_experiment
from experiments.program import write

GIN_FILE = "aamoe_1b.gin"
FSDP = {"v5p:2x2x2": 8, "v5p:4x4x4": 64, "v5p:8x8x8": 64, "v5p:16x16x16": 16, "v5p:16x16x32": 32}
"""Devices that parameters are divided over, by slice: a product of whole axes of its torus."""
HEADS = ["chips", "data x fsdp", "memory GiB", "spent TFLOP", "GB moved", "GB sent", "fsdp", "data"]
HEADS += ["compute ms", "HBM ms", "ICI ms", "step ms", "MFU", "bound"]


def summary_of(topology: str) -> Summary:
    """The step with one row for every chip."""
    chips = Slice.parse(topology).chips
    sizes = {"data": chips // FSDP[topology], "fsdp": FSDP[topology], "resource": 1, "tensor": 1}
    params = [f"MeshConfig.{axis} = {size}" for axis, size in sizes.items()]
    config = load_experiment([GIN_FILE], [*params, f"TrainingConfig.batch_size = {chips}"])
    return compile_apart(config, topology, "train", "placed")


def cells(summary: Summary) -> list[str]:
    """One row of the table; GB sent along an axis alone, or along several that include it."""
    parts = [part.collective for part in summary.network]
    sent = [sum(part.sent for part in parts if axis in part.axes) for axis in ("fsdp", "data")]
    return [
        f"{summary.chips:,.0f}",
        f"{summary.mesh['data']} x {summary.mesh['fsdp']}",
        f"{summary.memory.peak / GIB:.1f}",
        f"{summary.spent_flops / 1e12:.1f}",
        f"{summary.moved_bytes / 1e9:.0f}",
        *(f"{size / 1e9:.2f}" for size in (sum(part.sent for part in parts), *sent)),
        *(f"{1e3 * summary.limits[name]:.1f}" for name in ("compute", "HBM", "ICI")),
        f"{1e3 * summary.step_seconds:.1f}",
        f"{summary.mfu(summary.step_seconds):.1%}",
        summary.bound,
    ]


def bottleneck(found: Sequence[Summary]) -> str:
    """Where the network would become the limit: fewer tokens a chip leave it what it is, and shrink everything else."""
    last = found[-1]
    limits = last.limits
    other = max(limits["compute"], limits["HBM"])
    tokens = last.tokens / last.chips
    return (
        f"At {last.chips:,.0f} chips the links take {1e3 * limits['ICI']:.1f} ms of a step whose next limit takes "
        f"{1e3 * other:.1f} ms. What they carry is parameters and their gradients, whatever the rows: with less than "
        f"{tokens * limits['ICI'] / other:,.0f} tokens a chip in place of {tokens:,.0f} they would be the bottleneck. "
        f"Latency is not in the model: {sum(part.collective.count for part in last.network)} collectives a step."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="stem of a .md and a .json file")
    output, found = parser.parse_args().output, []
    for topology in FSDP:
        found.append(summary_of(topology))
        text = "\n\n".join([MODEL_NOTE, table(HEADS, [cells(summary) for summary in found]), bottleneck(found)])
        command = f"`python -m experiments.preflight_scaling --output={output}`"
        write([dataclasses.asdict(summary) for summary in found], f"{command}\n\n{text}\n", f"{output}.json")
        print(" | ".join(cells(found[-1])), flush=True)


if __name__ == "__main__":
    main()
