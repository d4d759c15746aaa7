"""Rows of a tile of the `resident` kernels: their addresses, and what is done with them while another tile attends."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.tpu import ROWS

BATCH = 8  # tokens whose sums are read before the first is written: rows of a tile are different tokens
BETWEEN = 4  # the same, between the products of another tile: more would be moved in the products' way
NEIGHBOURS = 3  # tiles whose addresses a step sees: the one before, its own, the next
UNROLL = 32  # rows in one basic block: enough to hide the latency of a load


def pitch(size: int) -> int:
    """From a token of a tile to the next, in rows, of which a token has `size`. Odd: 8 rows that lie a multiple of 8
    apart take two loads or stores."""
    return size + 1 if size % 2 == 0 else size


def row_slice(number, size: int = ROWS):
    """The `size` rows of a token of a tile."""
    return pl.ds(number * pitch(size), size)


Body = Callable[[Sequence, Any], None]
"""body(slots, first): what is done with a few rows of a tile: their tokens' slots, and the number of the first."""


def for_rows(row_ref, interpret: bool, body: Body) -> None:
    """All rows of a tile."""
    step = 1 if interpret else BATCH  # interpreted, every row is compiled as a slice of a whole array

    def several(i, carry):
        first = pl.multiple_of(i * step, step)
        body(addresses(row_ref, first, step), first)
        return carry

    jax.lax.fori_loop(0, row_ref.shape[-1] // step, several, 0, unroll=1 if interpret else UNROLL // BATCH)


def addresses(row_ref, first, count: int) -> list:
    """Of `count` rows of a tile."""
    view = row_ref.at[pl.ds(first, count)]  # addresses in it cost no arithmetic
    return [view[j] for j in range(count)]


class Bounds(NamedTuple):
    """The tiles of a window, in order: first those of context chunks, then those of experts. Numbers, or arrays [C] of
    the windows that as many cores take at the same time."""

    first: Int[Array, "*C"]
    experts: Int[Array, "*C"]  # the first tile of an expert
    number: Int[Array, "*C"]  # at least 1: an empty tile where there is none
    window: Int[Array, "*C"]


class Step(NamedTuple):
    """A step of the grid: one tile of one window, for one group of heads."""

    group: Any
    core: Any  # among those that take a window each
    number: Any  # of the tile in its window
    bounds: Bounds

    @classmethod
    def here(cls, first, second, bounds, cores: int) -> "Step":
        """From the indices of the grid, and the bounds of all cores' windows, [4, cores]."""
        group, core = (first, 0) if cores == 1 else (jax.lax.div(first, cores), jax.lax.rem(first, cores))
        return cls(group, core, second, Bounds(*(bounds[i, core] for i in range(len(Bounds._fields)))))

    @property
    def tile(self):
        """Among those of all windows."""
        return self.bounds.first + self.number

    def begins(self):
        """Whether it is the first tile of context, or of experts."""
        return (self.number == 0) | (self.tile == self.bounds.experts)

    def ends(self):
        """Whether it is the last one of a kind."""
        return (self.number == self.bounds.number - 1) | self._replace(number=self.number + 1).begins()

    def kind(self):
        """Of what the tile meets: 0, context and rotated queries; 1, experts."""
        return (self.tile >= self.bounds.experts).astype(jnp.int32)


class Rows(NamedTuple):
    """Addresses of the tokens of a tile, of the next one and of the one before.

    At either end of a window the neighbour is another window's. Its addresses are slots of this one too: what is
    gathered there is not used, and what is accumulated is zeros.
    """

    here: Any
    after: Any
    before: Any

    @classmethod
    def of(cls, ref) -> "Rows":
        """From those of neighbours, (3, 1, t)."""
        before, here, after = (ref.at[i, 0] for i in range(NEIGHBOURS))
        return cls(here, after, before)


class Phases(NamedTuple):
    """What is done with a tile, in one of two buffers: its tokens are picked, attend, and are added to their sums.

    `attend` calls `between(i, n)` between its products, for every i below n. The first tile that meets context, or
    experts, begins with `begin`, which is given the other buffer, and the last one ends with `end`.
    """

    begin: Callable[[Any], None]
    gather: Callable[[Any], Body]
    attend: Callable[[int, Callable[[int, int], None]], None]
    accumulate: Callable[[Any], Body]
    end: Callable[[], None]


def in_series(step: Step, rows: Rows, phases: Phases, interpret: bool) -> None:
    """One phase of a tile after the other."""
    pl.when(step.begins())(lambda: phases.begin(0))
    for_rows(rows.here, interpret, phases.gather(0))
    phases.attend(0, lambda i, n: None)
    for_rows(rows.here, interpret, phases.accumulate(0))
    pl.when(step.ends())(phases.end)


def overlapped(step: Step, rows: Rows, phases: Phases, interpret: bool) -> None:
    """While a tile attends, the next one is gathered into the other buffer, and the one before it accumulated.

    The first tile that meets context, or experts, has none before it with the same queries: it is gathered alone, and
    zeros are then accumulated, which `begin` leaves in the other buffer. The last one is accumulated alone.
    """
    parity = jax.lax.rem(step.number, 2)

    @pl.when(step.begins())
    def _():
        phases.begin(1 - parity)
        for_rows(rows.here, interpret, phases.gather(parity))

    for buffer in range(2):  # a copy of the code for each: the addresses in them are then known

        @pl.when(parity == buffer)
        def _(buffer=buffer):
            works = (rows.after, phases.gather(1 - buffer)), (rows.before, phases.accumulate(1 - buffer))

            def between(i: int, n: int) -> None:
                batches = rows.here.shape[-1] // BETWEEN
                for row_ref, body in works:
                    if interpret and i == 0:
                        for_rows(row_ref, interpret, body)
                for batch in () if interpret else range(i * batches // n, (i + 1) * batches // n):
                    for row_ref, body in works:
                        body(addresses(row_ref, batch * BETWEEN, BETWEEN), batch * BETWEEN)

            phases.attend(buffer, between)

    @pl.when(step.ends())
    def _():
        for_rows(rows.here, interpret, phases.accumulate(parity))
        phases.end()
