"""Router scores r_ij of every resource for every token (eq 4; AA-09, AA-10; decisions 04-06).

Shapes: b rows, n tokens of each, l chunks per row, E experts, d width. Everything here is float32 (decision 38).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Rotation, rotate
from aamoe_jax.shards import RESOURCE, WHOLE, Shards

# Accelerators multiply float32 in fewer bits unless told otherwise, and choices would flip.
HIGHEST = jax.lax.Precision.HIGHEST


class Router(nnx.Module):
    """r_ij = (W_c^T h_i, turned to position i) . (c_j, turned to the end of chunk j) / sqrt(d) for chunks of context,
    where c_j is the h of the chunk's last token; r_il = h_i . e_l / sqrt(d) for experts.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.d_model
        kernel = width**-0.5 * jax.random.normal(rngs.params(), (width, width))
        embeddings = jax.random.normal(rngs.params(), (config.aamoe.num_experts, width))
        self.context_kernel = nnx.Param(kernel, axes=("storage_float32", None))
        self.expert_embeddings = nnx.Param(embeddings, axes=("resources", "storage_float32"))
        self.rope = config.aamoe.router_rope

    def __call__(
        self,
        h: Float[Array, "b n d"],
        turn: Rotation,
        ends: Float[Array, "b l d"],
        turn_of_ends: Rotation,
        shards: Shards = WHOLE,
    ) -> tuple[Float[Array, "b n l"], Float[Array, "b n E"], Float[Array, "b n"]]:
        """Scores of the row's chunks, of the experts, and of the token's neighbourhood.

        Args:
          ends: h of the last token of every chunk of the row.
          turn, turn_of_ends: of the width of h.
        """
        query, experts, local = self.project(h, turn, shards)
        chunks = jnp.einsum("bid,bjd->bij", query, self.chunk_keys(ends, turn_of_ends), precision=HIGHEST)
        return chunks, experts, local

    def chunk_keys(self, ends: Float[Array, "b l d"], turn: Rotation) -> Float[Array, "b l d"]:
        """What chunks are scored by: the h of their last tokens, turned to where these stand."""
        ends = ends.astype(jnp.float32)
        return rotate(ends, turn) if self.rope == "relative" else ends

    def project(
        self, h: Float[Array, "b n d"], turn: Rotation, shards: Shards = WHOLE
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b n E"], Float[Array, "b n"]]:
        """The vector whose dot product with a chunk's key is the chunk's score, and the scores of the experts and of
        the token's own neighbourhood.

        The last is the score that a chunk ending in the token itself would have (decision 03): at equal positions the
        two rotations cancel, so it is the plain (W_c^T h_i) . h_i / sqrt(d).
        """
        h = h.astype(jnp.float32)
        scale = h.shape[-1] ** -0.5
        query = scale * jnp.matmul(h, self.context_kernel[...], precision=HIGHEST)
        local = jnp.sum(query * h, axis=-1)
        # Every token scores all experts: of each it takes one vector, m times less than its keys.
        embeddings = shards.gather(self.expert_embeddings[...], RESOURCE, 0)
        experts = scale * jnp.matmul(h, embeddings.T, precision=HIGHEST)
        return rotate(query, turn) if self.rope == "relative" else query, experts, local
