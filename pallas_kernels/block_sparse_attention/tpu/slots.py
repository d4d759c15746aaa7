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

from pallas_kernels.block_sparse_attention.tpu.layout import Layout
from pallas_kernels.block_sparse_attention.tpu.phases import Step


class Memory(NamedTuple):
    """Moves the tokens of a window between main memory, where those of all windows are, and their slots.

    A place is a function: what lies in main memory of given tokens.
    """

    layout: Layout
    length: int  # tokens in main memory
    step: Step
    semaphore: Any

    @classmethod
    def here(cls, step: Step, rows, layout: Layout, semaphore) -> "Memory":
        """`rows`: an array of all tokens."""
        return cls(layout, rows.shape[0], step, semaphore.at[0])

    def rows(self, ref) -> Callable:
        """A place in an array of a few rows a token and group, (L, Q, 128)."""
        size = ref.shape[1] // self.layout.groups
        mine = pl.ds(pl.multiple_of(self.step.group * size, size), size)
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

    def _move(self, pairs, direction: Callable) -> None:
        size, first = self.layout.tokens, self.step.bounds.window * self.layout.tokens
        piece = math.gcd(size, self.length)  # a copy has a static size, and the last window may be shorter

        def several(i, carry, what):
            here, there = (pl.ds(pl.multiple_of(x + i * piece, piece), piece) for x in (0, first))
            for place, slots in pairs:
                what(pltpu.make_async_copy(*direction(place(there), slots.at[here]), self.semaphore))
            return carry

        for what in (lambda copy: copy.start(), lambda copy: copy.wait()):
            pieces = jax.lax.div(jnp.minimum(size, self.length - first), piece)
            jax.lax.fori_loop(0, pieces, functools.partial(several, what=what), 0)


def clear(layout: Layout, *slots) -> None:
    """What padding rows of tiles read is masked, but must be a number."""
    for ref in slots:
        nothing = ref.at[pl.ds(layout.tokens, layout.slots - layout.tokens)]
        nothing[...] = jnp.zeros(nothing.shape, nothing.dtype)


def load_kind(memory: Memory, arrays: Sequence, slots) -> None:
    """Of arrays for context and for experts that of the phase, where it begins; one for both: once."""
    step = memory.step
    for kind, ref in enumerate(arrays):

        @pl.when(step.begins() & (step.kind() == kind) if len(arrays) > 1 else step.number == 0)
        def _(ref=ref):
            memory.load((memory.rows(ref), slots))
