"""The kernels of block-sparse attention for Hopper: TMA copies into swizzled shared memory, products by WGMMA.

A block of threads keeps keys and values of one resource and head in shared memory while its warpgroups walk over the
resource's tiles, 64 rows each; the next tile is on its way while one is at work. Scores stay in registers. Every pair
writes its own result and every resource its own gradients: no atomics, and the same bits on every run.

JAX's interpreter of such kernels knows no WGMMA with a transposed operand or one in registers. With products="dot" they
are plain dot products of the same arrays, read from the same shared memory: the one difference between what is
interpreted and what a GPU runs.

Shapes: N tiles, t rows a tile, R resources, m keys a resource, S parts of its keys, H heads, d head size; R1 = R + 1.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.gpu.common import (
    LOG2_E,
    Plan,
    Rows,
    Tiles,
    call,
    columns,
    copy,
    for_tiles,
    in_slots,
    lines,
    place,
    swizzled,
    transposed,
)
from pallas_kernels.block_sparse_attention.tile import finite

ROWS = 64  # t: what one warpgroup multiplies


def forward(
    query: Float[Array, "N t H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """Softmax attention of every row over each part of its resource, and its log-sum-exp; 0 and -inf if it sees none.

    Both in float32. Rows of tiles past begin[R] are not written.
    """
    (tiles, _, heads, d), (resources, m) = query.shape, key.shape[:2]
    dtype, parts = query.dtype, m // plan.part

    def kernel(begin, visible, query, key, value, output, lse, keys, rows, lse_smem, arrived):
        part, warpgroup, head = place("part", "warpgroup", "head")
        k_smem, v_smem = keys
        q_smem, seen_smem = targets = [x.at[warpgroup] for x in rows]

        def attend(tile, slot):
            seen = seen_smem[slot] - part * plan.part

            def step(j, state):
                first = 0 if state is None else pl.multiple_of(j * plan.block, plan.block)
                here = pl.ds(first, plan.block)
                score = _product(plan, q_smem.at[slot], transposed(k_smem.at[here]))
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                score = jnp.where(index < columns(seen, score), score * (plan.scale * LOG2_E), -jnp.inf)
                top = score.max(1) if state is None else jnp.maximum(state[0], score.max(1))
                weight = jnp.exp2(score - columns(finite(top), score))
                total, sums = weight.sum(1), None
                if state is not None:
                    keep = jnp.exp2(state[0] - finite(top))
                    total, sums = total + state[1] * keep, state[2] * columns(keep, state[2])
                return top, total, _product(plan, weight.astype(dtype), v_smem.at[here], sums)

            top, total, sums = jax.lax.fori_loop(1, plan.part // plan.block, step, step(0, None))
            output[part, tile, :, head] = sums / columns(jnp.where(total > 0, total, 1.0), sums)
            lse_smem[warpgroup] = (finite(top) + jnp.log2(total)) / LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse.at[part, tile, head])

        def load_rows(tile, *slot):
            copy((query.at[tile, :, head], visible.at[tile]), targets, *slot)

        for_tiles(begin, ((key, k_smem), (value, v_smem)), load_rows, arrived, attend, plan)

    slots = (plan.warpgroups, plan.slots, ROWS)
    return call(
        kernel,
        "block_sparse_attention_forward",
        plan,
        (*rows, query, key, value),
        [((parts, *query.shape), jnp.float32), ((parts, tiles, heads, ROWS), jnp.float32)],
        [swizzled((plan.part, d), dtype)] * 2,
        [swizzled((*slots, d), dtype), plgpu.SMEM(slots, jnp.int32)],
        plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
        [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups * plan.slots)],
        axes={"resource": resources, "split": plan.splits, "part": parts, "head": heads},
    )


def query_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """Gradients of every row's query (without the factor `scale`) and bias through each part of its resource.

    Rows of tiles past begin[R] are not written.
    """
    (count, _, heads, d), (resources, m) = tiles.query.shape, tiles.key.shape[:2]
    dtype, parts = tiles.query.dtype, m // plan.part

    def kernel(begin, visible, query, key, value, d_output, shift, delta, d_query, d_bias, keys, rows, *more):
        part, warpgroup, head = place("part", "warpgroup", "head")
        (k_smem, v_smem), (bias_smem, arrived) = keys, more
        q_smem, do_smem, seen_smem, shift_smem, delta_smem = targets = [x.at[warpgroup] for x in rows]

        def differentiate(tile, slot):
            seen, shift = seen_smem[slot] - part * plan.part, shift_smem[slot] * LOG2_E
            delta = delta_smem[slot]

            def step(j, state):
                first = pl.multiple_of(j * plan.block, plan.block)
                here, (d_query, d_bias) = pl.ds(first, plan.block), state
                score = _product(plan, q_smem.at[slot], transposed(k_smem.at[here])) * (plan.scale * LOG2_E)
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                weight = jnp.where(index < columns(seen, score), jnp.exp2(score + columns(shift, score)), 0.0)
                d_weight = _product(plan, do_smem.at[slot], transposed(v_smem.at[here]))
                d_score = weight * (d_weight - columns(delta, score))
                d_query = _product(plan, d_score.astype(dtype), k_smem.at[here], d_query)
                return d_query, d_bias + d_score.sum(1)

            nothing = jnp.zeros((ROWS, d), jnp.float32), jnp.zeros(ROWS, jnp.float32)
            d_q, d_b = jax.lax.fori_loop(0, plan.part // plan.block, step, nothing)
            q_smem[slot], bias_smem[warpgroup] = d_q.astype(dtype), d_b
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[slot], d_query.at[part, tile, :, head])
            plgpu.copy_smem_to_gmem(bias_smem.at[warpgroup], d_bias.at[part, tile, head])

        def load_rows(tile, *slot):
            copy(_rows(head, query, d_output, visible, shift, delta, tile), targets, *slot)

        for_tiles(begin, ((key, k_smem), (value, v_smem)), load_rows, arrived, differentiate, plan)

    return call(
        kernel,
        "block_sparse_attention_d_query",
        plan,
        (*tiles.rows, *tiles[:-1]),
        [((parts, *tiles.query.shape), dtype), ((parts, count, heads, ROWS), jnp.float32)],
        [swizzled((plan.part, d), dtype)] * 2,
        in_slots((plan.warpgroups, plan.slots, ROWS), d, dtype),
        plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
        [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=5, num_barriers=plan.warpgroups * plan.slots)],
        axes={"resource": resources, "split": plan.splits, "part": parts, "head": heads},
    )


def key_gradients(tiles: Tiles, plan: Plan) -> tuple[Float[Array, "R m H d"], Float[Array, "R m H d"]]:
    """Gradients of keys (without the factor `scale`) and values, in float32; see `query_gradients`.

    A warpgroup owns 64 keys and sums over all tiles of their resource, so that everything is transposed: keys are rows,
    queries are columns.
    """
    (*_, heads, d), (resources, m) = tiles.query.shape, tiles.key.shape[:2]
    dtype, part = tiles.query.dtype, plan.warpgroups * ROWS

    def kernel(begin, visible, query, key, value, d_output, shift, delta, d_key, d_value, keys, rows, *more):
        resource, part_index, head, warpgroup = place("resource", "part", "head", "warpgroup")
        out_smem, (keys_arrived, arrived, consumed) = more
        (k_smem, v_smem), (q_smem, do_smem, seen_smem, shift_smem, delta_smem) = (x.at[warpgroup] for x in keys), rows
        first_key = part_index * part + warpgroup * ROWS
        mine, leads = (resource, pl.ds(first_key, ROWS), head), warpgroup == 0
        first_tile, count = begin[resource], begin[resource + 1] - begin[resource]

        def load(i):
            slot, tile = jax.lax.rem(i, plan.slots), first_tile + i
            # Both warpgroups read the slot: it is free when both have said so.
            pl.when(i >= plan.slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            copy(_rows(head, query, d_output, visible, shift, delta, tile), rows, slot, arrived.at[slot])

        def step(i, state):
            d_key, d_value = state
            slot, ahead = jax.lax.rem(i, plan.slots), i + plan.slots - 1
            pl.when(leads & (ahead < count))(lambda: load(ahead))
            plgpu.barrier_wait(arrived.at[slot])
            score = _product(plan, k_smem, transposed(q_smem.at[slot])) * (plan.scale * LOG2_E)
            index = first_key + jax.lax.broadcasted_iota(jnp.int32, score.shape, 0)
            weight = jnp.exp2(score + lines(shift_smem[slot] * LOG2_E, score))
            weight = jnp.where(index < lines(seen_smem[slot], score), weight, 0.0)
            d_value = _product(plan, weight.astype(dtype), do_smem.at[slot], d_value)
            d_weight = _product(plan, v_smem, transposed(do_smem.at[slot]))
            d_score = weight * (d_weight - lines(delta_smem[slot], score))
            d_key = _product(plan, d_score.astype(dtype), q_smem.at[slot], d_key)
            plgpu.commit_smem()  # what was read here comes before what the copy engine writes next
            plgpu.barrier_arrive(consumed.at[slot])
            return d_key, d_value

        for source, target in ((key, k_smem), (value, v_smem)):
            plgpu.copy_gmem_to_smem(source.at[mine], target, keys_arrived.at[warpgroup])
        for i in range(plan.slots - 1):
            pl.when(leads & (i < count))(functools.partial(load, jnp.int32(i)))
        plgpu.barrier_wait(keys_arrived.at[warpgroup])
        nothing = jnp.zeros((ROWS, d), jnp.float32)
        sums = jax.lax.fori_loop(0, count, step, (nothing, nothing))

        @pl.when(leads)
        def _():
            for i in range(plan.slots):
                pl.when(i < count)(functools.partial(plgpu.barrier_wait, consumed.at[i]))

        for total, target in zip(sums, (d_key, d_value), strict=True):
            out_smem[warpgroup] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[warpgroup], target.at[mine])
            plgpu.wait_smem_to_gmem(0)

    return call(
        kernel,
        "block_sparse_attention_d_key",
        plan,
        (*tiles.rows, *tiles[:-1]),
        [(tiles.key.shape, jnp.float32)] * 2,
        [swizzled((plan.warpgroups, ROWS, d), dtype)] * 2,
        in_slots((plan.slots, ROWS), d, dtype),
        swizzled((plan.warpgroups, ROWS, d), jnp.float32),
        [
            plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups),
            plgpu.Barrier(num_arrivals=5, num_barriers=plan.slots),
            plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots),
        ],
        axes={"resource": resources, "part": m // part, "head": heads},
    )


def _rows(head, query, d_output, visible, shift, delta, tile):
    return (
        query.at[tile, :, head],
        d_output.at[tile, :, head],
        visible.at[tile],
        shift.at[tile, head],
        delta.at[tile, head],
    )


def _product(plan: Plan, a, b, sums=None):
    """sums + a @ b, accumulated in float32: a in registers or shared memory, b in shared memory."""
    if plan.products == "dot":
        a = a if isinstance(a, jax.Array) else a[...]
        b = b.ref[...].T if isinstance(b, transposed) else b[...]
        product = jnp.dot(a, b, preferred_element_type=jnp.float32)
        return product if sums is None else sums + product
    b = plgpu.transpose_ref(b.ref, (1, 0)) if isinstance(b, transposed) else b
    if sums is not None:
        return pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))(plgpu.ACC.init(sums))

    def multiply(sums):
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))
