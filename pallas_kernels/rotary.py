"""RMS norm and rotary embedding of heads on a TPU: one pass over main memory, in the layout of matrix products.

A product leaves the heads of a token side by side in lanes. For a norm over each head, and again for its two halves,
XLA gives every head registers of its own, and copies the array each time, forward and backward.

Shapes: N tokens, in whole tiles of t; H heads of k lanes, D = H k; G groups of heads.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tpu import F32, LANES, ROWS, call, compiled_or_interpreted, round_up
from pallas_kernels.varying import varying

TILE = 512  # tokens of a step
STRIP = 64  # tokens that are in registers at once
GROUP = 1024  # lanes of the heads that one step takes, at most
VMEM_SLACK = 4 * 2**20


class Layout(NamedTuple):
    """How heads lie, and what is done with them."""

    groups: int
    heads: int  # of a group
    k: int
    tile: int
    eps: float | None  # of the norm; None: there is none
    rotate: bool
    keep_normed: bool  # beside the rotated

    @property
    def lanes(self) -> int:
        """Of a group."""
        return self.heads * self.k

    @property
    def results(self) -> int:
        return self.rotate + self.keep_normed


def fits(dtype: jnp.dtype, tokens: int, k: int) -> bool:
    """Whether the kernels can do it, and it is worth it: bfloat16 or float32, heads of whole registers of lanes."""
    return dtype in (jnp.bfloat16, F32) and k % LANES == 0 and tokens >= STRIP


def norm_rotary(
    x: Float[Array, "*rows D"],
    k: int,
    scale: Float[Array, "k"] | None,
    rotary: tuple[Float[Array, "*rows k/2"], Float[Array, "*rows k/2"]] | None = None,
    *,
    keep_normed: bool = True,
    eps: float = 1e-6,
) -> tuple[Float[Array, "*rows D"], ...]:
    """Every head divided by its root mean square, and rotated.

        n = x / sqrt(mean(x^2) + eps) * scale       r = n * (cos, cos) + (n_2, n_1) * (-sin, sin)

    n_1 and n_2 are the halves of a head: the pairs (n_i, n_{i + k/2}) are rotated by their angle. Everything is
    computed in float32; n is rounded to the type of x before it is rotated.

    Args:
      k: size of a head.
      scale: learned; None: no norm.
      rotary: cosines and sines of every token's angles; not differentiated. None: nothing is rotated.
      keep_normed: whether n is returned beside r.

    Returns:
      n, if it is kept, and r, if there is one; differentiable in x and scale.

    Raises:
      ValueError: `fits` says no.
    """
    flat = x.reshape(-1, x.shape[-1])
    if not fits(x.dtype, len(flat), k):
        raise ValueError(
            f"{len(flat)} tokens of {x.dtype}, heads of {k}; wanted {STRIP} or more, bfloat16 or float32, heads of a "
            f"multiple of {LANES}"
        )
    heads, tile = x.shape[-1] // k, min(TILE, round_up(len(flat), STRIP))
    groups = next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n * k <= max(GROUP, k))
    rotate, eps_of_norm = rotary is not None, None if scale is None else eps
    layout = Layout(groups, heads // groups, k, tile, eps_of_norm, rotate, keep_normed or not rotate)
    angles = jnp.zeros((tile, k)) if rotary is None else jnp.concatenate(rotary, axis=-1).reshape(-1, k)
    flat, angles = (jnp.pad(y, ((0, -len(y) % tile), (0, 0))) for y in (flat, angles))
    found = _norm_rotary(layout, *varying((flat, angles, jnp.ones(k) if scale is None else scale.astype(F32))))
    return tuple(y[: x.size // x.shape[-1]].reshape(x.shape) for y in found)


def _forward(layout: Layout, x, angles, scale):
    given = x, angles, jnp.broadcast_to(scale, (ROWS, layout.k))
    return compiled_or_interpreted(_run_forward, *given, layout=layout), (x, angles, scale)


def _backward(layout: Layout, residuals, cotangents):
    x, angles, scale = residuals
    given = x, angles, jnp.broadcast_to(scale, (ROWS, layout.k)), *cotangents
    d_x, d_scale = compiled_or_interpreted(_run_backward, *given, layout=layout)
    return d_x, None, d_scale.sum((0, 1, 2))


_norm_rotary = jax.custom_vjp(lambda *arguments: _forward(*arguments)[0], (0,))
_norm_rotary.defvjp(_forward, _backward)


def _for_strips(layout: Layout, angles, body) -> None:
    """body(rows, turn, turn_back) of every strip of tokens: what rotates a head, and its transpose."""

    @pl.loop(0, layout.tile // STRIP)
    def _(number):
        rows = pl.ds(pl.multiple_of(number * STRIP, STRIP), STRIP)
        both, half = angles[rows, :], layout.k // 2
        exchanged = pltpu.roll(both, half, 1)
        first = jax.lax.broadcasted_iota(jnp.int32, both.shape, 1) < half
        cos, sin = jnp.where(first, both, exchanged), jnp.where(first, -exchanged, both)
        turn = lambda x: x * cos + pltpu.roll(x, half, 1) * sin  # noqa: E731
        turn_back = lambda x: x * cos + pltpu.roll(x * sin, half, 1)  # noqa: E731
        body(rows, turn, turn_back)


def _lanes(layout: Layout) -> list[slice]:
    """Of every head."""
    return [slice(head * layout.k, (head + 1) * layout.k) for head in range(layout.heads)]


def _inverse_rms(x, eps: float):
    """One over the root mean square of every row."""
    return jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps)


def _forward_kernel(x, angles, scale, *results, layout: Layout):
    def strip(rows, turn, _):
        for lanes in _lanes(layout):
            y = x[rows, lanes].astype(F32)
            if layout.eps is not None:
                y = y * _inverse_rms(y, layout.eps) * scale[:1, :]
            if layout.keep_normed:
                results[0][rows, lanes] = y.astype(x.dtype)
            if layout.rotate:
                results[-1][rows, lanes] = turn(y.astype(x.dtype).astype(F32)).astype(x.dtype)

    _for_strips(layout, angles, strip)


def _backward_kernel(x, angles, scale, *others, layout: Layout):
    *cotangents, d_x, d_scale = others
    d_scale[...] = jnp.zeros_like(d_scale)

    def strip(rows, _, turn_back):
        total = jnp.zeros((ROWS, layout.k), F32)
        for lanes in _lanes(layout):
            parts = [ref[rows, lanes].astype(F32) for ref in cotangents]
            if layout.rotate:
                parts[-1] = turn_back(parts[-1])
            d_y = functools.reduce(jnp.add, parts)
            if layout.eps is not None:
                y = x[rows, lanes].astype(F32)
                inverse = _inverse_rms(y, layout.eps)
                y = y * inverse
                total += (d_y * y).reshape(-1, ROWS, layout.k).sum(0)
                d_y = d_y * scale[:1, :]
                d_y = inverse * (d_y - y * jnp.mean(d_y * y, axis=1, keepdims=True))
            d_x[rows, lanes] = d_y.astype(d_x.dtype)
        d_scale[0, 0] += total

    _for_strips(layout, angles, strip)


def _run_forward(*given, layout: Layout, interpret: bool) -> tuple:
    x = given[0]
    results = [(_tokens(layout), x.shape, x.dtype)] * layout.results
    return _call(_forward_kernel, "norm_rotary_forward", given, results, layout=layout, interpret=interpret)


def _run_backward(*given, layout: Layout, interpret: bool) -> tuple:
    x = given[0]
    sums = pl.BlockSpec((1, 1, ROWS, layout.k), lambda group, tile: (group, tile, 0, 0))
    shape = layout.groups, len(x) // layout.tile, ROWS, layout.k
    results = [(_tokens(layout), x.shape, x.dtype), (sums, shape, F32)]
    return _call(_backward_kernel, "norm_rotary_backward", given, results, layout=layout, interpret=interpret)


def _tokens(layout: Layout) -> pl.BlockSpec:
    return pl.BlockSpec((layout.tile, layout.lanes), lambda group, tile: (tile, group))


def _call(kernel, name: str, given, results, *, layout: Layout, interpret: Any) -> tuple:
    x, cotangents = given[0], given[3:]
    angles = pl.BlockSpec((layout.tile, layout.k), lambda group, tile: (tile if layout.rotate else 0, 0))
    scale = pl.BlockSpec((ROWS, layout.k), lambda group, tile: (0, 0))
    blocks = [_tokens(layout), angles, scale, *[_tokens(layout)] * len(cotangents)]
    moved = [*given, *(jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in results)]
    a_token = 2 * layout.lanes * x.dtype.itemsize * 4 + layout.k * 2 * 4  # four arrays at most, in two buffers
    return call(
        functools.partial(kernel, layout=layout),
        name,
        (layout.groups, len(x) // layout.tile),
        (),
        list(zip(blocks, given, strict=True)),
        results,
        semantics=("parallel", "parallel"),
        vmem_bytes=layout.tile * a_token + VMEM_SLACK,
        cost=pl.CostEstimate(
            flops=8 * x.size,
            transcendentals=x.size // layout.k,
            bytes_accessed=sum(y.size * y.dtype.itemsize for y in moved),
        ),
        interpret=interpret,
    )
