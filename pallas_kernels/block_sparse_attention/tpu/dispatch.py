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
from typing import Any, Literal

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.tpu import dense, gathered, resident
from pallas_kernels.block_sparse_attention.types import Problem

COSTS: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = json.loads(
    (Path(__file__).parent / "costs.json").read_text(encoding="utf-8")
)
"""Modelled nanoseconds of one pair, forward and backward, m = 128, 1024 lanes: by chip, path and rows a tile. `issue`:
bundles alone; `time`: bundles or bytes, whichever takes longer, and what XLA moves around the kernels.

Written from the committed tables of schedules by `python -m benchmarks.tpu_schedule --costs`.
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
    costs: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> dict[str, float]:
    """Nanoseconds of one forward and backward pass by every path of `plans`: a model, for comparing them.

    Args:
      costs: like those of one chip in COSTS; None: its own.
    """
    times = {
        path: nanoseconds(problem, chip, path, plan, "issue" if path == "resident" else "time", costs)
        for path, plan in plans.items()
    }
    if "resident" in plans:
        layout, limits = plans["resident"].layout, chips.TPUS[chip]
        # What it moves depends on how often it meets a resource. Of one: keys and values in both passes, and their
        # float32 gradients, read and written.
        table_bytes = problem.m * problem.heads * problem.d * (2 * 2 * problem.dtype.itemsize + 2 * 2 * 4)
        moved = problem.met(layout.windows) * table_bytes / limits.bandwidth * 1e9
        times["resident"] = max(times["resident"], _divided(moved, chip, layout.groups * layout.cores))
    return times


def nanoseconds(
    problem: Problem,
    chip: str,
    path: str,
    plan: Any,
    kind: Literal["issue", "time"],
    costs: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    pairs: float | None = None,
) -> float:
    """Modelled, of the kernels of one path: both passes, and what pads the tiles of pairs that are spread evenly.

    Args:
      costs: like those of one chip in COSTS; None: its own.
      pairs: of all tokens; None: as many as there may be.
    """
    layout, known = plan.layout, (COSTS[chip] if costs is None else costs)[path]
    pairs = problem.max_pairs if pairs is None else pairs
    work = problem.m * problem.heads * problem.d / REFERENCE_WORK
    if path == "dense":
        # A token meets the chunks of its own row that are complete, half of them on average, and all experts.
        met = problem.tokens * (problem.chunks_of_row / 2 + problem.experts)
        return _divided(work * met * min(cost[kind] for cost in known.values()), chip, layout.groups)
    resident = path == "resident"
    met = problem.met(layout.windows) if resident else problem.resources
    pairs += met * layout.tile / 2  # the last tile of a resource is half empty on average
    cost = known[min(known, key=lambda tile: abs(int(tile) - layout.tile))][kind]
    return _divided(work * pairs * cost, chip, layout.groups * (layout.cores if resident else 1))


def _divided(time: float, chip: str, parts: int) -> float:
    """Over the cores of a device: each takes whole parts."""
    return time * -(-parts // chips.TPUS[chip].device_cores) / parts
