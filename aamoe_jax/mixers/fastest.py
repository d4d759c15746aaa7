"""Causal attention by the best kernel for the device: JAX's splash attention on TPUs, cuDNN on GPUs, `flash` elsewhere.

Both libraries want queries and keys of whole rows in bfloat16, and of every row: where all rows have the same, they are
copied. cuDNN knows no documents: rows with several go through `flash`. Splash attention has been compiled for TPUs and
interpreted, cuDNN's was compiled on an H100: see docs/kernels.md.

Shapes: b rows, S keys per row, q queries of them, H heads, G heads of keys and values, k = d / H.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from aamoe_jax.mixers.flash import Band, Place, flash_attention
from aamoe_jax.mixers.splash import TILES, splash_attention
from pallas_kernels import chips
from pallas_kernels.varying import varying

CUDNN_HEAD_SIZES = range(8, 129, 8)


def fastest_attention(
    query: Float[Array, "a q H k"],
    key: Float[Array, "a S G k"],
    value: Float[Array, "b S G k"],
    segment_ids: Int[Array, "b S"],
    *,
    first: Place = 0,
    reach: int | None = None,
) -> Float[Array, "b q H k"]:
    """softmax(q K^T / sqrt(k)) V over a query's document, up to itself.

    Args:
      query, key: of every row, or one for all.
      first: the place in the row of the first query.
      reach: the last so many tokens alone are seen, the token itself included; None: all.
    """
    blocks = functools.partial(_blocks, reach, first)
    if query.shape[1] != key.shape[1] or query.dtype != jnp.bfloat16:
        return blocks(query, key, value, segment_ids)
    query, key = (jnp.broadcast_to(x, (len(value), *x.shape[1:])) for x in (query, key))
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
