"""Attention, All-Attention, feed-forward layers and mixtures of experts are one sum over other candidates.

Each mixer against its definition by `weighted_sum`, and what the definitions have in common.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import apply_rotary, merge_heads, split_heads
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.experts import MoEConfig
from aamoe_jax.mixers.weighted_sum import (
    all_attention,
    attention,
    everything,
    feed_forward,
    mixture,
    softmax_selected,
    weighted_sum,
)

LENGTH, ROWS = 8, 2
CONFIG = ModelConfig(d_model=16, num_heads=2, num_layers=1, d_ff=24, own=(MoEConfig(num_experts=4, top_k=2),))
CONTEXT = Context.of_rows(CONFIG, ROWS, LENGTH)
H = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 16))


def of_tokens_and_heads(definition) -> jax.Array:
    """A definition, which gets row, token and head, over all of them: [b, L, H k]."""
    heads = range(CONFIG.num_heads)
    rows = [[jnp.stack([definition(b, i, n) for n in heads]) for i in range(LENGTH)] for b in range(ROWS)]
    return merge_heads(jnp.array(rows))


def test_uni_01_06_07_attention_sums_over_tokens_that_came_before():
    part = build_mixer("attention", CONFIG, rngs=nnx.Rngs(1)).parts["attention"]
    query, key, value = part.qkv(H)
    query, key = (apply_rotary(x, CONTEXT.rotary(CONFIG).heads) for x in (query, key))
    found = of_tokens_and_heads(lambda b, i, n: attention(query[b, i, n], key[b, : i + 1, n], value[b, : i + 1, n]))
    np.testing.assert_allclose(part(H, CONTEXT)[0], part.output(found), atol=2e-6)


def test_uni_01_06_07_all_attention_has_a_memory_among_its_candidates():
    part = build_mixer("all_attention", CONFIG, rngs=nnx.Rngs(1)).parts["attention"]
    query, key, value = part.qkv(H)
    rotated, key = (apply_rotary(x, CONTEXT.rotary(CONFIG).heads) for x in (query, key))
    memory_key, memory_value = (split_heads(x[...], CONFIG.head_dim) for x in (part.memory_keys, part.memory_values))
    memory = part.qkv.norm_key(memory_key), memory_value

    def one(b: int, i: int, n: int) -> jax.Array:
        both = jnp.stack([rotated[b, i, n], query[b, i, n]])
        return all_attention(both, key[b, : i + 1, n], value[b, : i + 1, n], *(x[:, n] for x in memory))

    np.testing.assert_allclose(part(H, CONTEXT)[0], part.output(of_tokens_and_heads(one)), atol=2e-6)


def test_uni_01_06_07_a_feed_forward_layer_sums_over_hidden_units():
    part = build_mixer("feed_forward", CONFIG, rngs=nnx.Rngs(1)).parts["feed_forward"]
    key, value = part.key.kernel[...].T, part.value.kernel[...]
    found = jax.vmap(jax.vmap(lambda x: feed_forward(x, key, value)))(H)
    np.testing.assert_allclose(part(H, CONTEXT)[0], found, atol=2e-6)


def test_uni_01_06_07_a_mixture_sums_over_the_best_experts():
    part = build_mixer("moe", CONFIG, rngs=nnx.Rngs(1)).parts["experts"]
    router = part.router(jnp.eye(16)[None], CONTEXT)[0]  # scores are linear in x
    found = jax.vmap(jax.vmap(lambda x: mixture(x, router, part.keys[...], part.values[...], 2)))(H)
    np.testing.assert_allclose(part(H, CONTEXT)[0], found, atol=2e-6)


def test_uni_07_of_the_union_of_two_sets_it_is_the_mean_by_the_mass_of_each():
    """One softmax over tokens and memory is attention to each, weighed: what lets devices share a row's keys."""
    scores, values = jax.random.normal(jax.random.key(1), (7,)), jax.random.normal(jax.random.key(2), (7, 3))

    def of(part: slice) -> jax.Array:
        chosen = {"selection": everything, "coefficients": softmax_selected}
        rows = scores[part], values[part]
        return weighted_sum(rows, scores=lambda x: x[0], values=lambda x: x[1], **chosen)

    mass = jnp.exp(jax.nn.logsumexp(scores[:3]) - jax.nn.logsumexp(scores))
    np.testing.assert_allclose(of(slice(7)), mass * of(slice(3)) + (1 - mass) * of(slice(3, 7)), atol=1e-6)


@pytest.mark.parametrize("tokens", [0, 5])
def test_uni_07_all_attention_without_memory_or_without_tokens_is_attention_to_the_other(tokens):
    query, key, value = (jax.random.normal(jax.random.key(n), (5, 4)) for n in range(3))
    both = jnp.stack([query[0], query[0]])
    found = all_attention(both, key[:tokens], value[:tokens], key[tokens:], value[tokens:])
    np.testing.assert_allclose(found, attention(query[0], key, value), atol=1e-6)


def test_uni_06_what_is_not_selected_has_no_share():
    """f = 0 for it: a mixture of the k best is the mixture of these alone."""
    x, router = jax.random.normal(jax.random.key(3), (6,)), jax.random.normal(jax.random.key(4), (6, 5))
    key, value = jax.random.normal(jax.random.key(5), (5, 6, 4)), jax.random.normal(jax.random.key(6), (5, 4, 6))
    best = jnp.argsort(-(x @ router))[:2]
    alone = mixture(x, router[:, best], key[best], value[best], 2)
    np.testing.assert_allclose(mixture(x, router, key, value, 2), alone, atol=1e-6)
