"""What each variant of deconstructed attention is, beside its definition in `oracle_deconstructed.py`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.cost import parameter_count
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.ledger.compiled import Trial
from aamoe_jax.mixers import recurrent
from aamoe_jax.mixers.attention import SAMPLED
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.deconstructed import PRINCIPLES
from aamoe_jax.mixers.fixed_maps import FixedQKConfig, fixed_tokens, noise_stream
from aamoe_jax.mixers.recurrent import LEAST_MEAN, running, tally
from aamoe_jax.mixers.sparse_attention import SparseAttentionConfig
from aamoe_jax.mixers.statistics import combine
from aamoe_jax.mixers.weighted_sum import head_scores, largest_logit
from aamoe_jax.model import merge, structure
from tests.aamoe.helpers import M
from tests.aamoe.helpers import model_config as small
from tests.evaluation.helpers import random_params
from tests.generation.helpers import assert_parity
from tests.mixers.rows import two_rows
from tests.test_model import run, tokens_of

LENGTH = 11
ROWS = two_rows(LENGTH)
CONFIG = ModelConfig(d_model=16, num_heads=4, num_layers=2)
VARIANTS = sorted(set(PRINCIPLES) - {"attention"})
MAPPED = sorted(set(PRINCIPLES) - {"mlp"})
FIXED = ("random_qk", "fixed_qk")


@functools.cache
def part_of(name: str, config: ModelConfig = CONFIG) -> nnx.Module:
    """The part that makes up a mixer."""
    (part,) = build_mixer(name, config, rngs=nnx.Rngs(3)).parts.values()
    return part


def random(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def map_of(part: nnx.Module, context: Context):
    """(h, embedded) -> the part's attention map."""
    graphdef, state = nnx.split(part)

    def function(h: jax.Array, embedded: jax.Array):
        return nnx.merge(graphdef, state).attention_map(h, dataclasses.replace(context, embedded=embedded))

    return jax.jit(function)


def one_row(config: ModelConfig, length: int) -> Context:
    return Context.of_rows(config, 1, length)


class TestDEC01:
    """Every variant keeps the principles that it says it keeps, and no others."""

    def test_they_are_those_of_the_paper(self):
        lost = {name: sorted(PRINCIPLES["attention"] - kept) for name, kept in PRINCIPLES.items()}
        assert lost == {
            "attention": [],
            "mlp": ["current_qk", "mathematical_form", "sequence_dependency", "token_mixing"],
            "approximate": ["mathematical_form"],
            "non_approximate": ["mathematical_form"],
            "random_qk": ["current_qk", "sequence_dependency"],
            "fixed_qk": ["current_qk", "sequence_dependency"],
            "static_qk": ["current_qk"],
        }

    @pytest.mark.parametrize("name", MAPPED)
    def test_maps_follow_what_they_should(self, name):
        """Another input of the layer, or another sequence altogether: does the map change?"""
        one_map = map_of(part_of(name), ROWS.context(CONFIG))
        (h, other), (embedded, others) = (random(seed, 2, 2, LENGTH, 16) for seed in (1, 2))
        found = one_map(h, embedded)
        changed = {
            "current_qk": bool((one_map(other, embedded) != found).any()),
            "sequence_dependency": bool((one_map(other, others) != found).any()),
            "token_mixing": bool((jnp.tril(found, -1) != 0).any()),
        }
        assert changed == {principle: principle in PRINCIPLES[name] for principle in changed}


class TestDEC02:
    @pytest.mark.parametrize("name", MAPPED)
    def test_what_comes_out_is_the_map_times_the_values(self, name):
        """Of standard attention, and of every variant that has a map."""
        graphdef, state = nnx.split(part_of(name))
        context, h = ROWS.context(CONFIG), random(1, 2, LENGTH, 16)

        @jax.jit
        def both(h):
            part = nnx.merge(graphdef, state)
            values = (h @ state["qkv"]["value"]["kernel"][...]).reshape(2, LENGTH, 4, 4)
            heads = jnp.einsum("bhij,bjhk->bihk", part.attention_map(h, context), values)
            return part(h, context)[0], heads.reshape(h.shape) @ state["output"]["kernel"][...]

        np.testing.assert_allclose(*both(h), atol=1e-5)


