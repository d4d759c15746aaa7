"""What mixtures of experts claim beside their definitions: work, continuity, capacity, routers, what they count.

Their definitions, gradients, causality and decoding are tested with those of all mixers by name (`test_every_mixer.py`
says where), their losses and the weight of sparsity in tests/training/test_auxiliary.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.cost import forward_flops
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import build_mixer, costs
from aamoe_jax.mixers.costs import Setting
from aamoe_jax.mixers.expert_sum import Copies, collect, expert_sum, in_buffers, in_order, spread
from aamoe_jax.mixers.experts import ExpertRouter, MoEConfig, within_room
from aamoe_jax.mixers.grouped import BLOCKS, blocks_of, grouped_feed_forward, room_for
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.mixers.weighted_sum import top_selected
from aamoe_jax.shards import WHOLE, Shards
from tests.aamoe.helpers import M, model_config
from tests.evaluation.test_causality import probed
from tests.generation.helpers import assert_parity
from tests.test_model import params_of

D, E, LENGTH = 16, 4, 24
MOE = MoEConfig(num_experts=E, top_k=2, expert_width=8)
CONFIG = ModelConfig(d_model=D, num_heads=2, num_layers=1, own=(MOE,))


def layer_of(name: str, **changes) -> nnx.Module:
    """The part of a mixer that has the experts."""
    config = dataclasses.replace(CONFIG, own=(dataclasses.replace(MOE, **changes),))
    return build_mixer(name, config, rngs=nnx.Rngs(0)).parts["experts"]


def context_of(segment_ids) -> Context:
    segment_ids = jnp.asarray(segment_ids)
    places = jnp.arange(segment_ids.shape[1])
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    positions = places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
    return Context(segment_ids, positions, "prefix", 1.0)


ONE_DOCUMENT = np.ones((1, LENGTH), np.int32)


def tokens(seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (1, LENGTH, D))


def run(layer: nnx.Module, h: jax.Array, segment_ids=ONE_DOCUMENT) -> tuple[np.ndarray, dict]:
    graphdef, params = nnx.split(layer)
    apply = jax.jit(lambda params, h: nnx.merge(graphdef, params)(h, context_of(segment_ids)))
    return jax.device_get(apply(params, h))


def with_gradients(function, *operands):
    """Gradients, and what they are of, against a random direction."""
    output, pull_back = jax.vjp(function, *operands)
    return output, *pull_back(jax.random.normal(jax.random.key(9), output.shape).astype(output.dtype))


def assert_close(found, wanted, tolerance: float = 1e-5):
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * np.abs(y).max())


class TestGrouped:
    """The feed-forward of every group: many blocks, few rows, none."""

    SIZES = (
        (BLOCKS[0] + BLOCKS[1] + BLOCKS[-1] + 7, 0, 1, 2 * BLOCKS[0], BLOCKS[-1], 0),
        (0, 0, BLOCKS[-1] - 1, BLOCKS[-1] + 1, 0, 130),
        (5, 3, 0, 1, 0, 2),
    )

    @staticmethod
    def operands(sizes: tuple[int, ...], dtype: str = "float32"):
        """Rows and weights are 0 past the last group, or may be anything of a finite size."""
        count = room_for(sum(sizes), max(max(sizes), 1))
        shapes = ((count, D), (count,), (len(sizes), D, 6), (len(sizes), 6, D))
        keys = jax.random.split(jax.random.key(0), 4)
        rows, weight, *weights = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
        weight = jnp.where(jnp.arange(count) < sum(sizes), weight, 0)
        return rows.astype(dtype), weight, *(x.astype(dtype) for x in weights)

    @staticmethod
    def definition(rows, weight, keys, values, *, sizes):
        outputs, start = [], 0
        for key, value, size in zip(keys, values, sizes, strict=True):
            at = slice(start, start + size)
            hidden = (weight[at, None] * jax.nn.relu(rows[at] @ key)).astype(rows.dtype)
            outputs.append(jnp.matmul(hidden, value, preferred_element_type=jnp.float32))
            start += size
        return jnp.concatenate([*outputs, jnp.zeros(rows[start:].shape)])

    def both(self, sizes, dtype):
        operands = self.operands(sizes, dtype)
        grouped = lambda *x: grouped_feed_forward(*x, jnp.array(sizes), max(max(sizes), 1))  # noqa: E731
        found = jax.jit(functools.partial(with_gradients, grouped))(*operands)
        definition = functools.partial(self.definition, sizes=sizes)
        return found, jax.jit(functools.partial(with_gradients, definition))(*operands)

    @pytest.mark.parametrize("sizes", SIZES)
    def test_it_is_a_loop_over_groups(self, sizes):
        found, wanted = self.both(sizes, "float32")
        real = np.arange(len(wanted[2])) < sum(sizes)  # weights of what is of no group are no one's
        assert_close([x * real if x.ndim == 1 else x for x in found], wanted)

    def test_in_bfloat16_products_are_rounded_and_sums_are_not(self):
        found, wanted = self.both(self.SIZES[1], "bfloat16")
        assert_close(found[3:], wanted[3:], 0.02)  # keys and values: sums over rows
        assert_close(found[:2], wanted[:2], 0.02)

    def test_blocks_are_no_larger_than_groups_can_be(self):
        assert blocks_of(10**6) == BLOCKS
        assert blocks_of(BLOCKS[0] - 1) == BLOCKS[1:]
        assert blocks_of(5) == (5,)


class TestExpertSum:
    """The sum over the chosen."""

    TOKENS = 2 * BLOCKS[-1] + 40
    MOST = 3

    @functools.cached_property
    def operands(self):
        keys = jax.random.split(jax.random.key(0), 5)
        shapes = ((self.TOKENS, D), (E, D, 6), (E, 6, D), (self.TOKENS, E))
        operands = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
        # One expert for all, one for half, one for few, one for none.
        chosen = jax.random.uniform(keys[4], operands[3].shape) < jnp.array([1.0, 0.5, 0.02, 0.0])
        return operands, chosen

    def found(self, x, keys, values, coefficients, *, most: int, room: int):
        copies = Copies.of(coefficients, self.operands[1], most)
        return expert_sum(x, keys, values, copies, WHOLE, room)

    @pytest.mark.parametrize("most", [MOST, E])
    def test_it_is_the_sum_over_all_with_zeros_for_the_others(self, most):
        operands, chosen = self.operands
        assert chosen.sum(-1).max() == self.MOST

        def dense(x, keys, values, coefficients):
            hidden = jax.nn.relu(jnp.einsum("td,edw->tew", x, keys))
            return jnp.einsum("te,tew,ewd->td", coefficients * chosen, hidden, values)

        for room in (self.TOKENS * most, int(chosen.sum())):
            sparse = functools.partial(self.found, most=most, room=room)
            found = jax.jit(functools.partial(with_gradients, sparse))(*operands)
            assert_close(found, with_gradients(dense, *operands), 1e-4)

    def test_what_nobody_chose_changes_nothing(self):
        (x, keys, values, coefficients), _ = self.operands
        found = functools.partial(self.found, most=self.MOST, room=10**4)
        broken = keys.at[3].set(jnp.nan)
        np.testing.assert_array_equal(found(x, broken, values, coefficients), found(x, keys, values, coefficients))

    def test_copies_are_in_order_or_in_buffers(self):
        group = jnp.array([1, 3, 0, 1, 1, 0, 3])  # 3: none
        slots, sizes = in_order(group, 3, 8)
        assert sizes.tolist() == [2, 3, 0]
        assert slots.copy.tolist() == [2, 5, 0, 3, 4, 1, 6, 7]
        assert slots.place.tolist() == [2, 5, 0, 3, 4, 1, 6]
        assert in_order(group, 3, 5)[0].copy.tolist() == [2, 5, 0, 3, 4]
        slots = in_buffers(group, 3, 4)
        assert slots.copy.tolist() == [2, 5, 7, 7, 0, 3, 4, 7, 7, 7, 7, 7]
        assert slots.place.tolist() == [4, 12, 0, 5, 6, 1, 12]

    def test_to_spread_and_to_collect_are_transposes(self):
        slots = in_buffers(jnp.array([1, 3, 0, 1, 1, 0, 3, 2]), 3, 4)
        x, y = (jax.random.normal(jax.random.key(n), (rows, 5)) for n, rows in ((0, 4), (1, 12)))
        np.testing.assert_allclose((spread(x, slots, 2) * y).sum(), (x * collect(y, slots, 2)).sum(), rtol=1e-5)
        for function, of in ((spread, x), (collect, y)):
            found = jax.vjp(lambda z, f=function: f(z, slots, 2), of)[1]((y, x)[function is collect])[0]
            np.testing.assert_array_equal(found, (collect(y, slots, 2), spread(x, slots, 2))[function is collect])


class TestShardCapacity:
    """Pairs past what a shard takes, on one: those of the last tokens are left out, and counted."""

    def run(self, name: str, shards: Shards, **changes):
        layer = layer_of(name, shard_capacity=1.0, **changes)
        context = dataclasses.replace(context_of(ONE_DOCUMENT), shards=shards)
        return jax.device_get(layer(tokens(), context))

    def test_relu_experts_have_as_many_pairs_as_they_aim_at(self):
        whole, about = self.run("relu_moe", WHOLE, mean_experts=1)
        output, bounded = self.run("relu_moe", Shards(), mean_experts=1)
        assert about["moe_dropped"] == 0
        wanted = about["moe_load"].sum()
        assert wanted > 1.5 * LENGTH  # half of four experts a token, more or less
        assert bounded["moe_load"].sum() == LENGTH
        assert bounded["moe_dropped"] == wanted - LENGTH
        assert bounded["relu_pairs"] == wanted  # what the sparsity loss sees
        same = np.abs(output - whole).max(-1)[0] < 1e-6
        cut = int(np.argmin(same))
        assert 0 < cut < LENGTH
        assert (np.abs(output[0, cut + 1 :]) == 0).all()

    def test_k_experts_of_one_shard_always_have_room(self):
        np.testing.assert_array_equal(self.run("moe", Shards())[0], self.run("moe", WHOLE)[0])

    def test_of_every_shard_the_first_pairs_are_kept(self):
        chosen = np.random.default_rng(0).random((40, 6)) < 0.6
        kept = np.asarray(within_room(jnp.asarray(chosen), 3, 20))
        for shard in range(3):
            mine = chosen[:, 2 * shard : 2 * shard + 2].copy().reshape(-1)
            mine[np.flatnonzero(mine)[20:]] = False
            np.testing.assert_array_equal(kept[:, 2 * shard : 2 * shard + 2].reshape(-1), mine)

    def test_less_than_the_even_share_is_refused(self):
        with pytest.raises(ConfigError, match=r"MoEConfig.shard_capacity = 0.5: must be at least 1"):
            dataclasses.replace(MOE, shard_capacity=0.5)


class TestUNI03:
    def test_uni_03_the_k_best_share_a_softmax_or_keep_their_share_of_one_over_all(self):
        scores = jnp.array([[[2.0, 0.0, 1.0, -1.0]]])
        real = jnp.ones((1, 1), bool)
        over_kept = np.exp([2, 1]) / np.exp([2, 1]).sum()
        over_all = np.exp([2, 1]) / np.exp([2, 0, 1, -1]).sum()
        for coefficients, wanted in (("softmax_selected", over_kept), ("softmax_then_topk", over_all)):
            mixture = layer_of("moe", coefficients=coefficients)._mixture(scores, real)
            np.testing.assert_allclose(mixture.coefficients[0, 0], [wanted[0], 0, wanted[1], 0], rtol=1e-6)

    def test_ties_go_to_the_lower_index(self):
        assert top_selected(jnp.array([1.0, 1.0, 1.0]), 2).tolist() == [True, True, False]

    def test_every_token_has_k_experts_and_none_is_dropped(self):
        _, about = run(layer_of("moe"), tokens())
        assert about["moe_load"].sum() == 2 * LENGTH
        assert about["moe_dropped"] == 0

    def test_more_experts_than_there_are_is_refused(self):
        with pytest.raises(ConfigError, match=r"MoEConfig.top_k = 5: must be at most num_experts = 4"):
            dataclasses.replace(MOE, top_k=5)


def around_zero(name: str) -> float:
    """By how much the output jumps where the score of one expert of a token passes 0, and its rank the second place."""
    layer = layer_of(name, top_k=1)
    h = jnp.zeros((1, LENGTH, D)).at[..., 0].set(1.0)  # so that the first row of W is the scores
    outputs = []
    for score in (-1e-6, 1e-6):
        scores = jnp.array([0.0, score, -1.0, -1.0])
        layer.router.scores.kernel[...] = jnp.zeros((D, E)).at[0].set(scores)
        outputs.append(run(layer, h)[0])
    return float(np.abs(outputs[0] - outputs[1]).max())


class TestUNI04:
    def test_uni_04_the_output_is_continuous_where_a_choice_jumps(self):
        assert around_zero("relu_moe") < 1e-5
        assert around_zero("moe") > 0.1

    def test_tokens_differ_in_how_many_experts_they_have(self):
        scores = jnp.array([[[-1.0, -2.0, -0.1, -3.0], [1.0, -2.0, 0.5, -3.0], [1.0, 2.0, 0.1, 3.0]]])
        mixture = layer_of("relu_moe")._mixture(scores, jnp.ones((1, 3), bool))
        assert mixture.chosen.sum(-1).tolist() == [[0, 2, 4]]
        np.testing.assert_array_equal(mixture.coefficients, jnp.maximum(scores, 0))


class TestUNI09:
    def test_uni_09_other_tokens_never_change_the_scores(self):
        config = dataclasses.replace(CONFIG, own=(dataclasses.replace(MOE, router="attention"),))
        router = ExpertRouter(config, rngs=nnx.Rngs(0))
        h = tokens()
        context = context_of(ONE_DOCUMENT)
        whole = router(h, context)
        for token in (0, LENGTH - 1):
            others = tokens(2).at[:, token].set(h[:, token])
            np.testing.assert_array_equal(router(others, context)[:, token], whole[:, token])
        assert router.scores.query.shape == (D, E)

    def test_experts_that_all_agree_are_scored_by_the_mean_of_their_values(self):
        config = dataclasses.replace(CONFIG, own=(dataclasses.replace(MOE, router="attention"),))
        router = ExpertRouter(config, rngs=nnx.Rngs(0))
        router.scores.query[...] = jnp.zeros((D, E))
        values = tokens() @ router.scores.value[...]
        wanted = jnp.broadcast_to(values.mean(-1, keepdims=True), values.shape)
        np.testing.assert_allclose(router(tokens(), context_of(ONE_DOCUMENT)), wanted, atol=1e-5)


def convolving() -> ExpertRouter:
    config = dataclasses.replace(CONFIG, own=(dataclasses.replace(MOE, router_input="causal_conv"),))
    router = ExpertRouter(config, rngs=nnx.Rngs(0))
    router.convolution.kernel[...] = jax.random.normal(jax.random.key(3), (3, D))
    return router


class TestUNI10:
    def test_uni_10_scores_depend_on_the_last_tokens_of_the_document_alone(self):
        segment_ids = np.repeat([1, 2], [10, LENGTH - 10])[None]
        changed_by = lambda token: changed(convolving(), segment_ids, token)  # noqa: E731
        assert changed_by(4) == [4, 5, 6, 7]
        assert changed_by(8) == [8, 9]  # the next document begins at 10
        assert changed_by(10) == [10, 11, 12, 13]

    def test_it_starts_as_the_token_alone(self):
        router = convolving()
        router.convolution.kernel[...] = jnp.zeros((3, D))
        context = context_of(ONE_DOCUMENT)
        np.testing.assert_allclose(router(tokens(), context), router.scores(tokens()), atol=1e-6)

    def test_parts_of_rows_too_short_to_look_back_are_refused(self):
        with pytest.raises(ValueError, match="2 tokens of a row on each part of `resource`: must be at least 3"):
            Shards(resource=2).end_of_part_before(jnp.zeros((1, 2, D)), 3)


def changed(router: ExpertRouter, segment_ids: np.ndarray, token: int) -> list[int]:
    """The tokens whose scores change with the input of one."""
    context, h = context_of(segment_ids), tokens()
    difference = router(h, context) - router(h.at[:, token].add(1.0), context)
    return np.flatnonzero(np.abs(np.asarray(difference)).max((0, 2)) > 1e-6).tolist()


class TestUNI11:
    """With two experts and one wanted by all, groups of 8 tokens, and room for 4 of each: the last four are dropped."""

    def layer(self) -> nnx.Module:
        layer = layer_of("switch", num_experts=2, capacity_factor=1.0, capacity_tokens=8)
        layer.router.scores.kernel[...] = jnp.zeros((D, 2)).at[0, 0].set(1.0)
        return layer

    @staticmethod
    def computed(output: np.ndarray) -> list[bool]:
        return (np.abs(output[0]).max(-1) > 0).tolist()

    @property
    def h(self) -> jax.Array:
        return jnp.abs(tokens())

    def test_uni_11_tokens_that_find_no_room_pass_the_layer_by_and_are_counted(self):
        output, about = run(self.layer(), self.h)
        assert self.computed(output) == 3 * ([True] * 4 + [False] * 4)
        assert about["moe_dropped"] == 12
        assert about["moe_load"].tolist() == [12, 0]
        figures = summarize({name: value[None] for name, value in about.items()})
        assert figures["moe_dropped"] == [0.5]
        assert figures["moe_dead"] == [0.5]
        assert figures["moe_entropy"] == [0.0]
        assert figures["moe_active"] == [0.5]

    def test_documents_take_no_room_from_each_other_and_padding_takes_none(self):
        segment_ids = np.repeat([1, 2, 0], [6, 10, LENGTH - 16])[None]
        output, about = run(self.layer(), self.h, segment_ids)
        second = [True] * 4 + [False] * 4 + [True] * 2
        assert self.computed(output) == [True] * 4 + [False] * 2 + second + [False] * 8
        assert about["moe_tokens"] == 16
        assert about["moe_dropped"] == 6


class TestOptions:
    """Routers and capacity that the defaults leave out, in all mixtures at once."""

    CONFIG = model_config(
        pattern=("moe+switch+relu_moe",),
        num_layers=1,
        own=(
            MoEConfig(
                num_experts=3,
                expert_width=8,
                coefficients="softmax_then_topk",
                router="attention",
                router_input="causal_conv",
                capacity_factor=1.0,
                capacity_tokens=6,
            ),
        ),
    )

    def params(self):
        params = params_of(self.CONFIG)
        for block in params["periods"]["blocks"].values():
            kernel = block["mixer"]["parts"]["experts"]["router"]["convolution"]
            kernel["kernel"] = jax.random.normal(jax.random.key(1), kernel["kernel"].shape)
        return params

    def test_they_decode_as_they_were_trained(self):
        assert_parity(self.CONFIG, self.params(), length=2 * M + 3, starts=[1, M + 3, 2 * M])

    def test_they_do_not_see_the_future(self):
        found = probed(self.CONFIG, "prefix")
        assert found.before == (0.0,) * 4
        assert min(found.after) > 0


class TestCost:
    def test_experts_that_a_token_does_without_cost_nothing(self):
        few, many = (dataclasses.replace(CONFIG, own=(dataclasses.replace(MOE, num_experts=n),)) for n in (4, 64))
        model_flops = lambda name, config: costs(name, Setting(config, 1, 1)).model_flops  # noqa: E731
        assert model_flops("moe", many) - model_flops("moe", few) == 2 * D * 60  # scores
        assert model_flops("moe", few) == 2 * D * 4 + 2 * 4 * D * 8
        assert model_flops("switch", few) == 2 * D * 4 + 4 * D * 8

    def test_what_computed_is_counted_where_it_is_known(self):
        config = dataclasses.replace(CONFIG, pattern=("moe+switch+relu_moe",))
        meant = forward_flops(config, 2, 100, {})
        loads = np.array([[100.0] * 4, [50.0] * 4, [150.0, 150, 150, 0]])  # 400 pairs of 400, 200 of 200, 450 of 400
        assert forward_flops(config, 2, 100, {"moe_load": loads}) - meant == 50 * 4 * D * 8
