"""The grammar of stacks: which mixers every layer has, in a few words (DEC-09, DEC-10).

    pattern   := entry, entry, ...              one period, repeated to the depth of the stack
    entry     := layer | layer*count | placement(layer, layer)
    layer     := mixer | mixer+mixer+...        residual blocks one after the other
    placement := even | odd | top | middle | bottom | quarter | first | last | bilateral

A placement stands for the whole stack: it puts its first layer, such as standard attention, where the hybrids of Xue,
Moosavi and Aletras (table 11) have it, and its second everywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PLACEMENTS = ("even", "odd", "top", "middle", "bottom", "quarter", "first", "last", "bilateral")


def expand(pattern: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """The layers of the shortest period that a pattern comes to in a stack of `num_layers`.

    Raises:
      ValueError: an entry that is none of the grammar, or layers that do not come to `num_layers`.
    """
    layers = [layer for entry in pattern for layer in _expand_entry(entry, num_layers)]
    if not layers:
        raise ValueError("must name at least one mixer")
    if num_layers % len(layers):
        raise ValueError(f"comes to {len(layers)} layers, which do not divide num_layers = {num_layers}")
    for size in range(1, len(layers) + 1):
        if len(layers) % size == 0 and layers == layers[:size] * (len(layers) // size):
            return tuple(layers[:size])
    raise AssertionError("a list is a repetition of itself")


def mixers_of(layer: str) -> list[str]:
    """The mixers of a layer, in order."""
    return layer.split("+")


def placement(name: str, num_layers: int) -> frozenset[int]:
    """The layers, counted from 1, that a placement leaves standard."""
    n, every = num_layers, range(1, num_layers + 1)
    return frozenset(
        {
            "even": [i for i in every if i % 2 == 0],
            "odd": [i for i in every if i % 2 == 1],
            "top": [i for i in every if i <= n // 2],
            "middle": [i for i in every if i <= n // 4 or i > n - n // 4],
            "bottom": [i for i in every if i > n // 2],
            "quarter": [i for i in every if i % 4 == 0],
            "first": [1],
            "last": [n],
            "bilateral": [1, n],
        }[name]
    )


def _expand_entry(entry: str, num_layers: int) -> list[str]:
    text = entry.replace(" ", "")
    placed = re.fullmatch(r"(\w+)\(([\w+]+),([\w+]+)\)", text)
    if placed:
        name, standard, other = placed.groups()
        if name not in PLACEMENTS:
            raise ValueError(f"{entry!r}: {name!r} is no placement; there are {', '.join(PLACEMENTS)}")
        kept = placement(name, num_layers)
        return [standard if i in kept else other for i in range(1, num_layers + 1)]
    repeated = re.fullmatch(r"([\w+]+)(?:\*([1-9][0-9]{0,8}))?", text)
    if not repeated:
        raise ValueError(f"{entry!r}: write 'mixer', 'mixer+mixer', 'layer*3' or 'even(layer, layer)'")
    count = int(repeated[2] or 1)
    if count > num_layers:
        raise ValueError(f"{entry!r}: is more than num_layers = {num_layers}")
    return [repeated[1]] * count
