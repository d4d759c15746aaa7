"""What the chips' compilers are given of the norm and rotary embedding of heads, both passes; and of what path A does
before and after its kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention.tpu.outputs import token_dots, token_rounded
from pallas_kernels.block_sparse_attention.tpu.words import words
from pallas_kernels.rotary import norm_rotary

shape = jax.ShapeDtypeStruct


def heads(*, tokens: int, number: int, k: int, dtype: str = "bfloat16", rotate: bool = True, keep_normed: bool = True):
    """With the gradients of heads and scale."""

    def both(x, scale, angles, cotangents):
        def run(x, scale):
            return norm_rotary(x, k, scale, angles if rotate else None, keep_normed=keep_normed)

        found, pull_back = jax.vjp(run, x, scale)
        return found, pull_back(cotangents)

    x, angle = shape((1, tokens, number * k), jnp.dtype(dtype)), shape((1, tokens, k // 2), jnp.float32)
    return both, (x, shape((k,), jnp.float32), (angle, angle), (x,) * (rotate + keep_normed))


def pairs(*, tokens: int, width: int):
    """Two arrays of bfloat16, each with a third as words."""
    return words, (shape((tokens, width), jnp.bfloat16),) * 3


def outputs(*, tokens: int, heads: int, d: int):
    """An output rounded, and its products with a gradient."""

    def both(output, d_output):
        return token_rounded(output, d_output.dtype), token_dots(output, d_output)

    return both, (shape((tokens, heads, d), jnp.float32), shape((tokens, heads, d), jnp.bfloat16))
