"""One step: exact sums over micro-batches, the loss by hand, and nothing that moves between host and device unasked."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from aamoe_jax.config import DataConfig
from aamoe_jax.data import ByteTokenizer
from aamoe_jax.model import merge, structure
from aamoe_jax.training.optimizer import build_optimizer, gradient_norm
from aamoe_jax.training.state import initial_state, place
from aamoe_jax.training.step import (
    gradients_and_metrics,
    is_logged,
    make_eval_step,
    make_train_step,
    micro_batches,
    over_mesh,
)
from pallas_kernels.block_sparse_attention.interface import SELDOM
from tests.evaluation.helpers import random_params
from tests.training.helpers import SEQ_LEN, assert_same_bits, experiment, model_config, random_batch

DATA = DataConfig(seq_len=SEQ_LEN, document_align=8)
BYTES = ByteTokenizer().byte_lengths


@functools.cache
def model_of(pattern: str, normalizer: str = "prefix"):
    config = model_config(pattern, normalizer, num_layers=1, kernel="reference")
    return config, structure(config), jax.tree.map(jnp.asarray, random_params(config))


@functools.cache
def dense_run(nonfinite: str = "stop"):
    """(placement, jitted step with donation, a copy of the first state whenever called)."""
    config = experiment(DATA, nonfinite=nonfinite)
    placement, optimizer = place(config), build_optimizer(config.optimizer, config.training.steps)
    _, graphdef, _ = model_of("parallel")
    first = initial_state(config.model, optimizer, 0, placement)
    step = jax.jit(make_train_step(config, graphdef, optimizer, BYTES, placement), donate_argnums=0)
    return placement, step, lambda: jax.tree.map(lambda leaf: leaf.copy(), first)


def updates_made(state) -> set[int]:
    """The optimizer's own counts."""
    return {int(count) for _, count in optax.tree.get_all_with_path(state.optimizer, "count")}


def on_device(batch: dict) -> dict:
    return jax.tree.map(jnp.asarray, batch)


@functools.cache
def gradients_of(pattern: str, normalizer: str, accumulate: int, weight: float):
    """(gradients, metrics) of one batch."""
    config, graphdef, params = model_of(pattern, normalizer)
    placement = place(dataclasses.replace(experiment(DATA), model=config))
    options = {"accumulate": accumulate, "weights": {"predictor_loss": weight}, "shards": placement.shards}
    compute = functools.partial(gradients_and_metrics, graphdef, byte_lengths=BYTES, **options)
    divided = over_mesh(compute, placement, (placement.params, PartitionSpec()))
    return jax.jit(divided)(placement.put_params(params), placement.put(random_batch()))


class TestMass:
    """How attention is divided: a statistic of logged steps."""

    def test_in_the_steps_that_ask_for_it_compiled_once(self):
        config, graphdef, params = model_of("aamoe")
        placement = place(dataclasses.replace(experiment(DATA), model=config))
        options = {"accumulate": 1, "shards": placement.shards, "byte_lengths": BYTES}
        compute = functools.partial(gradients_and_metrics, graphdef, **options)
        here = PartitionSpec()
        step = jax.jit(over_mesh(compute, placement, (placement.params, here), here, here))
        given = placement.put_params(params), placement.put(random_batch()), {}
        (gradients, with_mass), (same, without) = (step(*given, jnp.asarray(asked)) for asked in (True, False))
        assert step._cache_size() == 1
        jax.tree.map(np.testing.assert_array_equal, gradients, same)
        mass = {name: figure for name, figure in with_mass["statistics"].items() if name.startswith("mass_")}
        assert sum(float(figure.sum()) for figure in mass.values()) > 1
        assert all(not np.any(without["statistics"][name]) for name in mass)
        kept = with_mass["statistics"].keys() - mass.keys()
        for name in kept:
            np.testing.assert_array_equal(with_mass["statistics"][name], without["statistics"][name])

    def test_nothing_is_chosen_where_every_step_is_logged(self):
        model, graphdef, _ = model_of("aamoe")
        config = dataclasses.replace(experiment(DATA), model=model)
        placement, optimizer = place(config), build_optimizer(config.optimizer, config.training.steps)
        given = initial_state(model, optimizer, 0, placement), placement.put(random_batch())
        for log_every in (1, 2):
            training = dataclasses.replace(config.training, log_every=log_every)
            of_config = dataclasses.replace(config, training=training), graphdef, optimizer, BYTES, placement
            text = jax.jit(make_train_step(*of_config)).lower(*given).as_text(debug_info=True)
            assert (f"{SELDOM}/cond" in text) == (log_every > 1)

    def test_logged_are_the_first_step_every_so_many_and_the_last(self):
        training = dataclasses.replace(experiment(DATA).training, steps=11, log_every=4)
        assert [step for step in range(1, 12) if is_logged(step, training)] == [1, 4, 8, 11]
        traced = jax.jit(lambda step: is_logged(step, training))
        assert [step for step in range(1, 12) if traced(jnp.int32(step))] == [1, 4, 8, 11]


