"""What paged attention takes. b sequences, K slots."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Slots(NamedTuple):
    """Which resources every sequence's token meets: its slots below `count`; the others mean nothing."""

    resource: Int[Array, "b K"]  # the sequence's own pages 0..l-1, the shared experts l..l+E-1
    bias: Float[Array, "b K"]  # added to every score of the slot
    begin: Int[Array, "b K"]  # keys begin <= j < end of the resource are seen
    end: Int[Array, "b K"]
    count: Int[Array, "b"]
