"""Rows of a tile of the `resident` kernels: their addresses, and what is done with them while another tile attends."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.tpu import ROWS

BATCH = 8  # tokens whose sums are read before the first is written: rows of a tile are different tokens
BETWEEN = 4  # the same, between the products of another tile: more would be moved in the products' way
UNROLL = 32  # rows in one basic block: enough to hide the latency of a load


def row_slice(number, size: int = ROWS):
    """The `size` rows of a token of a tile."""
    return pl.ds(number * size if isinstance(number, int) else pl.multiple_of(number * size, size), size)


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
    view = row_ref.at[0, 0, pl.ds(first, count)]  # addresses in it cost no arithmetic
    return [view[j] for j in range(count)]


class Rows(NamedTuple):
    """Addresses of the tokens of a tile, of the next one and of the one before."""

    here: Any
    after: Any
    before: Any


class Phases(NamedTuple):
    """What is done with a tile, in one of two buffers: its tokens are picked, attend, and are added to their sums.

    `attend` calls `between(i, n)` between its products, for every i below n.
    """

    gather: Callable[[int], Body]
    attend: Callable[[int, Callable[[int, int], None]], None]
    accumulate: Callable[[int], Body]


def in_series(rows: Rows, phases: Phases, interpret: bool) -> None:
    """One phase of a tile after the other."""
    for_rows(rows.here, interpret, phases.gather(0))
    phases.attend(0, lambda i, n: None)
    for_rows(rows.here, interpret, phases.accumulate(0))


def overlapped(rows: Rows, phases: Phases, interpret: bool, bounds) -> None:
    """While a tile attends, the next one is gathered into the other buffer, and the one before it accumulated.

    The first tile that meets context, or experts, has none before it with the same queries: it is gathered alone, and
    what is then accumulated goes to the padding slot, see `_Blocks.rows`. The last one is accumulated alone.
    """
    step = pl.program_id(1)
    for buffer in range(2):  # a copy of the code for each: the addresses in them are then known

        @pl.when(jax.lax.rem(step, 2) == buffer)
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

            @pl.when(begins(step, bounds))
            def _():
                for_rows(rows.here, interpret, phases.gather(buffer))

            phases.attend(buffer, between)

            @pl.when(ends(step, bounds))
            def _():
                for_rows(rows.here, interpret, phases.accumulate(buffer))


def begins(step, bounds):
    """Whether the first tile of context, or of experts, is that of a step. `bounds`: those of a window."""
    return (step == 0) | (bounds[0] + step == bounds[1])


def ends(step, bounds):
    """Whether the last one is."""
    return (step == bounds[2] - 1) | begins(step + 1, bounds)


def kind_of(step, bounds):
    """Of what a tile meets: 0, context and rotated queries; 1, experts."""
    return (bounds[0] + step >= bounds[1]).astype(jnp.int32)
