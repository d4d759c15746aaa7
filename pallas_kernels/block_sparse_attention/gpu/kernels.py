"""The kernels of block-sparse attention for Hopper: copies into swizzled shared memory, products by WGMMA.

A block of threads keeps keys and values of one resource and head in shared memory while its warpgroups walk over the
resource's tiles, 64 rows each; where there is room for two, the next one is on its way while one is at work. Rows of
queries and output gradients are gathered by the threads themselves (`gather`), other matrices are copied by TMA. Scores
stay in registers. Every pair writes its own result and every resource its own gradients: no atomics, and the same bits
on every run.

JAX's interpreter of such kernels knows no WGMMA with a transposed operand or one in registers, nor the gather. With
products="dot" there are plain dot products of the same arrays, read from the same shared memory, and rows are copied
one by one: all else is what a GPU runs.

Shapes: T tokens, N tiles, t rows a tile, R resources, m keys a resource, S parts of its keys, H heads, d head size;
R1 = R + 1.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.gpu import gather
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

ROWS = 64  # t: what one warpgroup multiplies


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

    def kernel(
        begin, visible, token, query, query_expert, key, value, fraction, size, lse, keys, rows, statistics, arrived
    ):
        part, warpgroup, head = place("part", "warpgroup", "head")
        k_smem, v_smem = keys
        size_smem, lse_smem = [x.at[warpgroup] for x in statistics]
        q_smem, seen_smem = [x.at[warpgroup] for x in rows]
        arrive = functools.partial(_arrive, plan)

        def attend(tile, slot, load_next):
            seen = seen_smem[slot] - part * plan.part

            def step(j, state):
                first = 0 if state is None else pl.multiple_of(j * plan.block, plan.block)
                here = pl.ds(first, plan.block)
                (score,) = _products(plan, (q_smem.at[slot], transposed(k_smem.at[here])))
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                score = jnp.where(index < columns(seen, score), score * (plan.scale * LOG2_E), -jnp.inf)
                top = score.max(1) if state is None else jnp.maximum(state[0], score.max(1))
                weight = jnp.exp2(score - columns(finite(top), score))
                total, sums = weight.sum(1), jnp.zeros((ROWS, d), jnp.float32)
                if state is None:
                    load_next()
                else:
                    keep = jnp.exp2(state[0] - finite(top))
                    total, sums = total + state[1] * keep, state[2] * columns(keep, state[2])
                (sums,) = _add(plan, [sums], [lambda: (weight.astype(dtype), v_smem.at[here])])
                return top, total, sums

            top, total, sums = jax.lax.fori_loop(1, plan.part // plan.block, step, step(0, None))
            largest = size_of_rows(sums)
            q_smem[slot] = bitcast(packed(sums * columns(1.0 / largest, sums), dtype), dtype)
            size_smem[...] = largest / jnp.where(total > 0, total, 1.0)
            lse_smem[...] = (finite(top) + jnp.log2(total)) / LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[slot], fraction.at[part, tile, :, head])
            for source, target in ((size_smem, size), (lse_smem, lse)):
                plgpu.copy_smem_to_gmem(source, target.at[part, tile, head])

        def load_rows(tile):
            start_gather = _gather(plan, token.at[tile], q_smem)

            def start(slot, barrier):
                gather_queries(plan, (query, query_expert), lambda source: start_gather(source, q_smem.at[slot]))
                copy((visible.at[tile],), (seen_smem,), slot, barrier)

            return start

        for_tiles(begin, ((key, k_smem), (value, v_smem)), load_rows, arrived, attend, plan, arrive)

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
        (k_smem, v_smem), rows, bias_smem, arrived = scratch
        q_smem, do_smem, *others = [x.at[warpgroup] for x in rows]
        seen_smem, shift_smem, delta_smem = others
        arrive = functools.partial(_arrive, plan)

        def differentiate(tile, slot, load_next):
            seen, shift = seen_smem[slot] - part * plan.part, shift_smem[slot] * LOG2_E
            delta = delta_smem[slot]

            def step(j, state):
                first = pl.multiple_of(j * plan.block, plan.block)
                here, (d_query, d_bias) = pl.ds(first, plan.block), state
                operands = (q_smem, k_smem), (do_smem, v_smem)
                scores = _products(plan, *((x.at[slot], transposed(y.at[here])) for x, y in operands))
                score, d_weight = scores[0] * (plan.scale * LOG2_E), scores[1]
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                weight = jnp.where(index < columns(seen, score), jnp.exp2(score + columns(shift, score)), 0.0)
                d_score = weight * (d_weight - columns(delta, score))
                pl.when(j == 0)(load_next)
                (d_query,) = _add(plan, [d_query], [lambda: (d_score.astype(dtype), k_smem.at[here])])
                return d_query, d_bias + d_score.sum(1)

            nothing = jnp.zeros((ROWS, d), jnp.float32), jnp.zeros(ROWS, jnp.float32)
            d_q, d_b = jax.lax.fori_loop(0, plan.part // plan.block, step, nothing)
            q_smem[slot], bias_smem[warpgroup] = d_q.astype(dtype), d_b
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[slot], d_query.at[part, tile, :, head])
            plgpu.copy_smem_to_gmem(bias_smem.at[warpgroup], d_bias.at[part, tile, head])

        def load_rows(tile):
            start_gather = _gather(plan, token.at[tile], q_smem)

            def start(slot, barrier):
                gather_queries(plan, (query, query_expert), lambda source: start_gather(source, q_smem.at[slot]))
                start_gather(d_output, do_smem.at[slot])
                copy((visible.at[tile], shift.at[tile, head], delta.at[tile, head]), others, slot, barrier)

            return start

        for_tiles(begin, ((key, k_smem), (value, v_smem)), load_rows, arrived, differentiate, plan, arrive)

    return call(
        kernel,
        "block_sparse_attention_d_query",
        plan,
        arrays(tiles),
        [((parts, count, ROWS, heads, d), dtype), ((parts, count, heads, ROWS), jnp.float32)],
        [swizzled((plan.part, d), dtype)] * 2,
        in_slots((plan.warpgroups, plan.slots, ROWS), d, dtype),
        plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
        [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=4, num_barriers=plan.warpgroups * plan.slots)],
        axes={"resource": resources, "split": plan.splits, "part": parts, "head": heads},
    )


def key_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "R m H d"], Float[Array, "R m H d"]]:
    """Gradients of keys and values; see `query_gradients`.

    A warpgroup owns 64 keys and sums over all tiles of their resource, so that everything is transposed: keys are rows,
    queries are columns. Of two warpgroups one gathers the queries of a tile, the other its output gradients. There have
    to be two slots.
    """
    (resources, m, heads, d), dtype = tiles.key.shape, tiles.key.dtype
    part = plan.warpgroups * ROWS

    def kernel(begin, visible, token, query, query_expert, key, value, d_output, shift, delta, *rest):
        d_key, d_value, keys, (q_smem, do_smem, *others), out_smem, (keys_arrived, arrived, consumed) = rest
        resource, part_index, head, warpgroup = place("resource", "part", "head", "warpgroup")
        (k_smem, v_smem), (seen_smem, shift_smem, delta_smem) = (x.at[warpgroup] for x in keys), others
        first_key = part_index * part + warpgroup * ROWS
        mine, leads = (resource, pl.ds(first_key, ROWS), head), warpgroup == 0
        first_tile, count = begin[resource], begin[resource + 1] - begin[resource]

        def load_rows(i):
            tile = first_tile + jnp.minimum(i, count - 1)
            start_gather = _gather(plan, token.at[tile], q_smem)

            def start():
                slot = jax.lax.rem(i, plan.slots)
                # Both warpgroups read the slot: it is free when both have said so.
                pl.when(i >= plan.slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))

                @pl.when(leads)
                def _():
                    gather_queries(plan, (query, query_expert), lambda source: start_gather(source, q_smem.at[slot]))
                    of_rows = visible.at[tile], shift.at[tile, head], delta.at[tile, head]
                    copy(of_rows, others, slot, arrived.at[slot])

                @pl.when(warpgroup == plan.warpgroups - 1)
                def _():
                    start_gather(d_output, do_smem.at[slot])

            return start

        def step(i, state):
            d_key, d_value = state
            slot = jax.lax.rem(i, plan.slots)
            _arrive(plan, arrived.at[slot])
            plgpu.barrier_wait(arrived.at[slot])
            load_next = load_rows(i + 1)
            q, do = q_smem.at[slot], do_smem.at[slot]
            score, d_weight = _products(plan, (k_smem, transposed(q)), (v_smem, transposed(do)))
            score = score * (plan.scale * LOG2_E)
            index = first_key + jax.lax.broadcasted_iota(jnp.int32, score.shape, 0)
            weight = jnp.exp2(score + lines(shift_smem[slot] * LOG2_E, score))
            weight = jnp.where(index < lines(seen_smem[slot], score), weight, 0.0)
            pl.when(i + 1 < count)(load_next)

            def d_score():
                return weight * (d_weight - lines(delta_smem[slot], weight))

            through = [lambda: (weight.astype(dtype), do), lambda: (d_score().astype(dtype), q)]
            d_value, d_key = _add(plan, [d_value, d_key], through)
            plgpu.commit_smem()  # what was read here comes before what is written next
            plgpu.barrier_arrive(consumed.at[slot])
            return d_key, d_value

        for source, target in ((key, k_smem), (value, v_smem)):
            plgpu.copy_gmem_to_smem(source.at[mine], target, keys_arrived.at[warpgroup])
        pl.when(count > 0)(lambda: load_rows(jnp.int32(0))())
        plgpu.barrier_wait(keys_arrived.at[warpgroup])
        nothing = jnp.zeros((ROWS, d), jnp.float32)
        sums = jax.lax.fori_loop(0, count, step, (nothing, nothing))

        for i in range(plan.slots):
            pl.when(i < count)(functools.partial(plgpu.barrier_wait, consumed.at[i]))

        for total, target, factor in zip(sums, (d_key, d_value), (plan.scale, 1.0), strict=True):
            out_smem[warpgroup] = (total * factor).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], target.at[mine])
            plgpu.wait_smem_to_gmem(0)

    return call(
        kernel,
        "block_sparse_attention_d_key",
        plan,
        arrays(tiles),
        [(tiles.key.shape, dtype)] * 2,
        [swizzled((plan.warpgroups, ROWS, d), dtype)] * 2,
        in_slots((plan.slots, ROWS), d, dtype),
        swizzled((plan.warpgroups, ROWS, d), dtype),
        [
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups),
            plgpu.Barrier(num_arrivals=3 + plan.warpgroups, num_barriers=plan.slots),
            plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots),
        ],
        axes={"resource": resources, "part": m // part, "head": heads},
    )


def _gather(plan: Plan, token, like) -> Callable[[Any, Any], None]:
    """A function (source, target) that starts to gather the columns of a head, of the rows that `token` names;
    `_arrive` waits for them."""
    (head,), d = place("head"), like.shape[-1]
    if plan.products == "dot":
        return lambda source, target: copy_rows(source, token, head * d, target)
    tokens = gather.load_tokens(token, d, like.dtype)
    return lambda source, target: gather.start_rows(source, tokens, head * d, target)


def _arrive(plan: Plan, barrier) -> None:
    """Arrives at the barrier when what this warpgroup gathers is there."""
    if plan.products == "wgmma":
        gather.wait()
    plgpu.barrier_arrive(barrier)


def _products(plan: Plan, *pairs) -> list:
    """a @ b of every pair, accumulated in float32: both in shared memory. All are under way at once."""
    if plan.products == "dot":
        return [_dot(a, b) for a, b in pairs]

    def multiply(*sums):
        for x, (a, b) in zip(sums, pairs, strict=True):
            plgpu.wgmma(x, a, _operand(b))
        return [x[...] for x in sums]

    shapes = [(a.shape[0], b.ref.shape[0] if isinstance(b, transposed) else b.shape[1]) for a, b in pairs]
    return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def _add(plan: Plan, sums, factors) -> list:
    """sums + a @ b of every pair in `factors`, functions that give a in registers and b in shared memory: one product
    is under way while the next `a` is computed."""
    if plan.products == "dot":
        return [x + _dot(*factor()) for x, factor in zip(sums, factors, strict=True)]

    def multiply(refs):
        for x, factor in zip(refs, factors, strict=True):
            a, b = factor()
            plgpu.wgmma(x, a, _operand(b))

    return pl.run_state(multiply)([plgpu.ACC.init(x) for x in sums])


def _dot(a, b):
    a = a if isinstance(a, jax.Array) else a[...]
    b = b.ref[...].T if isinstance(b, transposed) else b[...]
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _operand(b):
    return b.ref.transpose((1, 0)) if isinstance(b, transposed) else b
