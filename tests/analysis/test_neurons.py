"""A layer read as patterns and messages is the layer (PM-01 to PM-09, PM-14, PM-16)."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.analysis import neurons
from aamoe_jax.analysis.neurons import as_neurons, convolved, heads_of
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.experts import MoEConfig, expert_width
from aamoe_jax.registry import MIXERS
from tests.aamoe.helpers import M, apply, context_of, model_config
from tests.evaluation.helpers import random_params
from tests.mixers.oracle_attention import ORACLES as ATTENTION
from tests.mixers.oracle_deconstructed import ORACLES as DECONSTRUCTED
from tests.mixers.oracle_depth import through
from tests.mixers.oracle_dynamic import ORACLES as DYNAMIC
from tests.mixers.rows import Rows

LENGTH = 9
CONFIG = ModelConfig(d_model=16, num_heads=4, num_layers=2, d_ff=24)
PLAIN = dataclasses.replace(CONFIG, qk_norm="none", num_kv_heads=2)
LLAMA = ModelConfig(
    vocab_size=128, d_model=4096, num_heads=32, num_layers=32, d_ff=14_336, pattern=("attention+swiglu",)
)
"""Llama 3 8B as the essay counts it: without grouped heads."""
X = np.random.default_rng(0).normal(size=(LENGTH, 16))


def mixer_of(name: str, config: ModelConfig = CONFIG) -> dict:
    """Random parameters; scales of norms are not 1."""
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build_mixer(name, config, rngs=nnx.Rngs(0)))))
    random = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: random.normal(size=leaf.shape) / leaf.shape[0] ** 0.5 + (leaf.ndim == 1), shapes)


def oracle(name: str, mixer: dict, config: ModelConfig, x: np.ndarray = X, positions=None) -> np.ndarray:
    """The mixer's output [n, d] for one document, in float64 and from its definition."""
    positions = np.arange(len(x)) if positions is None else positions
    return (ATTENTION | DECONSTRUCTED | DYNAMIC)[name](
        mixer, x[None], Rows(np.ones((1, len(x)), int), positions[None]), config
    )[0]


