"""Block-sparse attention on GPUs: results merged in XLA, the tiles in `kernels` (Hopper) or `blackwell`.

The kernels gather the rows of a tile. What it gives for each of its pairs is stored as it comes, and every token adds
up its own pairs, in order. Off a GPU the tiles are computed by `elsewhere`.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, N tiles, t rows a tile, S parts of m.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import tables as tables_lib
from pallas_kernels.block_sparse_attention.block_sizes import BlockSizes
from pallas_kernels.block_sparse_attention.gpu import blackwell, elsewhere, kernels
from pallas_kernels.block_sparse_attention.gpu.common import Plan, Queries, Rows, Tiles, unpacked
from pallas_kernels.block_sparse_attention.tables import Tables
from pallas_kernels.block_sparse_attention.tile import finite
from pallas_kernels.block_sparse_attention.types import Cotangents, Gradients, Inputs, Pairs, Partial, Problem
from pallas_kernels.varying import varying

TYPES = (jnp.bfloat16, jnp.float16)
LARGEST_HEAD = 128
TABLE_BYTES = 128 * 1024  # of shared memory, for the keys and values of one resource and head
SHARED_BYTES = 224 * 1024  # of 227 KiB, for matrices
TENSOR_COLUMNS = 512  # of a Blackwell's tensor memory; a float32 a row each
TILES_A_BLOCK = 16  # of a resource with an average number of pairs; measured on an H200


class Path(NamedTuple):
    """See `operation.Path`."""

    problem: Problem
    head_size: int  # what d is padded to
    forward_plan: Plan
    query_plan: Plan
    key_plan: Plan
    tiles_a_block: int

    @property
    def kernels(self) -> ModuleType:
        """Those of the generation that is planned for."""
        return blackwell if self.forward_plan.products == "tcgen05" else kernels

    @property
    def block_sizes(self) -> BlockSizes:
        """Keys at once in the forward pass and the gradients of keys, and the tiles of a block of threads."""
        return BlockSizes(keys=self.forward_plan.block, tiles=self.tiles_a_block)

    def tables(self, pairs: Pairs) -> Tables:
        """Tiles of as many rows as a warpgroup multiplies."""
        most = self.problem.resources, self.problem.max_pairs
        resource = jnp.minimum(pairs.resource, most[0] - 1)  # hidden, but every pair has a row
        return tables_lib.build(resource, pairs.count, *most, self.kernels.ROWS)

    def forward(self, inputs: Inputs, tables: Tables, start: Partial) -> tuple[Partial, Float[Array, "T K S H"]]:
        """Every pair on its own, then one distribution per token."""
        tiles = _tiles(self, inputs.pairs, tables)
        arrays = *_arrays(self, inputs, tiles), tiles.rows
        found = _run(self, "forward", self.forward_plan, *arrays)
        fraction_TKSHd = unpacked(_to_slots(found.fraction[..., : self.problem.d], tiles))
        size_TKSH = _to_slots(found.size.swapaxes(2, 3), tiles)
        lse_TKSH = _to_slots(found.lse.swapaxes(2, 3), tiles, fill=-jnp.inf) + tiles.bias_TK[..., None, None]
        top = finite(jnp.maximum(lse_TKSH.max((1, 2)), start.lse))
        weight_TKSH = jnp.exp(lse_TKSH - top[:, None, None])
        shares = weight_TKSH, weight_TKSH * size_TKSH, jnp.exp(start.lse - top)
        weight_TKSH, scaled_TKSH, first = jax.lax.optimization_barrier(shares)  # as in `_tiles`
        total = first + weight_TKSH.sum((1, 2))
        output = first[..., None] * start.output + (scaled_TKSH[..., None] * fraction_TKSHd).sum((1, 2))
        whole = Partial(output / jnp.where(total > 0, total, 1.0)[..., None], jnp.log(total) + top)
        return whole, lse_TKSH

    def mass(
        self, inputs: Inputs, tables: Tables, parts: Float[Array, "T K S H"], lse: Float[Array, "T H"]
    ) -> Float[Array, "T K"]:
        """From the log-sum-exp of every part of a resource."""
        return jnp.exp(parts - finite(lse)[:, None, None]).sum(2).mean(2)

    def backward(self, inputs: Inputs, tables: Tables, cotangents: Cotangents, start: Gradients) -> Gradients:
        """Scores once more for the queries, and once more, transposed, for the keys."""
        problem, tiles = self.problem, _tiles(self, inputs.pairs, tables)
        d_output = _padded(self, cotangents.output.astype(problem.dtype))
        lse, delta = (x.at[tiles.token].get(mode="clip").swapaxes(1, 2) for x in cotangents[1:])
        given = Tiles(*_arrays(self, inputs, tiles), d_output, tiles.bias - lse, delta, tiles.rows)
        d_query_SNtHd, d_bias_SNHt = _run(self, "query_gradients", self.query_plan, given)
        d_tables = _run(self, "key_gradients", self.key_plan, given)
        d_key, d_value = (x[:, : problem.m, :, : problem.d].astype(jnp.float32) for x in d_tables)

        d_query_TKSHd = _to_slots(d_query_SNtHd[..., : problem.d], tiles).astype(jnp.float32)
        expert = tiles.expert_TK[..., None, None, None]
        found = Gradients(
            start.query + jnp.where(expert, 0.0, d_query_TKSHd).sum((1, 2)),
            start.query_expert + jnp.where(expert, d_query_TKSHd, 0.0).sum((1, 2)),
            start.key + d_key / problem.scale,  # which `finished` multiplies by
            start.value + d_value,
            start.bias + _to_slots(d_bias_SNHt.sum(2)[..., None], tiles).sum((2, 3)),
        )
        return found.finished(problem)


def plan(problem: Problem) -> Path:
    """How the kernels are cut, from static shapes; ValueError for what they cannot do."""
    instead = "; implementation='xla' takes it"
    if problem.d > LARGEST_HEAD:
        raise ValueError(f"head size d={problem.d}; on a GPU wanted at most {LARGEST_HEAD}" + instead)
    if jax.default_backend() == "gpu" and problem.dtype not in TYPES:
        raise ValueError(
            f"dtype={jnp.dtype(problem.dtype).name}; wanted bfloat16 or float16, since the tensor cores would round "
            "anything longer" + instead
        )
    head_size = 64 if problem.d <= 64 else 128
    path = _blackwell(problem, head_size) if chips.is_blackwell() else _hopper(problem, head_size)
    wanted = problem.block_sizes.keys
    if wanted not in (None, *(fitting := _fitting_blocks(path))):
        raise ValueError(f"block_sizes.keys={wanted}; wanted {' or '.join(map(str, fitting))}")
    return path


def _hopper(problem: Problem, head_size: int) -> Path:
    part = _part(problem, head_size, kernels.ROWS, TABLE_BYTES)
    # Scores of 128 keys at once where that leaves registers enough: small heads, or nothing carried to a next block.
    block = 128 if part % 128 == 0 and (part == 128 or head_size == 64) else 64
    common = _common(problem, kernels.ROWS)._replace(part=part, block=problem.block_sizes.keys or block)
    # Where nothing is carried from keys to keys a third warpgroup has registers enough too, 168 a thread.
    warpgroups = 3 if common.block == part else 2
    return Path(
        problem,
        head_size,
        common._replace(warpgroups=warpgroups),
        common._replace(block=64, slots=2 if part * head_size <= TABLE_BYTES // 8 else 1),
        common._replace(warpgroups=2 if _whole(problem.m, kernels.ROWS) % 128 == 0 else 1),
        problem.block_sizes.tiles or TILES_A_BLOCK,
    )


def _blackwell(problem: Problem, head_size: int) -> Path:
    """Each of two warpgroups has tiles of 128 rows in shared memory: of queries, and for their gradients of output
    gradients too."""
    rows = blackwell.ROWS

    def cut(operands: int, table_bytes: int) -> Plan:
        part, tiles = _part(problem, head_size, rows, table_bytes), operands * 2 * rows * head_size * 2
        slots = min(2, (SHARED_BYTES - part * head_size * 2 * 2) // tiles)
        return _common(problem, rows)._replace(part=part, slots=slots, products="tcgen05")

    # Of small heads there is tensor memory for the scores of 128 keys.
    forward = cut(1, TABLE_BYTES)._replace(block=problem.block_sizes.keys or (128 if head_size == 64 else 64))
    query, tiles_a_block = cut(2, TABLE_BYTES // 2), problem.block_sizes.tiles or TILES_A_BLOCK
    return Path(problem, head_size, forward, query, query._replace(slots=2), tiles_a_block)


def _common(problem: Problem, rows: int) -> Plan:
    """What all kernels have; the rest is to be replaced."""
    tiles = problem.max_pairs / problem.resources / rows
    splits = max(1, round(tiles / (problem.block_sizes.tiles or TILES_A_BLOCK)))
    return Plan(problem.scale, part=0, block=64, splits=splits, slots=2, num_context=problem.num_context)


def _part(problem: Problem, head_size: int, rows: int, table_bytes: int) -> int:
    """As many keys as fit, of which whole parts make up a resource."""
    m, most = _whole(problem.m, rows), table_bytes // (2 * 2 * head_size)
    return max(keys for keys in range(rows, min(m, most) + 1, rows) if m % keys == 0)


def _fitting_blocks(path: Path) -> list[int]:
    """Of keys: those that divide a part, and on a Blackwell leave tensor memory for scores, weights and sums."""
    part = path.forward_plan.part
    columns = TENSOR_COLUMNS // path.forward_plan.warpgroups - path.head_size
    tensor_memory = path.kernels is blackwell
    return [keys for keys in (64, 128) if part % keys == 0 and not (tensor_memory and keys + keys // 2 > columns)]


def _whole(m: int, rows: int) -> int:
    return -(-m // rows) * rows


class _Tiles(NamedTuple):
    """What the rows of all tiles are, and where every slot's row is."""

    rows: Rows
    token: Int[Array, "N t"]  # T for padding
    bias: Float[Array, "N 1 t"]  # -inf for padding
    row_TK: Int[Array, "T K"]  # of all rows in one line
    used_TK: Bool[Array, "T K"]
    expert_TK: Bool[Array, "T K"]
    bias_TK: Float[Array, "T K"]  # 0 in unused slots


