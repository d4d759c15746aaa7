"""What all mixers share: norms, projections, rotary position embeddings.

Shapes: b rows, L tokens per row, d width, H heads, k = d / H.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ModelConfig
from pallas_kernels import chips, rotary
from pallas_kernels.rotary import norm_rotary

# Accelerators multiply float32 in fewer bits unless told otherwise, and choices would flip.
HIGHEST = jax.lax.Precision.HIGHEST


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm when `kind` is "layer"; statistics in float32, a learned scale, no bias."""

    def __init__(self, width: int, kind: str, eps: float = 1e-6):
        self.scale = nnx.Param(jnp.ones(width), axes=(None,))
        self.kind = kind
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        x32 = x.astype(jnp.float32)
        if self.kind == "layer":
            x32 = x32 - x32.mean(-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...]).astype(x.dtype)


class Projection(nnx.Module):
    """x W with W ~ N(0, gain^2 / width_in), multiplied in the type of x.

    `axes` names the two dimensions of W for `sharding.RULES`.
    """

    def __init__(
        self, width_in: int, width_out: int, *, axes: tuple[str | None, ...], rngs: nnx.Rngs, gain: float = 1.0
    ):
        scale = gain * width_in**-0.5
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (width_in, width_out)), axes=axes)

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
        # Flat: of a batch of rows, XLA for CPUs would transpose the output's gradient before it makes that of W.
        rows = x.reshape(-1, x.shape[-1]) @ self.kernel[...].astype(x.dtype)
        return rows.reshape(*x.shape[:-1], -1)


def residual_gain(config: ModelConfig) -> float:
    """Shrinks what each block adds at the start, so that the residual stream keeps its size whatever the depth."""
    return config.num_layers**-0.5


def rounded(x: Float[Array, "*batch"], dtype: Any) -> Float[Array, "*batch"]:
    """x in float32, rounded as in a type. Where XLA sees a cast and one back it leaves the rounding out; where an array
    travels between them it cannot, and a choice that is made of it would depend on the mesh."""
    x, kept = x.astype(jnp.float32), jnp.finfo(dtype)
    return x if dtype == jnp.float32 else jax.lax.reduce_precision(x, kept.nexp, kept.nmant)


def split_heads(x: Float[Array, "*batch d"], head_dim: int) -> Float[Array, "*batch H k"]:
    """Rows split contiguously into heads of size `head_dim` (decision 11): as many as are here."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


def merge_heads(x: Float[Array, "*batch H k"]) -> Float[Array, "*batch d"]:
    """The inverse of `split_heads`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class RotaryTable(NamedTuple):
    """Cosines and sines of the angles position * base^(-2n/k), n < k/2, for vectors of width k."""

    cos: Float[Array, "*batch k/2"]
    sin: Float[Array, "*batch k/2"]


def rotary_table(positions: Int[Array, "*batch"], width: int, base: float) -> RotaryTable:
    """The angles of every position, for vectors of `width`."""
    half = width // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)

    def of_row(positions: Int[Array, "*row"]) -> RotaryTable:
        angle = positions[..., None].astype(jnp.float32) * frequency
        return RotaryTable(jnp.cos(angle), jnp.sin(angle))

    # XLA's CPU compiler would fuse them into all that reads them, and so compute them anew for every head of every
    # unrolled layer. It drops an optimization barrier before it fuses, but fuses nothing out of a loop.
    return jax.lax.map(of_row, positions) if chips.is_cpu() and positions.ndim > 1 else of_row(positions)


def apply_rotary(x: Float[Array, "*batch k"], table: RotaryTable) -> Float[Array, "*batch k"]:
    """Rotary position embedding (RoPE): rotates every pair (x_n, x_{n + k/2}) by its angle.

    Dot products of two rotated vectors depend on the difference of their positions alone. Where x has heads, [..., H,
    k], all heads of a token have the angles of its position.
    """
    if x.ndim > table.cos.ndim:
        table = RotaryTable(*(angles[..., None, :] for angles in table))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    pairs = first * table.cos - second * table.sin, second * table.cos + first * table.sin
    return jnp.concatenate(pairs, axis=-1).astype(x.dtype)


def norm_heads(x: Float[Array, "*rows H k"], norm: Norm | None) -> Float[Array, "*rows H k"]:
    """Every head normed; without a norm as it is."""
    if norm is None:
        return x
    flat, k = merge_heads(x), x.shape[-1]
    if not _takes_kernel(flat, k):
        return norm(x)
    return split_heads(norm_rotary(flat, k, norm.scale[...], eps=norm.eps)[0], k)


