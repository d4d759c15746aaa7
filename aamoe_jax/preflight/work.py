"""What one device does in a step: matrix products, kernels, bytes through main memory. Loops are counted as they run.

The compiler's own `cost_analysis` counts the body of a loop once, and a model is a loop over its layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable

import numpy as np

from aamoe_jax.preflight.hlo import Computation, Instruction, Module, Run, Shape

PASSES = {"highest": 6, "high": 3, "default": 1}
"""Products of bfloat16 that make up one of float32, by its precision."""
KERNEL = "tpu_custom_call"
MOVES_NOTHING = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|after-all|partition-id|replica-id|"
    "opt-barrier|add-dependency|async-start|async-update|call-start|send|recv|"
    "(async|call|copy|slice|all-gather|all-reduce|collective-permute|send|recv)-done"
)
TRANSFERS = ("copy-start", "slice-start", "dynamic-slice-start")
PARTIAL = ("dynamic-slice", "slice", "gather")
SAME = ("bitcast", "reshape")
IN_PLACE = "output_to_operand_aliasing={{}: (0, {})}"
"""Of a fusion inside another: its operand under another tiling."""
WINDOW = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
"""Of a convolution that does not say otherwise."""


Operand = Callable[[Instruction, int], tuple[Shape, ...]]
"""The arrays of an operand of an instruction."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas kernel: FLOPs and bytes that its author attached, as often as it runs; else the bytes of its arrays."""

    name: str
    times: int
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device in one step."""

    product_flops: int
    """Two for every multiply-add of a matrix product, padding that the program makes included."""
    pass_flops: int
    """The same as the matrix units do them: a float32 product takes several of bfloat16."""
    bytes: int
    """Read from and written to main memory, kernels apart."""
    kernels: tuple[Kernel, ...]

    @property
    def kernel_bytes(self) -> int:
        return sum(kernel.bytes for kernel in self.kernels)


def measure(module: Module, runs: Iterable[Run]) -> Work:
    """Adds up what all instructions do."""
    flops = passes = moved = 0
    kernels: dict[str, Kernel] = {}
    for run in runs:
        item, shape_of = run.instruction, functools.partial(operand_shapes, run.computation)
        if item.opcode in ("dot", "convolution"):
            done = run.times * product_flops(item, shape_of)
            flops, passes = flops + done, passes + done * precision_passes(item, shape_of)
        if KERNEL in item.attributes and item.opcode == "custom-call":
            name = re.sub(r"(\.\d+|\.clone)+$", "", item.name)
            flops_of, bytes_of = (item.attribute(rf'"{kind}":"?(\d+)') for kind in ("flops", "bytes_accessed"))
            # Where nothing is attached, at least operands and results pass through main memory.
            work = int(flops_of or 0), int(bytes_of or moved_bytes(module, run.computation, item))
            known = kernels.get(name, Kernel(name, 0, 0, 0))
            more = (run.times * count for count in (1, *work))
            kernels[name] = Kernel(name, *map(operator.add, (known.times, known.flops, known.bytes), more))
        elif not run.fused:
            moved += run.times * moved_bytes(module, run.computation, item)
    return Work(flops, passes, moved, tuple(sorted(kernels.values(), key=lambda kernel: -kernel.flops)))


def operand_shapes(computation: Computation, item: Instruction, index: int) -> tuple[Shape, ...]:
    """The arrays of an operand."""
    return computation.instructions[item.operands[index]].results


def precision_passes(item: Instruction, shape_of: Operand) -> int:
    """How many products of bfloat16 the matrix units make of this one."""
    if shape_of(item, 0)[0].dtype != "f32" or shape_of(item, 1)[0].dtype != "f32":
        return 1
    return PASSES[item.attribute(r"operand_precision=\{(\w+)") or "default"]


def product_flops(item: Instruction, shape_of: Operand) -> int:
    """Two per multiply-add of a dot or convolution."""
    left, right = shape_of(item, 0)[0], shape_of(item, 1)[0]
    if item.opcode == "dot":
        contracted = item.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2 * item.results[0].elements * math.prod(left.sizes[int(i)] for i in contracted.split(",") if i)
    labels = re.split("_|->", item.attribute(r"dim_labels=(\w+->\w+)") or "")
    arrays = zip(labels, (left, right, item.results[0]), strict=True)
    sizes = [dict(zip(names, shape.sizes, strict=True)) for names, shape in arrays]
    spatial = [name for name in sizes[0] if name.isdigit()]
    groups = int(item.attribute(r"batch_group_count=(\d+)") or 1)
    valid = math.prod(_valid_positions(*(of[name] for of in sizes), **_window(item, int(name))) for name in spatial)
    return 2 * sizes[0]["b"] // groups * sizes[1]["i"] * sizes[1]["o"] * valid


def _window(item: Instruction, dimension: int) -> dict[str, int]:
    """How the kernel of a convolution moves along a spatial dimension."""
    parts = (part.split("=") for part in (item.attribute(r"window=\{([^}]*)\}") or "").split())
    chosen = {name: int(text.split("x")[dimension].split("_")[0]) for name, text in parts}
    return {name: chosen.get(name, fallback) for name, fallback in WINDOW.items()}


def _valid_positions(
    left: int, right: int, out: int, *, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
    """Pairs of an output and a kernel position that meet an input, not padding."""
    index = np.arange(out)[:, None] * stride - pad + np.arange(right)[None, :] * rhs_dilate
    met = (index % lhs_dilate == 0) & (index >= 0) & (index // lhs_dilate < left)
    return int(met.sum())


def moved_bytes(module: Module, computation: Computation, item: Instruction) -> int:
    """Bytes that an instruction outside of fusions reads from main memory and writes to it."""
    if MOVES_NOTHING.fullmatch(item.opcode) or (item.opcode == "custom-call" and not item.operands):
        return 0
    if item.opcode in TRANSFERS:
        arrays = [shape for shape in item.results if shape.sizes]
        return min(shape.bytes for shape in arrays) * sum(shape.in_main_memory for shape in arrays)
    if item.opcode == "fusion":
        inner = module.computations[item.called["calls"][0]]
        read = sum(
            _read_argument(module, inner, index)
            for index in range(len(item.operands))
            if _in_main_memory(operand_shapes(computation, item, index))
        )
        return read + sum(_written(module, inner, inner.root, item.results))
    written = sum(_size(shape) for shape in item.results)
    if item.opcode in PARTIAL:
        return 2 * written
    if item.opcode == "dynamic-update-slice":
        return 2 * sum(map(_size, operand_shapes(computation, item, 1)))
    return written + sum(
        _size(shape) for index in range(len(item.operands)) for shape in operand_shapes(computation, item, index)
    )


def _size(shape: Shape) -> int:
    return shape.bytes if shape.in_main_memory else 0


def _in_main_memory(arrays: tuple[Shape, ...]) -> bool:
    return any(shape.in_main_memory for shape in arrays)


def _read_argument(module: Module, computation: Computation, number: int) -> int:
    """Bytes of an argument that a fusion reads."""
    parameter = computation.parameter(number)
    return 0 if parameter is None else _read(module, computation, parameter.name)


def _read(module: Module, computation: Computation, name: str) -> int:
    """Bytes of a value that a fusion reads: slices of it where it takes no more."""
    whole = sum(shape.bytes for shape in computation.instructions[name].results)
    read = 0
    for user in computation.instructions.values():
        for index in (i for i, operand in enumerate(user.operands) if operand == name):
            if user.opcode in SAME or (IN_PLACE in user.attributes and index == 0):
                read += _read(module, computation, user.name)
            elif user.opcode in PARTIAL and index == 0:
                read += user.results[0].bytes
            elif user.opcode == "fusion":
                inner = module.computations[user.called["calls"][0]]
                read += _read_argument(module, inner, index)
            elif user.opcode != "dynamic-update-slice" or index != 0:  # which writes into it, in place
                read += whole
    return min(read, whole)


def _written(module: Module, computation: Computation, name: str, results: tuple[Shape, ...]) -> list[int]:
    """Bytes of each result that a fusion writes: updates alone where it updates in place."""
    item = computation.instructions[name]
    if item.opcode == "tuple":
        pairs = zip(item.operands, results, strict=False)
        return [size for operand, shape in pairs for size in _written(module, computation, operand, (shape,))]
    if not results[0].in_main_memory:
        return [0]
    if item.opcode in SAME:
        return _written(module, computation, item.operands[0], results)
    if item.opcode == "dynamic-update-slice":
        return [sum(shape.bytes for shape in operand_shapes(computation, item, 1))]
    if item.opcode == "fusion":
        inner = module.computations[item.called["calls"][0]]
        return _written(module, inner, inner.root, results)
    return [sum(map(_size, results))]
