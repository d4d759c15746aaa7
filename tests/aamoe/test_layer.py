"""The layer against its definition, its limits, and the future (AA-01, AA-06, AA-15-17, AA-21-26, AA-30, AA-41)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.aamoe.reference import allocated, learned_scores, reference_budgets, reference_granted, reference_layer
from aamoe_jax.aamoe.statistics import tally
from aamoe_jax.layers import apply_rotary, merge_heads
from aamoe_jax.mixers.all_attention import joint_attention
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context
from tests.aamoe.helpers import (
    HEADS,
    D,
    E,
    M,
    apply,
    context_of,
    gradients,
    inputs,
    layer_of,
    model_config,
    output_and_gradients,
    padded,
)
from tests.compiling import AS_USERS_DO

LOCALS = ("window", "chunk", "routed", "none")


def float64(tree):
    """Arrays as the reference takes them."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


ROUTERS = [
    *((local, {}) for local in LOCALS),
    ("chunk", {"router_input": "causal_conv", "expert_router": "attention"}),
    *(
        (local, {"router": "pooled", "pooled_keys": n, "key_convolution": n > 1, "query_convolution": n == 2})
        for local, n in (("window", 2), ("chunk", 1), ("none", M))
    ),
]
"""Every local resource under the learned router, and under pooled keys all that these allow."""


@pytest.mark.parametrize(("local", "router"), ROUTERS, ids=str)
def test_layer_is_section_2_2(local, router):
    """Under row budgets; the next test has all others."""
    config = model_config(local=local, normalizer="row", qk_norm="none", **router)
    layer = layer_of(config)
    h = inputs(1, 4 * M)
    context = dataclasses.replace(context_of(config, 1, 4 * M), detail="tokens")
    output, statistics = apply(layer, h, context)
    budget, count = np.asarray(statistics["budget"][0], np.float64), np.asarray(statistics["spent"][0])
    assert len(set(count.tolist())) > 3, "budgets should differ, or the test shows little"
    params = float64(nnx.to_pure_dict(nnx.state(layer)))
    np.testing.assert_allclose(budget, reference_budgets(params, config, float64(h[0])), rtol=1e-5)
    np.testing.assert_allclose(output[0], reference_layer(params, config, float64(h[0])), atol=2e-5)


OPTIONS: dict[str, dict] = {
    "null slot, pooled": {"null_slot": "learned", "router": "pooled", "local": "chunk"},
    "null slot, no local": {"null_slot": "learned", "local": "none"},
    "prices by distance": {"distance_price": 0.7, "local": "chunk", "importance": "bounded"},
    "prices, K_max": {"expert_price": 2.0, "beta": 6.0, "max_resources": 3, "null_slot": "learned"},
    "prices by load": {"load_price": 0.6, "beta": 6.0, "importance": "bounded"},
    "prices by load, pooled": {
        "load_price": 1.5,
        "distance_price": 0.2,
        "beta": 7.0,
        "router": "pooled",
        "local": "none",
    },
    "gate": {"expert_gate": True},
    "gate, shares": {"expert_gate": True, "expert_share": 0.5, "router": "pooled", "null_slot": "learned"},
    "shares": {"expert_share": 0.3, "beta": 5.0, "local": "routed"},
    "shares, K_max": {"expert_share": 0.45, "beta": 7.0, "max_resources": 6, "router": "pooled"},
    "K_max": {"max_resources": 3, "slack": 2, "importance": "bounded"},
    "separate": {"signal": "separate", "null_slot": "learned", "slack": 3},
    "separate, pooled": {"signal": "separate", "router": "pooled", "key_convolution": True, "importance": "bounded"},
    "row": {"normalizer": "row", "qk_norm": "rms", "num_kv_heads": 2, "router": "pooled", "null_slot": "learned"},
    "grouped": {"num_kv_heads": 1, "qk_norm": "rms", "router": "learned_nope", "local": "routed"},
    "no experts": {"num_experts": 0, "qk_norm": "rms", "null_slot": "learned"},
    "no context": {"context": "none", "local": "chunk", "qk_norm": "rms"},
    "router looks back": {"router_input": "causal_conv", "key_convolution": True, "expert_router": "attention"},
    "no bias": {"bias": "none", "importance": "uniform", "beta": 2.5},
}
"""What section 2.2 leaves open, and this project offers."""
CASES = {
    f"{local} {'-'.join(map(str, router.values()))}": {"local": local} | router for local, router in ROUTERS
} | OPTIONS
DOCUMENTS = ((0, 0, 3 * M), (0, 3 * M, 5 * M - 3), (1, 0, 5 * M))
"""(row, first token, one past the last): one row is packed and ends in padding, which the other has none of."""


