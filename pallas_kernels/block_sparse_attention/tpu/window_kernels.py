"""The kernels of the local window: a tile of tokens against its own keys and those of the tile before.

The tile is at least as long as the window, so no token sees further. As in `dense_kernels`, scores are transposed, keys
by tokens, and exponentials are to base 2.

Shapes: W tokens (whole tiles), t tokens a tile, G head groups, h heads a group, d head size, E lanes of all groups.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.block_sparse_attention.tpu.dense_kernels import F32, LOG2_E, dot

VMEM_BYTES = 56 * 2**20  # of the 64 MiB that the smallest chips have (v5p, TPU7x)


class Layout(NamedTuple):
    """Static sizes: `tile` in whole registers and at least `m`; `heads` of a group times `d` in whole registers."""

    tile: int
    tiles: int
    m: int  # tokens that one sees, itself included
    groups: int
    heads: int  # of a group
    d: int

    @property
    def lanes(self) -> int:
        """Lanes of a group."""
        return self.heads * self.d


def _hide(step, shift_ref, segment_ref, before_ref, own_ref, layout: Layout) -> None:
    """What is added to every score: 0, or -inf out of sight. The keys of the tile before are the first half."""
    tile = layout.tile
    key, token = (jax.lax.broadcasted_iota(jnp.int32, (tile, tile), axis) for axis in (0, 1))
    distance = token - key
    before = (distance + tile < layout.m) & (before_ref[...] == segment_ref[...]) & (step > 0)
    own = (distance >= 0) & (distance < layout.m) & (own_ref[...] == segment_ref[...])
    shift_ref[0], shift_ref[1] = (jnp.where(seen, 0.0, -jnp.inf) for seen in (before, own))


def _scores(shift, keys, query, scale: float):
    return [dot(key, query, (1, 1)) * (scale * LOG2_E) + shift[half] for half, key in enumerate(keys)]


def _forward_kernel(
    segment_ref, before_ref, own_ref, query_ref, key_before, key_own, value_before, value_own,  # in
    output_ref, lse_ref,  # out
    shift,  # scratch
    *, layout: Layout, scale: float,
):  # fmt: skip
    _hide(pl.program_id(1), shift, segment_ref, before_ref, own_ref, layout)
    for h in range(layout.heads):
        lanes = slice(h * layout.d, (h + 1) * layout.d)
        keys, values = ([x[:, lanes] for x in pair] for pair in ((key_before, key_own), (value_before, value_own)))
        scores = _scores(shift, keys, query_ref[:, lanes], scale)
        top = jnp.maximum(*(jnp.max(x, axis=0, keepdims=True) for x in scores))
        weights = [jnp.exp2(x - top) for x in scores]
        total = sum(jnp.sum(x, axis=0, keepdims=True) for x in weights)  # a token sees itself: at least 1
        output = sum(dot(v, x.astype(v.dtype), (0, 0)) for v, x in zip(values, weights, strict=True))
        output_ref[:, lanes] = (output / total).T
        lse_ref[0, h : h + 1] = jnp.log(total) + top / LOG2_E


def _backward_kernel(
    segment_ref, before_ref, own_ref, query_ref, key_before, key_own, value_before, value_own,  # in
    d_output_ref, lse_ref, delta_ref,
    d_query_ref, d_key_ref, d_value_ref, d_bias_ref,  # out: keys and values of the tile before
    shift, own_d_key, own_d_value,  # scratch: what the next step adds to
    *, layout: Layout, scale: float,
):  # fmt: skip
    step, dtype = pl.program_id(1), key_own.dtype

    @pl.when(step == layout.tiles)
    def _():
        d_key_ref[...] = own_d_key[...]
        d_value_ref[...] = own_d_value[...]

    @pl.when(step < layout.tiles)
    def _():
        _hide(step, shift, segment_ref, before_ref, own_ref, layout)
        d_bias = jnp.zeros((1, layout.tile), F32)
        for h in range(layout.heads):
            lanes, row = slice(h * layout.d, (h + 1) * layout.d), slice(h, h + 1)
            keys, values = ([x[:, lanes] for x in pair] for pair in ((key_before, key_own), (value_before, value_own)))
            query, d_output = query_ref[:, lanes], d_output_ref[:, lanes].astype(dtype)
            scores = _scores(shift, keys, query, scale)
            weights = [jnp.exp2(x - lse_ref[0, row] * LOG2_E) for x in scores]
            before, own = (dot(x.astype(dtype), d_output, (1, 0)) for x in weights)
            # In the first tile what is carried over is nothing yet, and what is written here is written anew.
            d_value_ref[:, lanes] = own_d_value[:, lanes] + before
            own_d_value[:, lanes] = own
            d_scores = [
                w * (dot(v, d_output, (1, 1)) - delta_ref[0, row]) for w, v in zip(weights, values, strict=True)
            ]
            d_bias += sum(jnp.sum(x, axis=0, keepdims=True) for x in d_scores)
            d_scores = [x.astype(dtype) for x in d_scores]
            before, own = (dot(x, query, (1, 0)) for x in d_scores)
            d_key_ref[:, lanes] = own_d_key[:, lanes] + before
            own_d_key[:, lanes] = own
            d_query_ref[:, lanes] = sum(dot(k, x, (0, 0)) for k, x in zip(keys, d_scores, strict=True)).T
        d_bias_ref[0] = d_bias


def _blocks(layout: Layout) -> dict[str, pl.BlockSpec]:
    """Which part of every array a step sees. The backward pass has one more step, which only writes the last keys."""
    tile, lanes = layout.tile, layout.lanes

    def own(i):
        return jnp.minimum(i, layout.tiles - 1)

    def before(i):
        return jnp.maximum(i - 1, 0)

    return {
        "segment": pl.BlockSpec((1, tile), lambda g, i: (0, own(i))),
        "segment before": pl.BlockSpec((tile, 1), lambda g, i: (before(i), 0)),
        "segment own": pl.BlockSpec((tile, 1), lambda g, i: (own(i), 0)),
        "before": pl.BlockSpec((tile, lanes), lambda g, i: (before(i), g)),
        "own": pl.BlockSpec((tile, lanes), lambda g, i: (own(i), g)),
        "stats": pl.BlockSpec((1, layout.heads, tile), lambda g, i: (g, 0, own(i))),
        "bias": pl.BlockSpec((1, 1, tile), lambda g, i: (g, 0, own(i))),
    }


_INTO = ("segment", "segment before", "segment own", "own", "before", "own", "before", "own")


def _call(kernel, name: str, steps: int, layout: Layout, into, out, shapes, scratch, arrays, interpret):
    # Inside shard_map a kernel must say over which axes of the mesh its results vary: over those of its arguments.
    varying, blocks = jax.typeof(arrays[-1]).manual_axis_type, _blocks(layout)
    return pl.pallas_call(
        kernel,
        grid=(layout.groups, steps),
        in_specs=[blocks[x] for x in into],
        out_specs=[blocks[x] for x in out],
        out_shape=[jax.ShapeDtypeStruct(shape, F32, manual_axis_type=varying) for shape in shapes],
        scratch_shapes=[pltpu.VMEM(shape, F32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name=name,
    )(*arrays)


def forward(
    segment: Int[Array, "W"],
    query: Num[Array, "W E"],
    key: Num[Array, "S E"],
    value: Num[Array, "S E"],
    *,
    layout: Layout,
    scale: float,
    interpret: bool,
) -> tuple[Float[Array, "W E"], Float[Array, "G h W"]]:
    """Output and log-sum-exp. Key and value: a row a token, and whatever comes after."""
    kernel = functools.partial(_forward_kernel, layout=layout, scale=scale)
    shapes = query.shape, (layout.groups, layout.heads, len(query))
    scratch = [(2, layout.tile, layout.tile)]
    arrays = segment[None], segment[:, None], segment[:, None], query, key, key, value, value
    name, out = "local_window_forward", ("own", "stats")
    return tuple(_call(kernel, name, layout.tiles, layout, _INTO, out, shapes, scratch, arrays, interpret))


def backward(
    segment: Int[Array, "W"],
    query: Num[Array, "W E"],
    key: Num[Array, "S E"],
    value: Num[Array, "S E"],
    d_output: Num[Array, "W E"],
    lse: Float[Array, "G h W"],
    delta: Float[Array, "G h W"],
    *,
    layout: Layout,
    scale: float,
    interpret: bool,
) -> tuple[Float[Array, "W E"], Float[Array, "W E"], Float[Array, "W E"], Float[Array, "G 1 W"]]:
    """Gradients of queries, keys, values and biases; `lse` is over all that a token sees, less the window's bias."""
    kernel = functools.partial(_backward_kernel, layout=layout, scale=scale)
    into, out = (*_INTO, "own", "stats", "stats"), ("own", "before", "before", "bias")
    shapes = *[query.shape] * 3, (layout.groups, 1, len(query))
    carried = layout.tile, layout.lanes
    scratch = [(2, layout.tile, layout.tile), carried, carried]
    arrays = segment[None], segment[:, None], segment[:, None], query, key, key, value, value, d_output, lse, delta
    name = "local_window_backward"
    return tuple(_call(kernel, name, layout.tiles + 1, layout, into, out, shapes, scratch, arrays, interpret))
