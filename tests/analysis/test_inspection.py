"""An inspection says what the model's statistics say, and its spans are what the layer really reads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.analysis.inspection import (
    CONTEXT,
    EXPERT,
    LOCAL,
    UNUSED,
    aamoe_layers,
    expert_uses,
    inspect_passage,
    slot_kinds,
    spans,
)
from aamoe_jax.config import ConfigError
from aamoe_jax.model import merge, structure
from tests.aamoe.helpers import E, M, context_of, inputs, layer_of, model_config, padded
from tests.analysis.helpers import inspected, params_of, tokens_of

LENGTH = 4 * M + 3


def test_numbers_are_the_models():
    found, config = inspected(), model_config()
    logits, said = jax.jit(
        lambda params, tokens: merge(structure(config), params)(tokens, budget="prefix", detail="resources")
    )(params_of(config), found.tokens[None])
    for name in ("spent", "budget", "resource", "probability", "mass"):
        used = found.kind != UNUSED if said[name].ndim == 4 else slice(None)
        np.testing.assert_allclose(vars(found)[name][used], said[name][:, 0][used], rtol=1e-5, atol=1e-7)
    log_p = np.asarray(jax.nn.log_softmax(logits[0]))
    np.testing.assert_allclose(
        found.bits[1:], -log_p[np.arange(len(found.tokens) - 1), found.tokens[1:]] / np.log(2), rtol=1e-5
    )
    assert np.isnan(found.bits[0])
    np.testing.assert_array_equal(found.likely[:, 0], np.argmax(log_p, -1))
    np.testing.assert_allclose(found.likely_probability[:, 0], np.exp(log_p.max(-1)), rtol=1e-5)


def test_totals_are_sums_over_the_tokens():
    found = inspected()
    assert (found.spent == 0).any()  # or the next lines would not see whether those are counted
    for layer in range(len(found.layers)):
        spent, kind, mass = found.spent[layer], found.kind[layer], found.mass[layer]
        assert found.totals["spent"][layer] == pytest.approx(spent.mean())
        assert found.totals["zero_budget"][layer] == pytest.approx((spent == 0).mean())
        for name, code in (("local", LOCAL), ("context", CONTEXT), ("expert", EXPERT)):
            assert found.totals[f"pairs_{name}"][layer] == pytest.approx((kind == code).sum() / spent.sum())
            share = mass[kind == code].sum() / mass[kind != UNUSED].sum()
            assert found.totals[f"mass_{name}"][layer] == pytest.approx(share, abs=1e-5)
        uses = expert_uses(found, layer)
        assert found.totals["dead_experts"][layer] == pytest.approx((E - len(uses)) / E)


def test_experts_are_told_with_the_tokens_that_use_them():
    found = inspected()
    uses = expert_uses(found, 1, examples=2)
    assert sum(use.tokens for use in uses) == (found.kind[1] == EXPERT).sum()
    assert [use.tokens for use in uses] == sorted((use.tokens for use in uses), reverse=True)
    for use in uses:
        slots = (found.expert[1] == use.expert) & (found.kind[1] == EXPERT)
        assert use.mass == pytest.approx(found.mass[1][slots].sum())
        assert len(use.examples) == min(2, use.tokens)
        weight = np.where(slots, found.mass[1], 0).sum(-1)
        assert weight[use.examples[0]] == weight.max() > 0


@pytest.mark.parametrize("local", ["window", "routed"])
def test_spans_are_the_text_that_the_layer_reads(local):
    """The output of a token depends on its own h, on the spans of its slots, and on nothing else.

    Chunks are chosen by their last tokens too, but a chosen chunk's last token is in its span, or in the window.
    """
    config = model_config(local=local, beta=4.0)
    layer = layer_of(config, importance=0.0)  # equal budgets: no token's depends on another token
    h = inputs(1, LENGTH)
    context = dataclasses.replace(context_of(config, 1, LENGTH), detail="resources")
    graphdef, params = nnx.split(layer)

    @jax.jit
    def reads(h):
        def apply(h):
            output, statistics = padded(nnx.merge(graphdef, params), h, context)
            return output[0].sum(-1), statistics

        influence, statistics = jax.jacrev(apply, has_aux=True)(h)
        return jnp.abs(influence[:, 0]).sum(-1) > 0, statistics["resource"], statistics["spent"]

    read, resource, spent = map(np.asarray, reads(h))
    kind = slot_kinds(config.aamoe, spent, resource, LENGTH)
    start, stop = spans(config.aamoe, resource, kind)
    token = np.arange(LENGTH)
    seen = ((start[0][..., None] <= token) & (token < stop[0][..., None])).any(1)
    seen |= np.eye(LENGTH, dtype=bool) & (spent[0] > 0)[:, None]
    np.testing.assert_array_equal(read, seen)


def test_a_window_crosses_the_start_of_its_chunk():
    """The first token of chunk 2 sees itself and the M - 1 tokens before it; of chunk 1 it may be given the rest."""
    config = model_config().aamoe
    resource = np.zeros((1, 2 * M + 1, 3), np.int64)
    resource[0, 2 * M] = [2, 1, 5]  # window, the chunk before, expert 2 of a text with 3 chunks
    kind = slot_kinds(config, np.full((1, 2 * M + 1), 3), resource, 2 * M + 1)
    start, stop = spans(config, resource, kind)
    assert kind[0, 2 * M].tolist() == [LOCAL, CONTEXT, EXPERT]
    assert list(zip(start[0, 2 * M], stop[0, 2 * M], strict=True)) == [(M + 1, 2 * M + 1), (M, M + 1), (0, 0)]


@pytest.mark.parametrize(("local", "kind"), [("chunk", LOCAL), ("routed", CONTEXT), ("none", CONTEXT)])
def test_of_its_own_chunk_a_token_sees_what_is_not_later(local, kind):
    config = model_config(local=local).aamoe
    resource = np.zeros((1, 2 * M + 3, 2), np.int64)
    resource[0, 2 * M + 2] = [2, 0]
    kinds = slot_kinds(config, np.full((1, 2 * M + 3), 2), resource, 2 * M + 3)
    start, stop = spans(config, resource, kinds)
    assert kinds[0, 2 * M + 2].tolist() == [kind, CONTEXT]
    assert list(zip(start[0, 2 * M + 2], stop[0, 2 * M + 2], strict=True)) == [(2 * M, 2 * M + 3), (0, M)]


def test_the_dial_multiplies_budgets():
    plain, half = inspected(), inspected(budget_scale=0.5)
    np.testing.assert_allclose(half.budget[0], 0.5 * plain.budget[0], rtol=1e-4)
    assert half.spent[0].sum() < plain.spent[0].sum()


def test_layers_are_named_by_their_place_in_the_stack():
    assert aamoe_layers(model_config(num_layers=4, pattern=("parallel", "aamoe"))) == (1, 3)


def test_what_cannot_be_inspected_is_refused():
    dense = model_config(pattern=("parallel",), d_ff=32)
    with pytest.raises(ConfigError, match="no AA-MoE layer"):
        inspect_passage(dense, {}, tokens_of(b"abc"))
    with pytest.raises(ConfigError, match="empty"):
        inspect_passage(model_config(), {}, tokens_of(b""))
