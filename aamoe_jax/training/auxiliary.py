"""What layers add to the objective beside the loss of the next token, and with which weight.

A layer returns such a loss as a statistic: a sum over the real tokens of its rows, so that those of devices and
micro-batches add up. The objective takes their mean over tokens, times a weight for every layer.

Shapes: n layers that have the loss.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Statistics
from aamoe_jax.mixers.experts import MoEConfig
from aamoe_jax.mixers.filtered import FilteredAttentionConfig
from aamoe_jax.registry import MIXERS

LOSSES = ("predictor_loss", "balance_loss", "sparsity_loss", "filter_loss", "centroid_loss")
"""The statistics that are such losses."""
PREDICTOR_WEIGHT = 0.1
"""Of a loss whose gradient stops at the predictor's input, is clipped by itself, and meets Adam: it never changes the
model."""
CENTROID_WEIGHT = 0.1
"""The same of a loss that reaches centroids alone, but for the clusters that they make."""
FIRST_WEIGHT = 1e-8
"""lambda_0: the sparsity loss begins without a say, and its weight grows for as long as it is needed (UNI-05)."""
FACTOR = 1.2
"""alpha: by which the weight of the sparsity loss changes every step."""

Weights = dict[str, Float[Array | np.ndarray, "..."] | float]


def loss_weights(config: ModelConfig) -> Weights:
    """The weights of LOSSES, which are means over the layers that have them. That of `sparsity_loss`, lambda of every
    layer of ReLU experts, is in the state."""
    layers = _layers_with("balance_loss", config)  # Switch adds the losses of all layers
    return {
        "predictor_loss": PREDICTOR_WEIGHT,
        "balance_loss": layers * config.of(MoEConfig).balance_weight,
        "filter_loss": _layers_with("filter_loss", config) * config.of(FilteredAttentionConfig).target_weight,
        "centroid_loss": CENTROID_WEIGHT,
    }


def auxiliary_loss(weights: Weights, statistics: Statistics) -> Float[Array, ""] | float:
    """The weighted sum of all losses that layers returned, not yet divided by the tokens."""
    return sum((jnp.mean(weights[name] * statistics[name]) for name in LOSSES if name in statistics), 0.0)


def first_sparsity_weights(config: ModelConfig) -> Float[Array, "n"]:
    """Before the first step."""
    return jnp.full(_layers_with("sparsity_loss", config), FIRST_WEIGHT, jnp.float32)


def adapted(weights: Float[Array, "n"], statistics: Statistics, config: ModelConfig) -> Float[Array, "n"]:
    """lambda alpha^sign((1 - k/E) - S): more where the share S of experts that a token does without is too small.

    This is ReMoE's rule, for every layer by itself (UNI-05).
    """
    moe = config.of(MoEConfig)
    pairs = moe.num_experts * jnp.maximum(statistics["moe_tokens"][0], 1)  # the tokens of all layers are the same
    sparsity = 1 - statistics["relu_pairs"] / pairs
    return weights * FACTOR ** jnp.sign(1 - moe.sparsity_target / moe.num_experts - sparsity)


def _layers_with(loss: str, config: ModelConfig) -> int:
    """Layers of the stack that return the loss."""
    return config.periods * sum(loss in MIXERS[name].cls.losses for _, name in config.mixers)
