"""What the kernels of both generations of GPUs have: how they are cut and called, and the loop over tiles.

Shapes: T tokens, N tiles, t rows a tile, R resources, m keys a resource, H heads, d head size; R1 = R + 1.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

LOG2_E = math.log2(math.e)


class Plan(NamedTuple):
    """How the kernels are cut."""

    scale: float
    part: int  # keys of a resource that are in shared memory at once
    block: int  # keys of which a warpgroup has the scores in registers at once
    splits: int  # blocks of threads that share the tiles of a resource
    slots: int  # tiles in shared memory, a warpgroup; 2: copies overlap with work
    warpgroups: Literal[1, 2] = 2  # of a block of threads; with 2, each may have 255 registers a thread
    products: Literal["wgmma", "tcgen05", "dot"] = "wgmma"
    num_context: int = 0  # resources below it are context chunks: see `Queries`


class Rows(NamedTuple):
    """The rows of all tiles. The tiles of resource r are begin[r] to begin[r + 1]; what lies past them is not read."""

    begin: Int[Array, "R1"]
    visible: Int[Array, "N t"]  # how many keys of its resource a row sees; 0 for padding


class Queries(NamedTuple):
    """The queries of the rows of all tiles: of context chunks those of `query`, of experts those of `query_expert`."""

    token: Int[Array, "N t"]
    query: Float[Array, "T H d"]
    query_expert: Float[Array, "T H d"]

    def gathered(self, expert: Bool[Array, "N 1"]) -> Float[Array, "N t H d"]:
        """In the order of the rows; a token past the last is the last."""
        # A row that is not wanted is read from token 0: always the same, and so from the cache.
        rotated = self.query.at[jnp.where(expert, 0, self.token)].get(mode="clip")
        other = self.query_expert.at[jnp.where(expert, self.token, 0)].get(mode="clip")
        return jnp.where(expert[..., None, None], other, rotated)


class Tiles(NamedTuple):
    """What the kernels of gradients take. With p = exp(scale q.k + shift) the gradient of a score is
    p (d output . v - delta)."""

    query: Any  # Float[Array, "N t H d"]; Queries, where the kernels gather them
    key: Float[Array, "R m H d"]
    value: Float[Array, "R m H d"]
    d_output: Float[Array, "N t H d"] | Float[Array, "T H d"]  # like the queries
    shift: Float[Array, "N H t"]
    delta: Float[Array, "N H t"]
    rows: Rows


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


class transposed(NamedTuple):
    """A matrix in shared memory whose transpose is multiplied with."""

    ref: Any


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


def for_tiles(begin, tables, load_rows, arrived, work, plan: Plan) -> None:
    """work(tile, slot) on every tile of a warpgroup, loading ahead as far as there are slots.

    Keys and values of this part are loaded by one warpgroup; both wait for them. `work` ends with its copies out under
    way.

    Args:
      tables: where keys and values are, and where they go.
      load_rows: (tile, slot, barrier) starts the copies of the tile's rows to the slot.
    """
    resource, split, part, head, warpgroup = place("resource", "split", "part", "head", "warpgroup")
    table_arrived, tile_arrived = arrived
    # Every `step`-th tile from the first; the block of threads has some if its first warpgroup has.
    step, end = plan.warpgroups * plan.splits, begin[resource + 1]
    leader = begin[resource] + plan.warpgroups * split
    first, some = leader + warpgroup, leader < end
    number = jax.lax.div(jnp.maximum(end - first, 0) + (step - 1), step)

    def arrival(i):
        return tile_arrived.at[warpgroup * plan.slots + jax.lax.rem(i, plan.slots)]

    def load(i):
        load_rows(first + i * step, jax.lax.rem(i, plan.slots), arrival(i))

    @pl.when(some & (warpgroup == 0))
    def _():
        for source, target in tables:
            here = source.at[resource, pl.ds(part * plan.part, plan.part), head]
            plgpu.copy_gmem_to_smem(here, target, table_arrived)

    pl.when(some)(lambda: plgpu.barrier_wait(table_arrived))
    for i in range(plan.slots - 1):
        pl.when(i < number)(functools.partial(load, jnp.int32(i)))

    @pl.loop(0, number)
    def _(i):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left the slot that is loaded next
        pl.when(i + plan.slots - 1 < number)(lambda: load(i + plan.slots - 1))
        slot = jax.lax.rem(i, plan.slots)
        plgpu.barrier_wait(arrival(i))
        work(first + i * step, slot)

    plgpu.wait_smem_to_gmem(0)
