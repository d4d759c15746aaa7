"""What everyone knows, held to other people's code: attention of Flax (AA-03, AA-04), eq 1 as a sum (AA-02, AA-05)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from aamoe_jax.config import AAMoEConfig, ModelConfig
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import build_mixer

LENGTH, WIDTH, HEADS = 9, 16, 4
CONFIG = ModelConfig(
    d_model=WIDTH, num_heads=HEADS, num_layers=1, qk_norm="none", aamoe=AAMoEConfig(chunk_size=8, num_experts=3)
)
H = jax.random.normal(jax.random.key(0), (2, LENGTH, WIDTH))


def context(config=CONFIG):
    """At position 0 throughout: its rotary embedding changes nothing."""
    return dataclasses.replace(Context.of_rows(config, 2, LENGTH), positions=jnp.zeros((2, LENGTH), jnp.int32))


def test_aa_03_04_dec_02_attention_is_that_of_flax():
    attention = build_mixer("attention", CONFIG, rngs=nnx.Rngs(1)).parts["attention"]
    flax = linen.MultiHeadDotProductAttention(HEADS, use_bias=False)
    kernels = {name: getattr(attention.qkv, name).kernel[...] for name in ("query", "key", "value")}
    params = {name: {"kernel": kernel.reshape(WIDTH, HEADS, -1)} for name, kernel in kernels.items()}
    params["out"] = {"kernel": attention.output.kernel[...].reshape(HEADS, -1, WIDTH)}
    wanted = flax.apply({"params": params}, H, mask=linen.make_causal_mask(H[..., 0]))
    np.testing.assert_allclose(attention(H, context())[0], wanted, atol=2e-6)


def test_aa_02_feed_forward_is_two_matrices():
    part = build_mixer("feed_forward", CONFIG, rngs=nnx.Rngs(1)).parts["feed_forward"]
    wanted = np.maximum(H @ part.key.kernel[...], 0) @ part.value.kernel[...]
    np.testing.assert_allclose(part(H, context())[0], wanted, atol=1e-5)
    assert len(jax.tree.leaves(nnx.state(part))) == 2, "no bias"


def test_aa_05_the_parallel_layer_is_the_sum_of_both():
    layer = build_mixer("parallel", CONFIG, rngs=nnx.Rngs(1))
    around = Context.of_rows(CONFIG, 2, LENGTH)
    both = sum(part(H, around)[0] for part in layer.parts.values())
    np.testing.assert_allclose(layer(H, around)[0], both, atol=1e-6)
    assert list(layer.parts) == ["attention", "feed_forward"]


def test_aa_08_experts_are_blocks_of_m_rows():
    layer = build_mixer("aamoe", CONFIG, rngs=nnx.Rngs(1))
    for table in (layer.expert_keys, layer.expert_values):
        assert table[...].shape == (3, 8, WIDTH)
        assert table.axes[0] == "resources"
