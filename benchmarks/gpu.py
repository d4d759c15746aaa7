"""Block-sparse attention on a GPU against dense causal attention: useful TFLOP/s, forward, and forward and backward.

    JAX_PLATFORMS=cuda python -m benchmarks.gpu --output=experiments/results/gpu.json
    python -m benchmarks.gpu --smoke

The kernels have to agree with the definition on this very device, gradients included, before a chunk size is measured.
From what matters most to what matters least, as long as --minutes lasts: tokens with budgets from 0 to 2b that meet
random earlier chunks and experts, and no local window; cuDNN's flash attention over the whole of the same text; and a
copy, as the limit of the memory. Useful are 4 m D FLOPs a pair forward and 10 m D backward; half of the square for
dense causal attention. What does not fit in memory is recorded as such.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import measure
from experiments.program import command_line, plain_table, publish, start, write
from pallas_kernels.block_sparse_attention import Pairs, block_sparse_attention

FLAGS = flags.FLAGS
CALLS = 5
"""Calls between two looks at the clock: launches overlap, as they do in a training step."""
ROUNDS = 5
"""Looks at the clock; the median counts."""
TOLERANCE = 2.0**-7
"""Of the largest value, for results in bfloat16 against the definition in float32."""
OUT_OF_MEMORY = "out of memory"
SMOKE = {
    "lengths": ["256"],
    "widths": ["128"],
    "chunk_sizes": ["64"],
    "budgets": ["2"],
    "experts": 2,
    "implementations": ["xla"],
    "dense": "xla",
    "copied_mib": 1,
}


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_list("lengths", ["8192", "32768", "131072", "16384", "65536"], "L, what matters most first.")
    flags.DEFINE_list("widths", ["1024", "2048"], "D, heads times head size.")
    flags.DEFINE_list("chunk_sizes", ["128", "256", "64"], "m.")
    flags.DEFINE_list("budgets", ["8", "4", "16"], "b: mean number of resources per token.")
    flags.DEFINE_integer("head_size", 128, "d.", lower_bound=1)
    flags.DEFINE_integer("experts", 64, "E.", lower_bound=0)
    flags.DEFINE_list("implementations", ["pallas_gpu", "xla"], "The first is checked, and measured at every L.")
    flags.DEFINE_integer("others_up_to", 16384, "The longest L at which the other implementations are measured.")
    flags.DEFINE_enum("dense", "cudnn", ["cudnn", "xla"], "Implementation of jax.nn.dot_product_attention.")
    flags.DEFINE_integer("copied_mib", 1024, "Size of the copied array.", lower_bound=1)
    flags.DEFINE_float("minutes", 7.0, "No new point is begun after so long.", 0.0)
    flags.DEFINE_bool("smoke", False, "One tiny point with XLA: does the program run?")
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")


@dataclasses.dataclass(frozen=True)
class Point:
    """One problem of the grid."""

    length: int
    width: int
    head_size: int
    m: int
    budget: int
    experts: int

    @property
    def slots(self) -> int:
        """K: budgets are anything from 0 to 2b."""
        return min(2 * self.budget, self.resources)

    @property
    def resources(self) -> int:
        """Chunks of the text and experts."""
        return self.length // self.m + self.experts


class Arrays(NamedTuple):
    """What the attention takes."""

    query: jax.Array
    query_expert: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array
    pairs: Pairs


def random_arrays(point: Point, dtype: str = "bfloat16") -> Arrays:
    """Normal queries, keys and values; for every token as many distinct earlier chunks and experts as it may have."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    heads, chunks = (point.width // point.head_size, point.head_size), point.length // point.m
    query, query_expert = (jax.random.normal(next(keys), (point.length, *heads), dtype) for _ in range(2))
    key, value = (jax.random.normal(next(keys), (point.resources, point.m, *heads), dtype) for _ in range(2))

    def choose(c: jax.Array, key: jax.Array) -> jax.Array:
        draw = jax.random.uniform(key, (point.m, point.resources))
        resource = jnp.arange(point.resources)
        return jax.lax.top_k(jnp.where((resource < c) | (resource >= chunks), draw, -1.0), point.slots)[1]

    chunk = jnp.arange(chunks)
    resource = jax.lax.map(lambda x: choose(*x), (chunk, jax.random.split(next(keys), chunks)))
    shape = point.length, point.slots
    available = jnp.repeat(chunk, point.m) + point.experts
    count = jnp.minimum(jax.random.randint(next(keys), shape[:1], 0, point.slots + 1), available)
    bias = jax.nn.log_sigmoid(jax.random.normal(next(keys), shape))
    pairs = Pairs(resource.reshape(shape).astype(jnp.int32), bias, jnp.full(shape, point.m, jnp.int32), count)
    return Arrays(query, query_expert, key, value, bias, pairs)


