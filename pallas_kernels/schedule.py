"""Read the TPU compiler's own schedule of a kernel: a core issues one bundle a cycle, in order.

So the bundles of a loop, times its trips, are its cycles, save for memory stalls and bank conflicts: a model, to be
printed as such. `aot.compile_apart(..., dump_to=folder)` leaves the notes that are read here; a kernel is found by the
name of its `pallas_call`.
"""

import itertools
import operator
import re
from pathlib import Path
from typing import NamedTuple

DELAY_SLOTS = 4  # bundles after a branch that are issued whether it is taken or not
_BUNDLE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+(?:(?:LH|LB|LE|PB|PF):?\s*)*:?\s*(>*)\s*\{")
_LOOP = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:(?:LH|LE|PB|PF):?\s*)*LB:")
_EXIT = re.compile(r"%(\w+) = scmp[\w.]+ (?:\(%(\w+)\), )?%(\w+), (\d+) /\* loop exit test \*/")
_BRANCH = re.compile(r"sbr\.rel.*? target = \$region(\d+)")
_PRODUCT = re.compile(r"\bvmat\w+")
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
    cycles_a_step: int  # bundles of one step of the grid, inner loops times their trips, without what may be skipped
    slots: dict[str, float]  # share of the slots of every kind that are filled in those cycles
    spills: int  # vector registers stored because there are too few

    @property
    def binding(self) -> tuple[str, float]:
        """The busiest kind of slot, and its share: the step cannot take less than that share of its cycles."""
        return max(self.slots.items(), key=lambda item: item[1])


def read(folder: Path, kernel: str) -> Schedule:
    """The schedule of `pallas_call(name=kernel)` from the notes in `folder`."""
    code = _only(folder, kernel, "final_bundles.txt", but="schedule-analysis")
    usage = _only(folder, kernel, "final_hlo-static-per-bundle-utilization.txt")
    return parse(code.read_text(encoding="utf-8"), usage.read_text(encoding="utf-8"))


def on_all_cores(folder: Path, kernel: str) -> bool:
    """Whether every core of a device of several runs the kernel: they then meet at a barrier first. What has no
    parallel dimension to divide runs on one."""
    code = _only(folder, kernel, "final_bundles.txt", but="schedule-analysis")
    return "BarrierMegacore" in code.read_text(encoding="utf-8")


def whole_cycles(text: str) -> int:
    """Cycles of a whole program from its listing: bundles times the trips of all loops around them. A loop whose trips
    are known at run time only counts once; what a branch may skip not at all."""
    bundles = _bundles(text)
    skipped = _skipped(bundles)
    starts, owner = _nesting(bundles, skipped)
    counted, trips = _all_trips(bundles, starts, owner), list[int]()
    for number, loop in enumerate(starts):  # those around it come before
        around = 1 if loop.parent is None else trips[loop.parent]
        trips.append(around * (counted[number] or 1))
    issued = [1 if number is None else 0 if starts[number].conditional else trips[number] for number in owner]
    for branch, start, end in skipped:
        within = owner[branch]
        for i in range(start + 1, end):
            if owner[i] == within:
                issued[i] = 0
    return sum(issued)


def _only(folder: Path, kernel: str, ending: str, but: str = "never") -> Path:
    pattern = re.compile(rf"\d+-{re.escape(kernel)}(\.\d+)?-\d+-(?!.*{but}).*{re.escape(ending)}$")
    found = [path for path in sorted(folder.iterdir()) if pattern.match(path.name)]
    if len(found) != 1:
        raise FileNotFoundError(f"{folder}: wanted one *-{kernel}-*{ending}, found {len(found)}")
    return found[0]


def parse(code: str, usage: str) -> Schedule:
    """The schedule from a kernel's listing and the slots that each of its bundles uses."""
    loops, issued = parse_loops(code)
    capacity, used = parse_slots(usage)
    if len(used) != len(issued):
        raise ValueError(f"{len(issued)} bundles, but the slots of {len(used)}")
    cycles = sum(issued)
    filled = {name: sum(map(operator.mul, issued, (row[name] for row in used))) for name in capacity}
    slots = {name: filled[name] / (room * max(1, cycles)) for name, room in capacity.items()}
    return Schedule(len(issued), loops, cycles, slots, sum(row["VSTORE:SPILL"] for row in used))


def parse_slots(text: str) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Slots of every kind in a bundle, and how many of them each bundle uses."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    rows = [[int(number) for number in line.split()] for line in lines[2:] if re.fullmatch(r"[\d ]*\d[\d ]*", line)]
    capacity, *used = (dict(zip(names, row, strict=True)) for row in rows)
    return capacity, used


class _Open(NamedTuple):
    """A loop while it is read."""

    depth: int
    start: int
    conditional: bool
    parent: int | None