class TestDEC03:
    def test_a_token_of_the_mlp_depends_on_itself_alone(self):
        h, context = random(1, 1, LENGTH, 16), one_row(CONFIG, LENGTH)
        graphdef, state = nnx.split(part_of("mlp"))
        call = jax.jit(lambda h: nnx.merge(graphdef, state)(h, context)[0])
        found, after = call(h), call(h.at[:, 4].add(1.0))
        changed = (found != after).any(-1)[0]
        assert changed.nonzero()[0].tolist() == [4]


class TestDEC04:
    @pytest.mark.parametrize("prompt", [1, 6])
    def test_the_parallel_form_is_the_recurrent_one(self, prompt):
        assert_recurrent("approximate", prompt)

    @pytest.mark.parametrize("groups", [4, 2])
    @pytest.mark.parametrize("chunk", [1, 3, 4, 100])
    def test_chunks_are_the_map_laid_out(self, monkeypatch, chunk, groups):
        """Output and gradients, in documents that begin and end within chunks and at their ends, and padding."""
        monkeypatch.setattr(recurrent, "CHUNK", chunk)
        config = dataclasses.replace(CONFIG, num_kv_heads=groups)
        graphdef, state = nnx.split(part_of("approximate", config))
        h, cotangent = random(1, 2, 2, LENGTH, 16)
        segments = jnp.array([[1, 1, 1, 2, 3, 3, 3, 3, 3, 0, 0], [1] * 8 + [2] * 3])
        context = dataclasses.replace(
            one_row(config, LENGTH), segment_ids=segments, positions=ROWS.context(config).positions
        )

        def laid_out(state, h):
            part = nnx.merge(graphdef, state)
            values = jnp.repeat(part.qkv.value(h).reshape(2, LENGTH, groups, 4), 4 // groups, axis=2)
            return part.output(jnp.einsum("bhij,bjhk->bihk", part.attention_map(h, context), values).reshape(h.shape))

        def loss(function):
            return jax.value_and_grad(lambda state, h: (function(state, h) * cotangent).sum(), argnums=(0, 1))

        found = jax.jit(loss(lambda state, h: nnx.merge(graphdef, state)(h, context)[0]))(state, h)
        wanted = jax.jit(loss(laid_out))(state, h)
        for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, two, atol=2e-4, rtol=1e-4)

    def test_memory_is_linear_in_length(self):
        """Four times the tokens, not five times the memory of both passes."""
        trial = Trial("approximate", ModelConfig(d_model=32, num_heads=2, num_layers=1))

        def temporaries(length):
            params, inputs, row = trial.shapes(1, length)
            step = jax.jit(lambda *x: trial.vjp(*x[:3])[1](x[3]))
            return step.lower(params, inputs, row, inputs.h).compile().memory_analysis().temp_size_in_bytes

        assert temporaries(4096) < 5 * temporaries(1024)

    def test_small_scores_give_nearly_softmax(self):
        """To first order both are 1 + x over their sum, so halving the queries divides what differs by about four."""
        part = part_of("approximate")
        softmax, context = part_of("attention"), one_row(CONFIG, LENGTH)
        h, differences = random(1, 1, LENGTH, 16), []
        for size in (0.02, 0.01):
            maps = []
            for each in (part, softmax):
                graphdef, state = nnx.split(each)
                state["qkv"]["query_norm"]["scale"] = nnx.Param(jnp.full(4, size))
                maps.append(jax.jit(lambda h, g=graphdef, s=state: nnx.merge(g, s).attention_map(h, context))(h))
            differences.append(float(jnp.abs(maps[0] - maps[1]).max()))
        assert 0 < differences[0] < 1e-3
        assert 3 < differences[0] / differences[1] < 5

    def test_a_sum_too_small_is_cut(self):
        """Keys against queries in every dimension: 1 - k u + k u^2 / 2 is negative at u = 1, and the sum with it."""
        graphdef, state = nnx.split(part_of("approximate"))
        state["qkv"]["key"]["kernel"] = nnx.Param(-state["qkv"]["query"]["kernel"][...])
        state["qkv"]["query_norm"]["scale"] = nnx.Param(jnp.full(4, 2.0**0.5))
        state["qkv"]["key_norm"]["scale"] = nnx.Param(jnp.full(4, 2.0**0.5))
        h, context = random(1, 1, 1, 16), one_row(CONFIG, 1)
        found = jax.jit(lambda h: nnx.merge(graphdef, state).attention_map(h, context))(h)[0, :, 0, 0]
        query = (h @ state["qkv"]["query"]["kernel"][...]).reshape(4, 4)
        squares = 2 * query**2 / (query**2).mean(-1, keepdims=True) / 2  # u = -q^2 / sqrt(k) of every dimension
        weight = 1 - squares.sum(-1) + (squares**2).sum(-1) / 2
        assert (weight < LEAST_MEAN).any()
        np.testing.assert_allclose(found, weight / jnp.maximum(weight, LEAST_MEAN), atol=1e-5)


