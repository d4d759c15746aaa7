"""From logits to the next token: greedy, temperature, top-k, top-p.

Shapes: b rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from aamoe_jax.config import ConfigError

NO_TOKEN = -1
"""Drawn where logits are no numbers: a cache overflowed, or training diverged."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature first, then the k best, then of these the most probable p."""

    temperature: float = 1.0
    """0 takes the most probable token, ties the lower id."""
    top_k: int | None = None
    """Only the k most probable tokens, and those as probable as the k-th. None: all."""
    top_p: float = 1.0
    """Only the fewest most probable tokens that together have this probability, and those as probable as the last of
    them. 1: all."""
    vocab_size: int | None = None
    """Only ids below it: a model may have more rows than its tokenizer has tokens. None: all."""

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature = {self.temperature}: must be at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k = {self.top_k}: must be at least 1, or None for all tokens")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p}: must be above 0 and at most 1")


def draw(logits: Float[Array, "b V"], keys: Key[Array, "b"], sampling: Sampling) -> Int[Array, "b"]:
    """One token per row, each with a key of its own; `NO_TOKEN` where logits are no numbers."""
    spoiled = jnp.isnan(logits).any(-1)
    if sampling.vocab_size is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < sampling.vocab_size, logits, -jnp.inf)
    if sampling.temperature == 0:
        return jnp.where(spoiled, NO_TOKEN, jnp.argmax(logits, axis=-1).astype(jnp.int32))
    # The best at 0: no temperature, however small, then makes an infinity of it.
    logits = truncate((logits - logits.max(-1, keepdims=True)) / max(sampling.temperature, 1e-30), sampling)
    return jnp.where(spoiled, NO_TOKEN, jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32))


def truncate(logits: Float[Array, "b V"], sampling: Sampling) -> Float[Array, "b V"]:
    """-inf for the tokens that top-k and top-p leave out."""
    if sampling.top_k is None and sampling.top_p == 1.0:
        return logits
    ordered = jnp.sort(logits, axis=-1, descending=True)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = ordered[:, sampling.top_k - 1 : sampling.top_k]
        logits, ordered = (jnp.where(x >= least, x, -jnp.inf) for x in (logits, ordered))
    if sampling.top_p < 1.0:
        probability = jax.nn.softmax(ordered, axis=-1)
        # A token stays while those before it have not reached p yet: the most probable one always does.
        kept = jnp.cumsum(probability, axis=-1) - probability < sampling.top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits
