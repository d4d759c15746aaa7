"""What a mixer is given, and what it returns.

A mixer is a module with `__call__(h, context) -> (output, statistics)`: h [b, L, d] is the normed input of the block,
output [b, L, d] is added to the residual stream, statistics is a flat dict of arrays (empty for dense mixers).

It decodes through a cache of its own making, a pytree of arrays:
* `empty_cache(rows, length)`: room for `length` tokens in every row;
* `fill(h, context, cache)`: the cache after a prompt h [b, L, d] that starts the rows, padded at its end;
* `decode(h, context, cache) -> (output, cache)`: one more token h [b, 1, d] per row, at `context.positions`; its output
  is what `__call__` would give it in a row of all tokens so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Rotation, rotation

BudgetMode = Literal["row", "prefix", "predictor", "predictor_uncapped"]
Detail = Literal["sums", "tokens", "resources"]
Statistics = dict[str, Array | np.ndarray]
Cache = Any
"""A pytree of arrays that a mixer makes and reads."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The batch around the activations, the same for every layer but for `beta`."""

    segment_ids: Int[Array, "b L"]
    """Documents of a row, counted from 1; 0 is padding. Tokens see their own document alone."""
    positions: Int[Array, "b L"]
    """Position of a token in its document."""
    budget: BudgetMode
    """Which budgets AA-MoE layers use: the row's, the prefix's, or the predictor's, under the cap or without it."""
    beta: Float[Array, ""] | float
    """Mean number of resources per token in this layer; at most the largest of the config, which bounds the work."""
    detail: Detail = "sums"
    """`tokens` adds per-token arrays to the statistics, `resources` also what every token was given."""
    scale: Float[Array, ""] | float = 1.0
    """The dial: beta is multiplied by it (AA-35). It may change without a new compilation."""
    max_scale: float = 1.0
    """The largest `scale` that the static bounds on work cover; a larger one is cut to it."""
    rotations: Mapping[int, Rotation] = dataclasses.field(default_factory=dict)
    """Rotations by width, where they were computed once for all layers."""

    @classmethod
    def of_rows(cls, config: ModelConfig, rows: int, length: int) -> Context:
        """Every row one document, budgets as configured (those of the first layer, where layers differ)."""
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        return cls(jnp.ones((rows, length), jnp.int32), positions, config.aamoe.budget.normalizer, config.betas[0])

    def with_rotations(self, config: ModelConfig) -> Context:
        """The same with what layers turn heads and router vectors by: sines are dear, and the same in every layer."""
        widths = (config.head_dim, config.d_model)
        return dataclasses.replace(
            self, rotations={width: rotation(self.positions, width, config.rope_base) for width in widths}
        )

    def rotation(self, config: ModelConfig, width: int) -> Rotation:
        """The rotation of every token's position, for vectors of `width`."""
        if width in self.rotations:
            return self.rotations[width]
        return rotation(self.positions, width, config.rope_base)

    @property
    def real(self) -> Bool[Array, "b L"]:
        """Tokens that are not padding."""
        return self.segment_ids > 0


def causal_mask(segment_ids: Int[Array, "b L"]) -> Bool[Array, "b L L"]:
    """mask[b, i, j]: token i may see token j, which is not later and of the same document."""
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])
