"""Which of the TPU paths: the one that the compilers' schedules say is the fastest, from static shapes alone.

A token has b pairs on average, of the resources that it may meet. Where it meets many of them (short rows), a tile of
tokens had better meet them all, under bias rows: `dense`. Else the pairs alone: `resident`, as long as the queries and
sums of the tokens fit fast memory in few windows. Every further window splits a resource's pairs once more, until tiles
are mostly padding and keys are read too often (long rows): `gathered`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.tpu import dense, gathered, resident
from pallas_kernels.block_sparse_attention.types import Problem

COSTS: Mapping[str, Mapping[str, Mapping[str, float]]] = json.loads(
    (Path(__file__).parent / "costs.json").read_text(encoding="utf-8")
)
"""Modelled nanoseconds of one pair, forward and backward, m = 128, 1024 lanes: by chip, path and rows a tile.

Written, with the table of all schedules, by `python -m benchmarks.tpu_schedule --costs`.
"""
REFERENCE_WORK = 128 * 1024
PLANS: Mapping[str, Callable[[Problem], Any]] = {
    "resident": resident.plan,
    "gathered": gathered.plan,
    "dense": dense.plan,
}


def fastest(problem: Problem) -> str:
    """`resident`, `gathered` or `dense`: of those that can do it, whichever `modelled` says.

    Raises:
      ValueError: none of them can, and why each cannot.
    """
    plans, refusals = {}, []
    for path, plan in PLANS.items():
        try:
            plans[path] = plan(problem)
        except ValueError as refusal:
            refusals.append(f"{path}: {refusal}")
    if not plans:
        raise ValueError("; ".join(refusals))
    times = modelled(problem, chips.current(), plans)
    return min(times, key=times.__getitem__)


def modelled(
    problem: Problem,
    chip: str,
    plans: Mapping[str, Any],
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Nanoseconds of one forward and backward pass by every path of `plans`: a model, for comparing them.

    Args:
      costs: like those of one chip in COSTS; None: its own.
    """
    limits, costs = chips.TPUS[chip], COSTS[chip] if costs is None else costs

    def divided(time: float, parts: int) -> float:
        """Over the cores of a device: each takes whole parts."""
        return time * -(-parts // limits.device_cores) / parts

    work = problem.m * problem.heads * problem.d / REFERENCE_WORK
    times = {}
    if "resident" in plans:
        layout = plans["resident"].layout
        met = problem.met(layout.windows)
        # Of one resource: keys and values in both passes, and their float32 gradients, read and written.
        table_bytes = problem.m * problem.heads * problem.d * (2 * 2 * problem.dtype.itemsize + 2 * 2 * 4)
        issue = work * _pairs(costs["resident"], problem.max_pairs, problem.max_pairs / met, layout.tile)
        time = max(issue, met * table_bytes / limits.bandwidth * 1e9)
        times["resident"] = divided(time, layout.groups * layout.cores)
    if "gathered" in plans:
        rows, tile = problem.max_pairs / problem.resources, plans["gathered"].layout.tile
        time = work * _pairs(costs["gathered"], problem.max_pairs, rows, tile)
        times["gathered"] = divided(time, plans["gathered"].layout.groups)
    if "dense" in plans:
        # A token meets the chunks of its own row that are complete, half of them on average, and all experts.
        pairs = problem.tokens * (problem.chunks_of_row / 2 + problem.experts)
        times["dense"] = divided(work * pairs * min(costs["dense"].values()), plans["dense"].layout.groups)
    return times


def _pairs(costs: Mapping[str, float], pairs: int, rows: float, tile: int) -> float:
    """With tiles of which the last one of a resource is half empty on average; at the cost of the nearest tile."""
    cost = costs[min(costs, key=lambda known: abs(int(known) - tile))]
    return pairs * cost * (rows + tile / 2) / max(rows, 1e-9)
