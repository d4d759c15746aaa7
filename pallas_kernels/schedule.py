"""Read the TPU compiler's own schedule of a kernel: a core issues one bundle a cycle, in order.

So the bundles of a loop, times its trips, are its cycles, save for memory stalls and bank conflicts: a model, to be
printed as such. `aot.compile_apart(..., dump_to=folder)` leaves the notes that are read here; a kernel is found by the
name of its `pallas_call`.
"""

import re
from pathlib import Path
from typing import NamedTuple

DELAY_SLOTS = 4  # bundles after a branch that are issued whether it is taken or not
_BUNDLE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+(?:(?:LH|LB|LE|PB|PF):?\s*)*:?\s*(>*)\s*\{")
_LOOP = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:(?:LH|LE|PB|PF):?\s*)*LB:")
_EXIT = re.compile(r"scmp[\w.]+ %\w+, (\d+) /\* loop exit test \*/")
_BRANCH = re.compile(r"sbr\.rel.*? target = \$region(\d+)")
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")


class Loop(NamedTuple):
    """A loop of the schedule, without the loops inside it."""

    depth: int  # 1: the grid of the kernel
    bundles: int
    trips: int | None  # None: known at run time only
    conditional: bool  # some branch may skip it


class Schedule(NamedTuple):
    """What the compiler made of one kernel."""

    bundles: int  # in all, every loop once
    loops: tuple[Loop, ...]  # in order of appearance
    slots: dict[str, float]  # share of the slots of every kind that are filled, all bundles alike
    spills: int  # vector registers stored for want of room

    @property
    def cycles_a_step(self) -> int:
        """Bundles of one step of the grid, inner loops times their trips; what a branch may skip is left out."""
        known = [loop for loop in self.loops if loop.depth >= 1 and not loop.conditional]
        return sum(loop.bundles * (1 if loop.depth == 1 else loop.trips or 1) for loop in known)


def read(folder: Path, kernel: str) -> Schedule:
    """The schedule of `pallas_call(name=kernel)` from the notes in `folder`."""
    code = _only(folder, kernel, "final_bundles.txt", but="schedule-analysis")
    usage = _only(folder, kernel, "final_hlo-static-per-bundle-utilization.txt")
    slots, spills = parse_slots(usage.read_text(encoding="utf-8"))
    bundles, loops = parse_loops(code.read_text(encoding="utf-8"))
    return Schedule(bundles, loops, slots, spills)


def _only(folder: Path, kernel: str, ending: str, but: str = "never") -> Path:
    pattern = re.compile(rf"\d+-{re.escape(kernel)}(\.\d+)?-\d+-(?!.*{but}).*{re.escape(ending)}$")
    found = [path for path in sorted(folder.iterdir()) if pattern.match(path.name)]
    if len(found) != 1:
        raise FileNotFoundError(f"{folder}: wanted one *-{kernel}-*{ending}, found {len(found)}")
    return found[0]


def parse_slots(text: str) -> tuple[dict[str, float], int]:
    """Share of every kind of slot in use, and the number of spilled vector registers."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    capacity = [int(number) for number in lines[2].split()]
    used = [[int(number) for number in line.split()] for line in lines[4:] if re.fullmatch(r"[\d ]+", line)]
    total = dict(zip(names, (sum(column) for column in zip(*used, strict=True)), strict=True))
    shares = {name: total[name] / (room * len(used)) for name, room in zip(names, capacity, strict=True)}
    return shares, total["VSTORE:SPILL"]


class _Open(NamedTuple):
    """A loop while it is read."""

    depth: int
    start: int
    conditional: bool


def parse_loops(text: str) -> tuple[int, tuple[Loop, ...]]:
    """Number of bundles, and the loops that the listing marks: `LB:` begins one, as many `>` as loops surround it."""
    bundles = _bundles(text)
    skipped = _skipped(bundles)
    owner: list[int | None] = []  # the loop that every bundle belongs to
    starts: list[_Open] = []
    stack: list[int] = []
    depth = 0
    for i, line in enumerate(bundles):
        if "{}" not in line:  # an empty bundle is listed without its depth
            depth = len(_BUNDLE.match(line).group(2))
        begins = _LOOP.match(line) is not None
        while stack and (starts[stack[-1]].depth > depth or (begins and starts[stack[-1]].depth == depth)):
            stack.pop()
        if begins:
            stack.append(len(starts))
            inside = starts[stack[-2]].start if len(stack) > 1 else 0
            starts.append(_Open(depth, i, any(start >= inside and start < i < end for start, end in skipped)))
        owner.append(stack[-1] if stack else None)
    loops = []
    for number, loop in enumerate(starts):
        mine = [i for i, which in enumerate(owner) if which == number]
        exits = [match for i in mine if (match := _EXIT.search(bundles[i]))]
        # Within a loop, too, what a branch may skip is not counted: copies that wait for a new block, first steps.
        always = [i for i in mine if not any(loop.start <= start < i < end for start, end in skipped)]
        trips = int(exits[-1].group(1)) if exits else None
        loops.append(Loop(loop.depth, len(always), trips, loop.conditional))
    return len(bundles), tuple(loops)


def _bundles(text: str) -> list[str]:
    """One string a bundle: comments may run over several lines."""
    bundles: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += " " + line
    return bundles


def _skipped(bundles: list[str]) -> list[tuple[int, int]]:
    """(branch, target) of every branch forward that may jump over bundles."""
    first: dict[str, int] = {}
    for i, line in enumerate(bundles):
        for region in _REGION.findall(line):
            first.setdefault(region, i)
    spans = []
    for i, line in enumerate(bundles):
        for region in _BRANCH.findall(line):
            target = first.get(region, i)
            # Delay slots follow a branch: a shorter jump skips nothing. One over most of the kernel guards the work
            # itself: an empty grid, or the steps that only fill and drain the pipeline.
            if i + DELAY_SLOTS < target < i + len(bundles) / 2:
                spans.append((i + DELAY_SLOTS, target))
    return spans
