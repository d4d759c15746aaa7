"""Router scores and the representation tensor (AA-09, AA-10, AA-13; decisions 04-06)."""

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from aamoe_jax.aamoe.resources import representation_tensor
from aamoe_jax.aamoe.router import Heads, LearnedRouter
from aamoe_jax.config import RouterPrecision
from aamoe_jax.mixers.base import Context
from tests.aamoe.helpers import D, E, M, inputs, layer_of, model_config


def turn(x: np.ndarray, position: int, base: float = 10_000.0) -> np.ndarray:
    half = x.size // 2
    angle = position * base ** (-np.arange(half) / half)
    first, second = x[:half], x[half:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    )


def scores_of(router, h, positions):
    """The router's scores in a row of its own, chunks ending at every M-th token."""
    context = Context(jnp.ones_like(positions), positions, "prefix", 4.0)
    heads = h[:, :, None]  # a learned router reads h alone
    chunks = jnp.ones((*positions.shape, positions.shape[1] // M), bool)
    return router.scores(h, Heads(h, *(heads,) * 6), chunks, context)[0]


def test_scores_are_eq_4():
    router = LearnedRouter(model_config(), rngs=nnx.Rngs(0))
    h = inputs(1, 24)
    chunks, experts, local = scores_of(router, h, jnp.arange(24)[None])
    weights, embeddings = np.asarray(router.context_kernel[...], np.float64), np.asarray(router.expert_embeddings[...])
    h64 = np.asarray(h[0], np.float64)
    for i in range(24):
        query = h64[i] @ weights
        for j in range(3):
            end = (j + 1) * M - 1
            wanted = turn(query, i) @ turn(h64[end], end) / D**0.5
            assert float(chunks[0, i, j]) == pytest.approx(wanted, abs=1e-5)
        np.testing.assert_allclose(experts[0, i], embeddings @ h64[i] / D**0.5, atol=1e-5)
        assert float(local[0, i]) == pytest.approx(query @ h64[i] / D**0.5, abs=1e-5)


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_scores_do_not_change_when_everything_moves(shift):
    router = LearnedRouter(model_config(), rngs=nnx.Rngs(0))
    h, positions = inputs(1, 24), jnp.arange(24)[None]
    here, there = scores_of(router, h, positions), scores_of(router, h, positions + shift)
    # Angles of position 1000 carry float32 rounding of about 1000 * 6e-8.
    np.testing.assert_allclose(here[0], there[0], atol=2e-4 if shift == 1000 else 2e-5)
    for before, after in zip(here[1:], there[1:], strict=True):
        assert (before == after).all()


def test_expert_scores_are_independent_of_position():
    router = LearnedRouter(model_config(), rngs=nnx.Rngs(0))
    h, order = inputs(1, 24), np.random.default_rng(0).permutation(24)
    positions = jnp.arange(24)[None]
    np.testing.assert_array_equal(
        scores_of(router, h[:, order], positions)[1], scores_of(router, h, positions)[1][:, order]
    )


def test_without_rotary_positions_it_ignores_them():
    router = LearnedRouter(model_config(router="learned_nope"), rngs=nnx.Rngs(0))
    h = inputs(1, 24)
    positions = jnp.arange(24)[None]
    assert (scores_of(router, h, positions)[0] == scores_of(router, h, positions * 7)[0]).all()


def test_representation_tensor_is_eq_6():
    context, experts = inputs(2, 24), inputs(E, M, seed=1)
    table = representation_tensor(context, experts)
    assert table.shape == (2 * 3 + E, M, D)
    np.testing.assert_array_equal(table[: 2 * 3].reshape(2, 24, D), context)
    np.testing.assert_array_equal(table[2 * 3 :], experts)


def test_gradient_reaches_both_sides_of_the_router():
    router = LearnedRouter(model_config(), rngs=nnx.Rngs(0))
    h, positions = inputs(1, 24), jnp.arange(24)[None]

    def loss(params, h):
        chunks, experts, local = scores_of(nnx.merge(graphdef, params), h, positions)
        return (chunks**2).sum() + (experts**2).sum() + (local**2).sum()

    graphdef, params = nnx.split(router)
    for leaf in jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(params, h)):
        assert jnp.abs(leaf).max() > 0


def precisions(jaxpr) -> list:
    """Of every matrix product, however deep."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation.params["precision"])
        for inner in jaxprs_in_params(equation.params):
            found += precisions(inner)
    return found


@pytest.mark.parametrize("precision", get_args(RouterPrecision))
@pytest.mark.parametrize(
    ("fields", "products"),
    [({"router": "pooled", "pooled_keys": 2}, 2), ({}, 3), ({"expert_router": "attention"}, 6)],
    ids=["pooled", "learned", "attention among experts"],
)
def test_every_product_of_the_router_has_the_precision_and_no_other(precision, fields, products):
    """In the forward pass, in its gradients, of which each has two, and in a step of decoding."""
    layer = layer_of(model_config(router_precision=precision, **fields))
    graphdef, params = nnx.split(layer)
    h, wanted = inputs(1, 24), (jax.lax.Precision(precision),) * 2
    context = Context(jnp.ones((1, 24), int), jnp.arange(24)[None], "prefix", 3.0)
    now = dataclasses.replace(context, segment_ids=jnp.ones((1, 1), int), positions=jnp.full((1, 1), 24))

    def both_passes(params, h):
        return jax.value_and_grad(lambda *x: nnx.merge(graphdef, x[0])(x[1], context)[0].sum(), argnums=(0, 1))(
            params, h
        )

    def decoded(params, h):
        layer = nnx.merge(graphdef, params)
        return layer.decode(h[:, :1], now, layer.empty_cache(1, 32))[0]

    for function, number in ((both_passes, 3 * products), (decoded, products)):
        found = [one for one in precisions(jax.make_jaxpr(function)(params, h).jaxpr) if one is not None]
        assert found == [wanted] * number
