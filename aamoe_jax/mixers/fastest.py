"""Causal attention by the best kernel for the device: JAX's splash attention on TPUs, cuDNN on GPUs, `flash` elsewhere.

Both libraries want queries and keys of whole rows in bfloat16. cuDNN knows no documents: rows with several go through
`flash`. Splash attention has been compiled for TPUs and interpreted, cuDNN's was never run: see docs/kernels.md.

Shapes: b rows, S keys per row, q queries of them, H heads, G heads of keys and values, k = d / H.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jaxtyping import Array, Float, Int

from aamoe_jax.mixers.flash import Band, Place, flash_attention
from pallas_kernels import chips
from pallas_kernels.varying import varying

TILES = (512, 256, 128)
"""Of splash attention: the largest that divides the row."""
CUDNN_HEAD_SIZES = range(8, 129, 8)


def fastest_attention(
    query: Float[Array, "b q H k"],
    key: Float[Array, "b S G k"],
    value: Float[Array, "b S G k"],
    segment_ids: Int[Array, "b S"],
    *,
    first: Place = 0,
    reach: int | None = None,
) -> Float[Array, "b q H k"]:
    """softmax(q K^T / sqrt(k)) V over a query's document, up to itself.

    Args:
      first: the place in the row of the first query.
      reach: the last so many tokens alone are seen, the token itself included; None: all.
    """
    blocks = functools.partial(_blocks, reach, first)
    if query.shape[1] != key.shape[1] or query.dtype != jnp.bfloat16:
        return blocks(query, key, value, segment_ids)
    if chips.kernels_by_default() and query.shape[1] % TILES[-1] == 0:
        return splash_attention(query, key, value, segment_ids, reach=reach)
    if jax.default_backend() == "gpu" and query.shape[-1] in CUDNN_HEAD_SIZES:
        single = (segment_ids == segment_ids[:, :1]).all()
        arrays = varying((query, key, value, segment_ids))
        return jax.lax.cond(single, functools.partial(_cudnn, reach), blocks, *arrays)
    return blocks(query, key, value, segment_ids)


def _blocks(reach: int | None, first: Place, query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    return flash_attention(query, key, value, segment_ids, Band(reach=reach), first=first).output


def _cudnn(reach: int | None, query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    window = None if reach is None else (reach - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, local_window_size=window, implementation="cudnn"
    )


def splash_attention(
    query: Float[Array, "b S H k"],
    key: Float[Array, "b S G k"],
    value: Float[Array, "b S G k"],
    segment_ids: Int[Array, "b S"],
    *,
    reach: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b S H k"]:
    """JAX's own kernel for TPUs, which skips blocks that the mask leaves out. S must be a multiple of 128."""
    query, key, value, segment_ids = varying((query, key, value, segment_ids))
    return _splash(reach, interpret, query, key, value, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _splash(reach: int | None, interpret: bool, query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    return _splash_forward(reach, interpret, query, key, value, segment_ids)[0]


def _splash_forward(
    reach: int | None, interpret: bool, query: Array, key: Array, value: Array, segment_ids: Array
) -> tuple[Array, Callable[..., Any]]:
    _, length, heads, _ = query.shape
    attend = functools.partial(_splash_rows, _splash_kernel(length, heads, reach, interpret), segment_ids)
    with _results_vary_as(query):
        return jax.vjp(attend, query, key, value)


def _splash_backward(
    reach: int | None, interpret: bool, pull_back: Callable[..., Any], d_output: Array
) -> tuple[Array | None, ...]:
    with _results_vary_as(d_output):
        return *pull_back(d_output), None


_splash.defvjp(_splash_forward, _splash_backward)


def _splash_rows(
    attend: splash_kernel.SplashAttentionKernel, segment_ids: Array, query: Array, key: Array, value: Array
) -> Array:
    def one_row(query: Array, key: Array, value: Array, segments: Array) -> Any:
        return attend(query, key, value, segment_ids=splash_kernel.SegmentIds(segments, segments))

    query, key, value = (x.swapaxes(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value))
    return jax.vmap(one_row)(query, key, value, segment_ids).swapaxes(1, 2)


def _splash_kernel(length: int, heads: int, reach: int | None, interpret: bool) -> splash_kernel.SplashAttentionKernel:
    shape, tile = (length, length), next(tile for tile in TILES if length % tile == 0)
    mask: Any = splash_mask.CausalMask(shape)
    if reach is not None:
        mask = splash_mask.LocalMask(shape, window_size=(reach - 1, 0), offset=0)
    # Gradients of queries have a kernel of their own: the fused one lays them out once for every block of keys.
    sizes = splash_kernel.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_q_dq=tile,
        block_kv_dq=tile,
    )
    return splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )


@contextlib.contextmanager
def _results_vary_as(x: Array) -> Iterator[None]:
    """While splash attention is traced, its results vary over the same axes of a mesh as x.

    `jax.shard_map` wants to know that of every kernel, and those of JAX 0.10 and 0.11 do not say it.
    """
    axes = jax.typeof(x).manual_axis_type

    class Varying(jax.ShapeDtypeStruct):
        def __init__(self, shape: Any, dtype: Any, **more: Any):
            super().__init__(shape, dtype, **({"manual_axis_type": axes} | more))

    theirs: Any = splash_kernel.jax
    splash_kernel.jax = types.SimpleNamespace(**vars(theirs) | {"ShapeDtypeStruct": Varying})  # type: ignore[assignment]
    try:
        yield
    finally:
        splash_kernel.jax = theirs