def documents_of(params, config, h) -> np.ndarray:
    """The definition of rows: every document by itself, and nothing for padding."""
    output = np.zeros_like(h)
    for row, start, stop in DOCUMENTS:
        output[row, start:stop] = reference_layer(params, config, h[row, start:stop])
    return output


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_and_gradients_are_those_of_the_definition(name):
    """Outputs; and the slope of a loss along a random direction of h and all parameters at once, and along each alone:
    router, budget, and what they send to h, to chunks that were not read, and to experts (AA-22)."""
    config = model_config(**{"qk_norm": "none", "kernel": "xla"} | CASES[name])
    layer, h = layer_of(config), inputs(2, 5 * M)
    if config.aamoe.null_slot == "learned":
        layer.null_logit[...] = jax.random.normal(jax.random.key(6), layer.null_logit.shape)
    segments = np.zeros((2, 5 * M), np.int32)
    for document, (row, start, stop) in enumerate(DOCUMENTS, start=1):
        segments[row, start:stop] = document
    context = context_of(config, 2, 5 * M, segment_ids=jnp.asarray(segments))
    output, (gradient, slope_h) = output_and_gradients(layer, h, context)
    at = float64((nnx.to_pure_dict(nnx.state(layer)), h))
    found = jax.tree.leaves(float64((nnx.to_pure_dict(gradient), slope_h)))
    leaves, structure = jax.tree.flatten(at)
    random = np.random.default_rng(0)
    directions = [random.normal(size=leaf.shape) for leaf in leaves]
    here = documents_of(at[0], config, at[1])
    np.testing.assert_allclose(output, here, atol=2e-5)

    def loss(step: float, chosen) -> float:
        moved = [x + step * d if i in chosen else x for i, (x, d) in enumerate(zip(leaves, directions, strict=True))]
        params, x = jax.tree.unflatten(structure, moved)
        return (documents_of(params, config, x) ** 2).sum()

    for chosen in [range(len(leaves)), *([index] for index in range(len(leaves)))]:
        wanted = (loss(1e-7, chosen) - (here**2).sum()) / 1e-7
        slope = sum((found[index] * directions[index]).sum() for index in chosen)
        assert slope == pytest.approx(wanted, rel=2e-3, abs=2e-3), chosen


@pytest.mark.parametrize(
    ("local", "router", "budget", "kernel"),
    [
        *((*router, "prefix", "xla") for router in ROUTERS),
        *((*router, "predictor", "xla") for router in (ROUTERS[0], ROUTERS[-1])),
        *((*router, "prefix", "reference") for router in (ROUTERS[1], ROUTERS[-3])),
    ],
    ids=str,
)
def test_the_past_does_not_move_when_the_future_changes(local, router, budget, kernel):
    """Prefix invariance (AA-15), to the bit: every causal mode, L % m != 0 included."""
    length = 4 * M + 3
    normalizer = "row" if budget == "predictor" else "prefix"
    config = model_config(local=local, normalizer=normalizer, kernel=kernel, **router)
    layer = layer_of(config)
    if budget == "predictor":
        layer.predictor.output_kernel[...] = jax.random.normal(jax.random.key(5), layer.predictor.output_kernel.shape)
    graphdef, params = nnx.split(layer)
    context = context_of(config, 1, length, budget=budget)
    run = jax.jit(
        lambda h: padded(nnx.merge(graphdef, params), h, context)[0],
        compiler_options=AS_USERS_DO if kernel == "xla" else None,
    )
    h, others = np.asarray(inputs(1, length)), np.asarray(inputs(5, length, seed=1))
    before = run(h)
    for cut, other in zip((1, M - 1, M, 2 * M + 3, length - 1), others, strict=True):
        after = run(np.where(np.arange(length)[:, None] < cut, h, other))
        before, after = np.asarray(before), np.asarray(after)
        np.testing.assert_array_equal(after[:, :cut], before[:, :cut])
        # The very last token may have no budget before and after.
        assert cut == length - 1 or (after[:, cut:] != before[:, cut:]).any()


