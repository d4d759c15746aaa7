"""What the GPU compiler makes of the kernels, for GPUs that are not there: registers, spills, memory, bytes.

    python -m benchmarks.gpu_kernels --output=experiments/results/gpu_kernels.json

Needs the CUDA plug-in and ptxas (extra `aot`), no driver. Registers, spills and instructions are those of ptxas, and
the same on every Hopper. Bytes a pair are modelled: the arrays that a kernel takes and gives, each moved once, and rows
that it gathers once a pair, over the pairs. XLA's sums per token after it are not in it.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import gpu_cases, measure
from experiments.program import command_line, plain_table, publish, start
from pallas_kernels import aot, chips, ptx

FLAGS = flags.FLAGS
KERNELS = ("forward", "d_query", "d_key")
"""One of the forward pass, and two of the backward pass."""
SHAPES: dict[str, dict[str, int]] = {
    "headline": {"m": 128, "d": 128, "heads": 8},
    "small": {"m": 64, "d": 128, "heads": 8},
    "long": {"m": 256, "d": 128, "heads": 8},
    "narrow": {"m": 128, "d": 64, "heads": 16},
}


def measured(chip: str, kernel: str, shape: dict[str, int]) -> dict[str, Any]:
    """One line of the table."""
    options = {"name": kernel, "chip": chip, **shape}
    with tempfile.TemporaryDirectory() as folder:
        program = aot.compile_apart(chip, "benchmarks.gpu_cases:kernel", options, dump_to=Path(folder))
        found = ptx.read(Path(folder), f"block_sparse_attention_{kernel}")
    moved = program.argument_bytes + program.output_bytes + gpu_cases.more_gathered(kernel, **shape)
    stages = gpu_cases.plan_of(chip, kernel, **shape).slots
    row = {"chip": chip, "kernel": kernel, **shape, **found._asdict(), "stages": stages}
    return {**row, "bytes_a_pair": moved / gpu_cases.PAIRS}


def report(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    names = {
        "chip": "chip",
        "kernel": "kernel",
        "m": "m",
        "d": "d",
        "heads": "H",
        "threads": "threads",
        "registers": "registers",
        "spill_bytes": "spilled bytes",
        "stack_bytes": "stack bytes",
        "shared_bytes": "shared KiB",
        "tensor_columns": "tensor memory columns",
        "stages": "stages",
        "wgmma": "wgmma",
        "tcgen05_mma": "tcgen05.mma",
        "tma_loads": "TMA in",
        "tma_gathers": "TMA gathers",
        "tma_stores": "TMA out",
        "row_copies": "cp.async",
        "bytes_a_pair": "bytes a pair",
    }
    shown = {"shared_bytes": lambda x: f"{x / 1024:.0f}", "bytes_a_pair": lambda x: f"{x:.0f}"}
    rows = [[shown.get(name, str)(row[name]) for name in names] for row in record["rows"]]
    targets = {row["chip"]: row["target"] for row in record["rows"]}
    texts = [
        "# The GPU kernels as compiled",
        f"Compiled for {', '.join(f'{chip} ({target})' for chip, target in targets.items())} without one; bfloat16, 64 "
        "context chunks, 64 experts, 512 pairs each. Those for a b200 have run on none. Stages: tiles of queries in "
        "shared memory, of each group of warps in `forward` and `d_query`. Instructions are counted in the text, those "
        "of a loop once; a TMA gather reads four rows. Bytes a pair are modelled: what a kernel takes and gives, moved "
        "once, and gathered rows once a pair.",
        plain_table(list(names.values()), "ll" + "r" * (len(names) - 2), rows),
        measure.closing(record["command"], record["versions"]),
    ]
    return "\n\n".join(texts)


def define_flags() -> None:
    """The flags of this program."""
    known = (*chips.HOPPERS, *chips.BLACKWELLS)
    flags.DEFINE_list("chips", ["h200", "b200"], f"Which of {', '.join(known)}.")
    flags.register_validator("chips", lambda given: set(given) <= set(known), f"there are {', '.join(known)}")
    flags.DEFINE_list("shapes", list(SHAPES), f"Which of {', '.join(SHAPES)}.")
    flags.register_validator("shapes", lambda given: set(given) <= set(SHAPES), f"there are {', '.join(SHAPES)}")
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")


def main() -> None:
    rows = []
    for chip, name, kernel in itertools.product(FLAGS.chips, FLAGS.shapes, KERNELS):
        rows.append(measured(chip, kernel, SHAPES[name]))
        print(f"{chip} {name} {kernel}: {rows[-1]}", file=sys.stderr, flush=True)
    record = {
        "command": command_line("benchmarks.gpu_kernels"),
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
        },
        "rows": rows,
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
