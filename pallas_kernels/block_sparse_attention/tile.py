"""The mathematics of one group of tiles: queries that share a short run of keys. The only matrix products are here.

Shapes: N tiles, H heads, t queries a tile, j keys a tile, d head size; batch dimensions lead, as fast products want.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import chips

F32 = jnp.float32


def step_scores() -> int:
    """Scores of one step of a loop over groups: on a CPU in cache, and enough of them for every core; on a GPU, where
    every step launches its kernels anew, 128 MiB in float32."""
    return 2**25 if chips.is_gpu() else 2**18


def partial_attention(
    query: Float[Array, "N H t d"],
    key: Float[Array, "N H j d"],
    value: Float[Array, "N H j d"],
    seen: Bool[Array, "N 1 t j"],
    scale: float,
) -> tuple[Float[Array, "N H t d"], Float[Array, "N H t"]]:
    """Softmax attention over the seen keys and its log-sum-exp; 0 and -inf for a query that sees none."""
    score = jnp.einsum("nhtd,nhjd->nhtj", query, key, preferred_element_type=F32)
    score = jnp.where(seen, score * scale, -jnp.inf)
    top = score.max(-1)
    top = jnp.where(top > -jnp.inf, top, 0.0)
    weight = jnp.exp(score - top[..., None])
    total = weight.sum(-1)
    output = jnp.einsum("nhtj,nhjd->nhtd", weight.astype(value.dtype), value, preferred_element_type=F32)
    return output / jnp.where(total > 0, total, 1.0)[..., None], jnp.log(total) + top


def partial_gradients(
    query: Float[Array, "N H t d"],
    key: Float[Array, "N H j d"],
    value: Float[Array, "N H j d"],
    cotangent: Float[Array, "N H t d"],
    shift: Float[Array, "N H t"],
    delta: Float[Array, "N H t"],
    seen: Bool[Array, "N 1 t j"],
    scale: float,
) -> tuple[Float[Array, "N H t d"], Float[Array, "N H j d"], Float[Array, "N H j d"], Float[Array, "N t"]]:
    """Gradients of (query, key, value, bias), recomputing the scores; query's and key's still lack the factor `scale`.

    With p = exp(scale * q.k + shift), shift = bias - lse over ALL resources of the query, and
    delta = output . cotangent - (cotangent of lse):  d score = p * (cotangent . v - delta).
    """
    score = jnp.einsum("nhtd,nhjd->nhtj", query, key, preferred_element_type=F32)
    d_weight = jnp.einsum("nhtd,nhjd->nhtj", cotangent, value, preferred_element_type=F32)
    weight = jnp.where(seen, jnp.exp(score * scale + shift[..., None]), 0.0)
    d_score = weight * (d_weight - delta[..., None])
    d_bias = d_score.sum((1, 3))
    weight, d_score = weight.astype(value.dtype), d_score.astype(value.dtype)
    d_query = jnp.einsum("nhtj,nhjd->nhtd", d_score, key, preferred_element_type=F32)
    d_key = jnp.einsum("nhtj,nhtd->nhjd", d_score, query, preferred_element_type=F32)
    d_value = jnp.einsum("nhtj,nhtd->nhjd", weight, cotangent, preferred_element_type=F32)
    return d_query, d_key, d_value, d_bias


def finite(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """-inf, the log of nothing, replaced by 0 so that differences with it stay numbers."""
    return jnp.where(x > -jnp.inf, x, 0.0)
