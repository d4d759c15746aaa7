"""One layer as a TPU's compiler has it, whole: forward and backward pass of AA-MoE, and of dense attention and a
feed-forward, with everything that XLA puts around the kernels.

    python -m benchmarks.compiled_layer --chips=v5e,v6e --output=experiments/results/compiled_layer.json

Needs libtpu (extra `aot`), and minutes and gigabytes of TMPDIR for every layer; what is in the output already is kept,
so the same command goes on. Every operation of the compiled program counts as the bundles of its listing times the
trips of its loops, or as its bytes of HBM, whichever takes longer, and as often as it runs; one that shares its listing
with equal ones counts for itself. A listing is of one core: of what two cores of a device divide it has half the trips.
A loop whose trips are known at run time only counts once; of a conditional the dearer branch counts. Attention kernels,
whose trips the data decides, and copies that the compiler lets run beside other work are left out:
`benchmarks.layer_model` adds the kernels. So a dense layer is the same for rows of every length, and is compiled once.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from aamoe_jax.config import AAMoEConfig, BudgetConfig, ModelConfig
from aamoe_jax.ledger.compiled import Inputs, Row, Trial
from benchmarks import measure
from experiments.program import command_line, plain_table, publish, start
from pallas_kernels import aot, schedule
from pallas_kernels.chips import TPUS, Chip

FLAGS = flags.FLAGS
LAYERS = {"aamoe": ("aamoe",), "dense": ("attention", "feed_forward")}
KERNELS = ("block_sparse_attention", "gathered_", "dense_attention", "splash")
"""What a `pallas_call` of attention is named like: left out."""
OTHER_KERNELS = {"local_window": "window", "selection": "selection", "choice": "router"}
OTHER_KERNELS |= {"norm_rotary": "projections", "token_": "tables"}
"""The parts of those that count."""
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "opt-barrier"}
"""Operations that take no time."""
BESIDE = re.compile(r"-(start|update|done)$")
"""Ends of operations that run beside others."""
SLICES = ("dynamic-slice", "gather", "slice")
"""Operations that read no more than they write."""
PRODUCTS, ROUTER_PRODUCTS = "products", "router products"
PLACES = {
    "window": ("tpu/window.py", "tpu/window_kernels.py"),
    "tables": ("block_sparse_attention/", "pallas_kernels/tpu.py", "aamoe/attend.py"),
    "router": ("aamoe/pooled.py", "aamoe/router.py", "pallas_kernels/choice/"),
    "selection": ("pallas_kernels/selection/", "aamoe/allocation.py", "aamoe/resources.py"),
    "budget": ("aamoe/budget.py",),
    "splash": ("mixers/splash.py", "splash_attention"),
    "projections": ("aamoe_jax/layers.py", "aamoe_jax/aamoe/layer.py", "mixers/convolution.py", "mixers/attention.py"),
}
"""Parts of a layer, by the file that an operation is of; the first that fits. All else is `other`."""

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")


@functools.cache
def config(m: int | None = None) -> ModelConfig:
    """The sizes at which kernels are tabled, with the layer of aamoe.gin. The larger its resources, the fewer: of 128
    keys there are 64 experts, a token gets 8 on average, and K_max = 32 slots are sorted.

    Args:
      m: keys of a resource. None, where nothing depends on it: 128.
    """
    m = m or 128
    return ModelConfig(
        d_model=1024,
        num_heads=8,
        num_layers=1,
        dtype="bfloat16",
        aamoe=AAMoEConfig(
            chunk_size=m,
            num_experts=64 * 128 // m,
            router="pooled",
            key_convolution=True,
            query_convolution=True,
            max_resources=32 * 128 // m,
            budget=BudgetConfig(beta=8 * 128 / m, importance="bounded"),
        ),
    )


class Operation(NamedTuple):
    """One line of a compiled program."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """Attributes, metadata and all."""

    def attribute(self, name: str) -> str | None:
        """A computation that it calls."""
        found = re.search(rf"{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


class Key(NamedTuple):
    """What is compiled: a chip, a layer, the size of its resources, and its rows."""

    chip: str
    layer: str
    m: int | None
    length: int
    rows: int


class Program(NamedTuple):
    """A compiled module."""

    computations: dict[str, list[Operation]]
    entry: str
    files: dict[int, str]
    """By the number of a stack frame, the file that its innermost call is in."""


class Cost(NamedTuple):
    """What one operation takes, each time that it runs."""

    part: str
    cycles: int
    bytes: int
    times: int

    def nanoseconds(self, chip: Chip) -> float:
        """In all, on one device."""
        bandwidth = chip.bandwidth * chip.device_cores
        return 1e9 * self.times * max(self.cycles / chip.clock, self.bytes / bandwidth)


def case(name: str, m: int | None, length: int, rows: int) -> tuple[Callable[..., Any], Any]:
    """Both passes of one mixer, statistics included, for `compile_apart`."""
    trial = Trial(name, config(m))

    def step(params: Any, inputs: Inputs, row: Row, cotangent: Any) -> tuple[Any, Any, Any]:
        output, pull_back, statistics = trial.vjp_and_statistics(params, inputs, row)
        return output, pull_back(cotangent), statistics

    params, inputs, row = trial.shapes(rows, length)
    return step, (params, inputs, row, inputs.h)


def parse(text: str) -> Program:
    """A module as the compiler prints it."""
    computations: dict[str, list[Operation]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if begins := _COMPUTATION.match(line):
            current = computations.setdefault(begins[2], [])
            entry = begins[2] if begins[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            name, shape, opcode, rest = found.groups()
            arguments = rest.partition(")")[0] if opcode != "fusion" else rest.partition("), ")[0]
            current.append(Operation(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", arguments)), rest))
    names = {int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.MULTILINE)}
    locations = re.findall(r"^(\d+) \{file_name_id=(\d+)", _section(text, "FileLocations"), re.MULTILINE)
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", _section(text, "StackFrames"), re.MULTILINE)
    of_location = {location: names[int(name)] for location, name in locations}
    return Program(computations, entry, {int(frame): of_location[location] for frame, location in frames})


def _section(text: str, title: str) -> str:
    return text.partition(f"\n{title}\n")[2].partition("\n\n")[0]


def executed(program: Program, costs: Callable[[Operation], float]) -> Iterator[tuple[Operation, int]]:
    """Every operation that runs on its own, and how often.

    Args:
      costs: of one operation, by which the dearer branch of a conditional is found.
    """

    def run(computation: str, times: int) -> Iterator[tuple[Operation, int]]:
        for operation in program.computations[computation]:
            if operation.opcode == "while":
                body, condition = (operation.attribute(name) or "" for name in ("body", "condition"))
                yield from run(body, times * trips(program.computations[condition]))
            elif operation.opcode == "conditional":
                listed = re.search(r"branch_computations=\{([^}]*)\}", operation.rest)
                names = re.findall(r"[\w.\-]+", listed[1]) if listed else []
                names = names or [operation.attribute(f"{side}_computation") or "" for side in ("true", "false")]
                yield from max((list(run(name, times)) for name in names), key=total)
            elif operation.opcode == "call":
                yield from run(operation.attribute("to_apply") or "", times)
            elif operation.opcode not in FREE and not BESIDE.search(operation.opcode):
                yield operation, times

    def total(branch: list[tuple[Operation, int]]) -> float:
        return sum(times * costs(operation) for operation, times in branch)

    yield from run(program.entry, 1)


def trips(condition: list[Operation]) -> int:
    """Of a loop that counts up to a constant; else 1."""
    bounds = [int(found[1]) for op in condition if (found := re.match(r"(\d+)\)", op.rest)) and op.opcode == "constant"]
    return max(bounds, default=1)


def hbm_bytes(shape: str) -> int:
    """Of the arrays that are in HBM: S(1) is VMEM."""
    total = 0.0
    for bits, dims, layout in _SHAPE.findall(shape):
        if "S(" not in layout:
            total += int(bits or 8) / 8 * float(np.prod([int(n) for n in dims.split(",") if n] or [1]))
    return int(total)


def costs_of(program: Program, folder: Path) -> list[Cost]:
    """What every operation of a layer takes; attention kernels left out."""
    shapes = {op.name: op.shape for operations in program.computations.values() for op in operations}
    listed, shared = listings(folder), equals(folder)

    @functools.cache
    def cycles(name: str) -> int:
        path = listed.get(name) or listed.get(shared.get(name, ""))
        return schedule.whole_cycles(path.read_text(encoding="utf-8")) if path else 0

    def moved(operation: Operation) -> int:
        if operation.opcode == "custom-call" and not operation.operands:  # room for an array that a kernel writes
            return 0
        inside = program.computations.get(_called(operation)) or [operation]
        written = hbm_bytes(operation.shape)
        read = [hbm_bytes(shapes.get(name, "")) for name in operation.operands]
        if inside[-1].opcode == "dynamic-update-slice" and written in read:  # in place: a part of the array is written
            read.remove(written)
            written = min(written, hbm_bytes(shapes[inside[-1].operands[1]]))
        elif any(op.opcode in SLICES for op in inside):
            read = [min(size, written) for size in read]
        return written + sum(read)

    def part(operation: Operation) -> str:
        for begins, name in OTHER_KERNELS.items() if operation.opcode == "custom-call" else ():
            if operation.name.startswith(begins):
                return name
        inside = {op.opcode for op in program.computations.get(_called(operation), ())} | {operation.opcode}
        frame = re.search(r"stack_frame_id=(\d+)", operation.rest)
        file = program.files.get(int(frame[1]), "") if frame else ""
        if inside & {"convolution", "dot"}:
            return ROUTER_PRODUCTS if any(end in file for end in PLACES["router"]) else PRODUCTS
        named = (name for name, ends in PLACES.items() if any(end in file for end in ends))
        return next(named, "other" if file else "copies")

    def is_kernel(operation: Operation) -> bool:
        return operation.opcode == "custom-call" and operation.name.startswith(KERNELS)

    found = executed(program, lambda operation: 0 if is_kernel(operation) else cycles(operation.name))
    return [Cost(part(op), cycles(op.name), moved(op), times) for op, times in found if not is_kernel(op)]


def costs_in(folder: Path) -> list[Cost]:
    """Of the one program whose compiler has written into the folder."""
    (text,) = folder.glob("*TLP-hlo.txt")
    return costs_of(parse(text.read_text(encoding="utf-8")), folder)


def bundles_around_kernels(folder: Path) -> int:
    """Of the same program, all but its attention kernels, on one core."""
    return sum(cost.cycles * cost.times for cost in costs_in(folder))


def _called(operation: Operation) -> str:
    return operation.attribute("calls") or ""


def listings(folder: Path) -> dict[str, Path]:
    """The final listing of every operation that has one, by its name."""
    pattern = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt$")
    return {found[1]: path for path in folder.iterdir() if (found := pattern.match(path.name))}


def equals(folder: Path) -> dict[str, str]:
    """The operation whose listing another shares, by the name of the other."""
    result: dict[str, str] = {}
    for path in folder.glob("*-TLP-*deduplication-map.txt"):
        for group in path.read_text(encoding="utf-8").split("key:")[1:]:
            key, _, rest = group.partition("\n")
            result |= {name.strip(): key for name in rest.splitlines()[2:]}
    return result


def measured(chip: str, layer: str, m: int | None, length: int, rows: int = 1) -> dict[str, Any]:
    """Nanoseconds a token of the parts of one layer, modelled. m: None for a dense one."""
    parts: dict[str, float] = {}
    for name in LAYERS[layer]:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root, "dump")
            shape = {"name": name, "m": m, "length": length, "rows": rows}
            aot.compile_apart(chip, "benchmarks.compiled_layer:case", shape, dump_to=folder)
            for cost in costs_in(folder):
                parts[cost.part] = parts.get(cost.part, 0.0) + cost.nanoseconds(TPUS[chip]) / (rows * length)
    ordered = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return {"chip": chip, "layer": layer, "m": m, "length": length, "rows": rows, "parts": ordered}


def wanted(chips: list[str], sizes: list[int], lengths: list[int], tokens: int) -> list[Key]:
    """Everything to compile, for resources of these sizes."""
    keys = []
    for m, length, chip in itertools.product(sizes, lengths, chips):
        rows = tokens // length or 1
        keys += [Key(chip, "aamoe", m, length, rows), Key(chip, "dense", None, rows * length, 1)]
    return list(dict.fromkeys(keys))


def report(record: dict[str, Any]) -> str:
    """The record as markdown."""
    names = [PRODUCTS, ROUTER_PRODUCTS, *PLACES, "copies", "other"]
    rows = []
    for row in record["rows"]:
        cells = [row["parts"].get(name, 0.0) for name in names]
        shape = row["chip"], row["layer"], row["m"] or "", row["length"], row["rows"]
        rows.append([*shape, *(f"{cell:.0f}" for cell in (sum(cells), *cells))])
    model, layer = config(), config().aamoe
    texts = [
        "# One layer on TPUs, as compiled",
        f"Nanoseconds a token, forward and backward, of all but the attention kernels: AA-MoE (D = {model.d_model}, "
        f"H = {model.num_heads}; E = {layer.num_experts}, beta = {layer.budget.beta:g}, K_max = {layer.max_resources} "
        f"at m = {layer.chunk_size}, and scaled with m so that there are as many keys; pooled router, convolution of "
        f"queries and keys), and dense attention with a feed-forward of width {4 * model.d_model}; rows of L tokens, "
        "bfloat16, one device (of v5p, two cores). Modelled from the compiler's listings and not "
        "measured: bundles times trips at the chip's clock, or bytes at HBM's bandwidth. `tables` is what lies around "
        "the kernel of chosen resources. Experts are prepared once for all rows: the fewer tokens there are, the more "
        "each pays. Without its attention kernel a dense layer is the same for rows of every length.",
        plain_table(["chip", "layer", "m", "L", "rows", "all", *names], "llrrr" + "r" * (len(names) + 1), rows),
        measure.closing(record["command"], record["versions"]),
    ]
    return "\n\n".join(texts)


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_list("chips", ["v5e", "v6e"], f"Which of {', '.join(TPUS)}.")
    flags.DEFINE_list("sizes", ["128"], "m: keys of a resource.")
    flags.DEFINE_list("lengths", ["2048", "8192", "32768"], "L: tokens of a row.")
    flags.DEFINE_integer("tokens", 32_768, "Of one device, in as many rows as they fill; 0: one row.", lower_bound=0)
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.", required=True)


def main() -> None:
    path, versions = Path(FLAGS.output), measure.machine()["versions"]
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"command": "", "rows": []}
    commands = "\n".join(dict.fromkeys([*known["command"].splitlines(), command_line("benchmarks.compiled_layer")]))
    rows = known["rows"]
    done = {tuple(row[name] for name in Key._fields) for row in rows}
    sizes, lengths = ([int(x) for x in given] for given in (FLAGS.sizes, FLAGS.lengths))
    for key in wanted(FLAGS.chips, sizes, lengths, FLAGS.tokens):
        if key not in done:
            rows.append(measured(*key))
            rows.sort(key=lambda row: (row["layer"], row["m"] or 0, list(TPUS).index(row["chip"]), row["length"]))
            record = {"command": commands, "versions": versions, "rows": rows}
            publish(record, report(record), path)
            print(f"{key}: done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    start(define_flags, main)