def test_row_budgets_do_see_the_future():
    """The paper's budgets leak (AA-28): the test above can fail."""
    config = model_config(normalizer="row")
    layer, h = layer_of(config), inputs(1, 4 * M)
    context = context_of(config, 1, 4 * M)
    changed = h.at[:, 2 * M :].set(inputs(1, 4 * M, seed=9)[:, 2 * M :])
    assert (apply(layer, changed, context)[0][:, : 2 * M] != apply(layer, h, context)[0][:, : 2 * M]).any()


@pytest.mark.parametrize("local", ["window", "chunk", "routed"])
def test_unbounded_budget_without_bias_is_all_attention(local):
    config = model_config(beta=1000.0, slack=1000, local=local, bias="none", qk_norm="rms")
    layer = layer_of(config, importance=0.0)
    h, context = inputs(2, 4 * M), context_of(config, 2, 4 * M)
    query, key, value = layer.qkv(h)
    memory = [x[...].reshape(E * M, HEADS, -1) for x in (layer.expert_keys, layer.expert_values)]
    dense = joint_attention(
        apply_rotary(query, context.rotary(config).heads),
        apply_rotary(key, context.rotary(config).heads),
        value,
        query,
        layer.qkv.norm_key(memory[0]),
        memory[1],
        context.segment_ids,
    )
    np.testing.assert_allclose(apply(layer, h, context)[0], layer.output(merge_heads(dense)), atol=1e-5)


def test_rows_that_are_not_whole_chunks_are_refused():
    layer = layer_of(model_config())
    with pytest.raises(ValueError, match=r"rows of 19 tokens are not whole chunks of 8: pad h and the context"):
        layer(inputs(1, 19), context_of(layer.config, 1, 19))


@pytest.mark.parametrize("router", ["learned", "pooled"])
def test_without_experts_and_bounds_it_is_causal_attention(router):
    local = "window" if router == "pooled" else "routed"
    config = model_config(beta=1000.0, slack=1000, bias="none", num_experts=0, router=router, local=local)
    layer = layer_of(config, importance=0.0)
    dense = CausalAttention(config, rngs=nnx.Rngs(7))
    dense.qkv, dense.output = layer.qkv, layer.output
    h, context = inputs(2, 4 * M + 5), context_of(config, 2, 4 * M + 5)
    np.testing.assert_allclose(apply(layer, h, context)[0], dense(h, context)[0], atol=1e-5)


def test_without_context_and_bounds_it_is_a_persistent_memory_feed_forward():
    config = model_config(beta=1000.0, slack=1000, bias="none", context="none", local="none", qk_norm="none")
    layer = layer_of(config, importance=0.0)
    h, context = inputs(1, 2 * M), context_of(config, 1, 2 * M)
    query = np.asarray(h @ layer.qkv.query.kernel[...], np.float64).reshape(2 * M, HEADS, -1)
    keys, values = (
        np.asarray(x[...], np.float64).reshape(E * M, HEADS, -1) for x in (layer.expert_keys, layer.expert_values)
    )
    weights = np.exp(np.einsum("ihk,nhk->ihn", query, keys) / (D / HEADS) ** 0.5)
    weights /= weights.sum(-1, keepdims=True)
    memory = np.einsum("ihn,nhk->ihk", weights, values).reshape(2 * M, D)
    np.testing.assert_allclose(apply(layer, h, context)[0][0], memory @ np.asarray(layer.output.kernel[...]), atol=1e-5)


@pytest.mark.parametrize("local", ["window", "none"])
def test_tokens_without_budget_get_exactly_nothing(local):
    """Bypass (AA-26): output 0, finite gradients, and no gradient through the empty rows."""
    config = model_config(local=local, normalizer="row", beta=0.5)
    layer = layer_of(config)
    h, context = inputs(1, 4 * M), dataclasses.replace(context_of(config, 1, 4 * M), detail="tokens")
    output, statistics = apply(layer, h, context)
    empty = statistics["spent"][0] == 0
    assert empty.sum() > M
    assert not output[0, empty].any()
    for leaf in jax.tree.leaves(gradients(layer, h, context)):
        assert jnp.isfinite(leaf).all()


def test_gradient_reaches_every_parameter():
    """Signal propagation (AA-22): router, budget, projections and experts learn from one loss."""
    config = model_config(null_slot="learned", qk_norm="rms")
    _, (gradient, _) = gradients(layer_of(config), inputs(2, 4 * M), context_of(config, 2, 4 * M))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert jnp.abs(leaf).max() > 0, path


