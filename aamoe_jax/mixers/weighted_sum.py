"""y = sum_j f_j(x) g_j(x): what attention, experts and all their kin have in common (UNI-01, UNI-06, UNI-07).

Candidates are what a token may draw from; scores compare it with them; selection keeps some of these; coefficients f
are made of the scores of what was kept; values g are what is summed. Every mixer says in its `weighted_sums` what its
five are.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class WeightedSum(NamedTuple):
    """A part of a mixer as such a sum, in words: a row of the table of mixers."""

    candidates: str
    scores: str
    selection: str
    coefficients: str
    values: str


def head_scores(query: Float[Array, "b q H k"], key: Float[Array, "b n G k"]) -> Float[Array, "b H q n"]:
    """q . k / sqrt(k) in float32; groups of H / G heads have their keys in common."""
    rows, tokens, heads, size = query.shape
    grouped = query.reshape(rows, tokens, key.shape[2], -1, size)
    scores = jnp.einsum("bigrk,bjgk->bgrij", grouped, key, preferred_element_type=jnp.float32)
    return size**-0.5 * scores.reshape(rows, heads, tokens, -1)


def head_mix(weights: Float[Array, "b H q n"], value: Float[Array, "b n G k"]) -> Float[Array, "b q H k"]:
    """sum_j f_j g_j of every head, in the type of the values; groups of H / G heads have their values in common."""
    rows, heads, tokens, count = weights.shape
    grouped = weights.astype(value.dtype).reshape(rows, value.shape[2], -1, tokens, count)
    return jnp.einsum("bgrij,bjgk->bigrk", grouped, value).reshape(rows, tokens, heads, -1)


def largest_logit(scores: Float[Array, "*#b"], seen: Bool[Array, "*#b"]) -> Float[Array, ""]:
    """The largest size of a score that enters a softmax (DEC-19)."""
    return jax.lax.stop_gradient(jnp.max(jnp.where(seen, jnp.abs(scores), 0)))


def softmax_selected(scores: Float[Array, "*#b n"], chosen: Bool[Array, "*#b n"]) -> Float[Array, "*b n"]:
    """Coefficients that add up to 1 over what was chosen, in float32; all 0 where nothing was (UNI-03, eq 5)."""
    scores = jnp.where(chosen, scores.astype(jnp.float32), -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1)


def root_normalized(activations: Float[Array, "*b n"], chosen: Bool[Array, "*#b n"]) -> Float[Array, "*b n"]:
    """Coefficients of what was chosen, over the root of its number: a sum of so many independent terms keeps its size
    (PM-13). All 0 where nothing was chosen."""
    count = jnp.maximum(chosen.sum(-1, keepdims=True), 1)
    return jnp.where(chosen, activations, 0) * jax.lax.rsqrt(count.astype(jnp.float32))


def top_selected(scores: Float[Array, "*b n"], k: int) -> Bool[Array, "*b n"]:
    """The k highest scores; ties go to the lower index."""
    _, index = jax.lax.top_k(scores, k)
    return jax.nn.one_hot(index, scores.shape[-1], dtype=bool).any(-2)
