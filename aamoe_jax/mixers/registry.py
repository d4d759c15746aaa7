"""Mixers by name: what a stack's pattern may contain."""

from __future__ import annotations

from flax import nnx

from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.config import MixerName, ModelConfig
from aamoe_jax.mixers.all_attention import AllAttentionLayer
from aamoe_jax.mixers.parallel import ParallelLayer

MIXERS: dict[MixerName, type[nnx.Module]] = {
    "aamoe": AAMoELayer,
    "parallel": ParallelLayer,
    "all_attention": AllAttentionLayer,
}


def build_mixer(name: MixerName, config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """The mixer called `name`."""
    return MIXERS[name](config, rngs=rngs)
