"""Attention of every token to what it was given, context and experts in one softmax (eq 5-7, 16; AA-16, AA-17, AA-41).

Shapes: b rows, L tokens per row, s of them attend together, m keys per resource, E experts, K slots,
H heads here, k head size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from aamoe_jax.aamoe.resources import Local, flat_index, representation_tensor
from aamoe_jax.aamoe.router import Heads
from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import flatten_tokens
from aamoe_jax.mixers.base import Context
from pallas_kernels.block_sparse_attention import Pairs, Window, block_sparse_attention


class Softmax(NamedTuple):
    """Attention over some keys, and the log-sum-exp of its scores: -inf where there are none."""

    output: Float[Array, "b s H k"]
    lse: Float[Array, "b s H"]


class Found(NamedTuple):
    """What the tokens that attend together found."""

    attention: Softmax
    mass: Float[Array, "b s K"]
    """Share of the attention on each slot, mean over heads."""
    overflow: Num[Array, ""] | int = 0
    """Pairs that had no room (`MeshConfig.pair_bound`)."""


class Given(NamedTuple):
    """What the tokens of rows were given: the row's index of every resource (chunks, then experts), and its bias."""

    resource: Int[Array, "b L K"]
    bias: Float[Array, "b L K"]
    count: Int[Array, "b L"]

    def visible(self, local: Local, m: int) -> Int[Array, "b L K"]:
        """How many keys of every resource its token sees: all m, but of the partial chunk those up to itself."""
        own, offset = jnp.divmod(jnp.arange(self.resource.shape[1]), m)
        return jnp.where(self.resource == local.partial_chunk(own)[:, None], offset[:, None] + 1, m)

    def without_window(self, local: Local) -> tuple[Float[Array, "b L"] | None, Given]:
        """The bias of the window, which the first slot holds (-inf for tokens without budget), and the other slots."""
        if not local.window:
            return None, self
        routed = Given(self.resource[..., 1:], self.bias[..., 1:], jnp.maximum(self.count - 1, 0))
        return jnp.where(self.count > 0, self.bias[..., 0], -jnp.inf), routed


class Options(NamedTuple):
    """What the attention of a layer depends on beside its inputs."""

    config: ModelConfig
    local: Local
    max_pairs: int
    """Static bound on the pairs of all rows."""
    max_score: Float[Array, ""] | None
    """What no score exceeds, where norms bound it."""


def attend_here(heads: Heads, given: Given, context: Context, options: Options) -> Found:
    """Attention where all resources are on this device: one call, the window in it (AA-17)."""
    rows, length = context.segment_ids.shape
    m, num_experts = heads.expert_key.shape[1], len(heads.expert_key)
    chunks = length // m
    window, routed = given.without_window(options.local)
    if window is not None:
        segment = (length + 1) * jnp.arange(rows)[:, None] + context.segment_ids
        window = Window(window.reshape(-1), segment.reshape(-1))
    pairs = (flat_index(routed.resource, chunks), routed.bias, routed.visible(options.local, m), routed.count)
    keys = representation_tensor(heads.key, heads.expert_key)
    attention = block_sparse_attention(
        flatten_tokens(heads.rotated_query),
        flatten_tokens(heads.query),
        keys,
        representation_tensor(heads.value, heads.expert_value),
        Pairs(*map(flatten_tokens, pairs)),
        num_context=len(keys) - num_experts,
        max_pairs=options.max_pairs,
        window=window,
        max_score=options.max_score,
        row_chunks=chunks,
        implementation=options.config.kernel,
    )
    output, lse, mass = (x.reshape(rows, length, *x.shape[1:]) for x in attention)
    if window is not None:  # the window's share is what the routed resources leave over
        mass = jnp.concatenate([1.0 - mass.sum(-1, keepdims=True), mass], axis=-1)
    return Found(Softmax(output, lse), mass)


def beside_null(attention: Softmax, null_logit: Float[Array, "H"]) -> Float[Array, "b s H k"]:
    """A key with value 0 and logit n takes exp(n) / (exp(n) + exp(lse)) of the attention (decision 15)."""
    kept = jax.nn.sigmoid(attention.lse - null_logit)
    return attention.output * kept[..., None].astype(attention.output.dtype)
