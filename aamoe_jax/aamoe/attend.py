"""Attention of every token to what it was given, context and experts in one softmax (eq 5-7, 16; AA-16, AA-17, AA-41).

Shapes: b rows, L tokens per row, n of them here, s of them attend together, m keys per resource, E experts, K slots,
H heads here, k head size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import collapse
from jaxtyping import Array, Float

from aamoe_jax.aamoe.allocation import Allocation
from aamoe_jax.aamoe.budget import most_pairs
from aamoe_jax.aamoe.parallel import Attended, Softmax, attend_everywhere
from aamoe_jax.aamoe.resources import LOCAL, representation_tensor
from aamoe_jax.aamoe.router import Heads
from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Context
from aamoe_jax.shards import TENSOR
from pallas_kernels.block_sparse_attention import Pairs, Window, block_sparse_attention


def attend(
    heads: Heads, allocation: Allocation, context: Context, config: ModelConfig, max_score: Float[Array, ""] | None
) -> Attended:
    """softmax(q . k / sqrt(k) + log P) v over the keys of all resources of a token: one call, the window in it (AA-17).

    Of the tokens that attend together. Mass is of the tokens here, 0 in unused slots.

    Args:
      max_score: what no score exceeds, where norms bound it.
    """
    shards, layer, local = context.shards, config.aamoe, LOCAL[config.aamoe.local]
    # eq 15-16, AA-21
    bias = allocation.log_prob if layer.bias == "log_prob" else jnp.zeros_like(allocation.log_prob)
    given = allocation.resource, bias, allocation.count
    resource, bias, count = (context.move(x, "here", "rows") for x in given)
    window_bias = None
    if local.window:  # it is in the first slot
        window_bias = jnp.where(count > 0, bias[..., 0], -jnp.inf)
        resource, bias, count = resource[..., 1:], bias[..., 1:], jnp.maximum(count - 1, 0)
    rows, length, slots = resource.shape
    own, offset = jnp.divmod(jnp.arange(length), layer.chunk_size)
    prefix = jnp.broadcast_to(offset + 1, context.segment_ids.shape)
    if not local.partial:  # a prefix that begins in another document shows nothing
        prefix = jnp.where(context.segment_ids[:, own * layer.chunk_size] == context.segment_ids, prefix, 0)
    visible = jnp.where(resource == (own - local.partial)[:, None], prefix[..., None], layer.chunk_size)
    most_beta = max(config.betas) * context.max_scale
    options: dict[str, Any] = {
        "max_pairs": most_pairs(context.budget, rows, length, slots, most_beta, layer),
        "max_score": max_score,
        "implementation": config.kernel,
    }
    if shards.resource > 1:
        pairs = Pairs(resource, bias, visible, count)
        found = attend_everywhere(heads, pairs, window_bias, context, context.rotary(config).heads, **options)
    else:
        # From the row's own index (its chunks, then the experts) to that of the table of all rows.
        chunks, row = length // layer.chunk_size, jnp.arange(rows)[:, None]
        resource += jnp.where(resource < chunks, row[..., None], rows - 1) * chunks
        window = None
        if window_bias is not None:
            segment = (length + 1) * row + context.segment_ids
            window = Window(window_bias.reshape(-1), segment.reshape(-1))
        attention = block_sparse_attention(
            collapse(heads.rotated_query, 0, 2),
            collapse(heads.query, 0, 2),
            representation_tensor(heads.key, heads.expert_key),
            representation_tensor(heads.value, heads.expert_value),
            Pairs(*(collapse(x, 0, 2) for x in (resource, bias, visible, count))),
            num_context=rows * chunks,
            window=window,
            row_chunks=chunks,
            **options,
        )
        output, lse, mass = (x.reshape(rows, length, *x.shape[1:]) for x in attention)
        if window is not None:  # the window's share is what the routed resources leave over
            mass = jnp.concatenate([1.0 - mass.sum(-1, keepdims=True), mass], axis=-1)
        found = Attended(Softmax(output, lse), mass)
    mass = shards.scatter_sum(found.mass, TENSOR) / shards.tensor  # the mean over heads
    used = jnp.arange(mass.shape[-1]) < allocation.count[..., None]
    # Every part of the heads has the same pairs.
    return Attended(found.attention, jnp.where(used, mass, 0), found.overflow / shards.tensor)


def beside_null(attention: Softmax, null_logit: nnx.Param | None) -> Float[Array, "b s H k"]:
    """Heads beside a null slot, where there is one: a key with value 0 and logit n, which takes exp(n) / (exp(n) +
    exp(lse)) of the attention (decision 15).

    Args:
      null_logit: n of every head.
    """
    if null_logit is None:
        return attention.output
    kept = jax.nn.sigmoid(attention.lse - null_logit[...])
    return attention.output * kept[..., None].astype(attention.output.dtype)