def test_one_resource_alone_gives_budget_and_router_no_gradient():
    """With one resource the bias is the same on every key and cancels (decision 17); the null slot mends it."""
    for null_slot, flows in (("none", False), ("learned", True)):
        config = model_config(beta=1.0, slack=0, local="chunk", null_slot=null_slot)
        layer = layer_of(config, importance=0.0)
        _, (gradient, _) = gradients(layer, inputs(1, 3 * M), context_of(config, 1, 3 * M))
        size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves((gradient["importance"], gradient["router"])))
        assert size > 1e-2 if flows else size < 1e-5


def test_one_resource_at_most_is_the_window_alone():
    config = model_config(beta=4.0, max_resources=1, kernel="xla")
    h = inputs(2, 3 * M)
    context = context_of(config, 2, 3 * M)
    output, about = apply(layer_of(config), h, context)
    assert about["pairs_context"] == about["pairs_expert"] == 0
    np.testing.assert_allclose(about["mass_local"], about["pairs_local"])
    assert jnp.isfinite(output).all()
    assert jnp.abs(output).max() > 0


@pytest.mark.parametrize("local", LOCALS)
def test_documents_that_start_inside_a_chunk_do_not_see_each_other(local):
    """The data of this package never does that, but the model is public."""
    config = model_config(local=local, slack=3, key_convolution=True, query_convolution=True, kernel="xla")
    layer = layer_of(config)
    start = jnp.asarray([13, 27])[:, None]
    index = jnp.broadcast_to(jnp.arange(5 * M), (2, 5 * M))
    positions = jnp.where(index >= start, index - start, index)
    context = Context(segment_ids=1 + (index >= start), positions=positions, budget="prefix", beta=3.0)
    h, other = (jax.random.normal(jax.random.key(seed), (2, 5 * M, D)) for seed in (1, 2))
    later = (index >= start)[..., None]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def second_document(h):
        output = jnp.where(later, layer(h, context)[0], 0)
        return jnp.square(output).sum(), output

    (gradient, output), (_, alike) = second_document(h), second_document(jnp.where(later, h, other))
    assert jnp.array_equal(output, alike)
    assert jnp.isfinite(gradient).all()
    assert float(jnp.abs(jnp.where(later, 0, gradient)).max()) == 0
    assert float(jnp.abs(jnp.where(later, gradient, 0)).max()) > 0


@pytest.mark.parametrize(
    ("local", "budget"),
    [("window", "prefix"), ("window", "predictor"), ("chunk", "row"), ("chunk", "predictor_uncapped")],
)
def test_packed_documents_do_not_see_each_other(local, budget):
    """Each is what it is alone, whatever its budgets are, with a cap that takes some of them (decision 23)."""
    config = model_config(slack=3, local=local, normalizer="row" if budget.startswith("predictor") else "prefix")
    layer = layer_of(config, importance=3.0)
    if budget.startswith("predictor"):
        layer.predictor.output_bias[...] = jnp.float32(2.0)  # more than beta for most tokens
        kernel = jax.random.normal(jax.random.key(5), layer.predictor.output_kernel.shape)
        layer.predictor.output_kernel[...] = 0.3 * kernel
    segments = jnp.array([[1] * 2 * M + [2] * (M + 3) + [0] * (M - 3) + [3] * 2 * M])
    h, clipped = inputs(1, 6 * M), []
    packed = apply(layer, h, context_of(config, 1, 6 * M, segment_ids=segments, budget=budget))[0]
    for start, stop in ((0, 2 * M), (2 * M, 3 * M + 3), (4 * M, 6 * M)):
        context = dataclasses.replace(context_of(config, 1, stop - start, budget=budget), detail="tokens")
        alone, about = apply(layer, h[:, start:stop], context)
        clipped.append(int((jnp.floor(about["budget"]) - about["spent"]).sum()))
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=1e-5)
    assert not packed[:, 3 * M + 3 : 4 * M].any()
    assert max(clipped) > 0, "the cap or the number of resources should take something"