class TestAccumulation:
    @pytest.mark.parametrize(("pattern", "normalizer"), [("parallel", "prefix"), ("aamoe", "row")])
    def test_two_micro_batches_are_one_batch(self, pattern, normalizer):
        batch = on_device(random_batch())
        counts = micro_batches(batch, 2)["loss_mask"].sum((1, 2))
        assert counts[0] != counts[1]
        whole, sums = gradients_of(pattern, normalizer, 1, 0.3)
        parts, added = gradients_of(pattern, normalizer, 2, 0.3)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), parts, whole)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), added, sums)
        assert sums["count"] == batch["loss_mask"].sum()
        if normalizer == "row":
            predictor = jax.tree_util.tree_leaves_with_path(whole)
            assert any("predictor" in str(path) and np.any(leaf) for path, leaf in predictor)

    def test_micro_batches_take_every_nth_row(self):
        batch = {"tokens": jnp.repeat(jnp.arange(6, dtype=jnp.int32)[:, None], 2, axis=1)}
        assert micro_batches(batch, 3)["tokens"][:, :, 0].tolist() == [[0, 3], [1, 4], [2, 5]]


class TestLoss:
    def test_by_hand(self):
        config, graphdef, params = model_of("parallel")
        batch = on_device(random_batch())
        placement = place(dataclasses.replace(experiment(DATA), model=config))
        step = jax.jit(make_eval_step(graphdef, "prefix", BYTES, placement))
        sums = step(placement.put_params(params), placement.put(random_batch()))
        inputs = (batch[name] for name in ("tokens", "segment_ids", "positions"))
        logits, _ = jax.jit(lambda params, *inputs: merge(graphdef, params)(*inputs))(params, *inputs)
        logits = np.asarray(logits, np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll = -np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
        np.testing.assert_allclose(sums["nll"], (nll * batch["loss_mask"]).sum(), rtol=1e-5)
        assert sums["count"] == sums["bytes"] == batch["loss_mask"].sum()  # every target here is a byte

    def test_an_empty_batch_is_no_nan(self):
        placement, step, first = dense_run()
        batch = random_batch()
        batch["loss_mask"] = np.zeros_like(batch["loss_mask"])
        state, metrics = step(first(), placement.put(batch))
        assert metrics["nll"] == 0
        assert metrics["grad_norm"] == 0
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


class TestTrainStep:
    def test_nothing_is_transferred_unasked_and_the_state_is_donated(self):
        placement, step, first = dense_run()
        batch, state = random_batch(), first()
        assert all(leaf.committed for leaf in jax.tree.leaves(state))
        step(first(), placement.put(batch))  # compiled
        with jax.transfer_guard("disallow"):
            with pytest.raises(ValueError, match="does not match the specs of the input"):
                step(state, batch)
            after, _ = step(state, placement.put(batch))
        assert state.params["embedding"].is_deleted()
        assert int(after.step) == 1

    def test_the_weight_of_the_predictor_does_not_reach_the_model(self):
        (light, _), (heavy, _) = (gradients_of("aamoe", "row", 1, weight) for weight in (0.3, 100.0))
        np.testing.assert_allclose(gradient_norm(light), gradient_norm(heavy), rtol=1e-5)
        moved = []
        leaves = zip(jax.tree_util.tree_leaves_with_path(light), jax.tree.leaves(heavy), strict=True)
        for (path, one), other in leaves:
            if "predictor" in str(path):
                moved.append(not np.allclose(one, other))
            else:
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        assert any(moved)


class TestNotFinite:
    def test_a_step_that_is_not_finite_leaves_the_state_as_it_was(self):
        placement, step, state = dense_run("skip")
        first = state()
        embedding = first.params["embedding"]
        row = jnp.arange(len(embedding))[:, None]
        broken = first._replace(params={**first.params, "embedding": jnp.where(row == 5, jnp.nan, embedding)})
        before = jax.device_get((broken.params, broken.optimizer))
        batch = random_batch()
        batch["tokens"][0, 0] = 5
        after, metrics = step(broken, placement.put(batch))
        assert not jnp.isfinite(metrics["nll"])
        assert int(after.step) == 1
        assert_same_bits((after.params, after.optimizer), before)
        assert updates_made(after) == {0}

    def test_one_that_is_finite_is_the_step_of_a_run_that_stops(self):
        """Both in one program, which computes gradients once: XLA promises no bits between programs compiled apart."""
        (placement, skip, state), (_, stop, _) = dense_run("skip"), dense_run()
        skipping, stopping = jax.jit(lambda *given: (skip(*given), stop(*given)))(
            state(), placement.put(random_batch())
        )
        assert_same_bits(skipping[0].params, stopping[0].params)
        assert updates_made(skipping[0]) == {1}
        assert skipping[1]["learning_rate"] == stopping[1]["learning_rate"] > 0
