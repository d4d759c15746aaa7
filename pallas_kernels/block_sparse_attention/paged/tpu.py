"""Paged attention on a TPU: the chosen pages and experts come one at a time, the next one while this one is computed.

The copies run ahead across sequences, so that only the very first is waited for in full. All heads are one product: a
query is laid out with a row for every head, 0 in the lanes of the others, so that queries [h, D] times keys [m, D] are
the scores of every head; of weights times values, [h, D], the lanes of a row's own head are kept. That is H times the
multiplications, on a unit that waits for memory.

Keys of experts are normed where they arrive. To norm the whole table at every step would read it all; to norm gathered
rows would write them and read them again.

Shapes: b sequences, l pages a sequence, m keys, E experts, K slots, H heads (h: in whole registers), d head size,
D = H d.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jaxtyping import Array, Float, Int

from pallas_kernels.block_sparse_attention.types import Cache, Slots
from pallas_kernels.tpu import F32, LANES, ROWS, call, compiled_or_interpreted, dot, round_up
from pallas_kernels.varying import varying

VMEM_SLACK = 4 * 2**20  # what the compiler wants beside the buffers


class Sequences(NamedTuple):
    """What scalar memory holds for all sequences at once."""

    first: Int[Array, "b"]  # resource of the first slot
    number: Int[Array, "b"]  # of slots
    before: Int[Array, "b"]  # slots of all sequences before
    following: Int[Array, "b+1"]  # the first sequence from here on that has slots; b: there is none


class Ranges(NamedTuple):
    """What scalar memory holds of the slots of one sequence at a time."""

    resource: Int[Array, "b 1 K"]
    bias: Float[Array, "b 1 K"]
    begin: Int[Array, "b 1 K"]
    end: Int[Array, "b 1 K"]


class Static(NamedTuple):
    """What is known when the kernel is compiled."""

    heads: int
    num_pages: int
    scale: float
    norm: Jaxpr  # of one head's rows [m, d]; what it closes over is an argument of the kernel


def attend(
    query: Float[Array, "b H d"],
    query_expert: Float[Array, "b H d"],
    cache: Cache,
    slots: Slots,
    norm: Callable[[Array], Array],
    scale: float,
) -> tuple[Float[Array, "b H d"], Float[Array, "b H"]]:
    """See `interface.paged_attention`."""
    (rows, heads, d), (num_pages, m) = query.shape, cache.page_key.shape[1:3]
    if slots.resource.shape[1] == 0:  # nobody has any; no shape is zero
        slots = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(rows, 1)), slots)._replace(count=slots.count)
    if len(cache.expert_key) == 0:
        none = jnp.zeros_like(cache.expert_key, shape=(1, m, heads, d))
        cache = cache._replace(expert_key=none, expert_value=none)
    queries = jnp.stack([query, query_expert], axis=1).reshape(rows, 2, heads * d)
    tables = jax.tree.map(lambda x: x.reshape(-1, m, heads * d), cache)
    ranges = Ranges(*(x[:, None] for x in slots[:4]))
    normed = jax.make_jaxpr(norm)(jax.ShapeDtypeStruct((m, d), query.dtype))
    # Blocks have two axes at least.
    consts = [x.reshape((1,) * (2 - x.ndim) + x.shape) for x in normed.consts]
    some = jnp.where(slots.count > 0, jnp.arange(rows), rows)
    following = jnp.append(jax.lax.cummin(some, reverse=True), rows)
    before = jnp.cumsum(slots.count) - slots.count
    sequences = Sequences(slots.resource[:, 0], slots.count, before, following)
    arrays = varying((sequences, ranges, queries, tables, consts))
    output, lse = compiled_or_interpreted(run, *arrays, static=Static(heads, num_pages, scale, normed.jaxpr))
    return output.reshape(query.shape), lse[:, :heads, 0]


def _norm_expert(buffers: Cache, buffer, consts: list, static: Static) -> None:
    """An expert that has arrived becomes a page in all but name."""
    dtype, d = buffers.page_key.dtype, buffers.page_key.shape[2] // static.heads
    shapes = [var.aval.shape for var in static.norm.constvars]  # type: ignore[attr-defined]
    consts = [ref[...].reshape(shape) for ref, shape in zip(consts, shapes, strict=True)]
    norm = jaxpr_as_fun(ClosedJaxpr(static.norm, consts))
    for h in range(static.heads):
        lanes = pl.ds(h * d, d)
        (buffers.page_key[buffer, :, lanes],) = norm(buffers.expert_key[buffer, :, lanes].astype(dtype))
    buffers.page_value[buffer] = buffers.expert_value[buffer].astype(dtype)


def _kernel(
    sequences: Sequences, ranges: Ranges, queries, tables: Cache, consts: list,  # in
    output_ref, lse_ref,  # out
    sums, buffers: Cache, semaphores,  # scratch
    *, static: Static,
):  # fmt: skip
    i, sequence_count = pl.program_id(0), pl.num_programs(0)
    count, dtype, (h, width) = sequences.number[i], queries.dtype, sums.shape
    d, m = width // static.heads, buffers.page_key.shape[1]

    def each_copy(sequence, resource, buffer, apply: Callable):
        """Applies `apply` to the copies of a page's, or of an expert's, keys and values to their buffers."""
        page, expert = sequence * static.num_pages + resource, resource - static.num_pages

        def both(first: int, index):
            for which, (table, into) in enumerate(zip(tables[first:][:2], buffers[first:][:2], strict=True)):
                apply(pltpu.make_async_copy(table.at[index], into.at[buffer], semaphores.at[buffer, which]))

        is_expert = expert >= 0
        pl.when(jnp.logical_not(is_expert))(lambda: both(0, page))
        pl.when(is_expert)(lambda: both(2, expert))

    def fetch(sequence, resource, buffer):
        pl.when(sequence < sequence_count)(lambda: each_copy(sequence, resource, buffer, lambda copy: copy.start()))

    def fetch_next(k, buffer):
        last, following = k + 1 == count, sequences.following[i + 1]
        first = sequences.first[jnp.minimum(following, sequence_count - 1)]
        later = ranges.resource[0, 0, jnp.minimum(k + 1, count - 1)]
        fetch(jnp.where(last, following, i), jnp.where(last, first, later), buffer)

    @pl.when(i == 0)
    def _():
        first = sequences.following[0]
        fetch(first, sequences.first[jnp.minimum(first, sequence_count - 1)], 0)

    lane, head = (jax.lax.broadcasted_iota(jnp.int32, (h, width), axis) for axis in (1, 0))
    own = (head * d <= lane) & (lane < (head + 1) * d)
    # Selected in float32: there are no registers of 8 rows of anything narrower.
    query, query_expert = (jnp.where(own, queries[0, pl.ds(n, 1), :].astype(F32), 0.0).astype(dtype) for n in (0, 1))
    key = jax.lax.broadcasted_iota(jnp.int32, (h, m), 1)
    sums[...] = jnp.zeros_like(sums)

    def attend_slot(k, carry):
        top, total = carry
        buffer, resource = (sequences.before[i] + k) % 2, ranges.resource[0, 0, k]
        fetch_next(k, 1 - buffer)
        each_copy(i, resource, buffer, lambda copy: copy.wait())
        is_expert = resource >= static.num_pages
        pl.when(is_expert)(lambda: _norm_expert(buffers, buffer, consts, static))
        either = jnp.where(is_expert, query_expert, query)
        score = dot(either, buffers.page_key[buffer], (1, 1))
        seen = (ranges.begin[0, 0, k] <= key) & (key < ranges.end[0, 0, k])
        score = jnp.where(seen, score * static.scale + ranges.bias[0, 0, k], -jnp.inf)
        new = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
        # Until a key has been seen there is no maximum to subtract.
        finite = jnp.where(new > -jnp.inf, new, 0.0)
        weight, keep = jnp.exp(score - finite), jnp.exp(top - finite)
        added = dot(weight.astype(dtype), buffers.page_value[buffer], (1, 0))
        sums[...] = keep * sums[...] + added
        return new, keep * total + jnp.sum(weight, axis=1, keepdims=True)

    top, total = jax.lax.fori_loop(0, count, attend_slot, (jnp.full((h, 1), -jnp.inf), jnp.zeros((h, 1))))
    lse = jnp.where(total > 0, jnp.log(total) + top, -jnp.inf)
    lse_ref[0] = jnp.broadcast_to(lse, lse_ref.shape[1:])
    output = jnp.where(own, sums[...] / jnp.where(total > 0, total, 1.0), 0.0)
    output_ref[0] = jnp.sum(output, axis=0, keepdims=True).astype(dtype)


def run(
    sequences: Sequences,
    ranges: Ranges,
    queries: Float[Array, "b 2 D"],
    tables: Cache,
    consts: list,
    *,
    static: Static,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Float[Array, "b 1 D"], Float[Array, "b h 128"]]:
    """The kernel: output, and the log-sum-exp of every head all over a row of lanes.

    Args:
      consts: what `static.norm` closes over.
    """
    (rows, _, width), m, slots = queries.shape, tables.page_key.shape[1], ranges.bias.shape[2]
    h, dtype = round_up(static.heads, ROWS), queries.dtype

    def a_sequence(*shape: int, memory: pltpu.MemorySpace = pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda i, *_: (i, 0, 0), memory_space=memory)

    in_smem, anywhere = a_sequence(1, slots, memory=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    arrivals = [pltpu.VMEM((2, m, width), kind) for kind in (dtype, dtype, *(x.dtype for x in tables[2:]))]
    pairs = rows * slots * m
    return call(
        functools.partial(_kernel, static=static),
        "paged_attention",
        (rows,),
        (sequences,),
        [
            (jax.tree.map(lambda _: in_smem, ranges), ranges),
            (a_sequence(2, width), queries),
            (jax.tree.map(lambda _: anywhere, tables), tables),
            ([pl.BlockSpec(x.shape, lambda *_, n=x.ndim: (0,) * n) for x in consts], consts),
        ],
        [(a_sequence(1, width), (rows, 1, width), dtype), (a_sequence(h, LANES), (rows, h, LANES), F32)],
        scratch=[pltpu.VMEM((h, width), F32), Cache._make(arrivals), pltpu.SemaphoreType.DMA((2, 2))],
        semantics=("arbitrary",),  # copies run ahead from one sequence into the next
        vmem_bytes=4 * m * width * (dtype.itemsize + tables.expert_key.dtype.itemsize) + VMEM_SLACK,
        cost=pl.CostEstimate(  # at most, and as if all were pages
            flops=4 * pairs * width * h,
            bytes_accessed=(2 * pairs * width + 3 * rows * width) * dtype.itemsize,
            transcendentals=pairs * h,
        ),
        interpret=interpret,
    )
