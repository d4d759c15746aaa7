"""A gate of experts beside the attention (`AAMoEConfig.expert_gate`): the layer has none, and this is the comparison
(AA-24).

Shapes: b rows, L tokens here, E experts, d width, K slots.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.aamoe.allocation import Allocation
from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import HIGHEST
from aamoe_jax.shards import RESOURCE, Shards


class ExpertGate(nnx.Module):
    """(h_i . g_l) / sqrt(d), added to log P(i, l) of the experts that token i was given: it weighs them, and has no say
    in which they are. It starts at 0, where the layer is the one without."""

    def __init__(self, config: ModelConfig):
        shape = config.aamoe.num_experts, config.d_model
        self.kernel = nnx.Param(jnp.zeros(shape), axes=("resources", "storage_float32"))

    def __call__(self, h: Float[Array, "b L d"], given: Allocation, num_chunks: int, shards: Shards) -> Allocation:
        """The allocation, with the gate in its bias."""
        kernel = shards.gather(self.kernel[...], RESOURCE, 0)
        gates = h.shape[-1] ** -0.5 * jnp.matmul(h.astype(jnp.float32), kernel.T, precision=HIGHEST)
        expert = given.resource - num_chunks
        of_slots = jnp.take_along_axis(gates, jnp.clip(expert, 0, len(kernel) - 1), axis=-1)
        gated = (expert >= 0) & (jnp.arange(expert.shape[-1]) < given.count[..., None])
        return given._replace(log_prob=given.log_prob + jnp.where(gated, of_slots, 0.0))