def _tiles(path: Path, pairs: Pairs, tables: Tables) -> _Tiles:
    pair, numbering, problem = tables.pair, tables.numbering, path.problem
    row_P = tables_lib.rows_to_pairs(jnp.arange(pair.size, dtype=jnp.int32).reshape(pair.shape), tables)
    used_TK = jnp.arange(problem.slots) < numbering.count[:, None]
    bias = pairs.bias.astype(jnp.float32)
    tiles = _Tiles(
        rows=Rows(tables.begin, tables_lib.slots_to_rows(pairs.visible, tables, 0)[:, 0]),
        token=numbering.token.at[pair].get(mode="fill", fill_value=problem.tokens),
        bias=tables_lib.slots_to_rows(bias, tables, -jnp.inf),
        row_TK=tables_lib.to_slots(row_P, numbering, problem.slots),
        used_TK=used_TK,
        expert_TK=pairs.resource >= problem.num_context,
        bias_TK=jnp.where(used_TK, bias, 0.0),
    )
    # Without it XLA may compute places anew for every element of the sums over slots: 5.5 ms for 8,192 tokens, H100.
    return jax.lax.optimization_barrier(tiles)


def _arrays(path: Path, inputs: Inputs, tiles: _Tiles) -> tuple[Queries, Array, Array]:
    """Queries of all tokens, and which of them the rows have. Keys and values [R, M, H, D] in whole blocks of keys; no
    row sees the padding."""
    more = _whole(path.problem.m, path.kernels.ROWS) - path.problem.m
    key, value = _padded(path, inputs.key, more), _padded(path, inputs.value, more)
    token = jnp.minimum(tiles.token, path.problem.tokens - 1)
    return Queries(token, _padded(path, inputs.query), _padded(path, inputs.query_expert)), key, value


