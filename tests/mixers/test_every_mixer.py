"""Every mixer against its definition in NumPy, and its gradients against differences of it.

That no mixer sees the future is tested in tests/evaluation/test_causality.py, that it decodes as it was trained in
tests/generation/test_decoder.py, and on meshes in tests/sharding/test_meshes.py: each for all mixers by name.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import AAMoEConfig, BudgetConfig, ModelConfig
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.clustered import ClusteredAttentionConfig
from aamoe_jax.mixers.depth import MixtureOfDepthsConfig
from aamoe_jax.mixers.experts import MoEConfig
from aamoe_jax.mixers.filtered import FilteredAttentionConfig
from aamoe_jax.mixers.sparse_attention import SparseAttentionConfig
from aamoe_jax.registry import MIXERS
from tests.mixers import (
    oracle_aamoe,
    oracle_attention,
    oracle_deconstructed,
    oracle_depth,
    oracle_dynamic,
    oracle_experts,
)
from tests.mixers.rows import two_rows

LENGTH = 11
ROWS = two_rows(LENGTH)
SELECTIONS = SparseAttentionConfig(window=3, stride=4, sinks=2), ClusteredAttentionConfig(clusters=5, clusters_kept=2)
"""They leave something out of so few tokens."""
MOE = MoEConfig(num_experts=3, expert_width=5, capacity_factor=1.0, capacity_tokens=4)
"""Experts so few that they overflow."""
DEPTH = MixtureOfDepthsConfig(capacity=0.4)
"""So small that it refuses some, and large enough that several go through."""
AAMOE = AAMoEConfig(
    chunk_size=3,
    num_experts=3,
    router="pooled",
    pooled_keys=3,
    key_convolution=True,
    null_slot="learned",
    expert_gate=True,
    max_resources=5,
    budget=BudgetConfig(beta=3.5, slack=2, expert_price=1.2, load_price=0.3),
)
"""Documents of the rows start where its chunks do; its cap, K_max and prices take something."""
OWN = (*SELECTIONS, FilteredAttentionConfig(threshold=0.88), MOE, DEPTH)
CONFIG = ModelConfig(d_model=16, num_heads=4, num_layers=2, d_ff=24, aamoe=AAMOE, own=OWN)
GROUPED = ModelConfig(
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    num_layers=2,
    d_ff=24,
    qk_norm="none",
    aamoe=AAMoEConfig(3, 3, local="routed", signal="separate", budget=BudgetConfig(beta=4.0, expert_share=0.4)),
    own=(
        *SELECTIONS,
        DEPTH,
        FilteredAttentionConfig(filter="message_norm", threshold=1.0),
        dataclasses.replace(MOE, coefficients="softmax_then_topk", router="attention", router_input="causal_conv"),
    ),
)
ORACLES = (
    oracle_aamoe.ORACLES
    | oracle_attention.ORACLES
    | oracle_depth.ORACLES
    | oracle_dynamic.ORACLES
    | oracle_deconstructed.ORACLES
    | oracle_experts.ORACLES
)


@functools.cache
def case(name: str, config: ModelConfig):
    """A mixer with random parameters, and a random input: (apply, parameters, h)."""
    mixer = build_mixer(name, config, rngs=nnx.Rngs(3))
    graphdef, state = nnx.split(mixer)
    noise = jax.random.normal(jax.random.key(5), (2, LENGTH, config.d_model))
    params = nnx.to_pure_dict(state)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    # Scales of norms start at 1, gates at 0: moved, so that no gradient is 0 by where it starts.
    leaves = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    rows = ROWS.padded(config.aamoe.chunk_size if name == "aamoe" else 1)
    context, extra = rows.context(config), ((0, 0), (0, rows.positions.shape[1] - LENGTH), (0, 0))

    def apply(params, h):
        return nnx.merge(graphdef, nnx.State(params))(jnp.pad(h, extra), context)[0][:, :LENGTH]

    return apply, jax.tree.unflatten(structure, leaves), noise


def test_every_mixer_has_a_definition():
    # Another test of this process may have imported a mixer from outside.
    shipped = {name for name, entry in MIXERS.items() if entry.cls.__module__.startswith("aamoe_jax.")}
    assert set(ORACLES) == shipped


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("config", [CONFIG, GROUPED], ids=["plain", "grouped"])
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_it_is_its_definition(name, config):
    """Attention and All-Attention (AA-06, UNI-02), static selections (UNI-08), and all others."""
    apply, params, h = case(name, config)
    wanted = ORACLES[name](float64(params), float64(h), ROWS, config)
    np.testing.assert_allclose(jax.jit(apply)(params, h), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(ORACLES))
def test_its_gradients_are_differences_of_its_definition(name):
    """Along a random direction of all parameters and the input at once, and along each parameter alone."""
    apply, params, h = case(name, CONFIG)
    at = float64((params, h))
    oracle = lambda params, h: (ORACLES[name](params, h, ROWS, CONFIG) ** 2).sum()  # noqa: E731
    found = jax.jit(jax.grad(lambda params, h: (apply(params, h) ** 2).sum(), argnums=(0, 1)))(params, h)
    leaves, structure = jax.tree.flatten(at)
    random = np.random.default_rng(0)
    directions = [random.normal(size=leaf.shape) for leaf in leaves]
    for chosen in [range(len(leaves)), *([index] for index in range(len(leaves)))]:
        step = [1e-5 * d if index in chosen else 0 * d for index, d in enumerate(directions)]
        ends = (jax.tree.unflatten(structure, [x + s * y for x, y in zip(leaves, step, strict=True)]) for s in (1, -1))
        higher, lower = (oracle(*end) for end in ends)
        slope = sum((g * d).sum() for g, d in zip(float64(jax.tree.leaves(found)), step, strict=True)) / 1e-5
        assert slope == pytest.approx((higher - lower) / 2e-5, rel=1e-4, abs=1e-4), chosen
