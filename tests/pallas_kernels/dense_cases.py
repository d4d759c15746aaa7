"""What the chips' compilers are given of dense attention and of the local window."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention.tpu import dense, dense_kernels, window_kernels
from pallas_kernels.block_sparse_attention.tpu import window as tpu_window
from pallas_kernels.block_sparse_attention.tpu.dense_kernels import Layout, Rows, Steps

INT, F32 = jnp.int32, jnp.float32


def kernel(
    name: str,
    *,
    tokens: int = 4096,
    resources: int = 64,
    heads: int = 8,
    d: int = 128,
    m: int = 128,
    block: int = 4,
    tile: int = 512,
    dtype: str = "bfloat16",
):
    """The kernel alone, `forward` or `backward`, and its arguments."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    blocks = resources // block
    layout = Layout(tile, tokens // tile, block, (blocks - 2, 2), m, 1, heads, d)
    rows = Rows(*(shape((blocks, block, tokens), kind) for kind in (F32, INT)))
    token, table = (shape((length, heads * d), dtype) for length in (tokens, resources * m))
    stats, number = shape((1, heads, tokens), F32), tokens // tile * blocks + 1
    steps = Steps(shape((number,), INT), shape((number,), INT), shape((), INT))
    options = {"vmem_bytes": dense.vmem_bytes(layout, dtype.itemsize), "interpret": False}
    run, more = {
        "forward": (dense_kernels.forward, (shape(token.shape, F32), stats)),
        "backward": (dense_kernels.backward, (token, stats, stats)),
    }[name]
    run = functools.partial(run, layout=layout, scale=d**-0.5, **options)
    return run, (rows, shape((2, *token.shape), dtype), table, table, *more, steps)


def window(name: str, *, tokens: int = 4096, heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16"):
    """The local window's kernel alone, `forward` or `backward`, and its arguments."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)
    layout = tpu_window.choose_layout((tokens, heads, d), m)
    tokens = layout.tiles * layout.tile
    token = shape((tokens, layout.groups * layout.lanes), dtype)
    stats = shape((layout.groups, layout.heads, tokens), F32)
    run, more = {
        "forward": (window_kernels.forward, ()),
        "backward": (window_kernels.backward, (token, stats, stats)),
    }[name]
    run = functools.partial(run, layout=layout, scale=d**-0.5, interpret=False)
    return run, (shape((tokens,), INT), token, token, token, *more)