def assert_recurrent(name: str, prompt: int) -> None:
    """A state after a prompt, then token by token: the same as all tokens at once."""
    graphdef, state = nnx.split(part_of(name))
    h = random(1, 2, LENGTH, 16)
    rows = Context.of_rows(CONFIG, 2, LENGTH)

    @jax.jit
    def both(h):
        part = nnx.merge(graphdef, state)
        first = Context.of_rows(CONFIG, 2, prompt)
        cache = part.fill(h[:, :prompt], first, part.empty_cache(2, LENGTH))

        def step(cache, i):
            here = dataclasses.replace(first, positions=jnp.full((2, 1), i), segment_ids=jnp.ones((2, 1), jnp.int32))
            output, cache = part.decode(jax.lax.dynamic_slice_in_dim(h, i, 1, axis=1), here, cache)
            return cache, output[:, 0]

        return part(h, rows)[0], jax.lax.scan(step, cache, jnp.arange(prompt, LENGTH))[1]

    parallel, recurrent = both(h)
    np.testing.assert_allclose(recurrent.swapaxes(0, 1), parallel[:, prompt:], atol=1e-5)


class TestDEC05:
    @pytest.mark.parametrize("prompt", [1, 6])
    def test_the_scan_is_the_recurrent_form(self, prompt):
        assert_recurrent("non_approximate", prompt)

    @pytest.mark.parametrize("size", [1.0, 1e3])
    def test_the_scan_is_a_masked_softmax_however_large_the_logits(self, size):
        """In two documents and padding; e^1000 is no number of float32."""
        logits, value = np.float64(size * random(1, 2, LENGTH, 4)), np.float64(random(2, 2, LENGTH, 4, 3))
        segments = jnp.asarray(ROWS.segment_ids)
        found = jax.jit(lambda s, v: running(tally(s, v), segments))(jnp.float32(logits), jnp.float32(value))
        log_total = found.top + jnp.log(found.total)
        for row, i in np.ndindex(2, LENGTH):
            seen = ROWS.seen(row, i)
            top = logits[row, seen].max(0)
            weights = np.exp(logits[row, seen] - top)
            wanted = np.einsum("jh,jhk->hk", weights, value[row, seen]) / weights.sum(0)[:, None]
            np.testing.assert_allclose(found.mean[row, i], wanted, atol=1e-4)
            np.testing.assert_allclose(log_total[row, i], top + np.log(weights.sum(0)), rtol=1e-5, atol=1e-5)
        same = ROWS.segment_ids[:, 1:] == ROWS.segment_ids[:, :-1]
        rises = np.diff(log_total, axis=1) >= 0
        assert rises[same].all()
        assert not rises[~same].all()  # a document starts anew

    def test_its_state_is_d_and_two_numbers_per_head(self):
        state = part_of("non_approximate").empty_cache(3, 100)
        assert sum(x.size for x in state) == 3 * (16 + 2 * 4)


