"""The kernels of the local window: a tile of tokens against its own keys and those of the tile before.

The tile is at least as long as the window, so no token sees further. As in `dense_kernels`, scores are transposed, keys
by tokens, and exponentials are to base 2.

Shapes: W tokens (whole tiles), t tokens a tile, G head groups, h heads a group, d head size, E lanes of all groups,
S rows of keys; X is E, or E/128 and 128.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.block_sparse_attention.tpu.dense_kernels import head, in_turn
from pallas_kernels.tpu import F32, LANES, LOG2_E, call, dot

VMEM_BYTES = 56 * 2**20  # of the 64 MiB that the smallest chips have (v5p, TPU7x)


class Layout(NamedTuple):
    """Static sizes: `tile` in whole registers and at least `m`; `heads` of a group times `d` in whole registers."""

    tile: int
    tiles: int
    m: int  # tokens that one sees, itself included
    groups: int
    heads: int  # of a group
    d: int
    by_token: bool = False  # whether every token of an output and of a query's gradient has registers of its own

    @property
    def lanes(self) -> int:
        """Lanes of a group."""
        return self.heads * self.d

    def of_tokens(self, tokens: int) -> tuple[int, ...]:
        """The shape of an output."""
        lanes = self.groups * self.lanes
        return (tokens, lanes // LANES, LANES) if self.by_token else (tokens, lanes)


class Arrays(NamedTuple):
    """What both passes read. Key and value: a row a token, and whatever comes after."""

    segment: Int[Array, "W"]
    query: Num[Array, "W E"]
    key: Num[Array, "S E"]
    value: Num[Array, "S E"]


def _two(step, kept, own_ref, layout: Layout) -> None:
    """Appends this tile's rows to those of the tile before, kept from the last step; the first tile has none."""
    kept[: layout.tile] = jnp.where(step > 0, kept[layout.tile :], jnp.zeros_like(own_ref))
    kept[layout.tile :] = own_ref[...]


def _hide(step, shift_ref, segment_ref, segments, layout: Layout) -> None:
    """What is added to every score: 0, or -inf out of sight."""
    key, token = (jax.lax.broadcasted_iota(jnp.int32, (2 * layout.tile, layout.tile), axis) for axis in (0, 1))
    distance = token + layout.tile - key
    exists = (step > 0) | (key >= layout.tile)
    seen = (distance >= 0) & (distance < layout.m) & exists & (segments[...] == segment_ref[...])
    shift_ref[...] = jnp.where(seen, 0.0, -jnp.inf)


