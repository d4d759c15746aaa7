"""What the chips' compilers are given of dense attention and of the local window."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import Pairs, Window, block_sparse_attention
from pallas_kernels.block_sparse_attention.operation import Problem
from pallas_kernels.block_sparse_attention.tpu import dense, dense_kernels, window_kernels
from pallas_kernels.block_sparse_attention.tpu import window as tpu_window
from pallas_kernels.block_sparse_attention.tpu.dense_kernels import Arrays, Steps

INT, F32 = jnp.int32, jnp.float32
EXPERTS = 8
ONE_CORE = "v5e"
"""A chip whose devices have one: its layouts, so that the schedules of all chips are of the same work."""


def kernels(*, tokens: int = 2048, heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16"):
    """Both kernels, forward and backward, and their arguments."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    context = tokens // m
    problem = Problem(tokens, heads, d, context + EXPERTS, m, 1, dtype, context, tokens, d**-0.5)
    with chips.assume(ONE_CORE):
        layout = dense.plan(problem).layout
    blocks, width = sum(layout.blocks), layout.groups * layout.lanes
    rows = [shape((blocks, layout.block, tokens), kind) for kind in (F32, INT)]
    token, table = (shape((length, width), dtype) for length in (tokens, blocks * layout.keys))
    stats = shape((layout.groups, layout.heads, tokens), F32)
    steps = Steps(*(shape((layout.tiles * blocks + 1,), INT),) * 2, shape((), INT))
    vmem_bytes = dense.vmem_bytes(layout, dtype.itemsize)
    options = {"layout": layout, "scale": problem.scale, "vmem_bytes": vmem_bytes, "interpret": False}

    def both(shared, start, d_output, lse, steps):
        forward = dense_kernels.forward(shared, start, lse, steps, **options)
        return forward, dense_kernels.backward(shared, d_output, lse, lse, steps, **options)

    shared = Arrays(*rows, shape((2, *token.shape), dtype), table, table)
    return both, (shared, shape(token.shape, F32), token, stats, steps)


def window_kernels_alone(
    *, tokens: int = 2048, heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16", by_token: bool = False
):
    """Both kernels of the local window, forward and backward, and their arguments; a table has experts too."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    with chips.assume(ONE_CORE):
        layout = tpu_window.choose_layout((tokens, heads, d), m, by_token)
    tokens = layout.tiles * layout.tile
    token, table = (
        shape((length, layout.groups * layout.lanes), dtype) for length in (tokens, tokens + EXPERTS * layout.tile)
    )
    stats = shape((layout.groups, layout.heads, tokens), F32)
    options = {"layout": layout, "scale": d**-0.5, "interpret": False}

    def both(shared, d_output, lse):
        gradients = window_kernels.backward(shared, d_output, lse, lse, **options)
        return window_kernels.forward(shared, **options), gradients

    return both, (window_kernels.Arrays(shape((tokens,), INT), token, table, table), token, stats)


def attention(*, tokens: int, heads: int, d: int, m: int, slots: int, dtype: str = "bfloat16"):
    """The whole of it with its gradients, rows of biases and local window included."""
    shape, context = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype)), tokens // m
    query, table = shape((tokens, heads, d)), shape((context + EXPERTS, m, heads, d))
    each = jax.ShapeDtypeStruct((tokens, slots), INT)
    pairs = Pairs(each, each.update(dtype=F32), each, jax.ShapeDtypeStruct((tokens,), INT))
    window = Window(jax.ShapeDtypeStruct((tokens,), F32), jax.ShapeDtypeStruct((tokens,), INT))

    def loss(arrays, biases, pairs, window):
        pairs, window = pairs._replace(bias=biases[0]), window._replace(bias=biases[1])
        options = {"num_context": context, "max_pairs": tokens * slots, "implementation": "pallas_tpu_dense"}
        result = block_sparse_attention(*arrays, pairs, window=window, **options)
        return jnp.sum(result.output.astype(F32) ** 2), result

    def both(arrays, pairs, window):
        return jax.grad(loss, argnums=(0, 1), has_aux=True)(arrays, (pairs.bias, window.bias), pairs, window)

    return both, ((query, query, table, table), pairs, window)
