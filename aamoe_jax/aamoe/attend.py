"""Attention of every token to what it was given, context and experts in one softmax (eq 5-7, 16; AA-16, AA-17, AA-41).

Shapes: b rows, L tokens per row, s of them attend together, m keys per resource, E experts, K slots,
H heads here, k head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from aamoe_jax.aamoe.resources import flat_index, representation_tensor
from aamoe_jax.aamoe.router import Heads
from aamoe_jax.layers import flatten_tokens
from aamoe_jax.mixers.base import Context
from pallas_kernels.block_sparse_attention import Pairs, Window, block_sparse_attention


class Softmax(NamedTuple):
    """Attention over some keys, and the log-sum-exp of its scores: -inf where there are none."""

    output: Float[Array, "b s H k"]
    lse: Float[Array, "b s H"]


class Attended(NamedTuple):
    """The attention of the tokens that attend together."""

    attention: Softmax
    mass: Float[Array, "b s K"]
    """Share of the attention on each slot, mean over heads."""
    overflow: Num[Array, ""] | float = 0
    """Pairs dropped past `MeshConfig.pair_bound`."""


def attend_here(
    heads: Heads, pairs: Pairs, window_bias: Float[Array, "b L"] | None, context: Context, **options: Any
) -> Attended:
    """Attention where all resources are on this device: one call, the window in it (AA-17).

    Args:
      pairs: what the tokens of rows were given beside the window, by the row's index (chunks, then experts).
      window_bias: of the window; -inf for tokens without budget. None: there is no window.
      options: of `block_sparse_attention`.
    """
    rows, length = context.segment_ids.shape
    chunks, num_experts = length // heads.expert_key.shape[1], len(heads.expert_key)
    window = None
    if window_bias is not None:
        segment = (length + 1) * jnp.arange(rows)[:, None] + context.segment_ids
        window = Window(window_bias.reshape(-1), segment.reshape(-1))
    pairs = pairs._replace(resource=flat_index(pairs.resource, chunks))
    keys = representation_tensor(heads.key, heads.expert_key)
    attention = block_sparse_attention(
        flatten_tokens(heads.rotated_query),
        flatten_tokens(heads.query),
        keys,
        representation_tensor(heads.value, heads.expert_value),
        Pairs(*map(flatten_tokens, pairs)),
        num_context=len(keys) - num_experts,
        window=window,
        row_chunks=chunks,
        **options,
    )
    output, lse, mass = (x.reshape(rows, length, *x.shape[1:]) for x in attention)
    if window is not None:  # the window's share is what the routed resources leave over
        mass = jnp.concatenate([1.0 - mass.sum(-1, keepdims=True), mass], axis=-1)
    return Attended(Softmax(output, lse), mass)


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