def _flat(ref, layout: Layout):
    """A block of tokens' registers, one row after the other."""
    return ref.reshape(layout.tile * layout.lanes // LANES, LANES)


def _write(ref, h: int, x, layout: Layout, interpret: bool) -> None:
    """What a head gives: lanes of all tokens, or some rows of every token's registers."""
    if not layout.by_token:
        ref[:, head(h, layout)] = x
        return
    size, rows = layout.lanes // LANES, layout.d // LANES
    for row in range(rows):
        number, some = h * rows + row, x[:, row * LANES : (row + 1) * LANES]
        if interpret:  # which cannot reshape a reference; compiled, a strided store takes fewer bundles than this
            ref[:, number, :] = some
        else:
            _flat(ref, layout)[pl.ds(number, layout.tile, stride=size), :] = some


def _forward_kernel(
    segment_ref, own_segment, query_ref, own_key, own_value,  # in
    output_ref, lse_ref,  # out
    shift, segments, keys, values,  # scratch: of two tiles
    *, layout: Layout, scale: float, interpret: bool,
):  # fmt: skip
    step = pl.program_id(1)
    for kept, own in ((segments, own_segment), (keys, own_key), (values, own_value)):
        _two(step, kept, own, layout)
    _hide(step, shift, segment_ref, segments, layout)

    def scores(h: int):
        return dot(keys[:, head(h, layout)], query_ref[:, head(h, layout)], (1, 1))

    def weights(_, score):
        score = score * (scale * LOG2_E) + shift[...]
        top = jnp.max(score, axis=0, keepdims=True)
        weight = jnp.exp2(score - top)
        return weight.astype(values.dtype), jnp.sum(weight, axis=0, keepdims=True), top

    def write(h: int, weight, total, top):  # a token sees itself: the total is at least 1
        _write(output_ref, h, (dot(values[:, head(h, layout)], weight, (0, 0)) / total).T, layout, interpret)
        lse_ref[0, h : h + 1] = jnp.log(total) + top / LOG2_E

    in_turn(layout.heads, scores, weights, write)


def _backward_kernel(
    segment_ref, own_segment, query_ref, own_key, own_value, d_output_ref, lse_ref, delta_ref,  # in
    d_query_ref, d_key_ref, d_value_ref, d_bias_ref,  # out: keys and values of the tile before
    shift, segments, keys, values, d_keys, d_values,  # scratch: of two tiles; gradients that the next step adds to
    *, layout: Layout, scale: float, interpret: bool,
):  # fmt: skip
    step, dtype, tile = pl.program_id(1), own_key.dtype, layout.tile

    @pl.when(step >= layout.tiles)
    def _():
        for ref, kept in ((d_key_ref, d_keys), (d_value_ref, d_values)):
            ref[...] = jnp.where(step == layout.tiles, kept[...], 0.0)  # no window reaches what comes after

    @pl.when(step < layout.tiles)
    def _():
        for kept, own in ((segments, own_segment), (keys, own_key), (values, own_value)):
            _two(step, kept, own, layout)
        _hide(step, shift, segment_ref, segments, layout)
        d_bias = [jnp.zeros((1, tile), F32)]

        def scores(h: int):
            return dot(keys[:, head(h, layout)], query_ref[:, head(h, layout)], (1, 1))

        def weights(h: int, score):
            lanes, row = head(h, layout), slice(h, h + 1)
            d_output = d_output_ref[:, lanes].astype(dtype)
            weight = jnp.exp2(score * (scale * LOG2_E) + shift[...] - lse_ref[0, row] * LOG2_E)
            d_score = weight * (dot(values[:, lanes], d_output, (1, 1)) - delta_ref[0, row])
            d_bias.append(d_bias.pop() + jnp.sum(d_score, axis=0, keepdims=True))
            return weight.astype(dtype), d_score.astype(dtype)

        def add(h: int, weight, d_score):
            lanes = head(h, layout)
            # In the first tile what is carried over is nothing yet, and what is written here is written anew.
            both = dot(weight, d_output_ref[:, lanes].astype(dtype), (1, 0))
            d_value_ref[:, lanes] = d_values[:, lanes] + both[:tile]
            d_values[:, lanes] = both[tile:]
            both = dot(d_score, query_ref[:, lanes], (1, 0))
            d_key_ref[:, lanes] = d_keys[:, lanes] + both[:tile]
            d_keys[:, lanes] = both[tile:]
            _write(d_query_ref, h, dot(keys[:, lanes], d_score, (0, 0)).T, layout, interpret)

        in_turn(layout.heads, scores, weights, add)
        d_bias_ref[0] = d_bias[0]


def _blocks(layout: Layout) -> dict[str, pl.BlockSpec]:
    """Which part of every array a step sees. The backward pass has more steps, which only write keys' gradients."""
    tile, lanes = layout.tile, layout.lanes
    own, before = (lambda i: jnp.minimum(i, layout.tiles - 1)), (lambda i: jnp.maximum(i - 1, 0))
    by_lanes = pl.BlockSpec((tile, lanes), lambda g, i: (own(i), g))
    by_token = pl.BlockSpec((tile, lanes // LANES, LANES), lambda g, i: (own(i), g, 0))
    return {
        "segment": pl.BlockSpec((1, tile), lambda g, i: (0, own(i))),
        "own segment": pl.BlockSpec((tile, 1), lambda g, i: (own(i), 0)),
        "before": pl.BlockSpec((tile, lanes), lambda g, i: (before(i), g)),
        "own": by_lanes,
        "result": by_token if layout.by_token else by_lanes,
        "stats": pl.BlockSpec((1, layout.heads, tile), lambda g, i: (g, 0, own(i))),
        "bias": pl.BlockSpec((1, 1, tile), lambda g, i: (g, 0, own(i))),
    }


def _call(
    kernel, name: str, steps: int, given: Arrays, arrays, results, scratch=(),
    *, products: int, layout: Layout, scale: float, interpret: bool,
):  # fmt: skip
    """Each score is worth as many `products` of d numbers."""
    blocks, (segment, *own), two = _blocks(layout), given, 2 * layout.tile
    # What is added to scores; and of two tiles segments, keys and values.
    kept = [((two, layout.tile), F32), ((two, 1), jnp.int32), *[((two, layout.lanes), given.key.dtype)] * 2]
    arrays = [("segment", segment[None]), ("own segment", segment[:, None]), *[("own", x) for x in own], *arrays]
    tokens = len(given.query)
    scores = tokens * two * layout.groups * layout.heads
    # No more rows of keys are read than there are tokens.
    read = sum(min(len(x), tokens) * math.prod(x.shape[1:]) * x.dtype.itemsize for _, x in arrays)
    written = sum(math.prod(shape) for _, shape in results) * 4
    return call(
        functools.partial(kernel, layout=layout, scale=scale, interpret=interpret),
        name,
        (layout.groups, steps),
        (),
        [(blocks[block], x) for block, x in arrays],
        [(blocks[block], shape, F32) for block, shape in results],
        scratch=[pltpu.VMEM(*x) for x in (*kept, *scratch)],
        vmem_bytes=VMEM_BYTES,
        cost=pl.CostEstimate(
            flops=2 * products * scores * layout.d, transcendentals=scores, bytes_accessed=read + written
        ),
        interpret=interpret,
    )


def forward(
    given: Arrays,
    *,
    layout: Layout,
    **options: Any,
) -> tuple[Float[Array, "W *X"], Float[Array, "G h W"]]:
    """Output and log-sum-exp."""
    tokens = len(given.query)
    results = [("result", layout.of_tokens(tokens)), ("stats", (layout.groups, layout.heads, tokens))]
    arguments = "local_window_forward", layout.tiles, given, (), results
    return _call(_forward_kernel, *arguments, products=2, layout=layout, **options)


def backward(
    given: Arrays,
    d_output: Num[Array, "W E"],
    lse: Float[Array, "G h W"],
    delta: Float[Array, "G h W"],
    *,
    layout: Layout,
    **options: Any,
) -> tuple[Float[Array, "W *X"], Float[Array, "S E"], Float[Array, "S E"], Float[Array, "G 1 W"]]:
    """Gradients of queries, keys, values and biases; `lse` is over all that a token sees, less the window's bias.

    S is all rows of the keys, zeros where no token sees them; or W, where theirs are no whole tiles.
    """
    arrays, tokens = [("own", d_output), ("stats", lse), ("stats", delta)], len(given.query)
    rows, lanes = given.key.shape
    rows = tokens if rows % layout.tile else rows
    results = [("result", layout.of_tokens(tokens)), *[("before", (rows, lanes))] * 2]
    results += [("bias", (layout.groups, 1, tokens))]
    scratch = [((layout.tile, layout.lanes), F32)] * 2
    arguments = "local_window_backward", rows // layout.tile + 1, given, arrays, results, scratch
    return _call(_backward_kernel, *arguments, products=5, layout=layout, **options)
