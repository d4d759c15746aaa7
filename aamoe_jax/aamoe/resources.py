"""Resources: chunks of context and experts under one index (eq 5-7, 9; decisions 03-04, 30).

Shapes: b rows, L tokens per row, n of them here, m tokens per chunk, l = L / m chunks per row, E experts,
R = b l + E resources, d width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def representation_tensor(context: Float[Array, "b L *d"], experts: Float[Array, "E m *d"]) -> Float[Array, "R m *d"]:
    """X of eq 6 (AA-13): the l chunks of every row, row after row, then the E experts.

    All rows share one table, so the experts are never copied per row. Eq 9 applies W^K (W^V) to the chunk rows alone;
    `context` is therefore given projected, and experts enter verbatim.
    """
    return jnp.concatenate([context.reshape(-1, *experts.shape[1:]), experts.astype(context.dtype)])


def chunk_ends(x: Array, chunk_size: int) -> Array:
    """The entry of every chunk's last token along axis 1: [b, L, ...] -> [b, l, ...]."""
    return x[:, chunk_size - 1 :: chunk_size]


def available_chunks(
    chunk: Int[Array, "b n"], segment: Int[Array, "b n"], chunk_segment: Int[Array, "b l"]
) -> Bool[Array, "b n l"]:
    """Whether chunk j may be chosen by token i: completed before the token's own chunk began, and of its document
    (AA-07, AA-15).

    Args:
      chunk, segment: the tokens' own chunks and documents.
      chunk_segment: the document of every chunk's last token.

    Documents start at chunk boundaries (decision 30), so a completed chunk belongs to one document, its last token's.
    An incomplete chunk ends in padding (segment 0), which no token shares.
    """
    earlier = jnp.arange(chunk_segment.shape[1]) < chunk[..., None]
    same = segment[..., None] == chunk_segment[:, None]
    return earlier & same & (segment > 0)[..., None]


def flat_index(resource: Int[Array, "b L K"], num_chunks: int) -> Int[Array, "b L K"]:
    """Index into the representation tensor of all rows, from the row's own index (chunks 0..l-1, experts l..l+E-1)."""
    rows = resource.shape[0]
    row = jnp.arange(rows)[:, None, None]
    return jnp.where(resource < num_chunks, resource + row * num_chunks, resource + (rows - 1) * num_chunks)
