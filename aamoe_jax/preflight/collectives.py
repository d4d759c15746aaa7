"""The collectives of a program: which axes of the mesh they run along, how often, how many bytes they send."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from aamoe_jax.preflight.hlo import Module, Run

EXCHANGED = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1, "ragged-all-to-all": 1}
"""How often a device sends all parts but its own of the larger side, the operands or the result."""
SLICES = "slices"
"""In place of axes: between slices, on the data center network."""
WHOLE = ("collective-permute", "collective-broadcast")
"""These send all of it."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind along the same axes."""

    kind: str
    axes: tuple[str, ...]
    group: int
    """Devices, or slices, that take part together."""
    count: int
    """In one step."""
    sent: float
    """Bytes that one device sends in one step."""
    members: tuple[int, ...]
    """One such group, by position in the mesh."""
    source: str
    """Where the largest of them was traced."""


def collectives(module: Module, runs: Iterable[Run], axes: dict[str, int]) -> tuple[Collective, ...]:
    """Everything that is sent, most bytes first.

    Args:
      axes: the mesh: names and sizes, the last one varying fastest over the devices of the program.
    """
    found: dict[tuple[str, tuple[str, ...]], list[tuple[Run, float, tuple[int, ...]]]] = {}
    for run in runs:
        kind = _kind(module, run)
        if kind is None:
            continue
        groups = device_groups(run.instruction.attributes, int(np.prod(list(axes.values()))))
        members = max(groups, key=len)
        if len(members) > 1:
            share = 1 if kind in WHOLE else EXCHANGED[kind] * (len(members) - 1) / len(members)
            sent = float(run.times) * _bytes(run) * share
            found.setdefault((kind, axes_of(groups, axes)), []).append((run, sent, tuple(members)))
    joined = []
    for (kind, names), parts in found.items():
        largest = max(parts, key=lambda part: part[1])
        count, total = sum(run.times for run, _, _ in parts), sum(sent for _, sent, _ in parts)
        joined.append(Collective(kind, names, len(largest[2]), count, total, largest[2], largest[0].instruction.source))
    return tuple(sorted(joined, key=lambda collective: -collective.sent))


def between_slices(runs: Iterable[Run], slices: int) -> tuple[Collective, ...]:
    """What goes over the network between slices, most bytes first. The compiler reduces or gathers within a slice
    first, and hands each device's part to the hosts, whose runtime exchanges it with those of the other slices."""
    found: dict[str, list[tuple[Run, float]]] = {}
    for run in runs:
        transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', run.instruction.attributes)
        if run.instruction.opcode == "send" and transfer is not None:
            kind = transfer[1].lower().replace("_", "-")
            (operand, *_) = (run.computation.instructions[name].results for name in run.instruction.operands)
            others = slices - 1 if kind == "all-gather" else (slices - 1) / slices
            share = EXCHANGED[kind] * others if kind in EXCHANGED else 1
            sent = float(run.times) * sum(shape.bytes for shape in operand) * share
            found.setdefault(kind, []).append((run, sent))
    joined = []
    for kind, parts in found.items():
        count, total = sum(run.times for run, _ in parts), sum(sent for _, sent in parts)
        source = max(parts, key=lambda part: part[1])[0].instruction.source
        joined.append(Collective(kind, (SLICES,), slices, count, total, (), source))
    return tuple(sorted(joined, key=lambda collective: -collective.sent))


def _kind(module: Module, run: Run) -> str | None:
    """The kind of a collective; None for anything else, and for the second half of an asynchronous one."""
    opcode = run.instruction.opcode.removesuffix("-start")
    if opcode not in EXCHANGED and opcode not in WHOLE:
        return None
    root = run.computation.instructions[run.computation.root]
    if opcode == "all-reduce" and run.fused and root.opcode == "dynamic-slice":
        return "reduce-scatter"  # the compiler writes it as a fusion of both
    return opcode


def _bytes(run: Run) -> int:
    """Of the larger side. An asynchronous start returns both sides."""
    item = run.instruction
    results = [shape.bytes for shape in item.results]
    operands = [shape.bytes for name in item.operands for shape in run.computation.instructions[name].results]
    if item.opcode.endswith("-start"):
        return max(sum(operands), sum(results) - sum(operands))
    return max(sum(operands), sum(results))


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """The groups of a collective, by position in the mesh; a permutation's pairs are groups of two.

    Written as lists, or as an iota that is reshaped, transposed and cut: `[4,2]<=[2,4]T(1,0)`.
    """
    pairs = re.search(r"source_target_pairs=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", attributes)
    listed = pairs or re.search(r"replica_groups=\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", attributes)
    if listed:
        return [[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is None:
        return [list(range(devices))]
    shape, source = (tuple(int(i) for i in text.split(",")) for text in iota.groups()[:2])
    order = np.arange(int(np.prod(source))).reshape(source)
    if iota[3]:
        order = order.transpose([int(i) for i in iota[3].split(",")])
    return order.reshape(shape).tolist()


def axes_of(groups: Sequence[Sequence[int]], axes: dict[str, int]) -> tuple[str, ...]:
    """The axes along which the members of a group differ."""
    varying: set[int] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group), tuple(axes.values())))
        varying |= {int(axis) for axis in np.flatnonzero((places != places[:, :1]).any(axis=1))}
    return tuple(name for index, name in enumerate(axes) if index in varying)
