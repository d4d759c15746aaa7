"""Which parameters decay and are clipped together, and the learning rate step by step."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from aamoe_jax.config import OptimizerConfig
from aamoe_jax.model import LanguageModel, split
from aamoe_jax.training.optimizer import build_optimizer, decay_mask, gradient_norm, learning_rate
from tests.training.helpers import model_config


def rates(config: OptimizerConfig, steps: int) -> list[float]:
    return [float(learning_rate(config, steps, update)) for update in range(steps)]


def shapes(**values) -> dict:
    """The parameters of a model, as shapes."""
    config = model_config(**values)
    return split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))[1]


class TestLearningRate:
    def test_cosine(self):
        config = OptimizerConfig(learning_rate=2.0, schedule="cosine", warmup_steps=4, final_fraction=0.1)
        found = rates(config, 12)
        np.testing.assert_allclose(found[:4], [0.5, 1.0, 1.5, 2.0])  # the peak at update number warmup_steps
        np.testing.assert_allclose(found[7], 2.0 * (0.1 + 0.9 * 0.5), rtol=1e-6)  # half way
        np.testing.assert_allclose(found[-1], 0.2, rtol=1e-6)
        assert all(left > right for left, right in itertools.pairwise(found[3:]))

    def test_warm_up_stable_decay(self):
        config = OptimizerConfig(
            learning_rate=1.0, schedule="wsd", warmup_steps=2, decay_fraction=0.4, final_fraction=0.0
        )
        np.testing.assert_allclose(rates(config, 10), [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0], rtol=1e-6, atol=1e-7)

    def test_without_warm_up_and_without_decay(self):
        config = OptimizerConfig(learning_rate=1.0, schedule="wsd", warmup_steps=0, decay_fraction=0.0)
        np.testing.assert_allclose(rates(config, 3), 1.0)

    @pytest.mark.parametrize("schedule", ["cosine", "wsd"])
    def test_a_run_that_is_shorter_than_its_warm_up(self, schedule):
        config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=10)
        np.testing.assert_allclose(rates(config, 3), [0.1, 0.2, 0.3], rtol=1e-6)


class TestDecay:
    def decayed(self, params: dict) -> set[str]:
        leaves = jax.tree_util.tree_leaves_with_path(decay_mask(params))
        return {jax.tree_util.keystr(path[-2:], simple=True, separator="/") for path, decays in leaves if decays}

    def test_aamoe(self):
        assert self.decayed(shapes(normalizer="row", embedding="tied")) == {
            "embedding",
            "query/kernel",
            "key/kernel",
            "value/kernel",
            "output/kernel",
            "router/context_kernel",
            "predictor/hidden_kernel",
        }

    def test_baselines(self):
        found = self.decayed(shapes(pattern="all_attention")) | self.decayed(shapes(pattern="parallel"))
        assert "embedding" in found
        assert not [name for name in found if "memory" in name or "norm" in name]
        assert self.decayed(shapes(pattern="parallel", embedding="untied")) >= {"embedding", "readout"}

    def test_what_does_not_decay_stays_where_there_is_no_gradient(self):
        params = {"periods": {"expert_keys": jnp.ones((1, 2, 3, 4)), "kernel": jnp.ones((1, 3, 4))}}
        optimizer = build_optimizer(OptimizerConfig(weight_decay=0.5, warmup_steps=0), steps=10)
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        assert not updates["periods"]["expert_keys"].any()
        assert (updates["periods"]["kernel"] < 0).all()


class TestClipping:
    def test_the_predictor_is_clipped_apart(self):
        params = {"kernel": jnp.ones((2, 2)), "predictor": {"kernel": jnp.ones((2, 2))}}
        optimizer = build_optimizer(OptimizerConfig(clip_norm=1.0), steps=10)

        def update(predictor: float) -> dict:
            gradients = {"kernel": jnp.full((2, 2), 0.3), "predictor": {"kernel": jnp.full((2, 2), predictor)}}
            state = optimizer.init(params)
            for _ in range(2):
                updates, state = optimizer.update(gradients, state, params)
            return updates | {"norm": gradient_norm(gradients)}

        small, large = update(0.0), update(1e6)
        np.testing.assert_array_equal(small["kernel"], large["kernel"])
        assert float(large["norm"]) == pytest.approx(0.6)
        assert np.isfinite(optax.tree.norm(large))
