"""Sampling without a cache: every token runs the whole causal forward again.

Slow and plainly right: the definition that a cached decoder has to equal.

Shapes: L tokens of context, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from aamoe_jax.config import ConfigError
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import merge


def sample(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    prompt: Int[np.ndarray, "p"],
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
    budget: BudgetMode,
    stop_id: int | None = None,
) -> Int[np.ndarray, "n"]:
    """Tokens that follow the prompt, `stop_id` (included) ending them early.

    Args:
      temperature: 0 picks the most probable token.

    Raises:
      ConfigError: for an empty prompt or a negative temperature.
    """
    if len(prompt) == 0:
        raise ConfigError("prompt = '': give at least one token to continue")
    if temperature < 0:
        raise ConfigError(f"temperature = {temperature}: must be at least 0")
    step = jax.jit(functools.partial(_next_token, graphdef, budget=budget))
    tokens = jnp.zeros(len(prompt) + new_tokens, jnp.int32).at[: len(prompt)].set(prompt)
    keys = jax.random.split(jax.random.key(seed), new_tokens)
    length = len(prompt)
    for key in keys:
        tokens = step(params, tokens, length, temperature, key)
        length += 1
        if stop_id is not None and int(tokens[length - 1]) == stop_id:
            break
    return np.asarray(tokens[len(prompt) : length])


def _next_token(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    tokens: Int[Array, "L"],
    length: Int[Array, ""] | int,
    temperature: Float[Array, ""] | float,
    key: Key[Array, ""],
    *,
    budget: BudgetMode,
) -> Int[Array, "L"]:
    """The tokens with one more at `length`. What stands past it is padding, which no token sees."""
    segment_ids = (jnp.arange(tokens.shape[0]) < length).astype(jnp.int32)[None]
    logits, _ = merge(graphdef, params)(tokens[None], segment_ids, budget=budget)
    logits = logits[0, length - 1]
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return tokens.at[length].set(jnp.where(temperature > 0, drawn, jnp.argmax(logits)).astype(jnp.int32))
