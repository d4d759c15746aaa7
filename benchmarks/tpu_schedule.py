"""The TPU compiler's own schedule of every kernel, for chips that are not there; JAX's splash attention beside them.

    python -m benchmarks.tpu_schedule --output=experiments/results/tpu_schedule.json --golden

Needs libtpu (extra `aot`). A core issues one bundle a cycle, in order: the bundles of a steady step of the grid, over
the pairs of the step, are modelled cycles a pair. The model leaves out memory stalls, bank conflicts and the steps that
begin and end something. It stands beside two limits: the FLOPs at the matrix units' peak, and the bytes at HBM's. With
--operation the whole operation is compiled too, and what it runs beside its kernels is set beside theirs.

A pair is one token and the m keys of one resource, all heads: 4mD FLOPs forward and 10mD backward, D = H d. Splash
attention is counted in the same pairs: a step of T queries, T keys and one head is T T / (m H) of them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from absl import flags

from benchmarks.compiled_layer import bundles_around_kernels
from benchmarks.schedule_report import report
from experiments.program import command_line, publish, start
from pallas_kernels import aot, block_sparse_attention, schedule
from pallas_kernels.block_sparse_attention.tpu import gathered as gathered_path
from pallas_kernels.block_sparse_attention.tpu.gathered_kernels import CHUNK
from pallas_kernels.chips import TPUS

FLAGS = flags.FLAGS
GOLDEN = Path(__file__).parent / "golden" / "tpu_schedule.json"
GOLDEN_COMMAND = "python -m benchmarks.tpu_schedule --golden"
TOLERANCE = 0.05
"""How much more bundles a pair than the golden file has is a regression."""
SPLASH_TOKENS = 8192
CASES = "tests.pallas_kernels"
"""Where the kernels' cases are."""
GROUP = 1024
"""Lanes of a head group, a step of the grid, by paths A and C; path B's follow from its layout."""
CHUNKS, BLOCKS = 128, 16
"""Chunks of pairs and blocks of tokens in the case of path B's sums."""

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PATHS = ("resident", "gathered", "dense")
FLOPS = {"forward": 4, "backward": 10}
"""Of a pair, over m D: two products, and five."""


class Shape(NamedTuple):
    """What a kernel is compiled for; bfloat16 throughout."""

    m: int
    d: int
    heads: int
    tile: int

    @property
    def width(self) -> int:
        """D."""
        return self.d * self.heads


class Part(NamedTuple):
    """One `pallas_call`: what to compile, and how many pairs a step of its grid serves."""

    case: str  # module:function
    options: dict[str, Any]
    call: str
    pairs_a_step: float


class Kernel(NamedTuple):
    """One pass of one way to attend, and how its parts and bytes are counted."""

    name: str
    direction: Direction
    parts: Callable[[Shape], list[Part]]
    bytes_a_pair: Callable[[Shape, list[aot.Compiled]], float]
    bytes_apart: Callable[[Shape], float] = lambda shape: 0.0
    """Of these, what XLA moves before and after the kernels: no bundle of theirs runs beside it."""


HEADLINE = Shape(128, 128, 8, 512)
SHAPES = {
    "headline": HEADLINE,
    "short": Shape(128, 128, 8, 256),
    "shortest": Shape(128, 128, 8, 128),
    "long": Shape(256, 128, 8, 512),
    "long_short": Shape(256, 128, 8, 256),
    "long_shortest": Shape(256, 128, 8, 128),
    "wide": Shape(256, 256, 4, 512),
    "longest": Shape(512, 128, 8, 512),
    "small": Shape(64, 128, 8, 512),
    "narrow": Shape(128, 64, 16, 512),
    "double": Shape(128, 128, 16, 512),
}
"""`short` and `shortest` tiles, of `long` resources too; `long`, `longest` and `small` resources, `wide` and `narrow`
heads, `double` width."""
OPERATION = {"tokens": 8192, "experts": 64, "rows": 512}
"""The whole operation at the headline's sizes: 64 chunks and 64 experts, 512 pairs each, 8 a token."""
OPERATION_PAIRS = 8 * 8192
COSTS = Path(block_sparse_attention.__file__).parent / "tpu" / "costs.json"
RESULTS = Path(__file__).parents[1] / "experiments" / "results"
COST_TABLES = ("tpu_schedule", "tpu_schedule_tiles", "tpu_schedule_paths")
"""The headline's, and those of smaller tiles."""


def _sizes(shape: Shape, direction: str) -> dict[str, Any]:
    return {"name": direction, "m": shape.m, "d": shape.d, "heads": shape.heads, "tile": shape.tile}


