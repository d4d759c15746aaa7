"""The kernels of dense attention under a bias row per resource: a tile of tokens against a block of resources.

Scores are transposed, keys by tokens: a bias, a maximum or a log-sum-exp is a row of lanes, and reductions over keys
are sums of whole registers. A grid step is one (tile, block) in which some token meets some resource; the others are
never visited. Exponentials are to base 2, as the hardware takes them.

Shapes: T tokens, B blocks (those of context first), n resources a block, m keys a resource, N steps and one more,
G head groups, h heads a group, d head size, D = h*d lanes of a group, E of all groups, S keys of all blocks,
t tokens a tile, c tiles.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.tpu import F32, LOG2_E, LOWEST, call, dot


class Layout(NamedTuple):
    """Static sizes, all padded: `tile` to 128, `m` to 16, `heads` of a group times `d` to 128."""

    tile: int  # tokens a tile
    tiles: int
    block: int  # resources a block
    blocks: tuple[int, int]  # of context, of experts: no block has both
    m: int
    groups: int
    heads: int  # of a group
    d: int

    @property
    def lanes(self) -> int:
        """Lanes of a group."""
        return self.heads * self.d

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.block * self.m


class Steps(NamedTuple):
    """The steps of a grid in order. One entry follows the last step: tile -1."""

    tile: Int[Array, "N"]
    block: Int[Array, "N"]
    number: Int[Array, ""]


class Arrays(NamedTuple):
    """What both passes read: of every resource rows over tokens, both kinds of queries, and the table."""

    bias: Float[Array, "B n T"]
    visible: Int[Array, "B n T"]  # 0: the token does not meet the resource
    query: Num[Array, "2 T E"]
    key: Num[Array, "S E"]
    value: Num[Array, "S E"]


def in_turn(heads: int, scores, weights, use) -> None:
    """use(h, *weights(h, scores(h))) for every head.

    The weights of one head are made between the products of its neighbours, which keep the matrix units busy.
    """
    score, made = scores(0), cast(Any, None)
    for h in range(heads):
        ahead = scores(h + 1) if h + 1 < heads else None
        if made is not None:
            use(h - 1, *made)
        made, score = weights(h, score), ahead
    use(heads - 1, *made)


def _shift(shift_ref, bias_ref, visible_ref, layout: Layout) -> None:
    """What is added to every score, to base 2: the bias, or -inf where the key is hidden. All heads share it."""
    key = jax.lax.broadcasted_iota(jnp.int32, (layout.m, layout.tile), 0)
    for r in range(layout.block):
        bias, visible = bias_ref[0, r : r + 1] * LOG2_E, visible_ref[0, r : r + 1]
        shift_ref[r * layout.m : (r + 1) * layout.m] = jnp.where(key < visible, bias, -jnp.inf)


def _by_resource(x, layout: Layout):
    """Sums over the keys of every resource of a block."""
    return x.reshape(layout.block, layout.m, layout.tile).sum(axis=1)


def _kind(block, layout: Layout):
    return (block >= layout.blocks[0]).astype(jnp.int32)  # 0: context, rotated queries; 1: experts


def head(h: int, layout) -> slice:
    """The lanes of a head in its group."""
    return slice(h * layout.d, (h + 1) * layout.d)


def _forward_kernel(
    tile, block,  # scalars
    bias_ref, visible_ref, query_ref, key_ref, value_ref, start_ref, start_lse_ref,  # in
    output_ref, lse_ref, pair_lse_ref,  # out
    shift, sums, tops, totals,  # scratch
    *, layout: Layout, scale: float,
):  # fmt: skip
    step, heads = pl.program_id(1), range(layout.heads)

    @pl.when((step == 0) | (tile[step] != tile[jnp.maximum(step - 1, 0)]))
    def _():
        tops[...] = jnp.maximum(start_lse_ref[0] * LOG2_E, LOWEST)
        totals[...] = jnp.where(start_lse_ref[0] > -jnp.inf, 1.0, 0.0)
        for h in heads:  # a start of no weight may hold anything finite
            sums[head(h, layout)] = start_ref[:, head(h, layout)].T * totals[h : h + 1]

    _shift(shift, bias_ref, visible_ref, layout)

    def scores(h: int):
        return dot(key_ref[:, head(h, layout)], query_ref[:, head(h, layout)], (1, 1))

    def weights(h: int, score):
        row = slice(h, h + 1)
        score = score * (scale * LOG2_E) + shift[...]
        old = tops[row]
        top = jnp.maximum(old, jnp.max(score, axis=0, keepdims=True))
        weight, decay = jnp.exp2(score - top), jnp.exp2(old - top)
        pair_totals = _by_resource(weight, layout)
        pair_lse_ref[0, 0, h * layout.block : (h + 1) * layout.block] = jnp.log(pair_totals) + top / LOG2_E
        totals[row] = totals[row] * decay + jnp.sum(pair_totals, axis=0, keepdims=True)
        tops[row] = top
        return weight.astype(value_ref.dtype), decay

    def add(h: int, weight, decay):
        lanes = head(h, layout)
        sums[lanes] = sums[lanes] * decay + dot(value_ref[:, lanes], weight, (0, 0))

    in_turn(layout.heads, scores, weights, add)

    @pl.when(tile[step] != tile[step + 1])
    def _():
        total = totals[...]
        lse_ref[0] = jnp.log(total) + tops[...] / LOG2_E
        share = 1.0 / jnp.where(total > 0, total, 1.0)
        for h in heads:
            output_ref[:, head(h, layout)] = (sums[head(h, layout)] * share[h : h + 1]).T


def _backward_kernel(
    tile, block,  # scalars
    bias_ref, visible_ref, query_ref, key_ref, value_ref, d_output_ref, lse_ref, delta_ref,  # in
    d_query_ref, d_key_ref, d_value_ref, d_bias_ref,  # out
    shift,  # scratch
    *, layout: Layout, scale: float,
):  # fmt: skip
    step, dtype = pl.program_id(1), key_ref.dtype

    @pl.when((step == 0) | (_kind(block[step], layout) != _kind(block[jnp.maximum(step - 1, 0)], layout)))
    def _():
        def zero(i, carry):
            d_query_ref[0, i] = jnp.zeros((layout.tile, layout.lanes), F32)
            return carry

        jax.lax.fori_loop(0, layout.tiles, zero, 0)

    @pl.when((step == 0) | (block[step] != block[jnp.maximum(step - 1, 0)]))
    def _():
        d_key_ref[...] = jnp.zeros_like(d_key_ref)
        d_value_ref[...] = jnp.zeros_like(d_value_ref)

    _shift(shift, bias_ref, visible_ref, layout)
    d_bias = jnp.zeros((layout.block, layout.tile), F32)
    for h in range(layout.heads):
        lanes, row = head(h, layout), slice(h, h + 1)
        query, d_output = query_ref[:, lanes], d_output_ref[:, lanes].astype(dtype)
        key, value = key_ref[:, lanes], value_ref[:, lanes]
        score = dot(key, query, (1, 1)) * (scale * LOG2_E) + shift[...]
        weight = jnp.exp2(score - lse_ref[0, row] * LOG2_E)
        d_value_ref[:, lanes] += dot(weight.astype(dtype), d_output, (1, 0))
        d_score = weight * (dot(value, d_output, (1, 1)) - delta_ref[0, row])
        d_bias += _by_resource(d_score, layout)
        d_score = d_score.astype(dtype)
        d_key_ref[:, lanes] += dot(d_score, query, (1, 0))
        d_query_ref[0, tile[step], :, lanes] += dot(key, d_score, (0, 0)).T
    d_bias_ref[0, 0] = d_bias


def _blocks(layout: Layout) -> dict[str, pl.BlockSpec]:
    """Which part of every array a step sees: t and b are the tiles and the blocks of all steps."""
    tile, lanes, rows = layout.tile, layout.lanes, (layout.block, layout.tile)
    return {
        "rows": pl.BlockSpec((1, *rows), lambda g, i, t, b: (b[i], 0, t[i])),
        "query": pl.BlockSpec((None, tile, lanes), lambda g, i, t, b: (_kind(b[i], layout), t[i], g)),
        "tokens": pl.BlockSpec((tile, lanes), lambda g, i, t, b: (t[i], g)),
        "stats": pl.BlockSpec((1, layout.heads, tile), lambda g, i, t, b: (g, 0, t[i])),
        "table": pl.BlockSpec((layout.keys, lanes), lambda g, i, t, b: (b[i], g)),
        "d_rows": pl.BlockSpec((1, 1, *rows), lambda g, i, t, b: (g, b[i], 0, t[i])),
        "pairs": pl.BlockSpec((1, 1, layout.heads * layout.block, tile), lambda g, i, t, b: (g, b[i], 0, t[i])),
        # The sums of all tokens' queries stay for as long as the kind does: one buffer.
        "d_query": pl.BlockSpec(
            (1, layout.tiles, tile, lanes),
            lambda g, i, t, b: (_kind(b[i], layout), 0, 0, g),
            pipeline_mode=pl.Buffered(1),
        ),
    }


SHARED = "rows", "rows", "query", "table", "table"  # the blocks of `Arrays`


def _call(kernel, name: str, steps: Steps, arrays, results, scratch, *, layout: Layout, scale, vmem_bytes, interpret):
    blocks = _blocks(layout)
    return call(
        functools.partial(kernel, layout=layout, scale=scale),
        name,
        (layout.groups, steps.number),
        (steps.tile, steps.block),
        [(blocks[block], x) for block, x in arrays],
        [(blocks[block], shape, F32) for block, shape in results],
        scratch=[pltpu.VMEM(shape, F32) for shape in scratch],
        vmem_bytes=vmem_bytes,
        interpret=interpret,
    )


def forward(
    given: Arrays,
    start: Float[Array, "T E"],
    start_lse: Float[Array, "G h T"],
    steps: Steps,
    *,
    layout: Layout,
    **options: Any,
) -> tuple[Float[Array, "T E"], Float[Array, "G h T"], Float[Array, "G B hn T"]]:
    """Attention over all blocks, added to `start`; and the log-sum-exp of every pair.

    Steps in order of tiles, every tile at least once. Pairs in blocks that were not visited hold anything.
    """
    stats, (blocks, _, tokens) = (layout.heads, layout.tile), given.bias.shape
    arrays = [*zip(SHARED, given, strict=True), ("tokens", start), ("stats", start_lse)]
    pairs = layout.groups, blocks, layout.heads * layout.block, tokens
    results = [("tokens", start.shape), ("stats", start_lse.shape), ("pairs", pairs)]
    scratch = [(layout.keys, layout.tile), (layout.lanes, layout.tile), stats, stats]
    return _call(_forward_kernel, "dense_attention_forward", steps, arrays, results, scratch, layout=layout, **options)


def backward(
    given: Arrays,
    d_output: Num[Array, "T E"],
    lse: Float[Array, "G h T"],
    delta: Float[Array, "G h T"],
    steps: Steps,
    *,
    layout: Layout,
    **options: Any,
) -> tuple[Float[Array, "2 c t E"], Float[Array, "S E"], Float[Array, "S E"], Float[Array, "G B n T"]]:
    """Gradients of queries, keys, values and biases.

    Steps in order of blocks, every block at least once. What was not visited holds anything: biases, and the queries
    of a kind of which there are no blocks.
    """
    arrays = [*zip(SHARED, given, strict=True), ("tokens", d_output), ("stats", lse), ("stats", delta)]
    key = given.key.shape
    d_query, d_rows = (2, layout.tiles, layout.tile, key[1]), (layout.groups, *given.bias.shape)
    results = [("d_query", d_query), ("table", key), ("table", key), ("d_rows", d_rows)]
    scratch = [(layout.keys, layout.tile)]
    return _call(
        _backward_kernel, "dense_attention_backward", steps, arrays, results, scratch, layout=layout, **options
    )