def sparse(point: Point, max_pairs: int, implementation: str) -> Callable[..., jax.Array]:
    """The attention of a point: arrays -> output."""

    def attend(*arrays) -> jax.Array:
        *tables, bias, pairs = arrays
        static = {"num_context": point.length // point.m, "max_pairs": max_pairs, "implementation": implementation}
        return block_sparse_attention(*tables, pairs._replace(bias=bias), **static).output

    return attend


def gradients(attend: Callable[..., jax.Array], wanted: int) -> Callable[..., Any]:
    """Forward and backward pass: gradients of the sum of squares in the first `wanted` arguments."""

    def loss(*arrays) -> jax.Array:
        return jnp.sum(jnp.square(attend(*arrays).astype(jnp.float32)))

    return jax.grad(loss, argnums=tuple(range(wanted)))


def milliseconds(call: Callable[..., Any], arrays: tuple[Any, ...]) -> float | str:
    """Median time of a call of what `jax.jit` has made; or that it does not fit in memory."""
    try:
        jax.block_until_ready(call(*arrays))
        times = [measure.seconds(lambda: [call(*arrays) for _ in range(CALLS)][-1]) for _ in range(ROUNDS)]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return OUT_OF_MEMORY
    return 1e3 * statistics.median(times) / CALLS


def both_passes(attend: Callable, with_gradients: Callable, arrays: tuple[Any, ...], flops: float) -> dict[str, Any]:
    """Time and useful TFLOP/s of the forward pass (`flops`), and of both (3.5 times as many)."""
    figures: dict[str, Any] = {}
    for name, call, useful in (("forward", attend, flops), ("both", with_gradients, 3.5 * flops)):
        time_ms = milliseconds(call, arrays)
        rate = None if isinstance(time_ms, str) else useful / time_ms / 1e9
        figures[name] = {"milliseconds": time_ms, "teraflops_per_second": rate}
    return figures


def kernel_milliseconds(call: Callable[..., Any], arrays: tuple[Any, ...]) -> dict[str, float]:
    """Time of each of our kernels on the GPU in a call, by JAX's profiler; nothing where there is no GPU."""
    jax.block_until_ready(call(*arrays))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call(*arrays) for _ in range(CALLS)][-1])
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = [plane for plane in jax.profiler.ProfileData.from_file(str(path)).planes if "GPU" in plane.name]
    events = [
        event for plane in planes for line in plane.lines if line.name.startswith("Stream") for event in line.events
    ]
    times: dict[str, float] = {}
    for event in events:
        if found := re.match(r"block_sparse_attention_([a-z_]+?)_mosaic", event.name):
            times[found[1]] = times.get(found[1], 0.0) + event.duration_ns / CALLS / 1e6
    return times


def verify(implementation: str, point: Point) -> dict[str, float]:
    """Largest errors of output and gradients against the definition in float32, in parts of the largest value.

    Raises:
      RuntimeError: one is above TOLERANCE. Nothing is worth timing then.
    """
    arrays = random_arrays(point)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)

    def evaluate(name: str, arrays: Arrays) -> list[np.ndarray]:
        attend = sparse(point, int(arrays.pairs.count.sum()), name)
        results = jax.jit(lambda *x: (attend(*x), *gradients(attend, 5)(*x)))(*arrays)
        return [np.asarray(x, np.float32) for x in results]

    with jax.default_matmul_precision("highest"):
        expected = evaluate("reference", exact)
    actual = evaluate(implementation, arrays)
    off = [float(np.abs(a - e).max() / np.abs(e).max()) for a, e in zip(actual, expected, strict=True)]
    errors = dict(zip(("output", *Arrays._fields[:5]), off, strict=True))
    if not max(errors.values()) <= TOLERANCE:  # a NaN is refused too
        raise RuntimeError(f"{implementation} is wrong at {point}: {errors}")
    return errors


def check_point(m: int) -> Point:
    """Small, but with tiles that are full, tiles that are not, and resources that nobody has."""
    return Point(length=4 * m, width=2 * FLAGS.head_size, head_size=FLAGS.head_size, m=m, budget=2, experts=8)


def copy_gigabytes_per_second(mebibytes: int) -> float | str:
    """Reading and writing an array: what the memory can do at best."""
    x = jnp.ones(mebibytes * 2**18, jnp.float32)
    time_ms = milliseconds(jax.jit(lambda x: x + 1), (x,))
    return time_ms if isinstance(time_ms, str) else 2 * x.nbytes / time_ms / 1e6


def measure_dense(length: int, width: int) -> dict[str, Any]:
    """Dense causal attention at one length."""
    shape = 1, length, width // FLAGS.head_size, FLAGS.head_size
    arrays = tuple(jax.random.normal(key, shape, "bfloat16") for key in jax.random.split(jax.random.key(1), 3))
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=FLAGS.dense)
    return both_passes(jax.jit(attend), jax.jit(gradients(attend, 3)), arrays, 2.0 * length**2 * width)