def parse_loops(text: str) -> tuple[tuple[Loop, ...], list[int]]:
    """The loops that the listing marks, and how often a step of the grid issues each bundle.

    `LB:` begins a loop, as many `>` as loops surround it. What a branch may skip counts as never issued: copies that
    wait for a new block, first steps.
    """
    bundles = _bundles(text)
    skipped = _skipped(bundles)
    starts, owner = _nesting(bundles, skipped)
    loops, issued = [], [0] * len(bundles)
    for number, (loop, trips) in enumerate(zip(starts, _all_trips(bundles, starts, owner), strict=True)):
        mine = [i for i, which in enumerate(owner) if which == number]
        always = [
            i for i in mine if not any(loop.start <= branch and start < i < end for branch, start, end in skipped)
        ]
        loops.append(Loop(loop.depth, len(always), trips, loop.conditional))
        for i in () if loop.conditional else always:
            issued[i] = 1 if loop.depth == 1 else trips or 1
    return tuple(loops), issued


def _nesting(bundles: list[str], skipped: list[tuple[int, int, int]]) -> tuple[list[_Open], list[int | None]]:
    """The loops in order of appearance, and the innermost one that every bundle belongs to."""
    owner: list[int | None] = []
    starts: list[_Open] = []
    stack: list[int] = []
    depth = 0
    for i, line in enumerate(bundles):
        if "{}" not in line:  # an empty bundle is listed without its depth
            depth = len(_BUNDLE.findall(line)[0][1])
        begins = _LOOP.match(line) is not None
        while stack and (starts[stack[-1]].depth > depth or (begins and starts[stack[-1]].depth == depth)):
            stack.pop()
        if begins:
            stack.append(len(starts))
            parent = stack[-2] if len(stack) > 1 else None
            inside, above = (0, False) if parent is None else (starts[parent].start, starts[parent].conditional)
            # It may begin in a delay slot of the very branch around it: what is issued there then does no harm.
            conditional = above or any(inside <= branch < i < end for branch, _, end in skipped)
            starts.append(_Open(depth, i, conditional, parent))
        owner.append(stack[-1] if stack else None)
    return starts, owner


def _all_trips(bundles: list[str], starts: list[_Open], owner: list[int | None]) -> list[int | None]:
    """Of every loop; None: known at run time only.

    The test of a loop may have moved into the one that ends it: it then hangs on that one's test.
    """
    trips: list[int | None] = [None] * len(starts)
    for number, loop in enumerate(starts):
        mine = " ".join(bundles[i] for i, which in enumerate(owner) if which == number)
        exits = list(_EXIT.finditer(mine))
        inner = {found[1] for found in exits}
        for found in exits:
            of = loop.parent if found[2] in inner else number
            if of is not None:
                trips[of] = _trips(found, mine)
    return trips


def _trips(exit_test: re.Match, bundles: str) -> int:
    """The bound of a counter over what a pass adds to it: an unrolled loop counts by more than one."""
    _, _, counter, bound = exit_test.groups()
    added = re.search(rf"%{counter} = sadd\.s32 (?:\(%\w+\), )?(\d+), ", bundles)
    return -(-int(bound) // int(added.group(1))) if added else int(bound)


def _bundles(text: str) -> list[str]:
    """One string a bundle: comments may run over several lines."""
    bundles: list[str] = []
    for line in text.splitlines():
        if _BUNDLE.match(line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += " " + line
    return bundles


def _skipped(bundles: list[str]) -> list[tuple[int, int, int]]:
    """(branch, the last of its delay slots, target) of every branch forward that may jump over bundles which a steady
    step does not issue."""
    first: dict[str, int] = {}
    for i, line in enumerate(bundles):
        for region in _REGION.findall(line):
            first.setdefault(region, i)
    # How much of the work comes before a bundle. Work is the matrix products, where there are any: code without any may
    # be as long, and begins or ends a window.
    products = [len(_PRODUCT.findall(line)) for line in bundles]
    done = list(itertools.accumulate(products if any(products) else [1] * len(bundles), initial=0))
    spans, large = [], []
    for i, line in enumerate(bundles):
        for region in _BRANCH.findall(line):
            target = first.get(region, i)
            share = (done[target] - done[i]) / done[-1]
            # Delay slots follow a branch: a shorter jump skips nothing. One over most of the work guards the work
            # itself: an empty grid, or the steps that only fill and drain the pipeline.
            if i + DELAY_SLOTS < target and share <= 1 / 2:
                spans.append((i, i + DELAY_SLOTS, target))
                if share > 1 / 4:
                    large.append(spans[-1])
    # Two copies of the work, for even and for odd steps: every step runs one, and the first is counted.
    copies = len(large) == 2 and large[0][2] <= large[1][0]
    return [span for span in spans if not (copies and span == large[0])]
