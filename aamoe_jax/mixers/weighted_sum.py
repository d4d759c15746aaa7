"""y = sum_j f_j(x) g_j(x): what attention, experts and all their kin have in common (UNI-01, UNI-06, UNI-07).

Candidates are what a token may draw from; scores compare it with them; selection keeps some of these; coefficients f
are made of the scores of what was kept; values g are what is summed. Every mixer says in its `weighted_sums` what its
five are, in words; `weighted_sum` is the form itself, for one token, and below it stand the layers that differ in
nothing else: attention, All-Attention, a feed-forward layer, a mixture of experts. They are definitions, which the
mixers are tested against (tests/mixers/test_weighted_sum.py); AA-MoE's (`aamoe/reference.py`) is written with it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


class WeightedSum(NamedTuple):
    """A part of a mixer as such a sum, in words: a row of the table of mixers."""

    candidates: str
    scores: str
    selection: str
    coefficients: str
    values: str


def weighted_sum(
    candidates: Any,
    *,
    scores: Callable[[Any], Any],
    selection: Callable[[Any], Any],
    coefficients: Callable[[Any, Any], Any],
    values: Callable[[Any], Any],
) -> Any:
    """y = sum_j f_j g_j, of shape [*H, v], over n candidates of one token, as JAX or NumPy arrays (UNI-01).

    Args:
      candidates: arrays of n rows each: what the token may draw from.
      scores: of candidates: [n, *H], in one head or in several.
      selection: of scores: bool, which candidates the token draws from.
      coefficients: f, of scores and selection: [n, *H], 0 for what was not selected.
      values: g, of candidates: [n, *H, v].
    """
    found = scores(candidates)
    return (coefficients(found, selection(found))[..., None] * values(candidates)).sum(0)


def everything(scores: Any) -> Any:
    """Selects all candidates: those with a score."""
    return scores > -np.inf


def attention(query: Float[Array, "k"], key: Float[Array, "n k"], value: Float[Array, "n v"]) -> Float[Array, "v"]:
    """One head of a token that sees n tokens, itself among them (UNI-02)."""
    return weighted_sum(
        (key, value),
        scores=lambda tokens: tokens[0] @ query * len(query) ** -0.5,
        selection=everything,
        coefficients=softmax_selected,
        values=lambda tokens: tokens[1],
    )


def all_attention(
    query: Float[Array, "2 k"],
    key: Float[Array, "n k"],
    value: Float[Array, "n v"],
    memory_key: Float[Array, "e k"],
    memory_value: Float[Array, "e v"],
) -> Float[Array, "v"]:
    """Attention whose candidates are tokens and the rows of a memory (UNI-07).

    Args:
      query: as it meets tokens, rotated, and as it meets the memory.
    """
    return weighted_sum(
        (jnp.concatenate([key, memory_key]), jnp.concatenate([value, memory_value])),
        scores=lambda rows: (
            jnp.concatenate([rows[0][: len(key)] @ query[0], rows[0][len(key) :] @ query[1]]) * query.shape[1] ** -0.5
        ),
        selection=everything,
        coefficients=softmax_selected,
        values=lambda rows: rows[1],
    )


def feed_forward(x: Float[Array, "d"], key: Float[Array, "n d"], value: Float[Array, "n d"]) -> Float[Array, "d"]:
    """A feed-forward layer with ReLU: candidates are hidden units, of which those that x activates are selected."""
    return weighted_sum(
        (key, value),
        scores=lambda units: units[0] @ x,
        selection=lambda scores: scores > 0,
        coefficients=lambda scores, chosen: jnp.where(chosen, scores, 0),
        values=lambda units: units[1],
    )


def mixture(
    x: Float[Array, "d"], router: Float[Array, "d E"], key: Float[Array, "E d w"], value: Float[Array, "E w d"], k: int
) -> Float[Array, "d"]:
    """A mixture of experts: the k best, by a softmax over their scores (UNI-03)."""
    return weighted_sum(
        (router.T, key, value),
        scores=lambda experts: experts[0] @ x,
        selection=lambda scores: top_selected(scores, k),
        coefficients=softmax_selected,
        values=lambda experts: jax.vmap(lambda K, V: feed_forward(x, K.T, V))(*experts[1:]),
    )


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
