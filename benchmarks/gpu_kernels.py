"""What the GPU compiler makes of the kernels, for a Hopper that is not there: registers, spills, shared memory, bytes.

    python -m benchmarks.gpu_kernels --output=experiments/results/gpu_kernels.json

Needs the CUDA plug-in and ptxas (extra `aot`), no driver. Registers, spills and instructions are those of ptxas, and
the same on every Hopper. Bytes a pair are modelled: the arrays that a kernel takes and gives, each moved once, over the
pairs; XLA's gather of the queries before, and its sums per token after, are not in it.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import gpu_cases, measure
from experiments.program import command_line, plain_table, publish, start
from pallas_kernels import aot, chips, ptx
from pallas_kernels.block_sparse_attention.gpu.kernels import ROWS

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
    options = {"name": kernel, **shape}
    with tempfile.TemporaryDirectory() as folder:
        program = aot.compile_apart(chip, "benchmarks.gpu_cases:kernel", options, dump_to=Path(folder))
        found = ptx.read(Path(folder), f"block_sparse_attention_{kernel}")
    moved, pairs = program.argument_bytes + program.output_bytes, gpu_cases.TILES * ROWS
    stages = gpu_cases.plan_of(kernel, **shape).slots
    return {"kernel": kernel, **shape, **found._asdict(), "stages": stages, "bytes_a_pair": moved / pairs}


def report(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    heads = ["kernel", "m", "d", "H", "threads", "registers", "spilled bytes", "stack bytes", "shared KiB", "stages"]
    heads += ["wgmma", "TMA in", "TMA out", "bytes a pair"]
    rows = []
    for row in record["rows"]:
        cells = [row[name] for name in ("kernel", "m", "d", "heads", "threads", "registers", "spill_bytes")]
        cells += [row["stack_bytes"], f"{row['shared_bytes'] / 1024:.0f}"]
        cells += [row[name] for name in ("stages", "wgmma", "tma_loads", "tma_stores")]
        rows.append([*cells, f"{row['bytes_a_pair']:.0f}"])
    texts = [
        "# The GPU kernels as compiled",
        f"Compiled for {record['chip']} ({record['rows'][0]['target']}) without one; bfloat16, 64 context chunks, 64 "
        "experts, 512 pairs each. Stages: tiles of queries in shared memory, of each group of warps in `forward` and "
        "`d_query`. Instructions are counted in the text, those of a loop once. Bytes a pair are modelled: what a "
        "kernel takes and gives, moved once.",
        plain_table(heads, "l" + "r" * (len(heads) - 1), rows),
        measure.closing(record["command"], record["versions"]),
    ]
    return "\n\n".join(texts)


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_enum("chip", "h200", list(chips.HOPPERS), "Which GPU.")
    flags.DEFINE_list("shapes", list(SHAPES), f"Which of {', '.join(SHAPES)}.")
    flags.register_validator("shapes", lambda given: set(given) <= set(SHAPES), f"there are {', '.join(SHAPES)}")
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")


def main() -> None:
    rows = []
    for name in FLAGS.shapes:
        for kernel in KERNELS:
            rows.append(measured(FLAGS.chip, kernel, SHAPES[name]))
            print(f"{name} {kernel}: {rows[-1]}", file=sys.stderr, flush=True)
    record = {
        "command": command_line("benchmarks.gpu_kernels"),
        "chip": FLAGS.chip,
        "versions": {
            name: importlib.metadata.version(name) for name in ("jax", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12")
        },
        "rows": rows,
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
