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
NASTY = b"</script><b>bold</b> <!-- &amp; {{data}} \xc3\xa9\xe2\x82\xac \xff\x07\t\r\n"
"""What would break a careless page: markup, placeholders, characters of several bytes, bytes of no character."""
PASSAGE = NASTY + TEXT[:70] + TEXT[8:38]
"""Both, and a repetition. Tests share it, since every other length is compiled anew."""


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
def inspected(budget_scale: float = 1.0) -> Inspection:
    """The passage under a small model, with tokens that are given nothing."""
    config = model_config()
    return inspect_passage(config, params_of(config), tokens_of(PASSAGE), budget_scale=budget_scale)