class TestFixedMaps:
    """DEC-06 and DEC-07: what they have in common."""

    @pytest.mark.parametrize("name", FIXED)
    def test_dec_06_07_the_map_is_the_same_for_two_inputs_in_all_layers(self, name):
        config = dataclasses.replace(CONFIG, pattern=(f"{name}+feed_forward", "attention"), num_layers=4)
        params = random_params(config)
        one, other = (run(config, params, tokens_of(1, LENGTH, seed), detail="maps") for seed in (1, 2))
        assert float(jnp.abs(one[0] - other[0]).min()) > 0
        maps, others = (statistics["attention_map"] for _, statistics in (one, other))
        np.testing.assert_array_equal(maps[::2], others[::2])
        assert float(jnp.abs(maps[1::2] - others[1::2]).max()) > 0.01  # of standard attention
        assert float(jnp.abs(maps[0] - maps[2]).max()) > 0.01  # of layers

    @pytest.mark.parametrize("name", FIXED)
    def test_dec_06_07_scores_have_no_batch_axis_and_the_output_is_linear_in_the_input(self, name):
        graphdef, state = nnx.split(part_of(name))
        context = ROWS.context(CONFIG)
        assert jax.eval_shape(lambda: nnx.merge(graphdef, state).scores(context)).shape == (4, LENGTH, LENGTH)
        call = jax.jit(lambda h: nnx.merge(graphdef, state)(h, context)[0])
        one, other = random(1, 2, 2, LENGTH, 16)
        np.testing.assert_allclose(call(2 * one - 3 * other), 2 * call(one) - 3 * call(other), atol=1e-4)

    @pytest.mark.parametrize("name", FIXED)
    def test_dec_06_07_the_sequence_runs_through_the_same_stack(self, name):
        """The map of the second layer is of what the first layer makes of the sequence."""
        config = dataclasses.replace(CONFIG, pattern=(f"{name}+feed_forward",))
        params, tokens = random_params(config), tokens_of(1, LENGTH)
        before = jax.block_until_ready(run(config, params, tokens, detail="maps"))[1]["attention_map"]
        # JAX reads NumPy arrays where they lie, so it has to be through with them before they change.
        params["periods"]["blocks"]["1_feed_forward"]["mixer"]["parts"]["feed_forward"]["value"]["kernel"][0] *= -1.0
        after = run(config, params, tokens, detail="maps")[1]["attention_map"]
        changed = [float(jnp.abs(old - new).max()) for old, new in zip(before, after, strict=True)]
        assert changed[0] == 0
        assert changed[1] > 0.01

    def test_dec_06_longer_noise_only_appends(self):
        short, long = (noise_stream(jnp.arange(n)[None], 64) for n in (20, 100))
        np.testing.assert_array_equal(short[0], long[0, :20])
        assert float(long.mean()) == pytest.approx(0, abs=0.05)
        assert float(long.std()) == pytest.approx(1, abs=0.05)

    def test_dec_07_any_tokens_will_do(self, tmp_path):
        np.save(tmp_path / "tokens.npy", np.array([5, 7, 11], np.uint16))
        file = str(tmp_path / "tokens.npy")
        assert fixed_tokens(file, 12, 7).tolist() == [5, 7, 11, 5, 7, 11, 5]
        with pytest.raises(ConfigError, match="wanted a list of ids below 11"):
            fixed_tokens(file, 11, 7)
        with pytest.raises(ConfigError, match=r"none\.npy': cannot be read"):
            fixed_tokens(str(tmp_path / "none.npy"), 11, 7)
        assert bytes((fixed_tokens(None, 384, 14) - 3).astype(np.uint8)) == b"Four score and"
        assert fixed_tokens(None, 10, 2000).max() == 9
        config = dataclasses.replace(CONFIG, pattern=("fixed_qk",))
        given = dataclasses.replace(config, own=(FixedQKConfig(file),))
        params, tokens = random_params(config), tokens_of(1, LENGTH)
        assert float(jnp.abs(run(config, params, tokens)[0] - run(given, params, tokens)[0]).max()) > 0.01


