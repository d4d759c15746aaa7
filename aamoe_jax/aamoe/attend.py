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
from aamoe_jax.config import AAMoEConfig, ModelConfig
from aamoe_jax.layers import merge_heads, split_heads
from aamoe_jax.mixers.base import Context, causal_mask
from aamoe_jax.mixers.weighted_sum import head_scores
from aamoe_jax.shards import TENSOR
from pallas_kernels.block_sparse_attention import Pairs, Window, block_sparse_attention


def attend(
    heads: Heads, allocation: Allocation, context: Context, config: ModelConfig, max_score: Float[Array, ""] | None
) -> Attended:
    """softmax(q . k / sqrt(k) + log P) v over the keys of all resources of a token: one call, the window in it (AA-17).

    Of the tokens that attend together. Mass is of the tokens here, 0 in unused slots, and where nobody asks for it.

    Args:
      max_score: what no score exceeds, where norms bound it.
    """
    shards, layer = context.shards, config.aamoe
    (resource, bias, visible, count), window_bias = seen(allocation, context, layer)
    rows, length, slots = resource.shape
    most_beta = max(config.betas) * context.max_scale
    options: dict[str, Any] = {
        "max_pairs": most_pairs(context.budget, rows, length, slots, most_beta, layer),
        "max_score": max_score,
        "with_mass": context.with_mass,
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
            _table(heads.key, heads.expert_key),
            _table(heads.value, heads.expert_value),
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
    used = (jnp.arange(mass.shape[-1]) < allocation.count[..., None]) & context.with_mass
    # Every part of the heads has the same pairs.
    return Attended(found.attention, jnp.where(used, mass, 0), found.overflow / shards.tensor)


def _table(context: Float[Array, "b L H k"], experts: Float[Array, "E m H k"]) -> Float[Array, "R m H k"]:
    """Put together with the heads side by side, as TPU kernels read it: apart, XLA would copy it twice more."""
    return split_heads(representation_tensor(merge_heads(context), merge_heads(experts)), context.shape[-1])


def seen(allocation: Allocation, context: Context, layer: AAMoEConfig) -> tuple[Pairs, Float[Array, "b L"] | None]:
    """What whole rows attend to: pairs, by the row's index of their resource; and the bias of every token's window,
    -inf where it has none, which is no pair."""
    local = LOCAL[layer.local]
    # eq 15-16, AA-21
    bias = allocation.log_prob if layer.bias == "log_prob" else jnp.zeros_like(allocation.log_prob)
    given = allocation.resource, bias, allocation.count
    resource, bias, count = (context.move(x, "here", "rows") for x in given)
    window_bias = None
    if local.window:  # it is in the first slot
        window_bias = jnp.where(count > 0, bias[..., 0], -jnp.inf)
        resource, bias, count = resource[..., 1:], bias[..., 1:], jnp.maximum(count - 1, 0)
    own, offset = jnp.divmod(jnp.arange(resource.shape[1]), layer.chunk_size)
    prefix = jnp.broadcast_to(offset + 1, context.segment_ids.shape)
    if not local.partial:  # a prefix that begins in another document shows nothing
        prefix = jnp.where(context.segment_ids[:, own * layer.chunk_size] == context.segment_ids, prefix, 0)
    visible = jnp.where(resource == (own - local.partial)[:, None], prefix[..., None], layer.chunk_size)
    return Pairs(resource, bias, visible, count), window_bias


def attention_map(
    heads: Heads,
    allocation: Allocation,
    lse: Float[Array, "b s H"],
    context: Context,
    config: ModelConfig,
) -> Float[Array, "b H L L"]:
    """The attention of every token to every token, dense (DEC-17): exp(q . k / sqrt(k) + log P - lse). What is missing
    to 1 goes to experts, and to the null slot. Without a mesh.

    Args:
      lse: log-sum-exp of all scores of a token.
    """
    m, (pairs, window_bias) = config.aamoe.chunk_size, seen(allocation, context, config.aamoe)
    rows, length, slots = pairs.resource.shape
    at = jnp.arange(rows)[:, None, None], jnp.arange(length)[:, None], pairs.resource  # those of experts are dropped
    bias = jnp.where(jnp.arange(slots) < pairs.count[..., None], pairs.bias, -jnp.inf)
    nothing = jnp.zeros((rows, length, length // m))
    bias_of_chunk = (nothing - jnp.inf).at[at].max(bias, mode="drop")
    visible = nothing.astype(jnp.int32).at[at].max(jnp.where(bias > -jnp.inf, pairs.visible, 0), mode="drop")
    token = jnp.arange(length)
    bias = jnp.where(token % m < jnp.repeat(visible, m, axis=-1), jnp.repeat(bias_of_chunk, m, axis=-1), -jnp.inf)
    if window_bias is not None:
        near = causal_mask(context.segment_ids) & (token[:, None] - token < m)
        bias = jnp.where(near, window_bias[..., None], bias)
    scores = head_scores(heads.rotated_query, heads.key) + bias[:, None]
    return jnp.where(bias[:, None] > -jnp.inf, jnp.exp(scores - jnp.moveaxis(lse, -1, 1)[..., None]), 0.0)


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