class TestPM01:
    """Heads, feed-forwards, memory and experts in one format."""

    @pytest.mark.parametrize("config", [CONFIG, PLAIN], ids=["normed", "grouped"])
    @pytest.mark.parametrize(
        "name", ["attention", "sqrt_attention", "gated_attention", "feed_forward", "swiglu", "mlp", "parallel"]
    )
    def test_the_sum_of_its_networks_is_the_layer(self, name, config):
        mixer = mixer_of(name, config)
        networks = as_neurons(name, mixer, config, X)
        found = sum(network.evaluate(X[-1]).sum(0) for network in networks.values())
        np.testing.assert_allclose(found, oracle(name, mixer, config)[-1], atol=1e-12, rtol=1e-12)

    def test_keys_and_queries_of_a_convolution(self):
        mixer = mixer_of("convolved_attention")
        (heads,) = as_neurons("convolved_attention", mixer, CONFIG, X).values()
        (part,) = mixer["parts"].values()
        found = heads.evaluate(convolved(part, X)[-1]).sum(0)
        np.testing.assert_allclose(found, oracle("convolved_attention", mixer, CONFIG)[-1], atol=1e-12)

    def test_memory_is_more_neurons_of_the_heads(self):
        mixer = mixer_of("all_attention")
        networks = as_neurons("all_attention", mixer, CONFIG, X)
        assert networks["memory"].P.shape == (4, 24, 16)
        found = together(networks["heads"], networks["memory"]).evaluate(X[-1]).sum(0)
        np.testing.assert_allclose(found, oracle("all_attention", mixer, CONFIG)[-1], atol=1e-12)

    @pytest.mark.parametrize("qk_norm", ["rms", "none"])
    def test_experts_are_more_neurons_of_the_heads(self, qk_norm):
        """Of a layer that can afford everything, at every token of a row of whole chunks."""
        config = model_config(
            beta=100.0, bias="none", local="routed", qk_norm=qk_norm, key_convolution=True, query_convolution=True
        )
        layer = AAMoELayer(config, rngs=nnx.Rngs(0))
        kernel = layer.convolution.kernel
        kernel[...] = jax.random.normal(jax.random.key(1), kernel.shape)
        h, context = jax.random.normal(jax.random.key(0), (1, 2 * M, 32)), context_of(config, 1, 2 * M)
        wanted = apply(layer, h, context)[0][0]
        mixer, x = nnx.to_pure_dict(nnx.state(layer)), np.asarray(h[0], np.float64)
        for i in (0, M, 2 * M - 1):
            networks = as_neurons("aamoe", mixer, config, x[: i + 1])
            assert networks["experts"].M.shape == (4, 6 * M, 32)
            found = together(networks["heads"], networks["experts"]).evaluate(convolved(mixer, x)[i]).sum(0)
            np.testing.assert_allclose(found, wanted[i], atol=1e-5)

    def test_experts_of_a_mixture_are_networks_side_by_side(self):
        mixer = mixer_of("moe")
        experts = as_neurons("moe", mixer, CONFIG)["experts"]
        part = mixer["parts"]["experts"]
        assert len(experts.P) == CONFIG.of(MoEConfig).num_experts
        wanted = [
            np.maximum(X[0] @ keys, 0) @ values for keys, values in zip(part["keys"], part["values"], strict=True)
        ]
        np.testing.assert_allclose(experts.evaluate(X[0]), wanted, atol=1e-12)

    def test_mixers_of_a_model_come_in_order(self):
        config = model_config(num_layers=4, pattern=("attention+feed_forward", "aamoe"))
        params = random_params(config)
        found = list(neurons.mixers_of(params, config))
        assert [(layer, name) for layer, name, _ in found] == [
            (0, "attention"), (0, "feed_forward"), (1, "aamoe"),
            (2, "attention"), (2, "feed_forward"), (3, "aamoe"),
        ]  # fmt: skip
        blocks = params["periods"]["blocks"]
        np.testing.assert_array_equal(
            found[4][2]["parts"]["feed_forward"]["key"]["kernel"],
            blocks["1_feed_forward"]["mixer"]["parts"]["feed_forward"]["key"]["kernel"][1],
        )

    def test_what_a_router_lets_through_is_the_layer_by_its_weight(self):
        mixer, rows = mixer_of("mixture_of_depths"), Rows(np.ones((1, LENGTH), int), np.arange(LENGTH)[None])
        networks = as_neurons("mixture_of_depths", mixer, CONFIG, X)
        assert list(networks) == ["heads", "feed_forward"]
        found = sum(network.evaluate(X[-1]).sum(0) for network in networks.values())
        wanted = through(mixer, X[None], rows, CONFIG, np.ones((1, LENGTH), bool))[0, -1]
        np.testing.assert_allclose(X[-1] @ mixer["router"] * found, wanted, atol=1e-12)

    @pytest.mark.parametrize("name", ["approximate", "non_approximate", "random_qk", "fixed_qk", "static_qk"])
    def test_a_mixer_of_other_weights_is_refused(self, name):
        with pytest.raises(ConfigError, match=f"mixer '{name}' cannot be read as neurons"):
            as_neurons(name, mixer_of(name), CONFIG, X)

    def test_every_mixer_is_read_or_refused(self):
        """Of any that may be added, someone has to say which."""
        refused = {"approximate", "non_approximate", "random_qk", "fixed_qk", "static_qk"}
        shipped = {name: entry for name, entry in MIXERS.items() if entry.cls.__module__.startswith("aamoe_jax.")}
        assert {name for name, entry in shipped.items() if entry.readable} == set(shipped) - refused
        for name in sorted(set(shipped) - refused):
            assert as_neurons(name, mixer_of(name), CONFIG)
            assert neurons.ranks(name, mixer_of(name), CONFIG)


