"""Looks for the block sizes with which `block_sparse_attention` is fastest at one shape, forward and backward.

    python -m pallas_kernels.tune --implementation=pallas_tpu_resident --chip=v5e --tokens=8192
    python -m pallas_kernels.tune --implementation=xla --tokens=4096 --heads=4 --head_size=64 --keys=64

With --chip no chip is needed: its compiler is asked ahead of time (extra `aot`), and the bundles that it schedules for
each candidate's kernels are counted, as `dispatch` counts them. That is a model: memory stalls, and what XLA does
around the kernels, are not in it. Without --chip candidates are timed in turn on the device that JAX has, and the
median counts. The last line is what to pass as `block_sizes`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from pallas_kernels import aot, chips, schedule
from pallas_kernels.block_sparse_attention import BlockSizes, Pairs, block_sparse_attention, interface
from pallas_kernels.block_sparse_attention.tpu import dense, dispatch
from pallas_kernels.block_sparse_attention.types import Problem

SCHEDULED = {
    "pallas_tpu_resident": ("block_sparse_attention_forward", "block_sparse_attention_backward"),
    "pallas_tpu_dense": ("dense_attention_forward", "dense_attention_backward"),
}
"""What is bound by its schedule, and the names of its kernels. "pallas_tpu_gathered" is bound by memory."""
CASE = "pallas_kernels.tune:case"
STEPS = 0.5, 1.0, 2.0
"""Candidates are the planner's sizes times these, every size with every other."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is computed: every token meets the same number of resources, drawn at random."""

    tokens: int = 8192
    heads: int = 8
    head_size: int = 128
    keys: int = 128
    """Of a resource, m."""
    experts: int = 64
    """Resources beside the chunks of context, of which there are tokens / keys."""
    pairs: int = 8
    """Resources of a token."""
    dtype: str = "bfloat16"

    @property
    def chunks(self) -> int:
        """Resources that are context."""
        return self.tokens // self.keys

    def problem(self, block_sizes: BlockSizes) -> Problem:
        """For the planners."""
        resources, dtype = self.chunks + self.experts, jnp.dtype(self.dtype)
        sizes = self.tokens, self.heads, self.head_size, resources, self.keys, self.pairs
        scale = self.head_size**-0.5
        return Problem(*sizes, dtype, self.chunks, self.pairs * self.tokens, scale, block_sizes)


class Result(NamedTuple):
    """One candidate."""

    block_sizes: BlockSizes
    milliseconds: float | None
    refused: str = ""
    """Why there is no time."""


def candidates(implementation: str, shape: Shape) -> list[BlockSizes]:
    """The planner's own sizes, and those around them that it takes; each once."""
    default = interface.plan(implementation, shape.problem(BlockSizes())).block_sizes
    found = {default: None}
    for factors in itertools.product(STEPS, repeat=len(default.given())):
        sizes = {name: int(size * x) for (name, size), x in zip(default.given().items(), factors, strict=True)}
        try:
            found[interface.plan(implementation, shape.problem(BlockSizes(**sizes))).block_sizes] = None
        except ValueError:
            continue
    return list(found)


def case(chip: str, implementation: str, shape: dict[str, Any], block_sizes: dict[str, int]) -> tuple[Callable, Any]:
    """The kernels of both passes, each on its own, for `aot.compile_apart`, and the shapes of their arguments."""
    given = Shape(**shape)
    function = both_passes(implementation, given, BlockSizes(**block_sizes))
    with chips.assume(chip):
        traced = jax.make_jaxpr(function)(*jax.eval_shape(lambda: arguments(given)))
    wanted = SCHEDULED[implementation]
    calls = {call.params["name"]: call for call in kernel_calls(traced.jaxpr) if call.params["name"] in wanted}

    def kernels(*of_calls: Sequence[jax.Array]) -> list[Any]:
        found = []
        for name, x in zip(wanted, of_calls, strict=True):
            with jax.named_scope(name):  # by which the compiler calls what it writes down
                found.append(calls[name].primitive.bind(*x, **calls[name].params))
        return found

    shapes = [[jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in calls[name].invars] for name in wanted]
    return kernels, shapes


def kernel_calls(jaxpr: Any) -> Iterator[Any]:
    """Every `pallas_call` that is compiled and not interpreted, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            if not equation.params["interpret"]:
                yield equation
            continue
        for inner in jaxprs_in_params(equation.params):
            yield from kernel_calls(inner)


def both_passes(implementation: str, shape: Shape, block_sizes: BlockSizes) -> Callable[..., Any]:
    """Gradients of the sum of squares, in all that there are gradients of."""
    static: dict[str, Any] = {"num_context": shape.chunks, "max_pairs": shape.pairs * shape.tokens}
    static |= {"implementation": implementation, "block_sizes": block_sizes, "with_mass": False}

    def loss(query, query_expert, key, value, bias, pairs, max_score):
        pairs = pairs._replace(bias=bias)
        found = block_sparse_attention(query, query_expert, key, value, pairs, max_score=max_score, **static)
        return jnp.sum(jnp.square(found.output.astype(jnp.float32)))

    return jax.grad(loss, argnums=range(5))


def arguments(shape: Shape) -> tuple[Any, ...]:
    """Normal queries, keys and values, of which no score is large; distinct resources of every token."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    resources, heads = shape.chunks + shape.experts, (shape.heads, shape.head_size)
    query, query_expert = (jax.random.normal(next(keys), (shape.tokens, *heads), shape.dtype) for _ in range(2))
    key, value = (jax.random.normal(next(keys), (resources, shape.keys, *heads), shape.dtype) for _ in range(2))
    chosen = jax.lax.top_k(jax.random.uniform(next(keys), (shape.tokens, resources)), shape.pairs)[1]
    bias, visible = jnp.zeros(chosen.shape), jnp.full(chosen.shape, shape.keys)
    pairs = Pairs(chosen, bias, visible, jnp.full(shape.tokens, shape.pairs))
    return query, query_expert, key, value, bias, pairs, jnp.float32(10)


def by_time(implementation: str, shape: Shape, sizes: Sequence[BlockSizes], rounds: int = 5) -> list[Result]:
    """The median of `rounds`, each of which runs every candidate once: what disturbs the machine disturbs all.

    Raises:
      ValueError: the implementation would be interpreted here, or gets another in its place: "pallas_gpu" on
        a GPU that has no kernels.
    """
    if implementation.startswith("pallas_tpu") and jax.default_backend() != "tpu":
        raise ValueError(f"implementation={implementation!r} is interpreted on a {jax.default_backend()}: name a chip")
    if implementation == "pallas_gpu" and not chips.takes_gpu_kernels(wanted := f"implementation={implementation!r}"):
        raise ValueError(f"{wanted} gets 'xla' here: nothing to tune")
    given, calls, refused = arguments(shape), {}, []
    for candidate in sizes:
        try:
            calls[candidate] = jax.jit(both_passes(implementation, shape, candidate)).lower(*given).compile()
            jax.block_until_ready(calls[candidate](*given))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            refused.append(Result(candidate, None, _first_line(str(error))))
    times: dict[BlockSizes, list[float]] = {candidate: [] for candidate in calls}
    for _, (candidate, call) in itertools.product(range(rounds), calls.items()):
        start = time.perf_counter()
        jax.block_until_ready(call(*given))
        times[candidate].append(1e3 * (time.perf_counter() - start))
    return [Result(candidate, statistics.median(found)) for candidate, found in times.items()] + refused


def by_schedule(chip: str, implementation: str, shape: Shape, sizes: Sequence[BlockSizes]) -> list[Result]:
    """Modelled times of one core of a chip that need not be here.

    Raises:
      CompileError: the compiler is missing.
      ValueError: the implementation's time is not that of its schedule.
    """
    if implementation not in SCHEDULED:
        raise ValueError(f"implementation={implementation!r} has no schedule; wanted one of {', '.join(SCHEDULED)}")
    aot.require_compiler(chip)
    name, work = implementation.removeprefix("pallas_tpu_"), shape.keys * shape.heads * shape.head_size
    results: list[Result] = []
    known: dict[BlockSizes, float | str] = {}
    for candidate in sizes:
        problem = shape.problem(candidate)
        with chips.assume(chip):
            path: Any = interface.plan(implementation, problem)
        # Whatever tokens a window has, the kernel is the same.
        compiled = dataclasses.replace(candidate, tokens=None) if name == "resident" else candidate
        if compiled not in known:
            try:
                known[compiled] = nanoseconds_a_pair(chip, implementation, shape, compiled, _pairs_a_step(path))
            except aot.CompileError as error:
                known[compiled] = _first_line(str(error).split(f" for {chip}: ", 1)[-1])
        found = known[compiled]
        if isinstance(found, str):
            results.append(Result(candidate, None, found))
            continue
        cost = found * dispatch.REFERENCE_WORK / work
        costs = {name: {str(path.layout.tile): {"issue": cost, "time": cost}}}
        times = dispatch.modelled(problem, chip, {name: path}, costs)
        results.append(Result(candidate, times[name] / 1e6))
    return results


def _first_line(reason: str) -> str:
    """The first line of an error's text that is not blank."""
    return next(filter(None, map(str.strip, reason.splitlines())), "no reason is given")[:200]


