"""What lies in a device's main memory when it is fullest, by name: from the compiler's buffer assignment.

The compiler leaves its notes beside the program (`xla_dump_to`), also where the program turned out too big.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Literal

from aamoe_jax.preflight.hlo import Module

Kind = Literal["argument", "output", "temporary", "constant"]

ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?, (.*?):?$")
VALUE = re.compile(r"^ value: <\d+ ([^ ]+?)(?:\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): ([^{]*)")
PEAK = re.compile(r"^    ([^ ]+?)\{[\d,]*\}: \d+ bytes \(cumulative")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A part of an allocation; one that several values share, one after the other, counts once."""

    kind: Kind
    bytes: int
    name: str
    shape: str
    source: str
    """What it is: the parameter's path, or what was traced."""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Main memory of one device."""

    bytes: dict[Kind, int]
    """By kind; outputs that lie in their arguments' place are arguments."""
    aliased: int
    """Those arguments."""
    buffers: tuple[Buffer, ...]
    """Those alive when memory is fullest, the biggest first."""


def are_placed(folder: Path) -> bool:
    """Whether the compiler has found a place for every buffer: it writes the program once more then."""
    return any(folder.glob("*after_optimizations_after_buffer_assignment.txt"))


def read_notes(folder: Path) -> tuple[str, str, str] | None:
    """(program, buffer assignment, live ranges) of the biggest program in a dump; None where it holds none."""
    found = sorted(folder.glob("*after_optimizations-buffer-assignment.txt"), key=lambda path: path.stat().st_size)
    if not found:
        return None
    stem = str(found[-1]).removesuffix("-buffer-assignment.txt")
    program, assigned, live = (
        Path(f"{stem}{end}.txt").read_text() for end in ("", "-buffer-assignment", "-live-range")
    )
    return program, assigned, live


def assignment(module: Module, assigned: str, live: str) -> Assignment:
    """Totals by kind, and the buffers that are alive at the peak.

    Args:
      assigned: the compiler's buffer assignment.
      live: its live ranges, with those at the peak of main memory.
    """
    sources = {
        item.name: item.source
        for computation in module.computations.values()
        for item in computation.instructions.values()
    }
    alive = {match[1] for line in live.splitlines() if (match := PEAK.match(line))}
    totals: dict[Kind, int] = {"argument": 0, "output": 0, "temporary": 0, "constant": 0}
    buffers: dict[tuple[int, int], Buffer] = {}
    kind: Kind | None = None
    number = aliased = 0
    for line in assigned.splitlines():
        if allocation := ALLOCATION.match(line):
            number += 1
            kind = _kind(allocation[3]) if allocation[2] in (None, "0") else None
            if kind is not None:
                totals[kind] += int(allocation[1])
                aliased += int(allocation[1]) if kind == "argument" and "live-out" in allocation[3] else 0
        elif kind is not None and (value := VALUE.match(line)):
            name, size, offset, shape = value[1], int(value[2]), int(value[3]), value[4]
            known = buffers.get((number, offset))
            if name in alive and (known is None or known.bytes < size):
                buffers[number, offset] = Buffer(kind, size, name, shape, sources.get(name, ""))
    return Assignment(totals, aliased, tuple(sorted(buffers.values(), key=lambda buffer: -buffer.bytes)))


def _kind(words: str) -> Kind | None:
    """None for what takes no memory of its own: scalars inside of reductions."""
    if "thread-local" in words:
        return None
    if words.startswith("parameter"):
        return "argument"
    if words.startswith("constant"):
        return "constant"
    return "output" if "maybe-live-out" in words and "temp" not in words else "temporary"
