"""Resources: chunks of context and experts under one index (eq 5-7, 9; decisions 03-04, 30).

Shapes: b rows, L tokens per row, n of them here, m tokens per chunk, l = L / m chunks per row, E experts,
R = b l + E resources, d width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
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

    partial: int = 0
    """How many chunks before its own is the one of which a token sees a prefix alone: its own up to itself; with a
    window, of the one before what the window leaves over (keys in both would count twice)."""


LOCAL: Mapping[str, Local] = {
    "window": Local(first=True, window=True, partial=1),
    "chunk": Local(first=True),
    "routed": Local(routed=True),
    "none": Local(),
}


def representation_tensor(context: Float[Array, "b L *d"], experts: Float[Array, "E m *d"]) -> Float[Array, "R m *d"]:
    """X of eq 6 (AA-13): the l chunks of every row, row after row, then the E experts.

    All rows share one table, so the experts are never copied per row. Eq 9 applies W^K (W^V) to the chunk rows alone;
    `context` is therefore given projected, and experts enter verbatim.
    """
    m, *heads = experts.shape[1:]
    rows = (x.reshape(-1, m, math.prod(heads)) for x in (context, experts.astype(context.dtype)))
    # As they lie: else XLA for TPUs gives every head registers of its own, and copies the table for that and back.
    return jax.lax.optimization_barrier(jnp.concatenate(list(rows))).reshape(-1, m, *heads)


def available_chunks(config: AAMoEConfig, context: Context) -> tuple[Int[Array, "b s"], Bool[Array, "b s l"]]:
    """The chunk that token i is in, and whether it may choose chunk j: completed before its own began, and of its
    document (AA-07, AA-15). Without routed context there is none.

    An incomplete chunk ends in padding (segment 0), which no token shares. Where a document starts inside a chunk, the
    chunk is nobody's; the data of this package never does that (decision 30).

    Raises:
      ValueError: rows are not whole chunks.
    """
    m, length = config.chunk_size, context.segment_ids.shape[1]
    if length % m:
        raise ValueError(f"rows of {length} tokens are not whole chunks of {m}: pad h and the context")
    own = jnp.broadcast_to(jnp.arange(length) // m, context.segment_ids.shape)
    own, segment = (context.move(x, "rows", "attending") for x in (own, context.segment_ids))
    segments = context.segment_ids.reshape(len(context.segment_ids), -1, m)
    last = segments[..., -1]
    chunk_segment = jnp.where((segments == last[..., None]).all(-1), last, 0)  # 0: of no document, or of two
    earlier = jnp.arange(length // m) < own[..., None]
    same = segment[..., None] == chunk_segment[:, None]
    return own, earlier & same & (segment > 0)[..., None] & (config.context == "routed")
