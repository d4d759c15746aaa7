"""Attention and mixtures of experts are one sum: other candidates, another selection, the same functions."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import apply_rotary, merge_heads
from aamoe_jax.mixers.base import Context, causal_mask
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.experts import MoEConfig
from aamoe_jax.mixers.weighted_sum import head_scores, softmax_selected, top_selected

LENGTH = 8
CONFIG = ModelConfig(d_model=16, num_heads=2, num_layers=1, d_ff=24, own=(MoEConfig(num_experts=4, top_k=2),))
CONTEXT = Context.of_rows(CONFIG, 2, LENGTH)
H = jax.random.normal(jax.random.key(0), (2, LENGTH, 16))


def test_uni_01_06_07_attention_sums_over_tokens_that_came_before():
    part = build_mixer("attention", CONFIG, rngs=nnx.Rngs(1)).parts["attention"]
    query, key, value = part.qkv(H)
    rotary = CONTEXT.rotary(CONFIG).heads
    candidates, scores = value, head_scores(apply_rotary(query, rotary), apply_rotary(key, rotary))
    coefficients = softmax_selected(scores, causal_mask(CONTEXT.segment_ids)[:, None])
    heads = (coefficients @ candidates.swapaxes(1, 2)).swapaxes(1, 2)
    np.testing.assert_allclose(part(H, CONTEXT)[0], part.output(merge_heads(heads)), atol=2e-6)


def test_uni_01_06_07_a_mixture_sums_over_the_best_experts():
    part = build_mixer("moe", CONFIG, rngs=nnx.Rngs(1)).parts["experts"]
    candidates = jnp.einsum(
        "blew,ewd->bled", jax.nn.relu(jnp.einsum("bld,edw->blew", H, part.keys[...])), part.values[...]
    )
    scores = part.router(H, CONTEXT)
    coefficients = softmax_selected(scores, top_selected(scores, 2))
    found = (coefficients[..., None, :] @ candidates)[..., 0, :]
    np.testing.assert_allclose(part(H, CONTEXT)[0], found, atol=2e-6)
