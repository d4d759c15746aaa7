"""What the `resident` kernels work on at once: some tokens of a tile and one head; and how it lies in registers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_sparse_attention.tpu.layout import Layout
from pallas_kernels.block_sparse_attention.tpu.phases import pitch
from pallas_kernels.tpu import F32, LANES, ROWS


def staggered(jobs: Sequence, *stages: Callable[[Any, Any], Any], between: Callable[[int, int], None]) -> list:
    """Takes every job through the stages, each a stage behind the job before it, and returns what the last ones gave.

    Neighbours are then independent, and the compiler, which mostly keeps the order of the source, finds work for the
    slots that one job's latency leaves empty.
    """
    state: list = [None] * len(jobs)
    steps = len(jobs) + len(stages) - 1
    for step in range(steps):
        for depth, stage in enumerate(stages):
            if 0 <= step - depth < len(jobs):
                state[step - depth] = stage(jobs[step - depth], state[step - depth])
            between(step * len(stages) + depth, steps * len(stages))
    return state


def later(job, state):
    """A stage in which nothing is done: the product before it has the time of one more job. Where there are registers
    for the scores of two jobs: not with 256 tokens a job."""
    return state


class Job(NamedTuple):
    """Some tokens of a tile and one head."""

    unit: int
    position: int  # of the head in its unit
    head: int
    first: int  # token of the tile

    @classmethod
    def all_of(cls, layout: Layout) -> list["Job"]:
        """All tokens and heads of a tile: heads that share a row are neighbours, and then tokens that share a head."""
        return [
            cls(unit, position, head, first)
            for unit, heads in enumerate(layout.units)
            for first in range(0, layout.tile, layout.columns)
            for position, head in enumerate(heads)
        ]

    def columns(self, layout: Layout) -> slice:
        """Its tokens."""
        return slice(self.first, self.first + layout.columns)

    def lanes(self, layout: Layout) -> slice:
        """The lanes of the whole unit in keys and values: other heads' are masked in the queries."""
        width = layout.rows_a_unit * LANES
        return slice(self.unit * width, (self.unit + 1) * width)


def load(ref, job: Job, layout: Layout, row: int = 0, size: int = ROWS):
    """The lanes of the job's unit of its tokens, (tokens, 128 or d)."""
    n = layout.rows_a_unit
    first = job.first * pitch(size) + row + job.unit * n
    parts = [ref[pl.ds(first + j, layout.columns, stride=pitch(size)), :] for j in range(n)]
    return parts[0] if n == 1 else jnp.concatenate(parts, axis=1)


def own(x, job: Job, layout: Layout):
    """Zero in the lanes of the unit's other heads, so that products over all lanes are products of the head."""
    if layout.d >= LANES:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    first = job.position * layout.d
    return jnp.where((first <= lane) & (lane < first + layout.d), x, 0.0)


class Sums:
    """What the heads of a unit give for the same tokens, added up and stored when the last one is in."""

    def __init__(self, ref, layout: Layout):
        self.ref, self.layout = ref, layout
        self.partial: dict[tuple[int, int], Any] = {}

    def add(self, job: Job, x) -> None:
        """x: what the job gives, in the lanes of its unit."""
        key, n = (job.unit, job.first), self.layout.rows_a_unit
        x = self.partial.pop(key, 0.0) + own(x, job, self.layout)
        if job.head != self.layout.units[job.unit][-1]:
            self.partial[key] = x
            return
        first = job.first * pitch(ROWS) + job.unit * n
        for j in range(n):
            part = x[:, j * LANES : (j + 1) * LANES]
            self.ref[pl.ds(first + j, len(x), stride=pitch(ROWS)), :] = part


def by_head(jobs: Sequence[Job], values: Sequence, layout: Layout) -> list:
    """Rows of all tokens of the tile, (1, t), head by head."""
    rows = [[value for job, value in zip(jobs, values, strict=True) if job.head == h] for h in range(layout.heads)]
    return [parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1) for parts in rows]


def stack(rows: list, size: int):
    """Rows (1, t) one below the other, zeros below them."""
    if len(rows) < size:  # the compiler has no arrays without rows
        rows = [*rows, jnp.zeros((size - len(rows), rows[0].shape[1]), F32)]
    return jnp.concatenate(rows, axis=0)
