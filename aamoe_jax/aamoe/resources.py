"""Resources: chunks of context and experts under one index (eq 5-7, 9; decisions 03-04, 30).

Shapes: b rows, L tokens per row, n of them here, m tokens per chunk, l = L / m chunks per row, E experts,
R = b l + E resources, d width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import AAMoEConfig
from aamoe_jax.mixers.base import Context


class Local(NamedTuple):
    """What a token sees of its own neighbourhood (`AAMoEConfig.local`; decisions 03, 04)."""

    first: bool = False
    """It is rank 1, bought before any other resource."""
    window: bool = False
    """It is the last m tokens, self included, whatever chunks they are in."""
    routed: bool = False
    """It is the own chunk up to the token, which competes like any other."""

    def partial_chunk(self, own: Int[Array, "*tokens"]) -> Int[Array, "*tokens"]:
        """The chunk of which a token sees a prefix alone: its own up to itself; with a window, of the one before what
        the window leaves over (keys in both would count twice)."""
        return own - 1 if self.window else own


LOCAL: Mapping[str, Local] = {
    "window": Local(first=True, window=True),
    "chunk": Local(first=True),
    "routed": Local(routed=True),
    "none": Local(),
}


def representation_tensor(context: Float[Array, "b L *d"], experts: Float[Array, "E m *d"]) -> Float[Array, "R m *d"]:
    """X of eq 6 (AA-13): the l chunks of every row, row after row, then the E experts.

    All rows share one table, so the experts are never copied per row. Eq 9 applies W^K (W^V) to the chunk rows alone;
    `context` is therefore given projected, and experts enter verbatim.
    """
    return jnp.concatenate([context.reshape(-1, *experts.shape[1:]), experts.astype(context.dtype)])


def available_chunks(config: AAMoEConfig, context: Context) -> Bool[Array, "b s l"]:
    """Whether chunk j may be chosen by token i: completed before the token's own chunk began, and of its document
    (AA-07, AA-15). Without routed context there is none.

    An incomplete chunk ends in padding (segment 0), which no token shares. Where a document starts inside a chunk, the
    chunk is nobody's; the data of this package never does that (decision 30).

    Raises:
      ValueError: rows are not whole chunks.
    """
    m, length = config.chunk_size, context.segment_ids.shape[1]
    if length % m:
        raise ValueError(f"rows of {length} tokens are not whole chunks of {m}: pad h and the context")
    index = jnp.broadcast_to(jnp.arange(length), context.segment_ids.shape)
    index, segment = map(context.rows_to_attending, (index, context.segment_ids))
    segments = context.segment_ids.reshape(len(context.segment_ids), -1, m)
    last = segments[..., -1]
    chunk_segment = jnp.where((segments == last[..., None]).all(-1), last, 0)  # 0: of no document, or of two
    earlier = jnp.arange(length // m) < (index // m)[..., None]
    same = segment[..., None] == chunk_segment[:, None]
    return earlier & same & (segment > 0)[..., None] & (config.context == "routed")


def flat_index(resource: Int[Array, "b L K"], num_chunks: int) -> Int[Array, "b L K"]:
    """Index into the representation tensor of all rows, from the row's own index (chunks 0..l-1, experts l..l+E-1)."""
    rows = resource.shape[0]
    row = jnp.arange(rows)[:, None, None]
    return jnp.where(resource < num_chunks, resource + row * num_chunks, resource + (rows - 1) * num_chunks)