@pytest.mark.parametrize(("scale", "kernel"), [(1.0, "reference"), (2.0, "xla")])
def test_the_pair_bound_has_room_for_the_slack_of_every_document(scale, kernel):
    """Predictors that ask for all there is, in a row of documents of one chunk each; and a budget scale."""
    config = model_config(beta=1.0, slack=3 * M, normalizer="row", kernel=kernel)
    layer = layer_of(config)
    layer.predictor.output_bias[...] = jnp.float32(100.0)
    scaled = {"beta": jnp.float32(scale), "scale": jnp.float32(scale), "max_scale": scale}
    segments = jnp.repeat(jnp.arange(1, 7), M)[None]
    h = inputs(1, 6 * M)
    context = dataclasses.replace(
        context_of(config, 1, 6 * M, segment_ids=segments, budget="predictor"), detail="tokens", **scaled
    )
    packed, about = apply(layer, h, context)
    assert int(about["spent"].sum()) == 6 * M * (scale + 3)
    one = dataclasses.replace(context_of(config, 1, M, budget="predictor"), **scaled)
    alone = apply(layer, h[:, 5 * M :], one)[0]
    np.testing.assert_allclose(packed[:, 5 * M :], alone, atol=1e-5)


def test_rows_of_a_batch_do_not_see_each_other():
    config = model_config()
    layer, h = layer_of(config), inputs(3, 4 * M)
    together = apply(layer, h, context_of(config, 3, 4 * M))[0]
    for row in range(3):
        alone = apply(layer, h[row : row + 1], context_of(config, 1, 4 * M))[0]
        np.testing.assert_allclose(together[row : row + 1], alone, atol=1e-5)


def test_shifting_all_positions_changes_nothing():
    config = model_config()
    layer, h, context = layer_of(config), inputs(1, 4 * M), context_of(config, 1, 4 * M)
    moved = dataclasses.replace(context, positions=context.positions + 40)
    np.testing.assert_allclose(apply(layer, h, moved)[0], apply(layer, h, context)[0], atol=2e-5)


@pytest.mark.parametrize(
    ("local", "router", "normalizer"),
    [(*ROUTERS[1], "prefix"), (*ROUTERS[-1], "row")],
    ids=str,
)
def test_fast_path_equals_reference_in_the_layer(local, router, normalizer):
    """AA-17: outputs and all gradients, element by element. Other options of `xla` are held to the definition above."""
    results = []
    for kernel in ("reference", "xla"):
        config = model_config(local=local, normalizer=normalizer, kernel=kernel, **router)
        results.append(gradients(layer_of(config), inputs(2, 4 * M + 3), context_of(config, 2, 4 * M + 3)))
    for slow, fast in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(fast, slow, atol=1e-5 * max(1.0, float(jnp.abs(slow).max())))


def test_statistics_count_what_was_given():
    """And what K_max cut (AA-27)."""
    config = model_config(normalizer="row", max_resources=4)
    layer = layer_of(config)
    context = dataclasses.replace(context_of(config, 2, 4 * M), detail="tokens")
    _, statistics = apply(layer, inputs(2, 4 * M), context)
    pairs = sum(float(statistics[f"pairs_{kind}"]) for kind in ("local", "context", "expert"))
    assert pairs == int(statistics["spent"].sum())
    assert int(statistics["max_budget"]) == 4, "K_max clips, and the clipping is counted"
    assert float(statistics["clipped"]) == float((jnp.floor(statistics["budget"] + 1e-4) - statistics["spent"]).sum())
    assert float(statistics["expert_load"].sum()) == float(statistics["pairs_expert"])
    mass = sum(float(statistics[f"mass_{kind}"]) for kind in ("local", "context", "expert"))
    assert mass == pytest.approx(float((statistics["spent"] > 0).sum()), rel=1e-5)


def test_a_budget_scale_above_one_raises_the_most_that_a_token_gets():
    config = model_config(max_resources=2, importance="uniform", beta=2.0, slack=100)
    for scale, most in ((0.5, 1), (1.5, 3)):
        scaled = {"beta": 2.0 * scale, "scale": jnp.float32(scale), "max_scale": 2.0}
        context = dataclasses.replace(context_of(config, 1, 3 * M), **scaled)
        assert int(apply(layer_of(config), inputs(1, 3 * M), context)[1]["max_budget"]) == most
        greedy = dataclasses.replace(context, beta=jnp.float32(4.0))  # wants more than K_max
        assert int(apply(layer_of(config), inputs(1, 3 * M), greedy)[1]["max_budget"]) == max(2, most)


