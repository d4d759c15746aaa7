"""The kernels of block-sparse attention for Blackwell (B200, sm_100a): rows gathered by TMA, products by tcgen05.

As in `kernels`, a block of threads keeps keys and values of one resource and head in shared memory while its warpgroups
walk over the resource's tiles. Three things differ. A tile has 128 rows. The copy engine gathers them itself, from the
queries of all tokens. And products go to tensor memory, from where a warpgroup loads scores into registers, and into
which it stores weights, the left operand of the next product; sums stay there. A warpgroup waits for each of its
products, and meanwhile the other has the tensor core or is at its softmax.

JAX's interpreter of such kernels knows neither tcgen05 nor tensor memory nor the gather. With products="dot" tensor
memory is shared memory, a product is a dot product of the same arrays, and rows are copied one by one: all else is what
a GPU runs. None of this has run on one.

Shapes: T tokens, N tiles, t rows a tile, R resources, m keys a resource, S parts of its keys, H heads, d head size;
R1 = R + 1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.gpu.common import (
    LOG2_E,
    Partials,
    Plan,
    Queries,
    Rows,
    Tiles,
    arrays,
    bitcast,
    call,
    columns,
    copy,
    copy_rows,
    flat,
    for_tiles,
    gather_queries,
    in_slots,
    lines,
    packed,
    place,
    size_of_rows,
    swizzled,
    transposed,
)
from pallas_kernels.block_sparse_attention.tile import finite

ROWS = 128  # t: the rows of tensor memory, one a thread


def forward(
    query: Queries,
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    rows: Rows,
    plan: Plan,
) -> Partials:
    """Softmax attention. Rows of tiles past begin[R] are not written."""
    (resources, m, heads, d), dtype = key.shape, key.dtype
    tiles, parts = len(rows.visible), m // plan.part

    def kernel(begin, visible, token, query, query_expert, key, value, fraction, size, lse, *scratch):
        part, warpgroup, head = place("part", "warpgroup", "head")
        (k_smem, v_smem), rows, statistics, arrived, core = scratch
        size_smem, lse_smem = [x.at[warpgroup] for x in statistics]
        q_smem, seen_smem = [x.at[warpgroup] for x in rows]
        core, (sums,) = _core(plan, *core)

        def load_rows(tile):
            def start(slot, barrier):
                gather_queries(plan, (query, query_expert), _gather(plan, token.at[tile], q_smem.at[slot], barrier))
                copy((visible.at[tile],), (seen_smem,), slot, barrier)

            return start

        def attend(tile, slot, load_next):
            seen = seen_smem[slot] - part * plan.part

            def step(j, state):
                first = 0 if state is None else pl.multiple_of(j * plan.block, plan.block)
                here = pl.ds(first, plan.block)
                score = core.product(q_smem.at[slot], transposed(k_smem.at[here]))
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                score = jnp.where(index < columns(seen, score), score * (plan.scale * LOG2_E), -jnp.inf)
                top = score.max(1) if state is None else jnp.maximum(state[0], score.max(1))
                weight = jnp.exp2(score - columns(finite(top), score))
                total = weight.sum(1)
                if state is None:
                    load_next()
                else:
                    keep = jnp.exp2(state[0] - finite(top))
                    total += state[1] * keep
                    core.scale(sums, keep)
                core.add(sums, weight.astype(dtype), v_smem.at[here], to_what_is_there=state is not None)
                return top, total

            top, total = jax.lax.fori_loop(1, plan.part // plan.block, step, step(0, None))
            whole = core.load(sums)
            largest = size_of_rows(whole)
            q_smem[slot] = bitcast(packed(whole * columns(1.0 / largest, whole), dtype), dtype)
            size_smem[...] = largest / jnp.where(total > 0, total, 1.0)
            lse_smem[...] = (finite(top) + jnp.log2(total)) / LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[slot], fraction.at[part, tile, :, head])
            for source, target in ((size_smem, size), (lse_smem, lse)):
                plgpu.copy_smem_to_gmem(source, target.at[part, tile, head])

        for_tiles(begin, ((key, k_smem), (value, v_smem)), load_rows, arrived, attend, plan)

    slots = (plan.warpgroups, plan.slots, ROWS)
    fraction, *statistics = call(
        kernel,
        "block_sparse_attention_forward",
        plan,
        (*rows, *flat(query), key, value),
        [((parts, tiles, ROWS, heads, d), dtype), *[((parts, tiles, heads, ROWS), jnp.float32)] * 2],
        [swizzled((plan.part, d), dtype)] * 2,
        [swizzled((*slots, d), dtype), plgpu.SMEM(slots, jnp.int32)],
        [plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32)] * 2,
        [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups * plan.slots)],
        _memory_of_the_core(plan, plan.block, [plan.warpgroups * d], dtype),
        axes={"resource": resources, "split": plan.splits, "part": parts, "head": heads},
    )
    # Integers for XLA: some bits are those of a NaN, which it may change.
    return Partials(fraction if dtype == jnp.float32 else bitcast(fraction, jnp.int16), *statistics)


def query_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """Gradients of every row's query (without the factor `scale`) and bias through each part of its resource.

    Rows of tiles past begin[R] are not written.
    """
    (resources, m, heads, d), dtype = tiles.key.shape, tiles.key.dtype
    count, parts = len(tiles.rows.visible), m // plan.part

    def kernel(
        begin, visible, token, query, query_expert, key, value, d_output, shift, delta, d_query, d_bias, *scratch
    ):
        part, warpgroup, head = place("part", "warpgroup", "head")
        (k_smem, v_smem), rows, bias_smem, arrived, core = scratch
        q_smem, do_smem, seen_smem, shift_smem, delta_smem = rows = [x.at[warpgroup] for x in rows]
        core, (sums,) = _core(plan, *core)
        given = token, query, query_expert, d_output, visible, shift, delta
        load_rows = functools.partial(functools.partial, _load_rows, plan, given, rows)

        def differentiate(tile, slot, load_next):
            seen, shift = seen_smem[slot] - part * plan.part, shift_smem[slot] * LOG2_E
            delta = delta_smem[slot]

            def step(j, d_bias):
                first = pl.multiple_of(j * plan.block, plan.block)
                here = pl.ds(first, plan.block)
                score = core.product(q_smem.at[slot], transposed(k_smem.at[here])) * (plan.scale * LOG2_E)
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                weight = jnp.where(index < columns(seen, score), jnp.exp2(score + columns(shift, score)), 0.0)
                d_weight = core.product(do_smem.at[slot], transposed(v_smem.at[here]))
                d_score = weight * (d_weight - columns(delta, score))
                pl.when(j == 0)(load_next)
                core.add(sums, d_score.astype(dtype), k_smem.at[here], to_what_is_there=j > 0)
                return d_bias + d_score.sum(1)

            d_b = jax.lax.fori_loop(0, plan.part // plan.block, step, jnp.zeros(ROWS, jnp.float32))
            q_smem[slot], bias_smem[warpgroup] = core.load(sums).astype(dtype), d_b
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[slot], d_query.at[part, tile, :, head])
            plgpu.copy_smem_to_gmem(bias_smem.at[warpgroup], d_bias.at[part, tile, head])

        for_tiles(begin, ((key, k_smem), (value, v_smem)), load_rows, arrived, differentiate, plan)

    return call(
        kernel,
        "block_sparse_attention_d_query",
        plan,
        arrays(tiles),
        [((parts, count, ROWS, heads, d), dtype), ((parts, count, heads, ROWS), jnp.float32)],
        [swizzled((plan.part, d), dtype)] * 2,
        in_slots((plan.warpgroups, plan.slots, ROWS), d, dtype),
        plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
        [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=5, num_barriers=plan.warpgroups * plan.slots)],
        _memory_of_the_core(plan, plan.block, [plan.warpgroups * d], dtype),
        axes={"resource": resources, "split": plan.splits, "part": parts, "head": heads},
    )


def key_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "R m H d"], Float[Array, "R m H d"]]:
    """Gradients of keys and values; see `query_gradients`.

    A block of threads owns 128 keys and sums over all tiles of their resource. Everything is transposed: keys are rows,
    queries are columns. Every warpgroup has columns of its own of each tile, and adds to the same sums, in turns.
    """
    (resources, m, heads, d), dtype = tiles.key.shape, tiles.key.dtype
    width = ROWS // plan.warpgroups

    def kernel(begin, visible, token, query, query_expert, key, value, d_output, shift, delta, *rest):
        d_key, d_value, (k_smem, v_smem), rows, (keys_arrived, arrived, consumed, turn), core = rest
        resource, part, head, warpgroup = place("resource", "part", "head", "warpgroup")
        core, (sums_k, sums_v) = _core(plan, *core, shared=True)
        q_smem, do_smem, seen_smem, shift_smem, delta_smem = rows
        keys, mine = pl.ds(part * ROWS, ROWS), pl.ds(warpgroup * width, width)
        leads, last = warpgroup == 0, warpgroup == plan.warpgroups - 1
        first_tile, count = begin[resource], begin[resource + 1] - begin[resource]

        def load(i):
            slot = jax.lax.rem(i, plan.slots)
            # Every warpgroup reads the slot: it is free when all have said so.
            pl.when(i >= plan.slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            given = token, query, query_expert, d_output, visible, shift, delta
            _load_rows(plan, given, rows, first_tile + i, slot, arrived.at[slot])

        @pl.when(leads)
        def _():
            for source, target in ((key, k_smem), (value, v_smem)):
                plgpu.copy_gmem_to_smem(source.at[resource, keys, head], target, keys_arrived)
            for total in (sums_k, sums_v):
                core.store(total, jnp.zeros((ROWS, d), jnp.float32))

        for i in range(plan.slots - 1):
            pl.when(leads & (i < count))(functools.partial(load, jnp.int32(i)))
        pl.when(last)(lambda: plgpu.barrier_arrive(turn.at[0]))
        plgpu.barrier_wait(keys_arrived)

        @pl.loop(0, count)
        def _(i):
            slot, ahead = jax.lax.rem(i, plan.slots), i + plan.slots - 1
            pl.when(leads & (ahead < count))(lambda: load(ahead))
            plgpu.barrier_wait(arrived.at[slot])
            q, do = q_smem.at[slot, mine], do_smem.at[slot, mine]
            seen, shift, delta = (x[slot, mine] for x in (seen_smem, shift_smem, delta_smem))
            score = core.product(k_smem, transposed(q)) * (plan.scale * LOG2_E)
            index = part * ROWS + jax.lax.broadcasted_iota(jnp.int32, score.shape, 0)
            weight = jnp.exp2(score + lines(shift * LOG2_E, score))
            weight = jnp.where(index < lines(seen, score), weight, 0.0)
            d_weight = core.product(v_smem, transposed(do))
            d_score = weight * (d_weight - lines(delta, score))
            plgpu.barrier_wait(turn.at[warpgroup])
            core.add(sums_v, weight.astype(dtype), do)
            core.add(sums_k, d_score.astype(dtype), q)
            plgpu.barrier_arrive(turn.at[jax.lax.rem(warpgroup + 1, plan.warpgroups)])
            plgpu.commit_smem()  # what was read here comes before what the copy engine writes next
            plgpu.barrier_arrive(consumed.at[slot])

        @pl.when(leads)
        def _():
            plgpu.barrier_wait(turn.at[0])  # the sums are whole
            for i in range(plan.slots):
                pl.when(i < count)(functools.partial(plgpu.barrier_wait, consumed.at[i]))

        for stores, sums, target, factor in ((leads, sums_k, d_key, plan.scale), (last, sums_v, d_value, 1.0)):

            @pl.when(stores)
            def _(sums=sums, target=target, factor=factor):
                target[resource, keys, head] = (core.load(sums) * factor).astype(dtype)

    return call(
        kernel,
        "block_sparse_attention_d_key",
        plan,
        arrays(tiles),
        [(tiles.key.shape, dtype)] * 2,
        [swizzled((ROWS, d), dtype)] * 2,
        in_slots((plan.slots, ROWS), d, dtype),
        [
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=5, num_barriers=plan.slots),
            plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots),
            plgpu.Barrier(num_arrivals=1, num_barriers=plan.warpgroups, orders_tensor_core=True),
        ],
        _memory_of_the_core(plan, width, [d, d], dtype),
        axes={"resource": resources, "part": m // ROWS, "head": heads},
    )


def _load_rows(plan: Plan, given, rows, tile, slot, barrier) -> None:
    """To a slot of `in_slots`."""
    token, query, query_expert, d_output, visible, shift, delta = given
    q_smem, do_smem, *others = rows
    (head,) = place("head")
    gather_queries(plan, (query, query_expert), _gather(plan, token.at[tile], q_smem.at[slot], barrier))
    _gather(plan, token.at[tile], do_smem.at[slot], barrier)(d_output)
    copy((visible.at[tile], shift.at[tile, head], delta.at[tile, head]), others, slot, barrier)


def _gather(plan: Plan, token, target, barrier) -> Callable[[Any], None]:
    """Of a source the columns of a head, of the rows that `token` names; arrives at the barrier."""
    (head,), d = place("head"), target.shape[1]

    def gather(source) -> None:
        if plan.products == "tcgen05":
            rows = plgpu.load(token, (), optimized=False)
            plgpu.copy_gmem_to_smem(source.at[rows, pl.ds(head * d, d)], target, barrier)
        else:
            copy_rows(source, token, head * d, target)
            plgpu.barrier_arrive(barrier)

    return gather


class _Core(NamedTuple):
    """The tensor core, and the parts of tensor memory that are a warpgroup's own."""

    plan: Plan
    result: Any  # float32 [128, n]
    left: Any  # 16-bit [128, n]
    done: Any

    def product(self, a, b):
        """a @ b in registers, accumulated in float32; both in shared memory."""
        self.add(self.result, a, b, to_what_is_there=False)
        return self.load(self.result)

    def add(self, sums, a, b, to_what_is_there=True) -> None:
        """sums += a @ b, or sums = a @ b; a in registers or shared memory, b in shared memory."""
        if isinstance(a, jax.Array):
            self.store(self.left, a)
            a = self.left
        if self.plan.products == "dot":
            b = b.ref[...].T if isinstance(b, transposed) else b[...]
            product = jnp.dot(a[...], b, preferred_element_type=jnp.float32)
            sums[...] = product + jnp.where(to_what_is_there, sums[...], 0.0)
            return
        b = plgpu.transpose_ref(b.ref, (1, 0)) if isinstance(b, transposed) else b
        plgpu.tcgen05_mma(sums, a, b, self.done, accumulate=to_what_is_there)
        plgpu.barrier_wait(self.done)

    def load(self, x):
        """From tensor memory to registers. The next product may overwrite it."""
        if self.plan.products == "dot":
            return x[...]
        loaded = plgpu.async_load_tmem(x)
        plgpu.wait_load_tmem()
        return loaded

    def store(self, x, value) -> None:
        """From registers to tensor memory, before the next product."""
        if self.plan.products == "dot":
            x[...] = value
            return
        plgpu.async_store_tmem(x, value)
        plgpu.commit_tmem()

    def scale(self, sums, factor) -> None:
        """sums *= factor, a number a row."""
        before = self.load(sums)
        self.store(sums, before * columns(factor, before))


def _core(plan: Plan, result, left, sums, done, shared: bool = False):
    """What this warpgroup has of `_memory_of_the_core`: the core, and its sums, or those that all share."""
    (warpgroup,) = place("warpgroup")

    def mine(x):
        width = x.shape[1] // plan.warpgroups
        return x.at[:, pl.ds(warpgroup * width, width)]

    return _Core(plan, mine(result), mine(left), done.at[warpgroup]), sums if shared else map(mine, sums)


def _memory_of_the_core(plan: Plan, width: int, sums: list[int], dtype: DTypeLike) -> list:
    """Of 512 columns of tensor memory: `width` of results and half as many of left operands a warpgroup, and sums."""
    memory = plgpu.SMEM if plan.products == "dot" else plgpu.TMEM
    packed = functools.partial(memory, packed=True) if memory is plgpu.TMEM else memory
    return [
        memory((ROWS, plan.warpgroups * width), jnp.float32),
        packed((ROWS, plan.warpgroups * width), dtype),
        [memory((ROWS, columns), jnp.float32) for columns in sums],
        plgpu.Barrier(num_barriers=plan.warpgroups, orders_tensor_core=True),
    ]