class TestDEC08:
    def test_maps_of_all_layers_are_there_before_the_first(self):
        config = dataclasses.replace(CONFIG, pattern=("static_qk+feed_forward",))
        params, tokens = random_params(config), tokens_of(2, LENGTH)
        before = jax.block_until_ready(run(config, params, tokens, detail="maps"))
        for value in params["periods"]["blocks"]["1_feed_forward"]["mixer"]["parts"]["feed_forward"].values():
            value["kernel"][0] *= 2.0
        qkv = params["periods"]["blocks"]["0_static_qk"]["mixer"]["parts"]["attention"]["qkv"]
        for name in ("query", "value"):
            qkv[name]["kernel"][0] *= -1.0
        after = run(config, params, tokens, detail="maps")
        maps = before[1]["attention_map"], after[1]["attention_map"]
        changed = [float(jnp.abs(old - new).max()) for old, new in zip(*maps, strict=True)]
        assert changed[0] > 0.01
        assert changed[1] == 0
        assert float(jnp.abs(before[0] - after[0]).max()) > 0.01


class TestDEC11:
    """What is skipped adds nothing: the rest is the stack that remains."""

    @pytest.mark.parametrize(
        ("skipped", "kept"), [(frozenset({"mlp"}), ["attention"] * 2), (frozenset({1}), ["attention", "mlp"])], ids=str
    )
    def test_a_stack_without_some_of_its_blocks(self, skipped, kept):
        config = dataclasses.replace(CONFIG, pattern=("attention+mlp",))
        params, tokens = random_params(config), tokens_of(1, LENGTH)
        found = jax.jit(lambda p: merge(structure(config, skipped), p)(tokens)[0])(params)
        blocks = params["periods"]["blocks"]
        if kept == ["attention"] * 2:
            remaining = dataclasses.replace(CONFIG, pattern=("attention",))
            left = {"0_attention": blocks["0_attention"]}
        else:
            remaining = dataclasses.replace(CONFIG, pattern=("attention+mlp",), num_layers=1)
            left = jax.tree.map(lambda x: x[:1], blocks)
        wanted, _ = run(remaining, params | {"periods": {"blocks": left}}, tokens)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


class TestDEC12:
    def test_all_variants_have_as_many_parameters(self):
        plain = dataclasses.replace(CONFIG, qk_norm="none")
        counts = {
            name: parameter_count(jax.eval_shape(lambda n=name: nnx.state(build_mixer(n, plain, rngs=nnx.Rngs(0)))))
            for name in PRINCIPLES
        }
        assert counts == dict.fromkeys(PRINCIPLES, 4 * 16 * 16)


class TestDEC19:
    def test_what_is_not_seen_does_not_count(self):
        assert largest_logit(jnp.array([1.0, -3.0, 9.0]), jnp.array([True, True, False])) == 3

    def test_the_largest_logit_of_every_layer_over_real_tokens(self):
        """One per layer, larger where queries are, and of micro-batches the larger one."""
        plain = dataclasses.replace(CONFIG, qk_norm="none", pattern=("non_approximate", "random_qk"), num_layers=4)
        params, tokens = random_params(plain), tokens_of(2, LENGTH)
        segments = jnp.ones_like(tokens).at[0, 5:].set(0)

        def largest(tokens, segments):
            return run(plain, params, tokens, segment_ids=segments)[1]

        both = largest(tokens, segments)
        assert both["logit_absmax"].shape == (4,)
        alone = [largest(tokens[row : row + 1], segments[row : row + 1]) for row in (0, 1)]
        np.testing.assert_allclose(combine(*alone)["logit_absmax"], both["logit_absmax"], rtol=1e-5)
        hidden = largest(tokens.at[0, 5:].add(1), segments)
        np.testing.assert_array_equal(both["logit_absmax"], hidden["logit_absmax"])
        for name in ("0_non_approximate", "1_random_qk"):
            params["periods"]["blocks"][name]["mixer"]["parts"]["attention"]["qkv"]["key"]["kernel"][:1] *= 1000.0
        larger = largest(tokens, segments)["logit_absmax"]
        np.testing.assert_allclose(larger[:2], 1000 * both["logit_absmax"][:2], rtol=0.5)

    @pytest.mark.parametrize("name", ["attention", "local_attention", "sink_attention", "strided_attention"])
    def test_of_blocks_that_of_some_tokens(self, name):
        """The largest among what they see: of all tokens in a row as short as the sample, and less in a longer one."""
        config = dataclasses.replace(CONFIG, own=(SparseAttentionConfig(window=3, stride=3, sinks=1),))
        part = build_mixer(name, config, rngs=nnx.Rngs(0)).parts["attention"]
        for length in (SAMPLED, 40):
            h, context = random(1, 2, length, 16), Context.of_rows(config, 2, length)
            context = dataclasses.replace(context, segment_ids=context.segment_ids.at[:, -2:].set(0))
            about = jax.jit(lambda h, part=part, context=context: part(h, context)[1])(h)
            query, key, _ = part._rotated(h, context)
            seen = part._visible(context)[:, :-2]
            scores = head_scores(query, key)[:, :, :-2]
            sample = np.linspace(0, length - 1, SAMPLED).round().astype(int)
            sample = sample[sample < length - 2]
            wanted = largest_logit(scores[:, :, sample], seen[:, None, sample])
            assert float(about["logit_absmax"]) == pytest.approx(float(wanted), rel=1e-5)
            assert float(wanted) <= float(largest_logit(scores, seen[:, None]))