def _arrays(programs: Iterable[aot.Compiled]) -> int:
    return sum(program.argument_bytes + program.output_bytes for program in programs)


def resident(direction: Direction, maximum: Literal["bounded", "running"] = "bounded") -> Kernel:
    """Queries and sums of all tokens in VMEM. The case: 64 tiles, 32 resources, 8 pairs a token, or 16 where m leaves
    room for half of the tokens; arrays move once."""
    case = f"{direction}_running" if maximum == "running" else direction

    def parts(shape: Shape) -> list[Part]:
        options = _sizes(shape, case) | {"tokens": (8 if shape.m < 512 else 4) * shape.tile}
        call = f"block_sparse_attention_{case}"
        return [Part(f"{CASES}.chip_cases:kernel", options, call, shape.tile / max(1, shape.width // GROUP))]

    name = "resident" if maximum == "bounded" else f"resident_{maximum}"
    return Kernel(name, direction, parts, lambda shape, programs: _arrays(programs) / (64 * shape.tile))


def gathered(direction: Direction) -> Kernel:
    """Rows of pairs in HBM, and the sums of a token's rows. The cases: 64 tiles, 32 resources, 32 pairs a token.

    XLA gathers the rows (and permutes outputs) apart: only its bytes are counted.
    """
    sums = {"forward": "merge", "backward": "add"}[direction]

    def parts(shape: Shape) -> list[Part]:
        groups = gathered_path.choose_layout(shape.heads, shape.d, jnp.dtype(jnp.bfloat16), rows=0.0).groups
        case = f"{CASES}.gathered_cases:kernel"
        by_chunk = CHUNKS * CHUNK / (CHUNKS + BLOCKS) / groups  # each block of tokens ends inside a chunk of pairs
        return [
            Part(case, _sizes(shape, direction), f"gathered_{direction}", shape.tile / groups),
            Part(case, _sizes(shape, sums), f"gathered_{sums}", by_chunk),
        ]

    def apart(shape: Shape) -> float:
        # Of rows, queries come and outputs go, or their gradients: bfloat16 and float32, each read and written.
        return (2 * 2 + 2 * 4) * shape.width

    def moved(shape: Shape, programs: list[aot.Compiled]) -> float:
        pairs = zip(programs, (64 * shape.tile, CHUNKS * CHUNK), strict=True)
        return sum(_arrays([program]) / count for program, count in pairs) + apart(shape)

    return Kernel("gathered", direction, parts, moved, apart)


def dense(direction: Direction) -> Kernel:
    """Every token against every resource, chosen or not, under a bias row, in tiles of its own.

    Of a step, bfloat16 blocks of 512 keys and values are read (forward), or queries and gradients of 512 tokens
    (backward), and 8 bytes of bias and visibility a pair. What is met once is left out.
    """

    def pairs(shape: Shape) -> float:
        return 512 * max(1, 512 // shape.m) / max(1, shape.width // GROUP)

    def parts(shape: Shape) -> list[Part]:
        options = {"tokens": 4096, "heads": shape.heads, "d": shape.d, "m": shape.m}
        part = Part(f"{CASES}.dense_cases:kernels", options, f"dense_attention_{direction}", pairs(shape))
        return [part] if shape.tile == HEADLINE.tile else []

    return Kernel("dense", direction, parts, lambda shape, _: 2 * 2 * 512 * min(shape.width, GROUP) / pairs(shape) + 8)


def paged() -> Kernel:
    """Decoding: every pair's keys and values come from HBM for one token. A step is a sequence, counted with one slot,
    so that what a sequence costs besides is counted in full."""

    def parts(shape: Shape) -> list[Part]:
        options = {"m": shape.m, "d": shape.d, "heads": shape.heads}
        part = Part(f"{CASES}.decode_cases:decode", options, "paged_attention", 1.0)
        return [part] if shape.tile == HEADLINE.tile else []  # it has no tiles

    return Kernel("paged", "forward", parts, lambda shape, _: 2 * 2 * shape.m * shape.width)


def splash(direction: Direction) -> Kernel:
    """JAX's flash attention; of a step, bfloat16 blocks of T x d are fetched or written anew."""
    call = {"forward": "splash_mha_fwd_residuals", "backward": "splash_mha_dkv_no_residuals"}[direction]
    # Keys and values; queries, the output's gradient, and partial gradients of queries, written and read.
    blocks = {"forward": 2, "backward": 4}[direction]

    def pairs(shape: Shape) -> float:
        return shape.tile**2 / (shape.m * shape.heads)

    def parts(shape: Shape) -> list[Part]:
        options = {"tokens": SPLASH_TOKENS, "heads": shape.heads, "d": shape.d, "tile": shape.tile}
        return [Part("benchmarks.tpu_cases:splash", options, call, pairs(shape))]

    return Kernel("splash", direction, parts, lambda shape, _: 2 * blocks * shape.tile * shape.d / pairs(shape))


ATTENTION = tuple(kernel(direction) for kernel in (resident, gathered, dense) for direction in DIRECTIONS)
KERNELS = (*ATTENTION, resident("forward", "running"), paged(), *map(splash, DIRECTIONS))


class Measured(NamedTuple):
    """One part as the compiler has it."""

    program: aot.Compiled
    schedule: schedule.Schedule
    pairs_a_step: float

    @property
    def bundles(self) -> float:
        """A pair."""
        return self.schedule.cycles_a_step / self.pairs_a_step


def row(chip: str, kernel: Kernel, shape: Shape, parts: list[Measured]) -> dict[str, Any]:
    """Modelled figures of one kernel: time is issue or HBM, whichever takes longer, and what XLA moves apart."""
    limits = TPUS[chip]
    bundles = sum(part.bundles for part in parts)
    names = parts[0].schedule.slots
    slots = {slot: sum(part.schedule.slots[slot] * part.bundles for part in parts) / bundles for slot in names}
    busiest = max(slots, key=slots.__getitem__)
    flops = FLOPS[kernel.direction] * shape.m * shape.width
    moved = kernel.bytes_a_pair(shape, [part.program for part in parts])
    issue = 1e9 * bundles / limits.clock
    hbm, apart = (1e9 * count / limits.bandwidth for count in (moved, kernel.bytes_apart(shape)))
    nanoseconds = max(issue, hbm - apart) + apart
    return {
        "chip": chip,
        "kernel": kernel.name,
        "direction": kernel.direction,
        **shape._asdict(),
        "bundles_a_pair": bundles,
        "slots": slots,
        "busiest": busiest,
        "busiest_bundles": slots[busiest] * bundles,
        "spills": sum(part.schedule.spills for part in parts),
        "bytes_a_pair": moved,
        "nanoseconds": nanoseconds,
        "issue_nanoseconds": issue,
        "mxu_nanoseconds": 1e9 * flops / limits.flops,
        "hbm_nanoseconds": hbm,
        "teraflops": flops / nanoseconds / 1e3,
        "share_of_peak": 1e9 * flops / nanoseconds / limits.flops,
    }


def measured(chip: str, kernels: Iterable[Kernel], shape: Shape) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Rows of the kernels at one shape; and those that the compiler refuses, with its words."""
    rows, refused = [], []
    with tempfile.TemporaryDirectory() as root:
        programs: dict[str, tuple[aot.Compiled, Path]] = {}

        def compiled(part: Part) -> Measured:
            """Every case is compiled once, whatever kernels are read from it."""
            case = json.dumps([part.case, part.options])
            if case not in programs:
                folder = Path(root, str(len(programs)))
                programs[case] = aot.compile_apart(chip, part.case, part.options, dump_to=folder), folder
            program, folder = programs[case]
            return Measured(program, schedule.read(folder, part.call), part.pairs_a_step)

        for kernel in kernels:
            name = key({"chip": chip, "kernel": kernel.name, "direction": kernel.direction} | shape._asdict())
            if not (parts := kernel.parts(shape)):
                continue
            try:
                rows.append(row(chip, kernel, shape, [compiled(part) for part in parts]))
                outcome = f"{rows[-1]['bundles_a_pair']:.2f} bundles a pair"
            except aot.CompileError as error:
                outcome = str(error).partition(f" for {chip}: ")[2].splitlines()[0][:300]
                refused.append({"what": name, "why": outcome})
            print(f"{name}: {outcome}", file=sys.stderr, flush=True)
    return rows, refused


def around(chip: str) -> dict[str, Any]:
    """Bundles a pair, both passes, of all that one core runs for the whole operation beside its attention kernels."""
    options = OPERATION | {name: getattr(HEADLINE, name) for name in ("m", "d", "heads")}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "dump")
        aot.compile_apart(chip, f"{CASES}.chip_cases:attention", options, dump_to=folder)
        bundles = bundles_around_kernels(folder)
    # Of what the cores of a device divide, each has its part.
    return {"chip": chip, "bundles_a_pair": bundles * TPUS[chip].device_cores / OPERATION_PAIRS}


def key(row: dict[str, Any]) -> str:
    """A row's name in the golden file."""
    sizes = ", ".join(f"{name} {row[name]}" for name in Shape._fields)
    return f"{row['chip']} {row['kernel']} {row['direction']}: {sizes}"


def write_golden(rows: list[dict[str, Any]]) -> None:
    """The bundles a pair of this project's kernels, and the compiler that they hold for; of its others, what is known.

    All of them take over half an hour, so that a run of some replaces those alone; another compiler's are dropped.
    """
    libtpu = importlib.metadata.version("libtpu")
    known = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {"libtpu": None}
    mine = known["bundles_a_pair"] if known["libtpu"] == libtpu else {}
    mine |= {key(row): round(row["bundles_a_pair"], 3) for row in rows if row["kernel"] != "splash"}
    record = {"libtpu": libtpu, "command": GOLDEN_COMMAND, "bundles_a_pair": mine}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n")


def costs(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Nanoseconds of one pair, both passes, at the headline's sizes: by chip, path and tile; see `dispatch.COSTS`.

    Raises:
      ValueError: a chip, a path or a pass is missing.
    """
    found: dict[str, dict[str, dict[str, dict[str, dict[str, Any]]]]] = {}
    for row in rows:
        if row["kernel"] in PATHS and Shape(row["m"], row["d"], row["heads"], HEADLINE.tile) == HEADLINE:
            tiles = found.setdefault(row["chip"], {}).setdefault(row["kernel"], {})
            tiles.setdefault(str(row["tile"]), {})[row["direction"]] = row
    for chip, path in itertools.product(TPUS, PATHS):
        if set(found.get(chip, {}).get(path, {}).get(str(HEADLINE.tile), {})) != set(DIRECTIONS):
            raise ValueError(f"{path} for {chip} has not both passes at the headline's sizes: no costs are written")

    def of_tile(both: dict[str, dict[str, Any]]) -> dict[str, float]:
        kinds = {"issue": "issue_nanoseconds", "time": "nanoseconds"}
        return {kind: round(sum(row[name] for row in both.values()), 3) for kind, name in kinds.items()}

    return {
        chip: {
            path: {tile: of_tile(both) for tile, both in tiles.items() if len(both) == len(DIRECTIONS)}
            for path, tiles in paths.items()
        }
        for chip, paths in found.items()
    }


def committed_rows() -> list[dict[str, Any]]:
    """Of the tables that costs are made of."""
    tables = (json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in COST_TABLES)
    return [row for table in tables for row in table["rows"]]


def regressions(rows: Iterable[dict[str, Any]], golden: dict[str, float]) -> list[str]:
    """What takes more bundles a pair than the golden file allows, or is not in it."""
    complaints = []
    for found in rows:
        name, bundles = key(found), found["bundles_a_pair"]
        if name not in golden:
            complaints.append(f"{name}: not in the golden file; {GOLDEN_COMMAND}")
        elif bundles > (1 + TOLERANCE) * golden[name]:
            complaints.append(f"{name}: {bundles:.2f} bundles a pair, were {golden[name]:.2f}; {GOLDEN_COMMAND}")
    return complaints


def define_flags() -> None:
    """The flags of this program."""
    names = list(dict.fromkeys(kernel.name for kernel in KERNELS))
    flags.DEFINE_list("chips", list(TPUS), "Which chips.")
    flags.DEFINE_list("kernels", names, "Which kernels.")
    flags.DEFINE_list("shapes", list(SHAPES), "Which shapes.")
    for flag, known in (("chips", TPUS), ("kernels", names), ("shapes", SHAPES)):
        message = f"--{flag}: there are {', '.join(known)}"
        flags.register_validator(flag, lambda given, known=known: set(given) <= set(known), message)
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")
    flags.DEFINE_bool("operation", False, "Also what surrounds the kernels, at the headline's sizes; minutes a chip.")
    flags.DEFINE_bool("golden", False, f"Write {GOLDEN.name}, which the AOT tests compare with.")
    flags.DEFINE_bool("costs", False, f"Write {COSTS.name}, by which TPUs choose, from committed tables; no more.")


def main() -> None:
    if FLAGS.costs:
        COSTS.write_text(json.dumps(costs(committed_rows()), indent=1) + "\n", encoding="utf-8")
        return
    kernels = [kernel for kernel in KERNELS if kernel.name in FLAGS.kernels]
    found = [measured(chip, kernels, SHAPES[name]) for chip in FLAGS.chips for name in FLAGS.shapes]
    rows, refused = (list(itertools.chain.from_iterable(parts)) for parts in zip(*found, strict=True))
    record = {
        "command": command_line("benchmarks.tpu_schedule"),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        "rows": rows,
        "operation": [around(chip) for chip in FLAGS.chips if FLAGS.operation],
        "refused": refused,
    }
    publish(record, report(record), FLAGS.output)
    if FLAGS.golden:
        write_golden(rows)


if __name__ == "__main__":
    start(define_flags, main)