def norm_and_rotate(
    x: Float[Array, "*rows d"], k: int, norm: Norm | None, table: RotaryTable, *, keep_normed: bool = False
) -> tuple[Float[Array, "*rows H k"], ...]:
    """Heads of size k: normed, if these are kept, and normed and rotated."""
    if _takes_kernel(x, k):
        scale, eps = (None, 0.0) if norm is None else (norm.scale[...], norm.eps)
        return tuple(split_heads(y, k) for y in norm_rotary(x, k, scale, table, keep_normed=keep_normed, eps=eps))
    heads = norm_heads(split_heads(x, k), norm)
    if x.dtype != jnp.float32:
        heads = jax.lax.optimization_barrier(heads)  # else XLA keeps the float32 that they were made of
    return *([heads] if keep_normed else []), apply_rotary(heads, table)


def _takes_kernel(x: Float[Array, "*rows d"], k: int) -> bool:
    return chips.kernels_by_default() and rotary.fits(x.dtype, x.size // x.shape[-1], k)


class QueryKeyValue(nnx.Module):
    """The projections W^Q, W^K, W^V, with RMS norms on query and key heads when the config asks (`qk_norm`).

    With fewer heads of keys and values than of queries, groups of heads have theirs in common (PM-09, DEC-21).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.d_model
        self.query = Projection(width, width, axes=("storage", "heads"), rngs=rngs)
        narrow = config.kv_heads * config.head_dim
        self.key = Projection(width, narrow, axes=("storage", "heads"), rngs=rngs)
        self.value = Projection(width, narrow, axes=("storage", "heads"), rngs=rngs)
        self.group = config.num_heads // config.kv_heads
        self.head_dim = config.head_dim
        self.qk_norm = config.qk_norm
        if config.qk_norm == "rms":
            self.query_norm = Norm(config.head_dim, "rms")
            self.key_norm = Norm(config.head_dim, "rms")

    def __call__(
        self,
        h: Float[Array, "b L d"],
        of_queries: Float[Array, "b L d"] | None = None,
        of_keys: Float[Array, "b L d"] | None = None,
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L G k"], Float[Array, "b L G k"]]:
        """Queries and keys (normed, not yet rotated) and values of every token; G = H / `group`.

        Args:
          of_queries, of_keys: what queries and keys are projected from; None: h.
        """
        query = split_heads(self.query(h if of_queries is None else of_queries), self.head_dim)
        key = split_heads(self.key(h if of_keys is None else of_keys), self.head_dim)
        value = split_heads(self.value(h), self.head_dim)
        if self.qk_norm == "rms":
            query, key = self.query_norm(query), self.key_norm(key)
        return query, key, value

    def rotated(
        self,
        h: Float[Array, "b L d"],
        table: RotaryTable,
        of_queries: Float[Array, "b L d"] | None = None,
        of_keys: Float[Array, "b L d"] | None = None,
        *,
        keep_normed: bool = False,
    ) -> tuple[Float[Array, "b L _ k"], ...]:
        """Queries before their rotary embedding, if these are kept; queries and keys after it, and values. See
        `__call__`."""
        query_norm, key_norm = self.norms
        query = self.query(h if of_queries is None else of_queries)
        queries = norm_and_rotate(query, self.head_dim, query_norm, table, keep_normed=keep_normed)
        keys = norm_and_rotate(self.key(h if of_keys is None else of_keys), self.head_dim, key_norm, table)
        return *queries, *keys, split_heads(self.value(h), self.head_dim)

    @property
    def norms(self) -> tuple[Norm | None, Norm | None]:
        """Of queries and of keys."""
        return (self.query_norm, self.key_norm) if self.qk_norm == "rms" else (None, None)

    def max_score(self) -> Float[Array, ""] | None:
        """What no score q . k / sqrt(k) exceeds, by the norms alone; None without them."""
        if self.qk_norm != "rms":
            return None
        # A normed head has norm sqrt(k) at most times its largest scale; 2 % for what rounding to bfloat16 may add.
        query, key = (jnp.abs(norm.scale[...]).max() for norm in (self.query_norm, self.key_norm))
        return jax.lax.stop_gradient(1.02 * query * key * math.sqrt(self.query_norm.scale[...].shape[0]))

    def norm_key(self, key: Float[Array, "*batch H k"]) -> Float[Array, "*batch H k"]:
        """The norm of keys, for those of experts."""
        return self.key_norm(key) if self.qk_norm == "rms" else key