class TestDEC21:
    """Groups of heads have keys in common in every variant that has heads: see `grouped` in test_every_mixer.py."""

    def test_norms_bound_logits_whatever_the_projections_are(self):
        graphdef, state = nnx.split(part_of("non_approximate"))
        for name in ("query", "key"):
            state["qkv"][name]["kernel"] = nnx.Param(1e4 * state["qkv"][name]["kernel"][...])
        h, context = random(1, 1, LENGTH, 16), one_row(CONFIG, LENGTH)
        about = jax.jit(lambda h: nnx.merge(graphdef, state)(h, context)[1])(h)
        assert 0.1 < float(about["logit_absmax"]) <= 4**0.5 + 1e-5

    @pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"mlp"}))
    def test_fewer_heads_of_keys_have_fewer_parameters(self, name):
        grouped = dataclasses.replace(CONFIG, qk_norm="none", num_kv_heads=1)
        state = jax.eval_shape(lambda: nnx.state(build_mixer(name, grouped, rngs=nnx.Rngs(0))))
        assert parameter_count(state) == 2 * 16 * 16 + 2 * 16 * 4


class TestDEC22:
    @pytest.mark.parametrize("name", FIXED)
    def test_no_step_computes_queries_and_keys_again(self, name):
        """Without their projections it goes on as if nothing had happened: that its logits are those of the forward
        pass is tested for every mixer in tests/generation/test_decoder.py."""
        config = dataclasses.replace(CONFIG, pattern=(name,))
        decoder, tokens = Decoder(config, random_params(config), length=LENGTH), np.asarray(tokens_of(1, LENGTH))

        def continued() -> np.ndarray:
            state = prefilled()
            return np.asarray(decoder.append(decoder.append(state, tokens[:, 4]), tokens[:, 5]).logits)

        def prefilled():
            return jax.tree.map(jnp.copy, start)

        start = decoder.prefill([tokens[0, :4]])
        wanted = continued()
        for period in decoder.params.periods:
            qkv = period["blocks"][f"0_{name}"]["mixer"]["parts"]["attention"]["qkv"]
            for which in ("query", "key"):
                qkv[which]["kernel"] = jnp.full_like(qkv[which]["kernel"], jnp.nan)
        np.testing.assert_array_equal(continued(), wanted)
        assert np.isnan(np.asarray(decoder.prefill([tokens[0, :4]]).logits)).all()

    @pytest.mark.parametrize("name", FIXED)
    def test_its_cache_grows_with_the_length_and_not_with_its_square(self, name):
        """2 d numbers a place, once for all rows, beside the values of every row."""
        part = part_of(name)
        for rows, length in ((1, 100), (3, 100), (3, 1000)):
            cache = jax.eval_shape(lambda rows=rows, length=length: part.empty_cache(rows, length))
            assert sum(x.size for x in jax.tree.leaves(cache)) == (2 + rows) * length * 16

    def test_the_map_of_all_places_is_that_of_fewer_where_streams_go_through_aamoe_layers(self):
        """A hybrid (DEC-10): the stream of a decoder is as long as its room, that of a forward pass as its row."""
        config = small(pattern=("aamoe+random_qk",), num_layers=2)
        assert_parity(config, random_params(config), length=2 * M + 3, starts=[M - 2])
