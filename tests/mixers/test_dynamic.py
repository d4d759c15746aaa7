"""What makes a head a network of tokens: neurons without softmax, with gates, left out, routed to (PM-02, PM-10 to 13).

That every one of these is its definition, sees no future, and decodes as it was trained is tested for all mixers by
name; here are the claims of their own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.analysis import clusters
from aamoe_jax.config import ModelConfig
from aamoe_jax.cost import parameter_count
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.generation.stream import evictions, stream
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.clustered import ClusteredAttention, ClusteredAttentionConfig
from aamoe_jax.mixers.dynamic import GatedAttention, SquareRootAttention
from aamoe_jax.mixers.feed_forward import FeedForward, SwiGLU
from aamoe_jax.mixers.filtered import FilteredAttention, FilteredAttentionConfig
from tests.aamoe.helpers import apply, context_of, inputs
from tests.generation.helpers import assert_parity
from tests.mixers.oracle_dynamic import filter_gate
from tests.test_model import params_of, tokens_of

LENGTH = 23
SEGMENTS = jnp.asarray([[1] * LENGTH, [1] * 9 + [2] * 11 + [0] * 3])
REAL = int((SEGMENTS > 0).sum())


def config_of(*own) -> ModelConfig:
    return ModelConfig(d_model=32, num_heads=4, num_layers=2, own=own)


def applied(part_type, config: ModelConfig):
    """Output and statistics of a fresh part over two rows; parts of one seed have their projections in common."""
    part = part_type(config, rngs=nnx.Rngs(0))
    return apply(part, inputs(2, LENGTH), context_of(config, 2, LENGTH, segment_ids=SEGMENTS))


def parameters_of(part_type, config: ModelConfig) -> int:
    return parameter_count(nnx.eval_shape(lambda: part_type(config, rngs=nnx.Rngs(0))))


class TestPM02:
    def test_gates_cost_no_parameters_where_the_width_is_left_to_the_config(self):
        config = dataclasses.replace(config_of(), d_model=3 * 64, num_heads=4)
        assert parameters_of(SwiGLU, config) == parameters_of(FeedForward, config)

    def test_a_width_that_is_given_is_that_of_the_hidden_units(self):
        config = dataclasses.replace(config_of(), d_ff=48)
        assert parameters_of(SwiGLU, config) == 3 * 32 * 48


@pytest.mark.parametrize("part_type", [SquareRootAttention, GatedAttention])
def test_pm_13_a_head_keeps_its_size_from_8_to_8192_neurons(part_type):
    """Of independent patterns and messages. The sum itself would grow by sqrt(1024) = 32, which is no factor of 2."""
    config, rows = config_of(), 8
    part = part_type(config, rngs=nnx.Rngs(0))

    @functools.partial(jax.jit, static_argnums=0)
    def deviation(n):
        empty, key = part.empty_cache(rows, n), jax.random.key(n)
        keys = jax.random.split(key, len(jax.tree.leaves(empty)))
        random = [jax.random.normal(key, x.shape) for key, x in zip(keys, jax.tree.leaves(empty), strict=True)]
        last = Context(jnp.ones((rows, 1), jnp.int32), jnp.full((rows, 1), n - 1), "prefix", 1.0)
        return part.decode(inputs(rows, 1), last, jax.tree.unflatten(jax.tree.structure(empty), random))[0].std()

    found = {n: float(deviation(n)) for n in (8, 256, 8192)}
    assert max(found.values()) < 2 * min(found.values()), found
    sums = [deviation * n**0.5 for n, deviation in found.items()]
    assert max(sums) > 15 * min(sums)


def test_pm_12_a_closed_gate_keeps_a_neuron_out():
    config = config_of()
    part = GatedAttention(config, rngs=nnx.Rngs(0))
    part.gate.kernel[...] = jnp.zeros_like(part.gate.kernel[...])
    shut, _ = apply(part, inputs(2, LENGTH), context_of(config, 2, LENGTH, segment_ids=SEGMENTS))
    assert jnp.abs(applied(GatedAttention, config)[0]).max() > 0.01
    np.testing.assert_array_equal(shut, 0)


@pytest.mark.parametrize(
    "part_type", [SquareRootAttention, GatedAttention, FilteredAttention, ClusteredAttention], ids=lambda x: x.__name__
)
def test_the_map_is_what_values_are_weighed_by(part_type):
    config = config_of(FilteredAttentionConfig(threshold=0.88), ClusteredAttentionConfig(6, 1))
    part = part_type(config, rngs=nnx.Rngs(0))
    h, context = inputs(2, LENGTH), context_of(config, 2, LENGTH, segment_ids=SEGMENTS)
    output, _ = apply(part, h, context)
    attention, value = part.attention_map(h, context), part.qkv(h)[2]
    mixed = jnp.einsum("bhij,bjhk->bihk", attention, value).reshape(h.shape)
    np.testing.assert_allclose(mixed @ part.output.kernel[...], output, atol=1e-5)
    assert attention.shape == (2, 4, LENGTH, LENGTH)
    assert (attention == jnp.tril(attention)).all()


class TestPM10:
    @pytest.mark.parametrize(
        "filtering",
        [
            FilteredAttentionConfig("none"),
            FilteredAttentionConfig("message_norm", threshold=0.0),
            FilteredAttentionConfig(threshold=0.0),
        ],
        ids=["none", "message_norm", "learned"],
    )
    def test_a_threshold_of_zero_keeps_all(self, filtering):
        """The learned filter too, before it has learned: it adds the same to all scores."""
        config = config_of(filtering)
        wanted, _ = applied(CausalAttention, config)
        found, about = applied(FilteredAttention, config)
        np.testing.assert_allclose(found[SEGMENTS > 0], wanted[SEGMENTS > 0], atol=1e-6)
        assert about["neurons_added"] == about["neurons_offered"] == 4 * REAL

    def test_what_is_kept_is_counted(self):
        config = config_of(FilteredAttentionConfig("message_norm", threshold=1.0))
        _, about = applied(FilteredAttention, config)
        state = nnx.to_pure_dict(nnx.state(FilteredAttention(config, rngs=nnx.Rngs(0))))
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), {"parts": {"attention": state}})
        gate = filter_gate(params, np.asarray(inputs(2, LENGTH), np.float64), config)
        assert about["neurons_added"] == (gate[np.asarray(SEGMENTS) > 0] > 0).sum()
        assert 0.2 < about["neurons_added"] / about["neurons_offered"] < 0.8

    def test_a_head_without_neurons_is_silent(self):
        found, about = applied(FilteredAttention, config_of(FilteredAttentionConfig("message_norm", threshold=50.0)))
        np.testing.assert_array_equal(found, 0)
        assert about["neurons_added"] == 0

    def test_a_message_is_measured_against_that_of_random_input(self):
        """A threshold means the same whatever the size of W^V and W^O."""
        config = config_of(FilteredAttentionConfig("message_norm", threshold=1.0))
        part = FilteredAttention(config, rngs=nnx.Rngs(0))
        h = inputs(64, LENGTH)
        value = part.qkv(h)[2]
        norms = part._message_norm(value)
        assert jnp.sqrt(jnp.square(norms).mean()) == pytest.approx(1, rel=0.02)
        part.output.kernel[...] = 7 * part.output.kernel[...]
        np.testing.assert_allclose(part._message_norm(value), norms, rtol=1e-5)

    def test_the_cache_shrinks(self):
        config = config_of(FilteredAttentionConfig(capacity=0.5))
        small, dense = (
            jax.eval_shape(lambda kind=kind: kind(config, rngs=nnx.Rngs(0)).empty_cache(3, 64))
            for kind in (FilteredAttention, CausalAttention)
        )
        assert small.neurons.key.size * 2 == dense.key.size
        assert small.neurons.value.size * 2 == dense.value.size

    def test_in_no_more_room_than_it_needs_it_decodes_as_it_was_trained(self):
        config = dataclasses.replace(config_of(), pattern=("filtered_attention",), num_layers=1)
        params, length, starts = params_of(config), 35, [24, 30]
        places = length + starts[1] - starts[0] + 1
        whole = Decoder(config, params, length=places).prefill(list(np.asarray(tokens_of(2, length))))
        held = [jnp.isfinite(period[0]["attention"].log_gate).sum(-1) for period in whole.caches]
        kept = max(int(count.max()) for count in held)
        assert length / 4 < kept < length
        tight = dataclasses.replace(config, own=(FilteredAttentionConfig(capacity=kept / places),))
        assert_parity(tight, params, length=length, starts=starts)

    def test_by_default_it_is_smaller_than_that_of_attention(self):
        sizes = [
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda p=part: p.empty_cache(3, 64))))
            for part in (kind(config_of(), rngs=nnx.Rngs(0)) for kind in (FilteredAttention, CausalAttention))
        ]
        assert sizes[0] < sizes[1]
        assert FilteredAttentionConfig().places(64) == 40
        assert FilteredAttentionConfig(target_share=0.25).places(64) == 20
        assert FilteredAttentionConfig(capacity=0.9).places(64) == 58
        for all_may_be_kept in (
            FilteredAttentionConfig("message_norm"),
            FilteredAttentionConfig(threshold=0.0),
            FilteredAttentionConfig(target_share=None),
            FilteredAttentionConfig(target_share=0.9),
        ):
            assert all_may_be_kept.places(64) == 64

    @pytest.mark.parametrize("filtering", ["learned", "none"])
    def test_a_full_cache_has_the_most_certain_and_of_equals_the_latest(self, filtering):
        """Whatever part of the text came at once."""
        config = config_of(FilteredAttentionConfig(filtering, threshold=0.86, capacity=0.3))
        part, places = FilteredAttention(config, rngs=nnx.Rngs(0)), 7
        if filtering == "learned":
            part.filter.kernel[...] = 0.05 * jax.random.normal(jax.random.key(4), part.filter.kernel.shape)
        h = inputs(2, LENGTH)
        gate = np.asarray(part.log_gate(h, part.qkv(h)[2])).swapaxes(1, 2).reshape(8, LENGTH)
        kept = np.isfinite(gate)
        for prompt in (1, 6, 15, LENGTH):
            given = jnp.tile((jnp.arange(LENGTH) < prompt).astype(jnp.int32), (2, 1))
            padded = context_of(config, 2, LENGTH, segment_ids=given)
            cache = part.fill(h, padded, part.empty_cache(2, LENGTH))
            for at in range(prompt, LENGTH):
                token = Context(jnp.ones((2, 1), jnp.int32), jnp.full((2, 1), at), "prefix", 1.0)
                cache = part.decode(h[:, at : at + 1], token, cache)[1]
            for head in range(8):
                best = sorted(range(LENGTH), key=lambda j, head=head: (gate[head, j], j))[-places:]
                held = np.isfinite(cache.log_gate[head])
                assert set(np.asarray(cache.position[head])[held]) == {j for j in best if kept[head, j]}
            np.testing.assert_array_equal(cache.evicted, np.maximum(kept.sum(1) - places, 0))
        assert kept.sum(1).min() < LENGTH or filtering == "none"
        assert kept.sum(1).max() > places

    def test_what_is_evicted_is_counted_and_generation_goes_on(self, caplog):
        config = dataclasses.replace(
            config_of(FilteredAttentionConfig("none", capacity=0.5)), pattern=("filtered_attention",), num_layers=1
        )
        decoder = Decoder(config, params_of(config), length=8)
        state = decoder.prefill([np.asarray(tokens_of(1, 3))[0], np.asarray(tokens_of(1, 4))[0]])
        assert evictions(state) == (0, 4 * 7)
        state = decoder.append(state, np.array([5, 5]))
        np.testing.assert_array_equal(state.caches[0][0]["attention"].evicted.reshape(2, 4), [[0] * 4, [1] * 4])
        assert evictions(state) == (4, 4 * 9)
        assert jnp.isfinite(state.logits).all()
        steps = stream(decoder, list(np.asarray(tokens_of(1, 3))), new_tokens=4, sampling=Sampling(temperature=0.0))
        assert all(0 <= token < config.vocab_size for (token,) in steps)
        assert "evicted 12 of the 28 keys that it kept: its caches have 4 places for 8 tokens" in caplog.text

    @pytest.mark.parametrize("threshold", [0.5, 0.86])
    def test_the_loss_moves_the_share_of_every_row_and_head_to_its_target(self, threshold):
        """By the logits alone, all of a row and head alike; from above and from below."""
        config = config_of(FilteredAttentionConfig(threshold=threshold, target_share=0.4))
        part = FilteredAttention(config, rngs=nnx.Rngs(0))
        part.filter.kernel[...] = 0.05 * jax.random.normal(jax.random.key(4), part.filter.kernel.shape)
        part.filter_bias[...] = jnp.asarray([3.0, 2.0, 1.0, -3.0])
        h, context = inputs(2, LENGTH), context_of(config, 2, LENGTH, segment_ids=SEGMENTS)
        graphdef, params = nnx.split(part)
        loss = lambda params: nnx.merge(graphdef, params)(h, context)[1]["filter_loss"]  # noqa: E731
        found = jax.jit(jax.grad(loss))(params)
        certainty = jax.nn.sigmoid(part._logit(h))
        real = (SEGMENTS > 0)[..., None]
        share = ((certainty >= threshold) & real).sum(1) / real.sum(1)
        wanted = jnp.where(real, (share - 0.4)[:, None], 0) / 4
        np.testing.assert_allclose(found["filter_bias"][...], wanted.sum((0, 1)), atol=1e-5)
        np.testing.assert_allclose(found["filter"]["kernel"][...], jnp.einsum("bld,blg->dg", h, wanted), atol=1e-4)
        assert not jnp.any(found["qkv"]["key"]["kernel"][...])

    def test_a_learned_filter_learns_to_drop_noise(self):
        """Half the tokens are the wanted one, half are noise, which queries and keys of 0 cannot tell apart."""
        config = config_of(FilteredAttentionConfig(threshold=0.5))
        part = FilteredAttention(config, rngs=nnx.Rngs(0))
        for projection in (part.qkv.query, part.qkv.key):
            projection.kernel[...] = jnp.zeros_like(projection.kernel[...])
        h, context = inputs(16, LENGTH), context_of(config, 16, LENGTH)
        noisy = jax.random.bernoulli(jax.random.key(1), 0.5, h.shape[:2])
        signal = jnp.zeros_like(h).at[:, :, 0].set(-3.0).at[:, :, 1].set(2.0)
        h = jnp.where(noisy[..., None], h.at[:, :, 0].set(3.0), signal)
        graphdef, params = nnx.split(part)
        wanted = part.output(part.qkv.value(signal)).mean((0, 1))

        @jax.jit
        def descend(params):
            def loss(params):
                output, _ = nnx.merge(graphdef, params)(h, context)
                return jnp.square(output[:, 8:] - wanted).mean()

            value, gradient = jax.value_and_grad(loss)(params)
            learns = lambda path, p, g: p - 100 * g if "filter" in str(path[0]) else p  # noqa: E731
            return jax.tree_util.tree_map_with_path(learns, params, gradient), value

        for _ in range(100):
            params, loss = descend(params)
        gate = nnx.merge(graphdef, params)
        kept = jnp.isfinite(gate.log_gate(h, gate.qkv(h)[2])).mean(-1)
        assert float(loss) < 1e-6
        assert float(kept[noisy].max()) == 0
        assert float(kept[~noisy].min()) == 1


class TestPM11:
    def test_all_clusters_are_exact_attention(self):
        config = config_of(ClusteredAttentionConfig(6, 6))
        wanted, _ = applied(CausalAttention, config)
        found, about = applied(ClusteredAttention, config)
        np.testing.assert_allclose(found[SEGMENTS > 0], wanted[SEGMENTS > 0], atol=1e-6)
        assert about["pairs_compared"] == about["pairs_offered"]

    def test_few_clusters_are_compared_to_few_keys(self):
        config = config_of(ClusteredAttentionConfig(6, 1))
        wanted, _ = applied(CausalAttention, config)
        found, about = applied(ClusteredAttention, config)
        assert jnp.abs(found - wanted).max() > 0.01
        pairs = 4 * (23 * 24 + 9 * 10 + 11 * 12) // 2
        assert about["pairs_offered"] == pairs
        assert 4 * REAL / pairs < about["pairs_compared"] / pairs < 0.5

    def test_recall_grows_to_1_and_is_more_with_the_clusters_of_the_keys(self):
        """Tokens of six kinds."""
        config = config_of(ClusteredAttentionConfig(6, 2))
        part = ClusteredAttention(config, rngs=nnx.Rngs(0))
        part.qkv.key.kernel[...] = part.qkv.query.kernel[...]  # kinds attend to their own
        part.qkv.query_norm.scale[...] = 4 * part.qkv.query_norm.scale[...]
        kinds = inputs(1, 6, seed=3)[0]
        h = kinds[jax.random.randint(jax.random.key(4), (2, 64), 0, 6)] + 0.3 * inputs(2, 64)
        segments = jnp.ones((2, 64), jnp.int32).at[1, 40:].set(0)
        context = context_of(config, 2, 64, segment_ids=segments)
        recall = jax.jit(lambda centroids: clusters.attention_recall(with_centroids(part, centroids), h, context))
        random = recall(part.centroids[...])
        keys = np.asarray(part.qkv(h)[1])[np.asarray(segments) > 0]
        found = recall(jnp.asarray(clusters.centroids_of_keys(keys, 6)))
        for masses in (random, found):
            assert (jnp.diff(masses) >= -1e-6).all()
            assert float(masses[-1]) == pytest.approx(1, abs=1e-5)
        assert float(found[0]) > float(random[0]) + 0.03

    def test_lloyd_never_moves_away_and_finds_clusters_that_there_are(self):
        random = np.random.default_rng(0)
        centers = 5 * random.normal(size=(4, 3))
        points = np.repeat(centers, 30, axis=0) + 0.1 * random.normal(size=(120, 3))
        centroids = clusters.spread_points(points, 4, random)

        def inertia():
            """What k-means makes small."""
            return np.square(points - centroids[clusters.nearest(points, centroids)]).sum(1).mean()

        before = inertia()
        for _ in range(5):
            centroids = clusters.lloyd(points, centroids, 1)
            after = inertia()
            assert after <= before + 1e-12
            before = after
        distances = np.linalg.norm(centers[:, None] - centroids, axis=-1)
        assert sorted(distances.argmin(1)) == [0, 1, 2, 3]
        assert distances.min(1).max() < 0.1

    def test_the_loss_is_the_mean_over_heads_of_squared_distances(self):
        """To the nearest centroid, and to all of them a little; padding counts nowhere."""
        config = dataclasses.replace(config_of(ClusteredAttentionConfig(6, 2, learn_centroids=True)), num_kv_heads=2)
        part = ClusteredAttention(config, rngs=nnx.Rngs(0))
        h = inputs(2, LENGTH)
        _, about = apply(part, h, context_of(config, 2, LENGTH, segment_ids=SEGMENTS))
        keys = np.asarray(part.qkv(h)[1], np.float64)[np.asarray(SEGMENTS) > 0]
        centroids = np.asarray(part.centroids[...], np.float64).reshape(6, 2, 8)
        distances = np.square(keys[:, None] - centroids).sum(-1)
        wanted = (distances.min(1) + 0.01 * distances.mean(1)).sum(0).mean() / 2
        assert float(about["centroid_loss"]) == pytest.approx(wanted, rel=1e-5)

    def test_a_centroid_without_points_stays(self):
        points = np.zeros((3, 2))
        centroids = clusters.lloyd(points, np.array([[0.0, 1.0], [9.0, 9.0]]), 2)
        np.testing.assert_array_equal(centroids, [[0, 0], [9, 9]])
        np.testing.assert_array_equal(clusters.spread_points(points, 2, np.random.default_rng(0)), np.zeros((2, 2)))


def with_centroids(part: ClusteredAttention, centroids: jax.Array) -> ClusteredAttention:
    graphdef, state = nnx.split(part)
    params = nnx.to_pure_dict(state) | {"centroids": centroids}
    return nnx.merge(graphdef, nnx.State(params))


def test_pm_15_each_closing_question_has_a_mixer_that_answers_it():
    """A message per head per token? Compare to each token? Gate instead of normalise?"""
    h, context = inputs(2, LENGTH), context_of(config_of(), 2, LENGTH, segment_ids=SEGMENTS)

    def map_of(part_type, *own) -> np.ndarray:
        return np.asarray(part_type(config_of(*own), rngs=nnx.Rngs(0)).attention_map(h, context))[0]

    messages = map_of(FilteredAttention, FilteredAttentionConfig("message_norm", threshold=1.0))
    in_a_head = messages.any(1)  # [head, token]: whether anyone saw the token
    assert (in_a_head.any(0) & ~in_a_head.all(0)).any()
    compared = map_of(ClusteredAttention, ClusteredAttentionConfig(6, 1)) > 0
    assert compared.sum() < 0.5 * 4 * LENGTH * (LENGTH + 1) / 2
    assert (compared.any(0) & ~compared.all(0)).any()
    gated = map_of(GatedAttention)
    assert (gated < 0).any()
    assert np.abs(gated.sum(-1) - 1).max() > 0.1
