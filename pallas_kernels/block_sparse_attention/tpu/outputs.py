"""What is done with an output whose tokens have registers of their own, on a TPU: one pass over main memory each.

XLA rounds it and copies the result to the layout of matrix products. The products of `token_dots` it makes with tokens
in lanes: it copies the output to that layout, and the gradient from it.

Shapes: T tokens, in tiles of t; H heads of d lanes, D = H d, Q = D / 128 rows of a token; H8 is H in whole registers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.operation import dots, rounded
from pallas_kernels.tpu import F32, LANES, ROWS, call, compiled_or_interpreted, round_up

TILE = LANES  # tokens of a step: `token_dots` turns a square


def fits(heads: int, d: int) -> bool:
    """Whether the kernels can do it: a token is whole registers of whole heads, a head whole rows, and there are few
    enough for a square."""
    register = ROWS * LANES
    return d % LANES == 0 and register % d == 0 and heads * d % register == 0 and heads <= LANES


def token_rounded(output: Float[Array, "T H d"], dtype: jnp.dtype) -> Float[Array, "T H d"]:
    """See `operation.rounded`."""
    if not fits(*output.shape[1:]):
        return rounded(output, dtype)
    found = compiled_or_interpreted(_run_rounded, output.reshape(-1, LANES), tokens=len(output), dtype=dtype)
    return found.reshape(output.shape)


def token_dots(output: Float[Array, "T H d"], d_output: Float[Array, "T H d"]) -> Float[Array, "T H"]:
    """See `operation.dots`."""
    tokens, heads, d = output.shape
    if not fits(heads, d):
        return dots(output, d_output)
    given = output.reshape(-1, LANES), d_output.reshape(tokens, -1)
    return compiled_or_interpreted(_run_dots, *given, heads=heads)[:heads].T


def _row(output, row: int, rows: int):
    """The same row of all tokens, (t, 128)."""
    return output[pl.ds(row, TILE, stride=rows), :]


def _rounded_kernel(output, found_ref):
    rows = found_ref.shape[1] // LANES
    for row in range(rows):
        found_ref[:, row * LANES : (row + 1) * LANES] = _row(output, row, rows).astype(found_ref.dtype)


def _dots_kernel(output, d_output, found_ref, *, heads: int):
    rows = d_output.shape[1] // LANES
    of_head = rows // heads
    lane = jax.lax.broadcasted_iota(jnp.int32, (TILE, LANES), 1)
    found = jnp.zeros((TILE, LANES), F32)
    for head in range(heads):
        products = jnp.zeros((TILE, LANES), F32)
        for row in range(head * of_head, (head + 1) * of_head):
            products += _row(output, row, rows) * d_output[:, row * LANES : (row + 1) * LANES].astype(F32)
        found = jnp.where(lane == head, jnp.sum(products, axis=1, keepdims=True), found)
    found_ref[...] = found.T[: found_ref.shape[0]]


def _run_rounded(output, *, tokens: int, dtype: jnp.dtype, interpret: bool) -> Float[Array, "T D"]:
    width = output.size // tokens
    result = _in_lanes(width), (tokens, width), dtype
    return _call(_rounded_kernel, "token_rounded", tokens, [(_by_token(width), output)], result, interpret)


def _run_dots(output, d_output, *, heads: int, interpret: bool) -> Float[Array, "H8 T"]:
    tokens, width = d_output.shape
    lines = round_up(heads, ROWS)
    result = pl.BlockSpec((lines, TILE), lambda step: (0, step)), (lines, tokens), F32
    kernel = functools.partial(_dots_kernel, heads=heads)
    arrays = [(_by_token(width), output), (_in_lanes(width), d_output)]
    return _call(kernel, "token_dots", tokens, arrays, result, interpret)


def _by_token(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((TILE * width // LANES, LANES), lambda step: (step, 0))


def _in_lanes(width: int) -> pl.BlockSpec:
    return pl.BlockSpec((TILE, width), lambda step: (step, 0))


def _call(kernel: Callable, name: str, tokens: int, arrays: list, result: tuple, interpret: Any):
    moved = [*(x for _, x in arrays), jax.ShapeDtypeStruct(*result[1:])]
    size = sum(x.size * x.dtype.itemsize for x in moved)
    return call(
        kernel,
        name,
        (pl.cdiv(tokens, TILE),),
        (),
        arrays,
        [result],
        semantics=("parallel",),
        vmem_bytes=2 * size * TILE // tokens + 2**21,
        cost=pl.CostEstimate(flops=2 * arrays[0][1].size, transcendentals=0, bytes_accessed=size),
        interpret=interpret,
    )[0]
