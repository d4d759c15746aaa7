"""Attention with one of its four principles after the other relaxed (DEC-01 to DEC-08; Xue, Moosavi, Aletras).

Every variant has as many parameters as standard attention with as many heads of keys as of queries (DEC-12).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Projection, residual_gain
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.costs import Costs, Setting
from aamoe_jax.mixers.parts import Part
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import register
from aamoe_jax.shards import TENSOR

Principle = Literal["token_mixing", "mathematical_form", "sequence_dependency", "current_qk"]
"""Tokens interact; by softmax over dot products; with weights that follow the input; made of the current layer."""

PRINCIPLES: Mapping[str, frozenset[Principle]] = {
    "attention": frozenset({"token_mixing", "mathematical_form", "sequence_dependency", "current_qk"}),
    "mlp": frozenset(),
    "approximate": frozenset({"token_mixing", "sequence_dependency", "current_qk"}),
    "non_approximate": frozenset({"token_mixing", "sequence_dependency", "current_qk"}),
    "random_qk": frozenset({"token_mixing", "mathematical_form"}),
    "fixed_qk": frozenset({"token_mixing", "mathematical_form"}),
    "static_qk": frozenset({"token_mixing", "mathematical_form", "sequence_dependency"}),
}
"""What every variant keeps of standard attention (DEC-01)."""


@register("mlp", "attention's parameters as a SwiGLU: tokens do not mix", neurons=True)
class TokenMLP(Part):
    """FC_Dn(SiLU(FC_Gt(h)) * FC_Up(h)) with d x d maps in place of W^Q, W^K and W^V, and W^O after it (DEC-03).

    Tokens do not mix, so there is nothing that a rotary embedding could tell apart. Groups of heads have no meaning
    here: the maps stay d x d whatever `num_kv_heads` is.
    """

    label = "mlp"
    weighted_sums = (WeightedSum("hidden units", "x . k", "all", "SiLU(x . k) (x . u)", "rows of V, then W^O"),)

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.d_model
        self.gate = Projection(width, width, axes=("storage", "heads"), rngs=rngs)
        self.up = Projection(width, width, axes=("storage", "heads"), rngs=rngs)
        self.down = Projection(width, width, axes=("heads", "storage"), rngs=rngs)
        self.output = Projection(width, width, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config))

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Four d x d maps: three hidden vectors with what SiLU keeps, and the input of W^O."""
        return at.per_token(8 * at.width**2, 7 * at.size * at.width)

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        down = self.down(jax.nn.silu(self.gate(h)) * self.up(h))
        return self.output(context.shards.scatter_sum(down, TENSOR, dimension=2)), {}
