"""What the kernels of both generations of GPUs have: how they are cut and called, and the loop over tiles.

Shapes: T tokens, N tiles, t rows a tile, R resources, m keys a resource, H heads, d head size; R1 = R + 1.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

LOG2_E = math.log2(math.e)


class Plan(NamedTuple):
    """How the kernels are cut."""

    scale: float
    part: int  # keys of a resource that are in shared memory at once
    block: int  # keys of which a warpgroup has the scores in registers at once
    splits: int  # blocks of threads that share the tiles of a resource
    slots: int  # tiles in shared memory, a warpgroup; 1, or 2: copies overlap with work
    warpgroups: int = 2  # of a block of threads; with 2, each may have 255 registers a thread, with 3 168
    products: Literal["wgmma", "tcgen05", "dot"] = "wgmma"
    num_context: int = 0  # resources below it are context chunks: see `Queries`


class Rows(NamedTuple):
    """The rows of all tiles. The tiles of resource r are begin[r] to begin[r + 1]; what lies past them is not read."""

    begin: Int[Array, "R1"]
    visible: Int[Array, "N t"]  # how many keys of its resource a row sees; 0 for padding


class Queries(NamedTuple):
    """The queries of the rows of all tiles: of context chunks those of `query`, of experts those of `query_expert`. The
    kernels gather them."""

    token: Int[Array, "N t"]
    query: Float[Array, "T H d"]
    query_expert: Float[Array, "T H d"]

    def gathered(self, expert: Bool[Array, "N 1"]) -> Float[Array, "N t H d"]:
        """In the order of the rows; a token past the last is the last."""
        rotated, other = (x.at[self.token].get(mode="clip") for x in (self.query, self.query_expert))
        return jnp.where(expert[..., None, None], other, rotated)


class Tiles(NamedTuple):
    """What the kernels of gradients take. With p = exp(scale q.k + shift) the gradient of a score is
    p (d output . v - delta)."""

    query: Queries
    key: Float[Array, "R m H d"]
    value: Float[Array, "R m H d"]
    d_output: Float[Array, "T H d"]
    shift: Float[Array, "N H t"]
    delta: Float[Array, "N H t"]
    rows: Rows


class Partials(NamedTuple):
    """Softmax attention of every row over each part of its resource. The output is size * unpacked(fraction)."""

    fraction: Float[Array, "S N t H d"] | Int[Array, "S N t H d"]  # see `packed`
    size: Float[Array, "S N H t"]  # of the largest value
    lse: Float[Array, "S N H t"]  # log-sum-exp; -inf where a row sees none, and the output is 0 then


FIXED_POINT_ONE = 2**15 - 1
ROUNDING = 1.5 * 2.0**23  # added to a float32, it leaves the nearest integer in the lowest bits


def packed(x, dtype: DTypeLike):
    """Values from -1 to 1 in fixed point of 16 bits, for inputs of 16 bits; float32 stays as it is.

    Rounding to bfloat16 or float16 would be too coarse for the gradients of biases, small differences of large sums.
    """
    if dtype == jnp.float32:
        return x
    return jax.lax.bitcast_convert_type(x * FIXED_POINT_ONE + ROUNDING, jnp.int32).astype(jnp.int16)


def unpacked(x: Shaped[Array, "*n"]) -> Float[Array, "*n"]:
    """In float32 what `packed` was given."""
    return x.astype(jnp.float32) / FIXED_POINT_ONE if x.dtype == jnp.int16 else x


def bitcast(x, dtype: DTypeLike):
    """The same bits as another type of the same size."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def call(kernel, name: str, plan: Plan, arrays, results, *scratch, axes: dict[str, int]):
    """The last axis runs fastest: the heads of a tile are neighbours in memory."""
    run = plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(*result) for result in results),
        scratch_types=scratch,
        grid=tuple(axes.values()),
        grid_names=tuple(map(own, axes)),
        num_threads=plan.warpgroups,
        thread_name=own("warpgroup"),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return run(*arrays)


def own(axis: str) -> str:
    """An axis of the grid. JAX takes one that the mesh has too for the mesh's."""
    return f"kernel_{axis}"


def place(*axes: str) -> list[Int[Array, ""]]:
    """The place of this block of threads, or of this warpgroup in it, on axes of the grid."""
    return [jax.lax.axis_index(own(axis)) for axis in axes]


def swizzled(shape: tuple[int, ...], dtype: DTypeLike):
    """Shared memory as tensor cores and TMA want it: rows of 128 bytes, in groups of 8, without bank conflicts."""
    tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def in_slots(slots: tuple[int, ...], d: int, dtype: DTypeLike) -> list:
    """Room for what a tile has in the gradients: query, output gradient, visible, shift and delta."""
    return [swizzled((*slots, d), dtype)] * 2 + [plgpu.SMEM(slots, kind) for kind in (jnp.int32, *[jnp.float32] * 2)]