@pytest.mark.parametrize("local", ["window", "none"])
def test_probabilities_are_normalised(local):
    """P(i, j) of eq 14, whatever the attention's bias leaves out (AA-20)."""
    config = model_config(local=local)
    layer, h = layer_of(config), inputs(1, 3 * M)
    _, about = apply(layer, h, dataclasses.replace(context_of(config, 1, 3 * M), detail="resources"))
    params, x = float64((nnx.to_pure_dict(nnx.state(layer)), h[0]))
    budget = reference_budgets(params, config, x)
    for i, granted in enumerate(reference_granted(config, budget)):
        score = learned_scores(params, config, x, i)
        whole = sum(np.exp(r) for (kind, _), r in score.items() if local == "window" or kind != "local")
        wanted = [np.exp(p) / whole for _, p in allocated(config, score, i, budget[i], int(granted), np.zeros(E))]
        np.testing.assert_allclose(about["probability"][0, i, : len(wanted)], wanted, rtol=1e-4)


def test_parameters_start_as_they_should():
    """Decision 29: experts and their embeddings as large as what they compete with; no budget differs."""
    layer = layer_of(model_config(d_model=64, num_experts=32), importance=0.0)
    sizes = {"expert_keys": 1, "expert_values": 1}
    for name, size in sizes.items():
        assert float(getattr(layer, name)[...].std()) == pytest.approx(size, rel=0.05)
    assert float(layer.router.expert_embeddings[...].std()) == pytest.approx(1, rel=0.05)
    assert float(layer.router.context_kernel[...].std()) == pytest.approx(64**-0.5, rel=0.05)
    fresh = AAMoELayer(model_config(), rngs=nnx.Rngs(0))
    assert not fresh.importance[...].any()


def test_there_is_no_gate_beside_the_attention():
    """AA-24: the softmax of the attention is all that mixes resources."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(layer_of(model_config())))
    names = {".".join(str(part.key) for part in path[:-1]) for path, _ in leaves}
    assert names == {
        *(f"qkv.{name}.kernel" for name in ("query", "key", "value")), "qkv.query_norm.scale", "qkv.key_norm.scale",
        "output.kernel", "router.context_kernel", "router.expert_embeddings", "expert_keys", "expert_values",
        "importance",
    }  # fmt: skip


@pytest.mark.parametrize("null_slot", ["none", "learned"])
@pytest.mark.parametrize("local", LOCALS)
def test_the_attention_map_is_what_the_output_is_made_of(local, null_slot):
    """Without experts, the map times the values is the output of every head (DEC-17)."""
    config = model_config(local=local, null_slot=null_slot, num_experts=0, beta=2.0, qk_norm="rms")
    layer, h = layer_of(config), inputs(2, 5 * M)
    segments = jnp.array([[1] * 3 * M + [2] * (M + 3) + [0] * (M - 3), [1] * 5 * M])
    context = dataclasses.replace(context_of(config, 2, 5 * M, segment_ids=segments), detail="maps")
    output, about = apply(layer, h, context)
    heads = jnp.einsum("bhij,bjhk->bihk", about["attention_map"], layer.qkv(h)[2])
    np.testing.assert_allclose(layer.output(merge_heads(heads)), output, atol=1e-5)


def test_what_the_attention_map_leaves_out_goes_to_experts():
    layer, h = layer_of(model_config(router="pooled")), inputs(1, 5 * M)
    context = dataclasses.replace(context_of(layer.config, 1, 5 * M), detail="maps")
    _, about = apply(layer, h, context)
    tokens = about["attention_map"].sum((0, 2, 3)).mean()
    assert float(tokens) == pytest.approx(float(about["mass_local"] + about["mass_context"]), rel=1e-5)
    assert float(about["mass_expert"]) > 1


def test_beta_changes_the_spend_without_recompiling():
    """AA-12: the budget is a number that the compiled layer is given."""
    config = model_config(beta=8.0)
    graphdef, params = nnx.split(layer_of(config))
    base = context_of(config, 1, 4 * M)

    @jax.jit
    def spent(beta):
        context = Context(base.segment_ids, base.positions, "prefix", beta, "tokens")
        return nnx.merge(graphdef, params)(inputs(1, 4 * M), context)[1]["spent"].sum()

    spends = [int(spent(jnp.float32(beta))) for beta in (1.0, 2.0, 4.0, 8.0)]
    assert spends == sorted(spends)
    assert spends[0] < spends[-1]
    assert spent._cache_size() == 1


def test_tallies_of_tpus_are_those_of_others(monkeypatch):
    number = jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 5, 3)))
    wanted = np.bincount(np.asarray(number).ravel(), minlength=7)[:6]
    np.testing.assert_array_equal(tally(number, 6), wanted)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, *, tpu, default: tpu(x))
    np.testing.assert_array_equal(tally(number, 6), wanted)