def _padded(path: Path, x: Float[Array, "*B d"], more: int = 0) -> Float[Array, "*B D"]:
    """Heads of the size that kernels take, and `more` keys in the second dimension."""
    widths = [(0, 0)] * x.ndim
    widths[1], widths[-1] = (0, more), (0, path.head_size - path.problem.d)
    return jnp.pad(x, widths)


def _to_slots(x: Shaped[Array, "S N t *U"], tiles: _Tiles, fill: int | float = 0.0) -> Shaped[Array, "T K S *U"]:
    """The row of every slot. XLA gathers inside the sum that follows: nothing of this size is stored."""
    parts, _, _, *rest = x.shape
    x = x.reshape(parts, -1, *rest).at[:, tiles.row_TK].get(mode="clip")
    used = tiles.used_TK.reshape(1, *tiles.used_TK.shape, *(1 for _ in rest))
    # Tiles past the last were never written: whatever they hold is dropped.
    return jnp.moveaxis(jnp.where(used, x, jnp.asarray(fill, x.dtype)), 0, 2)


def _run(path: Path, name: str, plan: Plan, *arrays):
    """The kernel of that name on a GPU, the same in XLA elsewhere."""
    kernel, same = (functools.partial(getattr(of, name), plan=plan) for of in (path.kernels, elsewhere))
    if path.problem.dtype not in TYPES:  # `plan` has refused it where there is a GPU
        return same(*arrays)

    def cuda(*arrays):
        # Inside shard_map results vary over the axes of the mesh over which arguments do; Mosaic GPU does not say so.
        return varying(kernel(*arrays), jax.typeof(jax.tree.leaves(arrays)[0]).manual_axis_type.varying)

    return jax.lax.platform_dependent(*arrays, cuda=cuda, default=same)
