"""Splash attention, JAX's own kernel for TPUs: with documents, and inside of `jax.shard_map`.

Shapes: b rows, S tokens per row, H heads, G heads of keys and values, k = d / H.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from pallas_kernels.residuals import RESIDUALS
from pallas_kernels.varying import varying

TILES = (512, 256, 128)
"""Queries, and keys, of a block: the largest that divides the row."""

Attend = Callable[..., Any]


def splash_attention(
    query: Float[Array, "b S H k"],
    key: Float[Array, "b S G k"],
    value: Float[Array, "b S G k"],
    segment_ids: Int[Array, "b S"],
    *,
    reach: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b S H k"]:
    """softmax(q K^T / sqrt(k)) V, without the blocks that the mask leaves out. S must be a multiple of 128.

    Args:
      reach: the last so many tokens alone are seen, the token itself included; None: all.
    """
    query, key, value, segment_ids = varying((query, key, value, segment_ids))
    return _splash(reach, interpret, query, key, value, segment_ids)


def splash_kernel(mask: Any, heads: int, tile: int, *, fused: bool = False, interpret: bool = False) -> Attend:
    """(query, key, value [heads, S, k], segment_ids) -> output.

    Args:
      fused: one backward kernel for all gradients. It lays those of queries out once for every block of keys.
    """
    apart = {} if fused else {"block_q_dq": tile, "block_kv_dq": tile}
    sizes = _module().BlockSizes(
        block_q=tile, block_kv=tile, block_q_dkv=tile, block_kv_dkv=tile, use_fused_bwd_kernel=fused, **apart
    )
    mask = masks.MultiHeadMask([mask] * heads)
    options = {"head_shards": 1, "q_seq_shards": 1, "residual_checkpoint_name": RESIDUALS}
    return _module().make_splash_mha(mask, block_sizes=sizes, interpret=interpret, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _splash(reach: int | None, interpret: bool, query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    return _forward(reach, interpret, query, key, value, segment_ids)[0]


def _forward(
    reach: int | None, interpret: bool, query: Array, key: Array, value: Array, segment_ids: Array
) -> tuple[Array, Callable[..., Any]]:
    _, length, heads, _ = query.shape
    shape, tile = (length, length), next(tile for tile in TILES if length % tile == 0)
    mask: Any = masks.CausalMask(shape)
    if reach is not None:
        mask = masks.LocalMask(shape, window_size=(reach - 1, 0), offset=0)
    attend = functools.partial(_attend, splash_kernel(mask, heads, tile, interpret=interpret), segment_ids)
    with _results_vary_as(query):
        return jax.vjp(attend, query, key, value)


def _backward(
    reach: int | None, interpret: bool, pull_back: Callable[..., Any], d_output: Array
) -> tuple[Array | None, ...]:
    with _results_vary_as(d_output):
        return *pull_back(d_output), None


_splash.defvjp(_forward, _backward)


def _attend(kernel: Attend, segment_ids: Array, query: Array, key: Array, value: Array) -> Array:
    def one_row(query: Array, key: Array, value: Array, segments: Array) -> Any:
        return kernel(query, key, value, segment_ids=_module().SegmentIds(segments, segments))

    query, key, value = (x.swapaxes(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value))
    return jax.vmap(one_row)(query, key, value, segment_ids).swapaxes(1, 2)


_axes: ContextVar[Any] = ContextVar("_axes", default=None)


class _Result(jax.ShapeDtypeStruct):
    """Of a kernel. `jax.shard_map` wants to know over which axes it varies, which JAX 0.10 and 0.11 do not say."""

    def __init__(self, shape: Any, dtype: Any, **more: Any):
        super().__init__(shape, dtype, **({"manual_axis_type": _axes.get()} | more))


@functools.cache
def _module() -> Any:
    """A copy of JAX's module, whose results are `_Result`: what others do with theirs stays as it is."""
    spec = importlib.util.find_spec("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.jax = types.SimpleNamespace(**vars(jax) | {"ShapeDtypeStruct": _Result})
    return module


@contextlib.contextmanager
def _results_vary_as(x: Array) -> Iterator[None]:
    """While splash attention is traced, its results vary over the same axes of a mesh as x."""
    token = _axes.set(jax.typeof(x).manual_axis_type)
    try:
        yield
    finally:
        _axes.reset(token)