def flat(query: Queries) -> tuple[Array, ...]:
    """What is gathered are rows of a matrix: [T, H * d]."""
    return query.token, *(x.reshape(len(x), -1) for x in query[1:])


def arrays(tiles: Tiles) -> tuple[Array, ...]:
    """The arguments of the kernels of gradients."""
    d_output = tiles.d_output.reshape(len(tiles.d_output), -1)
    return *tiles.rows, *flat(tiles.query), tiles.key, tiles.value, d_output, tiles.shift, tiles.delta


def gather_queries(plan: Plan, queries, gather) -> None:
    """Calls `gather` with the rotated queries for a context chunk, with the others for an expert."""
    (resource,) = place("resource")
    expert = resource >= plan.num_context
    for source, wanted in zip(queries, (~expert, expert), strict=True):
        pl.when(wanted)(functools.partial(gather, source))


def copy_rows(source, token, column, target) -> None:
    """target[i] = source[token[i], column : column + d], one by one: for the interpreter."""

    @pl.loop(0, target.shape[0])
    def _(row):
        target[row] = source[token[row], pl.ds(column, target.shape[1])]


class transposed(NamedTuple):
    """A matrix in shared memory whose transpose is multiplied with."""

    ref: Any


def size_of_rows(x):
    """Of the largest value; 1 where all are 0. Not finite where a value is not, so that none is lost."""
    size = jnp.abs(x).max(-1)
    return jnp.where(size == 0, 1.0, size)


def columns(x, like):
    """A number a row, for every column."""
    return jax.lax.broadcast_in_dim(x, like.shape, [0])


def lines(x, like):
    """A number a column, for every row."""
    return jax.lax.broadcast_in_dim(x, like.shape, [1])


def copy(sources, targets, slot, barrier) -> None:
    """From global memory to a slot of shared memory each; every copy arrives at the barrier."""
    for source, target in zip(sources, targets, strict=True):
        plgpu.copy_gmem_to_smem(source, target.at[slot], barrier)


def nothing(*_) -> None:
    """Where nothing is to be done."""


def for_tiles(begin, tables, load_rows, arrived, work, plan: Plan, arrive: Callable = nothing) -> None:
    """work(tile, slot, load_next) on every tile of a warpgroup.

    Keys and values of this part are loaded by one warpgroup; all wait for them. `work` ends with its copies out under
    way. With two slots it calls load_next() once: late enough for the previous tile's results to have left the slot,
    early enough to overlap the rest of the work. With one slot the next tile is loaded after it.

    Args:
      tables: where keys and values are, and where they go.
      load_rows: (tile) gives a function (slot, barrier) that starts the copies of the tile's rows to the slot.
      arrive: (barrier) is called before that of a tile is waited for.
    """
    resource, split, part, head, warpgroup = place("resource", "split", "part", "head", "warpgroup")
    table_arrived, tile_arrived = arrived
    # Every `step`-th tile from the first; the block of threads has some if its first warpgroup has.
    step, end = plan.warpgroups * plan.splits, begin[resource + 1]
    leader = begin[resource] + plan.warpgroups * split
    first, some = leader + warpgroup, leader < end
    number = jax.lax.div(jnp.maximum(end - first, 0) + (step - 1), step)

    def slot_and_arrival(i):
        slot = jax.lax.rem(i, plan.slots)
        return slot, tile_arrived.at[warpgroup * plan.slots + slot]

    @pl.when(some & (warpgroup == 0))
    def _():
        for source, target in tables:
            here = source.at[resource, pl.ds(part * plan.part, plan.part), head]
            plgpu.copy_gmem_to_smem(here, target, table_arrived)

    pl.when(number > 0)(lambda: load_rows(first)(*slot_and_arrival(jnp.int32(0))))
    pl.when(some)(lambda: plgpu.barrier_wait(table_arrived))

    @pl.loop(0, number)
    def _(i):
        slot, arrival = slot_and_arrival(i)
        arrive(arrival)
        plgpu.barrier_wait(arrival)
        load = load_rows(jnp.minimum(first + (i + 1) * step, end - 1))

        def load_next():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a tile has left the slot
            pl.when(i + 1 < number)(lambda: load(*slot_and_arrival(i + 1)))

        work(first + i * step, slot, load_next if plan.slots == 2 else nothing)
        if plan.slots == 1:
            load_next()

    plgpu.wait_smem_to_gmem(0)
