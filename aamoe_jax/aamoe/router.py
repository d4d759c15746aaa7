"""Router scores r_ij of every resource for every token (eq 4; AA-09, AA-10; decisions 04-06).

A router has, beside parameters of its own: `scores` of whole rows; `page_keys` and `expert_keys`, what it keeps of
chunks and experts while decoding; and `next_scores` of one more token. The other router is in `pooled.py`.

Shapes: b rows, s tokens that attend together, n of them here, l chunks per row, E experts, d width, H heads here, k
head size. Scores are float32 (decision 38).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from aamoe_jax.aamoe.cache import Cache
from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import RotaryTable, apply_rotary, split_heads
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.convolution import CausalConvolution
from aamoe_jax.mixers.experts import AttentionScores
from aamoe_jax.shards import RESOURCE, WHOLE, Shards

Scores = tuple[Float[Array, "b n l"], Float[Array, "b n E"], Float[Array, "b n"]]
"""Of the row's chunks, of the experts, and of the token's neighbourhood."""


class Heads(NamedTuple):
    """Queries, keys and values of the tokens that attend together, and of the experts here."""

    h: Float[Array, "b s d"]
    """What they are projections of."""
    query: Float[Array, "b s H k"]
    """Not rotated: what meets experts."""
    rotated_query: Float[Array, "b s H k"]
    key: Float[Array, "b s H k"]
    """Rotated."""
    value: Float[Array, "b s H k"]
    expert_key: Float[Array, "e m H k"]
    expert_value: Float[Array, "e m H k"]


class LearnedRouter(nnx.Module):
    """r_ij = RoPE(W_c^T h_i, i) . RoPE(c_j, end of chunk j) / sqrt(d) for chunks of context, where c_j is the h of the
    chunk's last token; r_il = h_i . e_l / sqrt(d) for experts.

    In place of h_i it may see a convolution over h_i and the tokens before (UNI-10); and score the experts of a token
    by attention among them (UNI-09).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.d_model
        kernel = width**-0.5 * jax.random.normal(rngs.params(), (width, width))
        embeddings = jax.random.normal(rngs.params(), (config.aamoe.num_experts, width))
        self.config = config
        self.precision = config.aamoe.router_precision
        self.context_kernel = nnx.Param(kernel, axes=("storage_float32", None))
        among = config.aamoe.num_experts and config.aamoe.expert_router == "attention"
        self.expert_attention = AttentionScores(width, config.aamoe.num_experts, rngs=rngs) if among else None
        if config.aamoe.num_experts and not among:
            self.expert_embeddings = nnx.Param(embeddings, axes=("resources", "storage_float32"))
        self.convolution = CausalConvolution(width) if config.aamoe.router_input == "causal_conv" else None
        self.rotary = config.aamoe.router == "learned"

    def scores(
        self, h: Float[Array, "b n d"], heads: Heads, chunks: Bool[Array, "b s l"], context: Context
    ) -> tuple[Scores, Heads]:
        """Scores of whole rows; and the heads, for attention.

        Args:
          chunks: which chunks the tokens that attend together can be given.
        """
        del chunks  # a score depends on no other
        rotary, shards, m = context.rotary(self.config), context.shards, self.config.aamoe.chunk_size
        attending = heads.h
        if self.convolution:
            attending = self.convolution(attending, context)
            h = context.move(attending, "attending", "here")
        query, experts, local = self.project(h, rotary.tokens, shards)
        keys = self.chunk_keys(shards.gather(attending[:, m - 1 :: m], RESOURCE), rotary.ends)
        return (jnp.einsum("bid,bjd->bij", query, keys, precision=self.precision), experts, local), heads

    def page_keys(self, heads: Heads, context: Context) -> Float[Array, "b l H k"]:
        """What the chunks of a prompt are scored by, in heads."""
        m = self.config.aamoe.chunk_size
        h = self.convolution(heads.h, context) if self.convolution else heads.h
        keys = self.chunk_keys(h[:, m - 1 :: m], context.rotary(self.config).ends)
        return split_heads(keys, self.config.head_dim)

    def expert_keys(self, keys: Float[Array, "E m H k"]) -> Float[Array, "0 1 H k"]:
        """What experts are scored by beside their embeddings: nothing."""
        return keys[:0, :1].astype(jnp.float32)

    def next_scores(
        self, h: Float[Array, "b 1 d"], heads: Heads, chunks: Bool[Array, "b 1 l"], context: Context, cache: Cache
    ) -> tuple[Scores, Cache]:
        """Scores of one more token in every row, and the cache with what its page would be scored by if it ended it."""
        del heads, chunks
        rotary, size = context.rotary(self.config).tokens, self.config.head_dim
        page = context.positions // self.config.aamoe.chunk_size
        h = self.convolution.decode(h, cache.before)[0] if self.convolution else h
        cache = cache.write_router_key(page, split_heads(self.chunk_keys(h, rotary), size))
        query, experts, local = self.project(h, rotary)
        of_chunks = cache.chunk_scores(split_heads(query, size), self.precision).sum((1, 3))[:, None]
        return (of_chunks, experts, local), cache

    def chunk_keys(self, ends: Float[Array, "b l d"], rotary: RotaryTable) -> Float[Array, "b l d"]:
        """What chunks are scored by: the h of their last tokens, with the rotary embedding of their positions."""
        ends = ends.astype(jnp.float32)
        return apply_rotary(ends, rotary) if self.rotary else ends

    def project(
        self, h: Float[Array, "b n d"], rotary: RotaryTable, shards: Shards = WHOLE
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b n E"], Float[Array, "b n"]]:
        """The vector whose dot product with a chunk's key is the chunk's score, and the scores of the experts and of
        the token's own neighbourhood.

        The last is the score that a chunk ending in the token itself would have (decision 03): at equal positions the
        two rotations cancel, so it is the plain (W_c^T h_i) . h_i / sqrt(d).
        """
        h = h.astype(jnp.float32)
        scale = h.shape[-1] ** -0.5
        query = scale * jnp.matmul(h, self.context_kernel[...], precision=self.precision)
        local = jnp.sum(query * h, axis=-1)
        query = apply_rotary(query, rotary) if self.rotary else query
        if not self.config.aamoe.num_experts:
            return query, jnp.zeros((*h.shape[:-1], 0)), local
        if self.expert_attention:
            return query, self.expert_attention(h, self.precision), local
        # Every token scores all experts: of each it takes one vector, m times less than its keys.
        embeddings = shards.gather(self.expert_embeddings[...], RESOURCE, 0)
        return query, scale * jnp.matmul(h, embeddings.T, precision=self.precision), local
