"""Does the past see the future? A probe that knows nothing of the model: when all tokens from a cut on are replaced, no
logit before the cut may move.

The same cut is made in every row of the batch, so that what leaks from one row to another shows too. Only tokens are
replaced: documents and padding stay where they are.

Shapes: b rows, L tokens per row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from aamoe_jax.sharding import on_host

Logits = Callable[[Int[np.ndarray, "b L"]], Float[Array, "b L V"]]


@dataclasses.dataclass(frozen=True)
class Causality:
    """What the probe saw at every cut."""

    cuts: tuple[int, ...]
    """Tokens from this position on were replaced."""
    before: tuple[float, ...]
    """Largest absolute change of a logit before the cut: 0 if the past is blind to the future."""
    after: tuple[float, ...]
    """The same from the cut on: were it 0, the probe would have tried nothing."""

    @property
    def largest(self) -> float:
        """The largest change before any cut; NaN where a logit was no number."""
        return float(np.max(self.before))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {"largest": self.largest} | {name: list(values) for name, values in dataclasses.asdict(self).items()}


def default_cuts(length: int, chunk_size: int) -> tuple[int, ...]:
    """After the first token, at a chunk boundary near the middle, inside the chunk behind it, before the last token.

    Raises:
      ValueError: a row of one token cannot be cut.
    """
    if length < 2:
        raise ValueError(f"length = {length}: a row must have at least 2 tokens to be cut")
    boundary = max(1, length // 2 // chunk_size) * chunk_size
    cuts = {1, boundary, boundary + max(1, chunk_size // 2), length - 1}
    return tuple(sorted(cut for cut in cuts if cut < length))


def other_tokens(tokens: Int[np.ndarray, "b L"], vocab_size: int, *, seed: int = 0) -> Int[np.ndarray, "b L"]:
    """Tokens of the vocabulary of which none is the one in its place."""
    shift = np.random.default_rng(seed).integers(1, vocab_size, tokens.shape)
    return ((tokens + shift) % vocab_size).astype(tokens.dtype)


def probe(
    logits_of: Logits, tokens: Int[np.ndarray, "b L"], cuts: Sequence[int], *, vocab_size: int, seed: int = 0
) -> Causality:
    """Runs the model once on the tokens, and once for every cut.

    Args:
      logits_of: the model; deterministic, and best compiled.
      cuts: positions from 1 to L - 1.
      vocab_size: replacements are drawn from the tokens below it; at least 2.

    Raises:
      ValueError: a cut that leaves nothing before or after it.
    """
    length = tokens.shape[1]
    if not cuts or not all(0 < cut < length for cut in cuts):
        raise ValueError(f"cuts = {tuple(cuts)}: must be positions from 1 to {length - 1}")
    reference, other = logits_of(tokens), other_tokens(tokens, vocab_size, seed=seed)
    before, after = [], []
    for cut in cuts:
        changed = np.where(np.arange(length) < cut, tokens, other)
        change = on_host(_largest_change(logits_of(changed), reference))
        before.append(float(change[:cut].max()))
        after.append(float(change[cut:].max()))
    return Causality(tuple(cuts), tuple(before), tuple(after))


@jax.jit
def _largest_change(left: Float[Array, "b L V"], right: Float[Array, "b L V"]) -> Float[Array, "L"]:
    change = jnp.abs(left - right)
    # XLA's maximum on a CPU passes over NaN, and would call a broken model causal.
    return jnp.where(jnp.isnan(change).any(axis=(0, 2)), jnp.nan, change.max(axis=(0, 2)))