def _pairs_a_step(path: Any) -> float:
    """That one step of a kernel's grid computes: of one of the groups of heads."""
    resources = path.layout.block if isinstance(path, dense.Path) else 1  # that a tile meets at once
    return path.layout.tile * resources / path.layout.groups


def nanoseconds_a_pair(chip: str, implementation: str, shape: Shape, sizes: BlockSizes, pairs: float) -> float:
    """Both passes, by the bundles of a steady step of their kernels."""
    options = {
        "chip": chip,
        "implementation": implementation,
        "shape": dataclasses.asdict(shape),
        "block_sizes": sizes.given(),
    }
    with tempfile.TemporaryDirectory() as folder:
        aot.compile_apart(chip, CASE, options, dump_to=Path(folder))
        found = [schedule.read(Path(folder), kernel) for kernel in SCHEDULED[implementation]]
    return 1e9 * sum(kernel.cycles_a_step for kernel in found) / pairs / chips.TPUS[chip].clock


def report(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    first, *_ = rows = record["results"]
    best = best_of(rows)
    names = list(first["block_sizes"])
    heads = [*names, "milliseconds", "to the default"]
    lines = [f"| {' | '.join(heads)} |", f"|{'--:|' * len(heads)}"]
    for row in rows:
        cells = [str(row["block_sizes"][name]) for name in names]
        ratio = row["milliseconds"] and first["milliseconds"] and f"{row['milliseconds'] / first['milliseconds']:.3f}"
        cells += [f"{row['milliseconds']:.3f}" if row["milliseconds"] else f"refused: {row['refused']}", ratio or ""]
        lines.append(f"| {' | '.join(cells)} |")
    shape = ", ".join(f"{name} {size}" for name, size in record["shape"].items())
    sizes = ", ".join(f"{name}={size}" for name, size in best["block_sizes"].items())
    return "\n\n".join(
        [
            f"# Block sizes of {record['implementation']}",
            f"{record['how']}. {shape}; forward and backward. The first line is the default.",
            "\n".join(lines),
            f"```\n{record['command']}\n```",
            f"block_sizes=BlockSizes({sizes})\n",
        ]
    )


def best_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest; of equal ones the first, so that the default wins."""
    timed = [row for row in rows if row["milliseconds"] is not None]
    if not timed:
        raise ValueError(f"no candidate can be computed: {rows[0]['refused']}")
    return min(timed, key=lambda row: row["milliseconds"])


def tuned(implementation: str, shape: Shape, chip: str | None, rounds: int) -> dict[str, Any]:
    """The record of all candidates, the default first."""
    with chips.assume(chip) if chip else contextlib.nullcontext():
        sizes = candidates(implementation, shape)
    if chip:
        aot.require_compiler(chip)
        version = importlib.metadata.version("libtpu")
        how = f"Modelled from the compiler's schedule, one core of a {chip}, libtpu {version}"
        found = by_schedule(chip, implementation, shape, sizes)
    else:
        how = f"Timed, median of {rounds}, on {jax.devices()[0].device_kind}"
        found = by_time(implementation, shape, sizes, rounds)
    order = {candidate: number for number, candidate in enumerate(sizes)}
    found.sort(key=lambda result: order[result.block_sizes])
    return {
        "command": shlex.join(["python", "-m", "pallas_kernels.tune", *sys.argv[1:]]),
        "implementation": implementation,
        "shape": dataclasses.asdict(shape),
        "how": f"{how}, jax {jax.__version__}",
        "results": [result._asdict() | {"block_sizes": result.block_sizes.given()} for result in found],
    }


def _make_room(output: Path) -> None:
    """Makes the folder of `output`.

    Raises:
      ValueError: there can be no such file.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output={output}: its folder cannot be made: {error.strerror}") from error
    if output.is_dir():
        raise ValueError(f"--output={output} is a folder; wanted a file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", required=True, help=f"one of {', '.join(interface.PLANS)}")
    parser.add_argument("--chip", choices=list(chips.TPUS), help="by the schedule of its compiler; else by time, here")
    parser.add_argument("--rounds", type=int, default=5, help="how often every candidate is timed")
    parser.add_argument("--output", type=Path, help="JSON file to write, and a .md beside it")
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = parser.parse_args()
    try:
        if given.output is not None:
            _make_room(given.output)  # now, not after minutes of compiling
        shape = Shape(**{field.name: vars(given)[field.name] for field in dataclasses.fields(Shape)})
        if given.implementation not in interface.PLANS:
            raise ValueError(f"--implementation={given.implementation}: there are {', '.join(interface.PLANS)}")
        record = tuned(given.implementation, shape, given.chip, given.rounds)
        text = report(record)
    except (ValueError, aot.CompileError) as error:
        sys.exit(f"error: {error}")
    print(text, end="")
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        given.output.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
