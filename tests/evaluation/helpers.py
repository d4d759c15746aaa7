"""Models and rows that the tests of evaluation share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from aamoe_jax.config import ModelConfig
from aamoe_jax.model import LanguageModel, split


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Parameters drawn on the host, which takes no compilation.

    Unlike initial ones they leave nothing at 0: budgets and predictions differ from token to token.
    """
    shapes = jax.eval_shape(lambda: split(LanguageModel(config, rngs=nnx.Rngs(0)))[1])
    generator = np.random.default_rng(seed)
    rows = ("expert_keys", "expert_values", "expert_embeddings", "memory_keys", "memory_values")
    scales = dict.fromkeys((*rows, "importance"), 1.0) | {"output_kernel": 0.35}  # predictions near real budgets

    def draw(path, leaf) -> np.ndarray:
        scale = scales.get(path[-1].key, config.d_model**-0.5)
        return (scale * generator.normal(size=leaf.shape) + (path[-1].key == "scale")).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)
