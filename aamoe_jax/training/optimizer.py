"""AdamW with clipping, warm-up and a schedule: which parameters decay, how the learning rate moves."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from aamoe_jax.config import OptimizerConfig

PERSISTENT_ROWS = ("expert_keys", "expert_values", "expert_embeddings", "memory_keys", "memory_values", "centroids")
"""Keys and values that are parameters themselves (decision 29; All-Attention's memory is the same thing undivided),
and centroids, which are means of keys."""
STACKED = "periods"
"""The subtree whose parameters have a leading axis over the periods of the stack."""
BESIDE = ("predictor", "centroids")
"""Parameters that learn by losses of their own, beside the model: budget predictors, and centroids of keys."""


def learning_rate(config: OptimizerConfig, steps: int, update: Int[Array, ""] | int) -> Float[Array, ""]:
    """The learning rate of an update, counted from 0.

    Warm-up is linear and reaches the peak at update number `warmup_steps`; the last update has the final fraction.
    """
    step = jnp.asarray(update, jnp.float32) + 1
    if config.schedule == "cosine":
        start = min(config.warmup_steps, steps)
    else:
        start = max(config.warmup_steps, steps - round(config.decay_fraction * steps))
    progress = jnp.clip((step - start) / max(steps - start, 1), 0, 1)
    decayed = 1 - progress if config.schedule == "wsd" else 0.5 * (1 + jnp.cos(jnp.pi * progress))
    fraction = config.final_fraction + (1 - config.final_fraction) * decayed
    return config.learning_rate * jnp.minimum(step / max(config.warmup_steps, 1), 1) * fraction


def decay_mask(params: Any) -> Any:
    """True for what weight decay shrinks: matrices and the embedding table, not vectors and not persistent rows."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim - (path[0].key == STACKED) >= 2 and path[-1].key not in PERSISTENT_ROWS, params
    )


def beside_mask(params: Any, names: Sequence[str] = BESIDE) -> Any:
    """True for the parameters that learn beside the model and not with it."""
    return jax.tree_util.tree_map_with_path(lambda path, _: any(part.key in names for part in path), params)


def gradient_norm(gradients: Any) -> Float[Array, ""]:
    """Global norm of the model's gradients, before clipping, without what learns beside it."""
    leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(beside_mask(gradients)), strict=True)
    return optax.tree.norm([gradient for gradient, beside in leaves if not beside])


def clip_each(most: float) -> optax.GradientTransformation:
    """Clips the gradients of each of BESIDE to a norm of `most`."""

    def clip(gradients: Any, _: Any) -> Any:
        for name in BESIDE:
            mask = beside_mask(gradients, (name,))
            norm = optax.tree.norm(jax.tree.map(lambda x, named: x if named else None, gradients, mask))
            scale = jnp.where(norm < most, 1.0, most / norm)
            gradients = jax.tree.map(lambda x, named, scale=scale: x * scale if named else x, gradients, mask)
        return gradients

    return optax.stateless(clip)


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW over a run of `steps` updates."""
    clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(
        # Clipped apart: under one norm the losses of what learns beside the model would change its steps.
        optax.masked(clip, lambda params: jax.tree.map(operator.not_, beside_mask(params))),
        optax.masked(clip_each(config.clip_norm), beside_mask),
        optax.adamw(
            lambda update: learning_rate(config, steps, update),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
