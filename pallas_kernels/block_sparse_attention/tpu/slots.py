"""The tokens of a window in fast memory, each in a slot, and where they come from and go to in main memory.

Shapes: L tokens, G head groups, Q rows of a token in all groups.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sparse_attention.tpu.layout import GROUP, PIECE, Layout
from pallas_kernels.block_sparse_attention.tpu.phases import Step
from pallas_kernels.tpu import LANES, ROWS


class Memory(NamedTuple):
    """Moves the tokens of a window between main memory, where those of all windows are, and their slots.

    A place is a function: what lies in main memory of given tokens.
    """

    layout: Layout
    length: int  # tokens in main memory
    step: Step
    semaphores: Any  # one for each buffer of `store_as`

    @classmethod
    def here(cls, step: Step, rows, layout: Layout, semaphores) -> "Memory":
        """`rows`: an array of all tokens."""
        return cls(layout, rows.shape[0], step, semaphores)

    def rows(self, ref) -> Callable:
        """A place in an array of a few rows a token and group, (L, Q, 128)."""
        size = ref.shape[1] // self.layout.groups
        mine = pl.ds(pl.multiple_of(self.step.group * size, size), size)
        return lambda tokens: ref.at[tokens, mine]

    def lanes(self, ref) -> Callable:
        """A place in an array with the rows of a token and group side by side, (L, 1024 G)."""
        mine = pl.ds(pl.multiple_of(self.step.group * GROUP, GROUP), GROUP)
        return lambda tokens: ref.at[tokens, mine]

    def stats(self, ref) -> Callable:
        """A place in an array of one row a token and group, (G, L, 128)."""
        return lambda tokens: ref.at[self.step.group, tokens]

    def load(self, *pairs) -> None:
        """(place, slots): all at once, and waits for them."""
        self._move(pairs, lambda place, slots: (place, slots))

    def store(self, *pairs) -> None:
        """(place, slots): the way back."""
        self._move(pairs, lambda place, slots: (slots, place))

    def store_as(self, place, slots, buffers, scale: float, interpret: bool) -> None:
        """`slots` times `scale`, rows of a token side by side, in the type of `buffers`, (2, PIECE, 1024): one leaves
        while the other is filled."""
        piece = math.gcd(self._piece, PIECE)

        def copy(i):
            here, buffer = pl.ds(0, piece), jax.lax.rem(i, 2)
            source, semaphore = buffers.at[buffer, here], self.semaphores.at[buffer]
            return pltpu.make_async_copy(source, place(self._part(self._first, i, piece)), semaphore)

        def convert(i, carry):
            pl.when(i >= 2)(lambda: copy(i - 2).wait())
            for row in range(ROWS):
                part = row_of_tokens(slots, row, i * piece, piece, interpret) * scale
                lanes = slice(row * LANES, (row + 1) * LANES)
                buffers[jax.lax.rem(i, 2), pl.ds(0, piece), lanes] = part.astype(buffers.dtype)
            copy(i).start()
            return carry

        pieces = self._pieces(piece)
        jax.lax.fori_loop(0, pieces, convert, 0)
        for i in (pieces - 2, pieces - 1):
            pl.when(i >= 0)(functools.partial(lambda i: copy(i).wait(), i))

    @property
    def _first(self):
        return self.step.bounds.window * self.layout.tokens

    @property
    def _piece(self) -> int:
        return math.gcd(self.layout.tokens, self.length)  # a copy has a static size, and the last window may be shorter

    def _pieces(self, piece: int):
        return jax.lax.div(jnp.minimum(self.layout.tokens, self.length - self._first), piece)

    def _part(self, first, i, piece: int):
        return pl.ds(pl.multiple_of(first + i * piece, piece), piece)

    def _move(self, pairs, direction: Callable) -> None:
        def several(i, carry, what):
            here, there = (self._part(first, i, self._piece) for first in (0, self._first))
            for place, slots in pairs:
                what(pltpu.make_async_copy(*direction(place(there), slots.at[here]), self.semaphores.at[0]))
            return carry

        for what in (lambda copy: copy.start(), lambda copy: copy.wait()):
            jax.lax.fori_loop(0, self._pieces(self._piece), functools.partial(several, what=what), 0)


def token(slots, row, interpret: bool):
    """The rows of one token; `row` is its number times ROWS, so that most addresses take no arithmetic."""
    number = jax.lax.shift_right_logical(row, ROWS.bit_length() - 1)
    if len(slots.shape) == 2:
        return slots.at[pl.ds(number, 1)]
    if interpret:  # interpreters cannot write through another shape
        return slots.at[number]
    size = slots.shape[1]
    first = pl.multiple_of(row * (size // ROWS), size)
    return slots.reshape(slots.shape[0] * size, LANES).at[pl.ds(first, size)]


def row_of_tokens(slots, row: int, first, size: int, interpret: bool):
    """One row each of `size` tokens, (size, 128)."""
    if interpret:  # see `token`
        return slots[pl.ds(first, size)][:, row]
    return slots.reshape(slots.shape[0] * ROWS, LANES)[pl.ds(first * ROWS + row, size, stride=ROWS), :]


def clear(layout: Layout, *slots) -> None:
    """What padding rows of tiles read is masked, but must be a number."""
    for ref in slots:
        nothing = ref.at[pl.ds(layout.tokens, layout.slots - layout.tokens)]
        nothing[...] = jnp.zeros(nothing.shape, nothing.dtype)


def clear_tokens(layout: Layout, slots, interpret: bool) -> None:
    """All but padding."""
    size = ROWS if interpret else math.gcd(layout.tokens, PIECE)

    def several(i, carry):
        some = slots.at[pl.ds(pl.multiple_of(i * size, size), size)]
        some[...] = jnp.zeros(some.shape, some.dtype)
        return carry

    jax.lax.fori_loop(0, layout.tokens // size, several, 0)


def load_kind(memory: Memory, arrays: Sequence, slots) -> None:
    """Of arrays for context and for experts that of the phase, where it begins; one for both: once."""
    step = memory.step
    for kind, ref in enumerate(arrays):

        @pl.when(step.begins() & (step.kind() == kind) if len(arrays) > 1 else step.number == 0)
        def _(ref=ref):
            memory.load((memory.rows(ref), slots))


def scale_heads(sums, stats, lane: int, *, layout: Layout, interpret: bool, divide: bool = False) -> None:
    """Multiplies every head of every token by the statistic in lane `lane` + head, or divides by it unless it is 0."""
    size = ROWS if interpret else math.gcd(layout.tokens, PIECE)  # enough tokens to hide the latency of a transpose
    # Of every row of a token, the lane of its first head, of its second, and so on.
    lanes = [
        [lane + unit[min(position, len(unit) - 1)] for unit in layout.units for _ in range(layout.rows_a_unit)]
        for position in range(len(layout.units[0]))
    ]
    number = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)

    def several(i, carry):
        first = pl.multiple_of(i * size, size)
        factor = stats[pl.ds(first, size), :].T
        if divide:
            factor = 1.0 / jnp.where(factor > 0, factor, 1.0)
        rows = [jnp.concatenate([factor[x : x + 1] for x in (heads * ROWS)[:ROWS]], axis=0) for heads in lanes]
        for token in range(size):
            mine, *others = (jnp.broadcast_to(x[:, token : token + 1], number.shape) for x in rows)
            for position, other in enumerate(others, 1):
                mine = jnp.where(number < position * layout.d, mine, other)
            sums[first + token] *= mine
        return carry

    jax.lax.fori_loop(0, layout.tokens // size, several, 0)
