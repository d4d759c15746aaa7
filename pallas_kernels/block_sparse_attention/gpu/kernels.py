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
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

ROWS = 64  # t: what one warpgroup multiplies
LOG2_E = math.log2(math.e)


class Plan(NamedTuple):
    """How the kernels are cut."""

    scale: float
    part: int  # keys of a resource that are in shared memory at once
    block: int  # keys of which a warpgroup has the scores in registers at once
    splits: int  # blocks of threads that share the tiles of a resource
    slots: int  # tiles in shared memory, a warpgroup; 2: copies overlap with work
    warpgroups: Literal[1, 2] = 2  # of a block of threads; with 2, each may have 255 registers a thread
    products: Literal["wgmma", "dot"] = "wgmma"


class Rows(NamedTuple):
    """The rows of all tiles. The tiles of resource r are begin[r] to begin[r + 1]; what lies past them is not read."""

    begin: Int[Array, "R1"]
    visible: Int[Array, "N t"]  # how many keys of its resource a row sees; 0 for padding


def forward(
    query: Float[Array, "N t H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """Softmax attention of every row over each part of its resource, and its log-sum-exp; 0 and -inf if it sees none.

    Rows of tiles past begin[R] are not written.
    """
    (tiles, _, heads, d), (resources, m) = query.shape, key.shape[:2]
    dtype, parts = query.dtype, m // plan.part

    def kernel(begin, visible, query, key, value, output, lse, keys, queries, statistics, arrived):
        part, warpgroup, mine = jax.lax.axis_index("part"), jax.lax.axis_index("warpgroup"), _mine(begin, plan)
        head, (k_smem, v_smem), (seen_smem, lse_smem) = jax.lax.axis_index("head"), keys, statistics
        q_smem, (table_arrived, tile_arrived) = queries.at[warpgroup], arrived

        def arrival(i):
            return tile_arrived.at[warpgroup * plan.slots + jax.lax.rem(i, plan.slots)]

        def load(i):
            slot = jax.lax.rem(i, plan.slots)
            plgpu.copy_gmem_to_smem(query.at[mine.tile(i), :, head], q_smem.at[slot], arrival(i))
            plgpu.copy_gmem_to_smem(visible.at[mine.tile(i)], seen_smem.at[warpgroup, slot], arrival(i))

        def attend(i, slot):
            seen = seen_smem[warpgroup, slot] - part * plan.part

            def step(j, state):
                first = 0 if state is None else pl.multiple_of(j * plan.block, plan.block)
                here = pl.ds(first, plan.block)
                score = _product(plan, q_smem.at[slot], _transposed(k_smem.at[here]))
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                score = jnp.where(index < _columns(seen, score), score * (plan.scale * LOG2_E), -jnp.inf)
                top = score.max(1) if state is None else jnp.maximum(state[0], score.max(1))
                weight = jnp.exp2(score - _columns(_finite(top), score))
                total, sums = weight.sum(1), None
                if state is not None:
                    keep = jnp.exp2(state[0] - _finite(top))
                    total, sums = total + state[1] * keep, state[2] * _columns(keep, state[2])
                return top, total, _product(plan, weight.astype(dtype), v_smem.at[here], sums)

            top, total, sums = jax.lax.fori_loop(1, plan.part // plan.block, step, step(0, None))
            output[part, mine.tile(i), :, head] = sums / _columns(jnp.where(total > 0, total, 1.0), sums)
            lse_smem[warpgroup] = (_finite(top) + jnp.log2(total)) / LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse.at[part, mine.tile(i), head])

        _load_tables((key, k_smem), (value, v_smem), table_arrived, mine, plan)
        _for_tiles(mine, plan, load, arrival, attend)

    call = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((parts, *query.shape), jnp.float32),
            jax.ShapeDtypeStruct((parts, tiles, heads, ROWS), jnp.float32),
        ),
        scratch_types=(
            [_swizzled((plan.part, d), dtype)] * 2,
            _swizzled((plan.warpgroups, plan.slots, ROWS, d), dtype),
            [
                plgpu.SMEM((plan.warpgroups, plan.slots, ROWS), jnp.int32),
                plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
            ],
            [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups * plan.slots)],
        ),
        **_grid("block_sparse_attention_forward", plan, resource=resources, split=plan.splits, part=parts, head=heads),
    )
    return call(*rows, query, key, value)


def query_gradients(
    query: Float[Array, "N t H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    d_output: Float[Array, "N t H d"],
    shift: Float[Array, "N H t"],
    delta: Float[Array, "N H t"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "S N t H d"], Float[Array, "S N H t"]]:
    """Gradients of every row's query (without the factor `scale`) and bias through each part of its resource.

    With p = exp(scale q.k + shift) the gradient of a score is p (d output . v - delta). Rows of tiles past begin[R] are
    not written.
    """
    (tiles, _, heads, d), (resources, m) = query.shape, key.shape[:2]
    dtype, parts = query.dtype, m // plan.part

    def kernel(begin, visible, query, key, value, d_output, shift, delta, d_query, d_bias, keys, queries, *more):
        part, warpgroup, mine = jax.lax.axis_index("part"), jax.lax.axis_index("warpgroup"), _mine(begin, plan)
        head, (statistics, bias_smem, (table_arrived, tile_arrived)) = jax.lax.axis_index("head"), more
        (k_smem, v_smem), (q_smem, do_smem) = keys, (x.at[warpgroup] for x in queries)
        seen_smem, shift_smem, delta_smem = (x.at[warpgroup] for x in statistics)

        def arrival(i):
            return tile_arrived.at[warpgroup * plan.slots + jax.lax.rem(i, plan.slots)]

        def load(i):
            slot, tile = jax.lax.rem(i, plan.slots), mine.tile(i)
            plgpu.copy_gmem_to_smem(query.at[tile, :, head], q_smem.at[slot], arrival(i))
            plgpu.copy_gmem_to_smem(d_output.at[tile, :, head], do_smem.at[slot], arrival(i))
            plgpu.copy_gmem_to_smem(visible.at[tile], seen_smem.at[slot], arrival(i))
            plgpu.copy_gmem_to_smem(shift.at[tile, head], shift_smem.at[slot], arrival(i))
            plgpu.copy_gmem_to_smem(delta.at[tile, head], delta_smem.at[slot], arrival(i))

        def differentiate(i, slot):
            seen, shift = seen_smem[slot] - part * plan.part, shift_smem[slot] * LOG2_E
            delta = delta_smem[slot]

            def step(j, state):
                first = pl.multiple_of(j * plan.block, plan.block)
                here, (d_query, d_bias) = pl.ds(first, plan.block), state
                score = _product(plan, q_smem.at[slot], _transposed(k_smem.at[here])) * (plan.scale * LOG2_E)
                index = first + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
                weight = jnp.where(index < _columns(seen, score), jnp.exp2(score + _columns(shift, score)), 0.0)
                d_weight = _product(plan, do_smem.at[slot], _transposed(v_smem.at[here]))
                d_score = weight * (d_weight - _columns(delta, score))
                d_query = _product(plan, d_score.astype(dtype), k_smem.at[here], d_query)
                return d_query, d_bias + d_score.sum(1)

            nothing = jnp.zeros((ROWS, d), jnp.float32), jnp.zeros(ROWS, jnp.float32)
            d_q, d_b = jax.lax.fori_loop(0, plan.part // plan.block, step, nothing)
            q_smem[slot], bias_smem[warpgroup] = d_q.astype(dtype), d_b
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[slot], d_query.at[part, mine.tile(i), :, head])
            plgpu.copy_smem_to_gmem(bias_smem.at[warpgroup], d_bias.at[part, mine.tile(i), head])

        _load_tables((key, k_smem), (value, v_smem), table_arrived, mine, plan)
        _for_tiles(mine, plan, load, arrival, differentiate)

    in_slots = (plan.warpgroups, plan.slots, ROWS)
    call = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((parts, *query.shape), dtype),
            jax.ShapeDtypeStruct((parts, tiles, heads, ROWS), jnp.float32),
        ),
        scratch_types=(
            [_swizzled((plan.part, d), dtype)] * 2,
            [_swizzled((*in_slots, d), dtype)] * 2,
            [plgpu.SMEM(in_slots, kind) for kind in (jnp.int32, jnp.float32, jnp.float32)],
            plgpu.SMEM((plan.warpgroups, ROWS), jnp.float32),
            [plgpu.Barrier(num_arrivals=2), plgpu.Barrier(num_arrivals=5, num_barriers=plan.warpgroups * plan.slots)],
        ),
        **_grid("block_sparse_attention_d_query", plan, resource=resources, split=plan.splits, part=parts, head=heads),
    )
    return call(*rows, query, key, value, d_output, shift, delta)


def key_gradients(
    query: Float[Array, "N t H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    d_output: Float[Array, "N t H d"],
    shift: Float[Array, "N H t"],
    delta: Float[Array, "N H t"],
    rows: Rows,
    plan: Plan,
) -> tuple[Float[Array, "R m H d"], Float[Array, "R m H d"]]:
    """Gradients of keys (without the factor `scale`) and values, in float32; see `query_gradients`.

    A warpgroup owns 64 keys and sums over all tiles of their resource, so that everything is transposed: keys are rows,
    queries are columns.
    """
    heads, d, (resources, m) = *query.shape[2:], key.shape[:2]
    dtype, part = query.dtype, plan.warpgroups * ROWS

    def kernel(begin, visible, query, key, value, d_output, shift, delta, d_key, d_value, keys, queries, *more):
        resource, head, warpgroup = (jax.lax.axis_index(axis) for axis in ("resource", "head", "warpgroup"))
        (seen_smem, shift_smem, delta_smem), out_smem, (keys_arrived, arrived, consumed) = more
        (k_smem, v_smem), (q_smem, do_smem) = (x.at[warpgroup] for x in keys), queries
        first_key = jax.lax.axis_index("part") * part + warpgroup * ROWS
        mine, leads = (resource, pl.ds(first_key, ROWS), head), warpgroup == 0
        first_tile, count = begin[resource], begin[resource + 1] - begin[resource]

        def load(i):
            slot, tile = jax.lax.rem(i, plan.slots), first_tile + i
            # Both warpgroups read the slot: it is free when both have said so.
            pl.when(i >= plan.slots)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            plgpu.copy_gmem_to_smem(query.at[tile, :, head], q_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(d_output.at[tile, :, head], do_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(visible.at[tile], seen_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(shift.at[tile, head], shift_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(delta.at[tile, head], delta_smem.at[slot], arrived.at[slot])

        def step(i, state):
            d_key, d_value = state
            slot, ahead = jax.lax.rem(i, plan.slots), i + plan.slots - 1
            pl.when(leads & (ahead < count))(lambda: load(ahead))
            plgpu.barrier_wait(arrived.at[slot])
            score = _product(plan, k_smem, _transposed(q_smem.at[slot])) * (plan.scale * LOG2_E)
            index = first_key + jax.lax.broadcasted_iota(jnp.int32, score.shape, 0)
            weight = jnp.exp2(score + _lines(shift_smem[slot] * LOG2_E, score))
            weight = jnp.where(index < _lines(seen_smem[slot], score), weight, 0.0)
            d_value = _product(plan, weight.astype(dtype), do_smem.at[slot], d_value)
            d_weight = _product(plan, v_smem, _transposed(do_smem.at[slot]))
            d_score = weight * (d_weight - _lines(delta_smem[slot], score))
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

    call = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(key.shape, jnp.float32),) * 2,
        scratch_types=(
            [_swizzled((plan.warpgroups, ROWS, d), dtype)] * 2,
            [_swizzled((plan.slots, ROWS, d), dtype)] * 2,
            [plgpu.SMEM((plan.slots, ROWS), kind) for kind in (jnp.int32, jnp.float32, jnp.float32)],
            _swizzled((plan.warpgroups, ROWS, d), jnp.float32),
            [
                plgpu.Barrier(num_arrivals=2, num_barriers=plan.warpgroups),
                plgpu.Barrier(num_arrivals=5, num_barriers=plan.slots),
                plgpu.Barrier(num_arrivals=plan.warpgroups, num_barriers=plan.slots),
            ],
        ),
        **_grid("block_sparse_attention_d_key", plan, resource=resources, part=m // part, head=heads),
    )
    return call(*rows, query, key, value, d_output, shift, delta)


def _grid(name: str, plan: Plan, **axes: int) -> dict:
    """The last axis runs fastest: the heads of a tile are neighbours in memory."""
    return {
        "grid": tuple(axes.values()),
        "grid_names": tuple(axes),
        "num_threads": plan.warpgroups,
        "thread_name": "warpgroup",
        "kernel_name": name,
        "compiler_params": plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    }


def _swizzled(shape: tuple[int, ...], dtype: DTypeLike):
    """Shared memory as WGMMA and TMA want it: rows of 128 bytes, in groups of 8, without bank conflicts."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


class _transposed(NamedTuple):
    """A matrix in shared memory whose transpose is multiplied with."""

    ref: Any


def _product(plan: Plan, a, b, sums=None):
    """sums + a @ b, accumulated in float32: a in registers or shared memory, b in shared memory."""
    if plan.products == "dot":
        a = a if isinstance(a, jax.Array) else a[...]
        b = b.ref[...].T if isinstance(b, _transposed) else b[...]
        product = jnp.dot(a, b, preferred_element_type=jnp.float32)
        return product if sums is None else sums + product
    b = plgpu.transpose_ref(b.ref, (1, 0)) if isinstance(b, _transposed) else b
    if sums is not None:
        return pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))(plgpu.ACC.init(sums))

    def multiply(sums):
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _columns(x, like):
    """A number a row, for every column."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def _lines(x, like):
    """A number a column, for every row."""
    return jax.lax.broadcast_in_dim(x, like.shape, [1])


def _finite(x):
    return jnp.where(x > -jnp.inf, x, 0.0)


class _Mine(NamedTuple):
    """The tiles of one warpgroup: every `step`-th from `first`."""

    first: Array
    count: Array
    step: int
    some: Array  # whether this block of threads has any

    def tile(self, i):
        return self.first + i * self.step


def _mine(begin, plan: Plan) -> _Mine:
    resource, split = jax.lax.axis_index("resource"), jax.lax.axis_index("split")
    step = plan.warpgroups * plan.splits
    leader = begin[resource] + plan.warpgroups * split
    first = leader + jax.lax.axis_index("warpgroup")
    end = begin[resource + 1]
    count = jax.lax.div(jnp.maximum(end - first, 0) + (step - 1), step)
    return _Mine(first, count, step, leader < end)


def _load_tables(key, value, arrived, mine: _Mine, plan: Plan) -> None:
    """Keys and values of this part, by one warpgroup; both wait for them."""
    resource, head, part = (jax.lax.axis_index(axis) for axis in ("resource", "head", "part"))

    @pl.when(mine.some & (jax.lax.axis_index("warpgroup") == 0))
    def _():
        for source, target in (key, value):
            plgpu.copy_gmem_to_smem(source.at[resource, pl.ds(part * plan.part, plan.part), head], target, arrived)

    @pl.when(mine.some)
    def _():
        plgpu.barrier_wait(arrived)


def _for_tiles(mine: _Mine, plan: Plan, load, arrival, work) -> None:
    """work(i, slot) on every tile, loading ahead as far as there are slots; work ends with its copies out under way."""
    for i in range(plan.slots - 1):
        pl.when(i < mine.count)(functools.partial(load, jnp.int32(i)))

    @pl.loop(0, mine.count)
    def _(i):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left the slot that is loaded next
        pl.when(i + plan.slots - 1 < mine.count)(lambda: load(i + plan.slots - 1))
        slot = jax.lax.rem(i, plan.slots)
        plgpu.barrier_wait(arrival(i))
        work(i, slot)

    plgpu.wait_smem_to_gmem(0)
