"""Reads the compiler's text of an optimized program: computations, instructions, how often each one runs."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from pallas_kernels.block_sparse_attention.interface import SELDOM

BYTES = {"pred": 1, "token": 0, "opaque": 0, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16}
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
NAME = re.compile(r"%([\w.\-]+)")
BRANCHES = ("branch_computations", "true_computation", "false_computation")
CALLS = ("calls", "to_apply", "condition", "body", "called_computations", *BRANCHES)
CALLED = re.compile(rf"\b({'|'.join(CALLS)})=(\{{[^}}]*\}}|%[\w.\-]+)")
END = r"\}(?:,.*)?$"
"""Of a computation. A line of an instruction may begin with a brace too: attributes of kernels have several lines."""
COMPUTATION = re.compile(rf"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{{\n((?:(?!{END}).*\n)*)\}}", re.MULTILINE)
CONTINUED = re.compile(r"\n(?!  )")
"""Instructions are indented, the other lines of their attributes are not."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array of a type."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def bytes(self) -> int:
        """Without padding."""
        return math.ceil(self.elements * element_bytes(self.dtype))

    @property
    def in_main_memory(self) -> bool:
        """Not in the chip's fast memory, `S(1)`: what lies there moves nothing through main memory."""
        return "S(" not in self.layout


def element_bytes(dtype: str) -> int | float:
    """Bytes of one element: those of `f32`, `bf16`, `s8`, ... are in their names."""
    if dtype in BYTES:
        return BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0


def shapes(text: str) -> tuple[Shape, ...]:
    """All arrays of a type, those of tuples too."""
    return tuple(
        Shape(dtype, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size), layout)
        for dtype, sizes, layout in ARRAY.findall(text)
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operand_text: str
    attributes: str

    @functools.cached_property
    def results(self) -> tuple[Shape, ...]:
        """The arrays that it makes."""
        return shapes(self.type)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names."""
        return tuple(NAME.findall(self.operand_text))

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of computations, by the attribute that names them."""
        return {kind: tuple(NAME.findall(names)) for kind, names in CALLED.findall(self.attributes)}

    def attribute(self, pattern: str) -> str | None:
        """The first group of the pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None

    @property
    def source(self) -> str:
        """What was traced, such as `jit(train_step)/jvp()/while/body/dot_general`; empty where it is not known."""
        return self.attribute(r'op_name="([^"]*)"') or ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in order; the last one, or that marked ROOT, is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    def parameter(self, number: int) -> Instruction | None:
        """The instruction that stands for an argument; None where a fusion has no use for it."""
        parameters = (item for item in self.instructions.values() if item.opcode == "parameter")
        return next((item for item in parameters if item.operand_text == f"{number}"), None)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: str


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction in its computation, and how often one step runs it."""

    instruction: Instruction
    computation: Computation
    times: int
    fused: bool
    """Inside a fusion: it moves nothing itself."""


def parse(text: str) -> Module:
    """The program.

    Raises:
      ValueError: the text has no entry computation.
    """
    found = list(COMPUTATION.finditer(text))
    entry = next((each[2] for each in found if each[1]), None)
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    return Module({each[2]: _computation(each[2], CONTINUED.sub(" ", each[3]).splitlines()) for each in found}, entry)


def _computation(name: str, lines: list[str]) -> Computation:
    instructions, root = {}, ""
    for line in lines:
        if " = " not in line:
            continue
        left, right = line.strip().split(" = ", 1)
        instruction = _instruction(left.removeprefix("ROOT ").lstrip("%"), right)
        instructions[instruction.name] = instruction
        if left.startswith("ROOT ") or not root:
            root = instruction.name
    return Computation(name, instructions, root)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    opcode, rest = text[end:].strip().split("(", 1)
    close = _closing("(" + rest) - 1
    return Instruction(name, text[:end], opcode, rest[:close], rest[close + 1 :])


def _closing(text: str) -> int:
    """Where the parenthesis that opens the text closes."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis does not close: {text[:80]}")


def runs(module: Module) -> Iterator[Run]:
    """Every instruction that a step runs, with how often. Of the branches of a conditional the longest is taken, or
    the shortest where it holds what most steps leave out."""
    yield from _runs(module, module.computations[module.entry], 1, False)


def _runs(module: Module, computation: Computation, times: int, fused: bool) -> Iterator[Run]:
    for instruction in computation.instructions.values():
        yield Run(instruction, computation, times, fused)
        called = instruction.called
        if instruction.opcode == "while":
            trips = trip_count(module, computation, instruction)
            yield from _runs(module, module.computations[called["body"][0]], times * trips, fused)
            continue
        inside = fused or instruction.opcode == "fusion"
        # `to_apply` of reductions and sorts are scalar functions, that of a call is a computation.
        kinds = ["calls", "called_computations"] + ["to_apply"] * (instruction.opcode == "call")
        names = [name for kind in kinds for name in called.get(kind, ()) if name in module.computations]
        if branches := [name for kind in BRANCHES for name in called.get(kind, ())]:
            pick = min if SELDOM in instruction.source else max
            names.append(pick(branches, key=lambda name: _length(module, name)))
        for name in names:
            yield from _runs(module, module.computations[name], times, inside)


def _length(module: Module, name: str) -> int:
    """Instructions of a computation and of all that it calls."""
    return sum(1 for _ in _runs(module, module.computations[name], 1, False))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int:
    """How often a loop runs that counts up to a constant; 1 where that cannot be seen."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
    if known:
        return int(known)
    condition = module.computations[loop.called["condition"][0]]
    test = condition.instructions[condition.root]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return 1
    start, limit = (_before_loop(computation, loop, condition, name) for name in test.operands)
    return max(0, limit - start) if start is not None and limit is not None else 1


def _before_loop(computation: Computation, loop: Instruction, condition: Computation, name: str) -> int | None:
    """The constant that a value of the condition has when the loop starts."""
    item = _origin(condition, name)
    if item.opcode == "get-tuple-element":
        start = _origin(computation, loop.operands[0])
        if start.opcode != "tuple":
            return None
        item = _origin(computation, start.operands[int(item.attribute(r"index=(\d+)") or 0)])
    return int(item.operand_text) if item.opcode == "constant" and item.operand_text.lstrip("-").isdigit() else None


def _origin(computation: Computation, name: str) -> Instruction:
    """What a value is a copy of."""
    item = computation.instructions[name]
    while item.opcode in ("copy", "bitcast", "reshape", "copy-done", "copy-start", "convert"):
        item = computation.instructions[item.operands[0]]
    return item
