"""Puts one small bug after the other into a copy of the code, and asks the nearest tests whether they notice.

    python -m tests.mutants --count=150 --output=/tmp/mutants

A sample of mutants is drawn by seed, in an order that does not depend on how many are asked for. What has run is in
OUTPUT.jsonl, so the same command goes on where it was stopped; OUTPUT.md lists what survived. A survivor is a hole in
the tests, or changes nothing that counts.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("aamoe_jax/aamoe", "aamoe_jax/mixers", "pallas_kernels")
"""What is mutated."""
IGNORED = ("Raise", "Assert", "AnnAssign", "Import", "ImportFrom", "JoinedStr")
"""Syntax in which a change is none of the mathematics."""
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min", "cumsum": "cumprod", "exp": "square"}
NEAREST = (
    ("aamoe_jax/aamoe/costs.py", ("tests/ledger/test_ledger.py -k aamoe",)),
    ("aamoe_jax/aamoe/budget.py", ("tests/aamoe/test_budget.py",)),
    ("aamoe_jax/aamoe/allocation.py", ("tests/aamoe/test_allocation.py", "tests/aamoe/test_ablations.py")),
    ("aamoe_jax/aamoe/router.py", ("tests/aamoe/test_router.py",)),
    ("aamoe_jax/aamoe/correlations.py", ("tests/evaluation/test_budget_use.py",)),
    (
        "aamoe_jax/aamoe/statistics.py",
        ("tests/aamoe/test_layer.py -k statistics", "tests/evaluation/test_perplexity.py"),
    ),
    (
        "aamoe_jax/aamoe/parallel.py",
        ("tests/sharding/test_parallel.py", "tests/sharding/test_meshes.py -k pooled_keys"),
    ),
    ("aamoe_jax/aamoe/layer.py", ("tests/aamoe/test_layer.py",)),
    ("aamoe_jax/aamoe/attend.py", ("tests/aamoe/test_layer.py",)),
    ("aamoe_jax/aamoe/decode.py", ("tests/generation/test_decoder.py -k aamoe",)),
    ("aamoe_jax/aamoe/cache.py", ("tests/generation/test_decoder.py -k aamoe",)),
    (
        "aamoe_jax/aamoe",
        ("tests/mixers/test_every_mixer.py -k aamoe", "tests/aamoe", "tests/generation/test_decoder.py"),
    ),
    ("aamoe_jax/mixers/experts.py", ("tests/mixers/test_experts.py", "tests/training/test_auxiliary.py")),
    ("aamoe_jax/mixers/expert_sum.py", ("tests/mixers/test_experts.py",)),
    ("aamoe_jax/mixers/grouped.py", ("tests/mixers/test_experts.py",)),
    ("aamoe_jax/mixers/depth.py", ("tests/mixers/test_depth.py",)),
    ("aamoe_jax/mixers/dynamic.py", ("tests/mixers/test_dynamic.py",)),
    ("aamoe_jax/mixers/filtered.py", ("tests/mixers/test_dynamic.py",)),
    ("aamoe_jax/mixers/routed.py", ("tests/mixers/test_routed.py",)),
    ("aamoe_jax/mixers/recurrent.py", ("tests/mixers/test_deconstructed.py",)),
    ("aamoe_jax/mixers/fixed_maps.py", ("tests/mixers/test_deconstructed.py",)),
    ("aamoe_jax/mixers/clustered.py", ("tests/mixers/test_dynamic.py",)),
    ("aamoe_jax/mixers/flash.py", ("tests/mixers/test_flash.py",)),
    ("aamoe_jax/mixers/fastest.py", ("tests/mixers/test_fastest.py",)),
    ("aamoe_jax/mixers/sparse_attention.py", ("tests/mixers/test_sparse_attention.py",)),
    ("aamoe_jax/mixers", ("tests/ledger/test_ledger.py", "tests/mixers", "tests/generation/test_decoder.py")),
    ("pallas_kernels/selection", ("tests/pallas_kernels/test_selection.py",)),
    ("pallas_kernels/block_sparse_attention/paged", ("tests/pallas_kernels/test_paged.py",)),
    ("pallas_kernels/block_sparse_attention/gpu", ("tests/pallas_kernels/test_gpu.py",)),
    ("pallas_kernels/block_sparse_attention/tpu/dense", ("tests/pallas_kernels/test_dense.py",)),
    ("pallas_kernels/block_sparse_attention/tpu/window", ("tests/pallas_kernels/test_dense.py",)),
    ("pallas_kernels/block_sparse_attention/tpu/gathered", ("tests/pallas_kernels/test_gathered.py",)),
    (
        "pallas_kernels/block_sparse_attention/tpu",
        ("tests/pallas_kernels/test_block_sparse_attention.py", "tests/pallas_kernels/test_dispatch.py"),
    ),
    ("pallas_kernels/schedule.py", ("tests/pallas_kernels/test_schedule.py",)),
    ("pallas_kernels/block_sparse_attention/tables.py", ("tests/pallas_kernels/test_tables.py",)),
    ("pallas_kernels", ("tests/pallas_kernels",)),
)
"""The tests that are asked, the first ones first; all entries that fit the start of a path."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: characters from `start` to `stop` of a file become `new`."""

    path: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.start}:{self.stop}:{self.new}"

    def applied(self, source: str) -> str:
        """The file with the bug in it."""
        return source[: self.start] + self.new + source[self.stop :]


