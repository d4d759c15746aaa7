"""Losses that layers add: how they enter the objective, and how the weight of the sparsity loss finds its size."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from aamoe_jax.config import DataConfig, ModelConfig
from aamoe_jax.data.tokenizers import ByteTokenizer
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.experts import MoEConfig, weighed_by_load
from aamoe_jax.model import structure
from aamoe_jax.training.auxiliary import LOSSES, adapted, auxiliary_loss, first_sparsity_weights, loss_weights
from aamoe_jax.training.checkpoints import load_checkpoint
from aamoe_jax.training.loop import train
from aamoe_jax.training.optimizer import build_optimizer
from aamoe_jax.training.state import initial_state, place
from aamoe_jax.training.step import gradients_and_metrics, make_train_step, over_mesh
from tests.evaluation.helpers import random_params
from tests.training.helpers import SEQ_LEN, assert_same_bits, experiment, random_batch, replace, tiny_data, untimed

MOE = MoEConfig(num_experts=8, top_k=2, expert_width=8, capacity_tokens=16, capacity_factor=1.0)
DATA = DataConfig(seq_len=SEQ_LEN)


def model_of(pattern: str, **values) -> ModelConfig:
    fields = {"d_model": 16, "num_heads": 2, "num_layers": 1, "pattern": (pattern,), "own": (MOE,)}
    return ModelConfig(**fields | values)


def gradients_of(pattern: str, accumulate: int):
    """(gradients, metrics) of one batch."""
    config = dataclasses.replace(experiment(DATA), model=model_of(pattern))
    placement = place(config)
    compute = functools.partial(
        gradients_and_metrics,
        structure(config.model),
        weights={"balance_loss": 3.0, "sparsity_loss": 2.0},
        accumulate=accumulate,
        shards=placement.shards,
        byte_lengths=np.ones(config.model.vocab_size, np.int32),
    )
    divided = over_mesh(compute, placement, (placement.params, PartitionSpec()))
    return jax.jit(divided)(placement.put_params(random_params(config.model)), placement.put(random_batch()))


class TestObjective:
    def test_losses_of_micro_batches_add_up(self):
        (whole, sums), (parts, added) = (gradients_of("switch+relu_moe", accumulate) for accumulate in (1, 2))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), parts, whole)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), added, sums)
        assert sums["tokens"] == (random_batch()["segment_ids"] > 0).sum()
        assert sums["statistics"]["balance_loss"].shape == (1,)
        assert sums["statistics"]["sparsity_loss"].shape == (1,)

    def test_every_layer_counts_as_its_weight_says(self):
        statistics = {
            "predictor_loss": jnp.array([1.0, 3.0]),
            "sparsity_loss": jnp.array([1.0, 2.0, 3.0]),
            "other": 5.0,
        }
        weights = {"predictor_loss": 0.5, "balance_loss": 7.0, "sparsity_loss": jnp.array([1.0, 0.0, 2.0])}
        assert auxiliary_loss(weights, statistics) == pytest.approx(0.5 * 2.0 + 7.0 / 3)
        assert auxiliary_loss(weights, {}) == 0

    def test_balancing_losses_of_all_layers_are_added(self):
        config = model_of("moe+switch", num_layers=3)
        weights = loss_weights(config)
        assert {*weights, "sparsity_loss"} == set(LOSSES)
        assert auxiliary_loss(weights, {"balance_loss": jnp.ones(6)}) == pytest.approx(6 * 0.01)


class TestBalance:
    def test_uni_11_it_is_the_loss_of_switch(self):
        """E sum_l (share of the tokens whose best is l) (mean probability of l), over the tokens that are real."""
        config = model_of("switch")
        mixer = build_mixer("switch", config, rngs=nnx.Rngs(0))
        router = mixer.parts["experts"].router
        h = jax.random.normal(jax.random.key(0), (1, 40, 16))
        context = Context(jnp.ones((1, 40), jnp.int32).at[:, 30:].set(0), jnp.arange(40)[None], "prefix", 1.0)
        graphdef, params = nnx.split(mixer)
        about = jax.jit(lambda params: nnx.merge(graphdef, params)(h, context)[1])(params)
        p = np.asarray(jax.nn.softmax(router(h, context)[0, :30]), np.float64)
        share = np.bincount(p.argmax(-1), minlength=8) / 30
        assert about["balance_loss"] / 30 == pytest.approx(8 * share @ p.mean(0), rel=1e-5)

    def test_it_is_least_where_all_experts_are_used_alike(self):
        context = Context.of_rows(model_of("moe"), 1, 8)
        even = jnp.full((1, 8, 8), 1 / 8)
        chosen = jnp.eye(8, dtype=bool)[None]
        assert weighed_by_load(even, chosen, 1, context) / 8 == pytest.approx(1.0)
        two = chosen | jnp.roll(chosen, 1, axis=-1)
        assert weighed_by_load(even, two, 2, context) / 8 == pytest.approx(1.0)  # the same, whatever k is
        one = jnp.zeros((1, 8, 8)).at[..., 0].set(1.0)
        assert weighed_by_load(one, one > 0, 1, context) / 8 == pytest.approx(MOE.num_experts)


class TestUNI05:
    def test_uni_05_the_weight_follows_the_sign_of_what_is_missing(self):
        """1 - k/E = 0.75 of all experts are to be left out: 400 of 1600 pairs of 200 tokens are to remain."""
        config = model_of("relu_moe", num_layers=3)
        first = first_sparsity_weights(config)
        np.testing.assert_allclose(first, [1e-8] * 3)
        statistics = {"relu_pairs": jnp.array([401.0, 400.0, 399.0]), "moe_tokens": jnp.array([200.0] * 3)}
        np.testing.assert_allclose(adapted(first, statistics, config), [1.2e-8, 1e-8, 1e-8 / 1.2], rtol=1e-6)

    def test_uni_05_sparsity_reaches_its_target(self):
        """Within 2 %, from about half of all experts per token; the mean of the last steps, between which it swings."""
        steps = 450
        config = dataclasses.replace(experiment(DATA, steps=steps), model=model_of("relu_moe"))
        config = replace(config, "optimizer", learning_rate=1e-2)
        placement, optimizer = place(config), build_optimizer(config.optimizer, steps)
        state = initial_state(config.model, optimizer, 0, placement)
        lengths = ByteTokenizer().byte_lengths
        step = make_train_step(config, structure(config.model), optimizer, lengths, placement)
        step, sparsity = jax.jit(step, donate_argnums=0), []
        batches = [placement.put(random_batch(seed)) for seed in range(4)]
        for index in range(steps):
            state, metrics = step(state, batches[index % 4])
            sparsity.append(1 - float(metrics["statistics"]["relu_pairs"][0]) / 8 / float(metrics["tokens"]))
        assert sparsity[0] < 0.6
        assert np.mean(sparsity[-50:]) == pytest.approx(1 - 2 / 8, abs=0.02)

    def test_uni_05_a_resumed_run_goes_on_to_the_same_bits(self, tmp_path):
        config = experiment(tiny_data(tmp_path), model_of("relu_moe"), steps=4, eval_every=0, checkpoint_every=2)
        whole, resumed = tmp_path / "whole", tmp_path / "resumed"
        train(config, whole)
        shutil.copytree(whole, resumed)
        shutil.rmtree(resumed / "checkpoints" / "4")
        train(config, resumed)
        assert_same_bits(load_checkpoint(resumed).params, load_checkpoint(whole).params)
        weights = [load_checkpoint(run).metadata["sparsity_weight"] for run in (whole, resumed)]
        assert weights[0] == weights[1] == pytest.approx([1e-8 * 1.2**4], rel=1e-5)
        assert untimed(resumed) == untimed(whole)
        last = untimed(whole)[-1]
        assert last["layers"]["sparsity_weight"] == pytest.approx([1e-8 * 1.2**3], rel=1e-5)
        assert last["layers"]["moe_sparsity"] == [pytest.approx(1 - last["layers"]["moe_active"][0] / 8)]
        assert last["sparsity_loss"] > 0
        assert json.loads(json.dumps(last)) == last