def measure_point(point: Point) -> dict[str, Any]:
    """All implementations at one point."""
    arrays = random_arrays(point)
    pairs = int(arrays.pairs.count.sum())
    row: dict[str, Any] = dataclasses.asdict(point) | {"pairs": pairs}
    first, *others = FLAGS.implementations
    names = first, *(others if point.length <= FLAGS.others_up_to else ())
    calls = {name: (jax.jit(attend := sparse(point, pairs, name)), jax.jit(gradients(attend, 5))) for name in names}
    for name in names:
        row[name] = both_passes(*calls[name], arrays, 4.0 * point.m * point.width * pairs)
    fits = row[first]["both"]["milliseconds"] != OUT_OF_MEMORY
    row["kernels"] = kernel_milliseconds(calls[first][1], arrays) if fits else {}
    return row


def measure_grid() -> Iterator[dict[str, Any]]:
    """Before the first point and after every one: the rows and errors so far, and how many points are left out."""
    lists = (map(int, x) for x in (FLAGS.lengths, FLAGS.widths, FLAGS.chunk_sizes, FLAGS.budgets))
    lengths, widths, chunk_sizes, budgets = map(list, lists)
    # Every length at the first chunk size and budget before any at the others.
    grid = list(itertools.product(chunk_sizes, budgets, widths, lengths))
    end, rows, errors, known = time.monotonic() + 60 * FLAGS.minutes, [], {}, {}
    yield {"errors": errors, "rows": rows, "left_out": len(grid)}
    for m, budget, width, length in grid:
        if time.monotonic() > end:
            break
        if str(m) not in errors:
            errors[str(m)] = verify(FLAGS.implementations[0], check_point(m))
        if (length, width) not in known:
            known[length, width] = measure_dense(length, width)
        point = Point(length, width, FLAGS.head_size, m, budget, FLAGS.experts)
        rows.append(measure_point(point) | {"dense": known[length, width]})
        print(f"{point}: {rows[-1][FLAGS.implementations[0]]}", file=sys.stderr, flush=True)
        yield {"errors": errors, "rows": rows, "left_out": len(grid) - len(rows)}


def report(record: dict[str, Any]) -> str:
    """The record as markdown."""
    first, *_ = names = [*record["implementations"], "dense"]
    both = [(name, what) for name in names for what in ("forward", "both")]
    found = {m: ", ".join(f"{name} {error:.1e}" for name, error in of.items()) for m, of in record["errors"].items()}
    errors = "; ".join(f"m = {m}: {named}" for m, named in found.items())
    copy = record["copy_gigabytes_per_second"]
    rows = [
        [
            *(row[name] for name in ("width", "m", "budget", "length")),
            *(_cell(row[name][what] if name in row else None) for name, what in both),
            f"{sum(row['kernels'].values()):.3f}" if row["kernels"] else "",
            _speed_up(row["dense"]["both"], row[first]["both"]),
        ]
        for row in record["rows"]
    ]
    parts = [
        "# Block-sparse attention on a GPU",
        f"{record['machine']['device']}, bfloat16, E = {record['experts']}, d = {record['head_size']}. Milliseconds "
        "and useful TFLOP/s, forward, and forward and backward; routed pairs alone. Dense is causal attention over "
        f"all L tokens ({record['dense']}). `kernels`: of the time of {first} that of "
        "its kernels alone; XLA makes tables before them and adds up after them. "
        f"A copy: {copy if isinstance(copy, str) else f'{copy:.0f} GB/s'}.",
        f"Errors of {first} against the definition, in parts of the largest value. {errors}.",
        plain_table(
            ["D", "m", "b", "L", *map(", ".join, both), "kernels, both", "speed-up"], "r" * (6 + len(both)), rows
        ),
    ]
    if record["left_out"]:
        parts.append(f"{record['left_out']} further points were not measured.")
    return "\n\n".join([*parts, measure.closing(record["command"], record["machine"]["versions"])])


def _cell(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "not measured"
    time_ms, rate = figures["milliseconds"], figures["teraflops_per_second"]
    return time_ms if rate is None else f"{time_ms:.3f} ({rate:.3g})"


def _speed_up(slow: dict[str, Any], fast: dict[str, Any]) -> str:
    times = slow["milliseconds"], fast["milliseconds"]
    return "" if OUT_OF_MEMORY in times else f"{times[0] / times[1]:.2f}"


def main() -> None:
    if FLAGS.smoke:
        for name, value in SMOKE.items():
            FLAGS[name].value = value
    record = {
        "command": command_line("benchmarks.gpu"),
        "machine": measure.machine(),
        **{name: FLAGS[name].value for name in ("implementations", "dense", "experts", "head_size")},
        "copy_gigabytes_per_second": copy_gigabytes_per_second(FLAGS.copied_mib),
    }
    for measured in measure_grid():
        record |= measured
        if FLAGS.output is not None:  # what is measured stays, should the machine be taken away
            write(record, report(record), FLAGS.output, indent=1)
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
