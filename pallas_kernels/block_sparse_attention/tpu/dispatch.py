"""Which of the TPU paths: the one that the compilers' schedules say is the fastest, from static shapes alone.

A token has b pairs on average, of the resources that it may meet. Where it meets many of them (short rows), a tile of
tokens had better meet them all, under bias rows: `dense`. Else the pairs alone: `resident`, as long as the queries and
sums of the tokens fit fast memory in few windows. Every further window splits a resource's pairs once more, until tiles
are mostly padding and keys are read too often (long rows): `gathered`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.operation import Problem
from pallas_kernels.block_sparse_attention.tpu import resident

COSTS: Mapping[str, Mapping[str, Mapping[str, float]]] = json.loads(
    (Path(__file__).parent / "costs.json").read_text(encoding="utf-8")
)
"""Modelled nanoseconds of one pair, forward and backward, m = 128, 1024 lanes: by chip, path and rows a tile.

Written by `python -m benchmarks.tpu_schedule --costs` from the committed schedules.
"""
REFERENCE_WORK = 128 * 1024


def fastest(problem: Problem, row_chunks: int) -> str:
    """`resident`, `gathered` or `dense`, whichever `modelled` says."""
    times = modelled(problem, row_chunks, chips.current())
    return min(times, key=times.__getitem__)


def modelled(problem: Problem, row_chunks: int, chip: str) -> dict[str, float]:
    """Nanoseconds of one forward and backward pass by each path: a model, for comparing them.

    Args:
      row_chunks: chunks of one row of the batch; a token meets those of its own row that are complete, half of them
        on average, and all experts.
    """
    limits, costs = chips.TPUS[chip], COSTS[chip]
    work = problem.m * problem.heads * problem.d / REFERENCE_WORK
    experts = problem.resources - problem.num_context
    window = resident.plan(problem, limits.vmem).layout
    rows = problem.tokens / max(1, row_chunks * problem.m)  # of the batch
    # Of the windows of one row, those before a chunk do not meet it.
    seen = experts + problem.num_context * (
        1 / window.windows if rows >= window.windows else (1 + 1 / window.windows) / 2
    )
    reading = window.windows * seen * _table_bytes(problem) / limits.bandwidth * 1e9
    pairs = {
        "resident": _pairs(costs["resident"], problem.max_pairs, problem.max_pairs / (window.windows * seen)),
        "gathered": _pairs(costs["gathered"], problem.max_pairs, problem.max_pairs / problem.resources),
        "dense": problem.tokens * (row_chunks / 2 + experts) * min(costs["dense"].values()),
    }
    times = {path: work * time for path, time in pairs.items()}
    return times | {"resident": max(times["resident"], reading)}


def _pairs(costs: Mapping[str, float], pairs: int, rows: float) -> float:
    """With the best tile: the last one of a resource is half empty on average."""
    return min(pairs * cost * (rows + int(tile) / 2) / max(rows, 1e-9) for tile, cost in costs.items())


def _table_bytes(problem: Problem) -> int:
    """Of one resource: keys and values in both passes, and their float32 gradients, read and written."""
    return problem.m * problem.heads * problem.d * (2 * 2 * problem.dtype.itemsize + 2 * 2 * 4)