def together(left: neurons.Neurons, right: neurons.Neurons) -> neurons.Neurons:
    """The neurons of both under one softmax."""
    both = {name: np.concatenate([getattr(left, name), getattr(right, name)], axis=1) for name in ("P", "M")}
    return left._replace(**both)


class TestPM03:
    """Two matrices in place of four."""

    def test_merged_matrices_are_the_head(self):
        """x_q (x_k W^P)^T = q k^T and x_v W^M = v W^O, where tokens are not turned."""
        mixer, nowhere = mixer_of("attention", PLAIN), np.zeros(LENGTH, int)
        heads = heads_of(mixer["parts"]["attention"], PLAIN)
        P, M = np.einsum("nd,Hde->Hne", X, heads.W_P), np.einsum("nd,Hde->Hne", X, heads.W_M)
        merged = neurons.Neurons(P, M, "softmax", scale=PLAIN.head_dim**-0.5)
        wanted = oracle("attention", mixer, PLAIN, positions=nowhere)[-1]
        np.testing.assert_allclose(merged.evaluate(X[-1]).sum(0), wanted, atol=1e-12)
        np.testing.assert_allclose(heads.pattern(X, nowhere), P, atol=1e-12)
        np.testing.assert_allclose(heads.message(X), M, atol=1e-12)

    def test_turned_patterns_are_the_standard_layer(self):
        """The layer as it runs, in float32: pattern = (x_k W^K R_k) R_q^T W^Q^T, norms included."""
        for config in (CONFIG, PLAIN):
            mixer = build_mixer("attention", config, rngs=nnx.Rngs(0))
            wanted = apply(mixer, jnp.asarray(X, jnp.float32)[None], context_of(config, 1, LENGTH))[0][0, -1]
            (heads,) = as_neurons("attention", nnx.to_pure_dict(nnx.state(mixer)), config, X).values()
            np.testing.assert_allclose(heads.evaluate(X[-1]).sum(0), wanted, atol=1e-5)

    def test_patterns_depend_on_the_distance_alone_and_messages_not_even_on_that(self):
        mixer, at = mixer_of("attention"), np.arange(LENGTH)
        here, later = (as_neurons("attention", mixer, CONFIG, X, positions)["heads"] for positions in (at, at + 40))
        np.testing.assert_allclose(here.P, later.P, atol=1e-12)
        apart = as_neurons("attention", mixer, CONFIG, X, 3 * at)["heads"]
        assert np.abs(here.P - apart.P).max() > 0.1
        np.testing.assert_array_equal(here.M, apart.M)

    def test_normed_keys_have_no_pattern_matrix(self):
        heads = heads_of(mixer_of("attention")["parts"]["attention"], CONFIG)
        with pytest.raises(ValueError, match="patterns of normed keys are no linear map"):
            _ = heads.W_P


def test_pm_04_pm_05_a_network_that_grows_is_causal_attention():
    """Append one neuron per token, evaluate on that token. Without positions: where they turn, patterns follow the
    query, and the network is laid out anew for each (TestPM01)."""
    mixer = mixer_of("attention")
    heads = heads_of(mixer["parts"]["attention"], CONFIG)
    network, nowhere = as_neurons("attention", mixer, CONFIG)["heads"], np.zeros(1, int)
    assert network.P.shape == network.M.shape == (4, 0, 16)
    outputs = []
    for x in X:
        network = network.grow(heads.pattern(x[None], nowhere)[:, 0], heads.message(x[None])[:, 0])
        outputs.append(network.evaluate(x).sum(0))
        assert network.activations(x).sum(-1) == pytest.approx(1)
    np.testing.assert_allclose(outputs, oracle("attention", mixer, CONFIG, positions=np.zeros(LENGTH, int)), atol=1e-12)


def test_a_neuron_without_a_gate_joins_no_gated_network():
    network = as_neurons("gated_attention", mixer_of("gated_attention"), CONFIG, X)["heads"]
    with pytest.raises(ValueError, match="gated_root neurons have gates"):
        network.grow(np.zeros((4, 16)), np.zeros((4, 16)))


