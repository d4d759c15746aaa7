"""A small random model on real text."""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import numpy as np
from flax import nnx

from aamoe_jax.analysis.inspection import Inspection, inspect_passage
from aamoe_jax.config import ModelConfig
from aamoe_jax.data import ByteTokenizer
from aamoe_jax.model import LanguageModel, split
from tests.aamoe.helpers import model_config

TEXT = "\n".join(json.__doc__.strip().splitlines()).encode()
"""The documentation of a module of the standard library: real text, with examples of code."""


def tokens_of(text: bytes) -> np.ndarray:
    return ByteTokenizer().encode(text).astype(np.int32)


@functools.cache
def params_of(config: ModelConfig) -> dict[str, Any]:
    """Random parameters with unequal budgets: w_B starts at 0."""
    params = jax.jit(lambda key: split(LanguageModel(config, rngs=nnx.Rngs(key)))[1])(jax.random.key(0))

    def stir(path, leaf):
        return 2 * jax.random.normal(jax.random.key(1), leaf.shape) if path[-1].key == "importance" else leaf

    return jax.tree_util.tree_map_with_path(stir, params)


@functools.cache
def inspection_of(text: bytes, budget_scale: float = 1.0, **changes: Any) -> Inspection:
    config = model_config(**changes)
    return inspect_passage(config, params_of(config), tokens_of(text), budget_scale=budget_scale)