class Finder(ast.NodeVisitor):
    """All mutants of one file."""

    def __init__(self, path: str, source: str):
        self.path, self.source, self.found = path, source, list[Mutant]()
        self._bytes = source.encode()
        self._lines = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        """Annotations, texts, decorators and messages stay as they are."""
        if type(node).__name__ in IGNORED:
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for child in node.body:
                self.visit(child)
            return
        for old, new in self._changes(node):
            self._add(*old, new)
        self.generic_visit(node)

    def _changes(self, node: ast.AST) -> Iterator[tuple[tuple[int, int], str]]:
        whole = self._span(node)
        match node:
            case ast.BinOp(left=left, op=op, right=right):
                yield from self._operator(left, op, right)
                if isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div):
                    yield whole, self._text(left)  # a term is dropped
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield from self._operator(left, op, right)
            case ast.BoolOp(op=op, values=[left, right]):
                yield from self._operator(left, op, right)
            case ast.UnaryOp(op=ast.USub() | ast.Invert() | ast.Not(), operand=operand):
                yield whole, self._text(operand)
            case ast.Constant(value=bool() as value):
                yield whole, str(not value)
            case ast.Constant(value=int() as value):
                yield whole, str(value + 1)
            case ast.Constant(value=float() as value):
                yield whole, repr(2 * value or 1.0)
            case ast.Call(func=function, args=[first, second, *_]) if not isinstance(second, ast.Starred):
                name = ast.unparse(function).rpartition(".")[2]
                if name == "where" and len(node.args) == 3:
                    first, second = node.args[1:]
                if name not in ("isinstance", "getattr", "hasattr", "minimum", "maximum", "min", "max"):
                    between = self.source[self._span(first)[1] : self._span(second)[0]]
                    both = self._span(first)[0], self._span(second)[1]
                    yield both, self._text(second) + between + self._text(first)  # arguments are swapped
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            yield (whole[1] - len(node.attr), whole[1]), NAMES[node.attr]
        if isinstance(node, ast.Name) and node.id in ("min", "max"):
            yield whole, NAMES[node.id]

    def _operator(self, left: ast.expr, op: ast.AST, right: ast.expr) -> Iterator[tuple[tuple[int, int], str]]:
        if type(op) in OPERATORS:
            start, stop = self._span(left)[1], self._span(right)[0]
            between = self.source[start:stop]
            symbol = between.strip(" ()\n\\")
            if "#" not in between and between.count(symbol) == 1:
                at = start + between.index(symbol)
                yield (at, at + len(symbol)), OPERATORS[type(op)]

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends, in characters."""
        if not isinstance(node, ast.expr):
            return 0, 0
        ends = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
        start, stop = (self._lines[line - 1] + column for line, column in ends)
        return len(self._bytes[:start].decode()), len(self._bytes[:stop].decode())

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self.source[start:stop]

    def _add(self, start: int, stop: int, new: str) -> None:
        mutant = Mutant(self.path, self.source.count("\n", 0, start) + 1, start, stop, self.source[start:stop], new)
        try:
            same = ast.dump(ast.parse(mutant.applied(self.source))) == ast.dump(ast.parse(self.source))
        except SyntaxError:
            return
        if not same:
            self.found.append(mutant)


def mutants(rooms: Sequence[str]) -> list[Mutant]:
    """All mutants of the files under some folders, or of some files."""
    found: dict[str, Mutant] = {}
    for room in rooms:
        paths = [ROOT / room] if room.endswith(".py") else sorted((ROOT / room).rglob("*.py"))
        for path in paths:
            name = path.relative_to(ROOT).as_posix()
            found |= {mutant.name: mutant for mutant in Finder(name, path.read_text(encoding="utf-8")).found}
    return list(found.values())


def nearest(path: str) -> list[str]:
    """The tests to ask about a file, nearest first."""
    return list(dict.fromkeys(test for start, tests in NEAREST if path.startswith(start) for test in tests))


def outcome(mutant: Mutant, copy: Path, limit: int) -> dict[str, object]:
    """Runs the nearest tests of a copy of the tree with one bug in it, until one fails or the time is over."""
    file, began = copy / mutant.path, time.monotonic()
    source = file.read_text(encoding="utf-8")
    asked, verdict = [], "survived"
    try:
        file.write_text(mutant.applied(source), encoding="utf-8")
        for tests in nearest(mutant.path):
            left = limit - (time.monotonic() - began)
            if left <= 0:
                break
            asked.append(tests)
            code = run(f"{sys.executable} -m pytest -x -q -p no:cacheprovider {tests}".split(), copy, left)
            if code not in (0, 5):  # 5: no test of that name
                verdict = "noticed" if code is not None else "survived, out of time"
                break
    finally:
        file.write_text(source, encoding="utf-8")
    seconds = round(time.monotonic() - began, 1)
    return dataclasses.asdict(mutant) | {"name": mutant.name, "verdict": verdict, "asked": asked, "seconds": seconds}


def run(command: list[str], folder: Path, seconds: float) -> int | None:
    """The exit status; None where the time was over. What it started ends with it."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(command, cwd=folder, env=environment, **quiet) as process:  # type: ignore[call-overload]
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def report(rows: Sequence[dict], total: int) -> str:
    """What survived, as Markdown."""
    lost = [row for row in rows if row["verdict"] != "noticed"]
    lines = [f"{len(rows)} mutants of {total} ran; {len(rows) - len(lost)} were noticed, {len(lost)} were not.", ""]
    lines += ["| where | was | became | verdict | asked |", "|---|---|---|---|---|"]
    for row in lost:
        old, new = (str(row[name]).replace("|", "\\|").replace("\n", " ") for name in ("old", "new"))
        where, asked = f"{row['path']}:{row['line']}", ", ".join(row["asked"])
        lines.append(f"| {where} | `{old}` | `{new}` | {row['verdict']} | {asked} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="how many mutants of the sample have run at the end")
    parser.add_argument("--seed", type=int, default=0, help="draws the sample")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one mutant")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no mutant is begun after so many")
    parser.add_argument("--output", type=Path, required=True, help="OUTPUT.jsonl and OUTPUT.md are written")
    parser.add_argument("rooms", nargs="*", default=ROOMS, help="folders and files that are mutated")
    options = parser.parse_args(argv)
    everything, began = mutants(options.rooms), time.monotonic()
    random.Random(options.seed).shuffle(everything)
    records = options.output.with_suffix(".jsonl")
    rows = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    done = {row["name"] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=lambda at, _: (".git", "runs", "data", "site") if Path(at) == ROOT else ())
        for mutant in everything[: options.count]:
            if mutant.name in done or time.monotonic() - began > 60 * options.minutes:
                continue
            rows.append(outcome(mutant, copy, options.limit))
            with records.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(
                f"{len(rows)}: {rows[-1]['verdict']} in {rows[-1]['seconds']} s: {mutant.path}:{mutant.line}",
                flush=True,
            )
    options.output.with_suffix(".md").write_text(report(rows, len(everything)))


if __name__ == "__main__":
    main()