def test_pm_16_names_are_those_of_the_appendix():
    assert {"P", "M"} <= set(neurons.Neurons._fields)
    assert {"W_P", "W_M"} <= set(dir(neurons.Heads))
    arguments = {
        neurons.Heads.pattern: "x_k",
        neurons.Heads.message: "x_v",
        neurons.Neurons.evaluate: "x_q",
    }
    for function, name in arguments.items():
        assert name in inspect.signature(function).parameters


def test_pm_06_outputs_of_heads_add_up_to_what_w_o_makes_of_them_side_by_side():
    mixer = mixer_of("attention")
    output = mixer["parts"]["attention"]["output"]["kernel"]
    network = as_neurons("attention", mixer, CONFIG, X)["heads"]
    part = mixer["parts"]["attention"]
    values = (X @ part["qkv"]["value"]["kernel"]).reshape(LENGTH, 4, 4)
    side_by_side = np.einsum("Hn,nHk->Hk", network.activations(X[-1]), values).reshape(16)
    np.testing.assert_allclose(network.evaluate(X[-1]).sum(0), side_by_side @ output, atol=1e-12)


def test_pm_07_parameters_are_those_of_the_essay():
    """Counted from the layers themselves: "168M" and "64M" are 168 and 64 times 2^20."""
    feed_forward, attention = neurons.parameters("swiglu", LLAMA), neurons.parameters("attention", LLAMA)
    norms = 2 * 128
    assert feed_forward == 176_160_768 == 168 * 2**20
    assert attention - norms == 67_108_864 == 64 * 2**20
    assert feed_forward / (attention - norms) == pytest.approx(2.625)


class TestPM08:
    def test_heads_outgrow_feed_forwards_after_448_tokens(self):
        """The essay says 494: 32 layers of 14,336 are 458,752 neurons, not 494,000."""
        assert neurons.neurons_per_token(LLAMA) == 1024
        assert neurons.static_neurons(LLAMA) == 458_752
        assert neurons.crossover(LLAMA) == 448
        assert 8192 * neurons.neurons_per_token(LLAMA) == 8_388_608

    def test_they_outgrow_them_with_the_token_that_passes(self):
        """9 learned neurons in a layer of 4 heads: after 3 tokens, not 2."""
        config = dataclasses.replace(CONFIG, d_ff=9, num_layers=1, pattern=("parallel",))
        assert (neurons.static_neurons(config), neurons.neurons_per_token(config)) == (9, 4)
        assert neurons.crossover(config) == 3

    def test_only_heads_that_are_read_as_neurons_grow(self):
        config = dataclasses.replace(CONFIG, num_layers=3, pattern=("mixture_of_depths", "random_qk", "mlp"))
        assert neurons.neurons_per_token(config) == 4
        assert neurons.static_neurons(config) == 24 + 16

    def test_with_tied_messages_after_four_times_as_many(self):
        grouped = dataclasses.replace(LLAMA, num_kv_heads=8)
        assert neurons.crossover(grouped, "distinct") == 1792
        assert neurons.crossover(grouped) == 448

    def test_every_kind_of_neuron_counts(self):
        config = model_config(num_layers=4, pattern=("aamoe", "all_attention", "moe", "parallel"))
        experts, memory = 4 * 6 * M, 4 * 128
        mixture = config.of(MoEConfig).num_experts * expert_width(config)
        assert neurons.static_neurons(config) == experts + memory + mixture + 128
        assert neurons.neurons_per_token(config) == 4 * 3

    def test_a_stack_that_never_grows_has_no_crossover(self):
        with pytest.raises(ValueError, match="tokens add no neurons"):
            neurons.crossover(dataclasses.replace(CONFIG, pattern=("feed_forward",)))

    def test_active_neurons_of_a_layer_are_m_times_its_pairs(self):
        """Of 3.5 resources per token one is local, half a one a chunk, two are experts."""
        figures = {"spent": [3.5], "pairs_local": [2 / 7], "pairs_context": [1 / 7], "pairs_expert": [4 / 7]}
        found = neurons.active_neurons(figures, model_config(num_layers=1))
        for kind, wanted in {"local": M, "context": M / 2, "expert": 2 * M}.items():
            assert found[kind] == [pytest.approx(wanted)]


def test_pm_09_grouped_heads_are_heads_with_tied_weights():
    """Four heads with two pairs of keys and values are four heads whose keys and values are the same two by two."""
    grouped, untied = mixer_of("attention", PLAIN), dataclasses.replace(PLAIN, num_kv_heads=None)
    qkv = grouped["parts"]["attention"]["qkv"]
    repeat = lambda kernel: np.repeat(kernel.reshape(16, 2, 4), 2, axis=1).reshape(16, 16)  # noqa: E731
    tied = {name: {"kernel": repeat(qkv[name]["kernel"])} for name in ("key", "value")}
    part = grouped["parts"]["attention"] | {"qkv": qkv | tied}
    np.testing.assert_allclose(
        oracle("attention", grouped, PLAIN), oracle("attention", {"parts": {"attention": part}}, untied), atol=1e-12
    )
    heads = heads_of(grouped["parts"]["attention"], PLAIN)
    for weights in (heads.W_K, heads.W_V):
        np.testing.assert_array_equal(weights[0::2], weights[1::2])
        assert (weights[0] != weights[2]).any()
    assert neurons.neurons_per_token(PLAIN, "distinct") * 2 == neurons.neurons_per_token(PLAIN)


class TestPM14:
    def test_a_head_writes_to_as_many_directions_as_it_is_wide(self):
        """However many tokens: messages of 40 have rank 4, those of 24 hidden units rank 16."""
        mixer = mixer_of("parallel")
        many = np.random.default_rng(2).normal(size=(40, 16))
        networks = as_neurons("parallel", mixer, CONFIG, many)
        assert [np.linalg.matrix_rank(messages) for messages in networks["heads"].M] == [4] * 4
        found = neurons.ranks("parallel", mixer, CONFIG)
        assert [(rank.largest, rank.numerical) for rank in found["heads"]] == [(4, 4)] * 4
        assert [(rank.largest, rank.numerical) for rank in found["feed_forward"]] == [(16, 16)]
        heads = heads_of(mixer["parts"]["attention"], CONFIG)
        for rank, product in zip(found["heads"], heads.W_M, strict=True):
            spectrum = np.linalg.svd(product, compute_uv=False)
            assert rank.stable == pytest.approx(np.square(spectrum).sum() / spectrum[0] ** 2)

    def test_so_does_what_a_head_reads_from_its_memory(self):
        found = neurons.ranks("all_attention", mixer_of("all_attention"), CONFIG)
        assert [(rank.largest, rank.numerical) for rank in found["memory"]] == [(4, 4)] * 4

    def test_directions_that_are_not_there_do_not_count(self):
        mixer = mixer_of("attention")
        value = mixer["parts"]["attention"]["qkv"]["value"]
        value["kernel"][:, 1:4] = 0  # the first head is left with one
        first, second, *_ = neurons.ranks("attention", mixer, CONFIG)["heads"]
        assert (first.largest, first.numerical, second.numerical) == (4, 1, 4)
        assert first.stable == pytest.approx(1)


def test_a_message_speaks_for_the_tokens_that_it_makes_likely():
    config = model_config(vocab_size=8)
    params = {"norm": {"scale": np.full(32, 2.0)}, "readout": np.eye(8, 32)}
    messages = np.zeros((2, 32))
    messages[0, [3, 5]] = 1, 2
    messages[1, [0, 7]] = 3, 1
    np.testing.assert_array_equal(neurons.likely_tokens(messages, params, config, 2), [[5, 3], [0, 7]])
