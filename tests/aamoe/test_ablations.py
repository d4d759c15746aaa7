"""What the layer is compared with from within: other signals, a gate, prices, budgets of their own (AA-23, AA-24,
AA-32, AA-39)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.aamoe.allocation import Candidates, OneBudget, Price, Prices, Ranking, afford, pay
from aamoe_jax.aamoe.budget import UNBOUNDED, Budget
from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.config import BudgetConfig, ConfigError
from tests.aamoe.helpers import E, M, apply, context_of, inputs, layer_of, model_config, padded

LENGTH = 6 * M


def allocated(config, importance: float = 1.0):
    """(allocation, statistics) of one row, and the layer that made them."""
    layer = layer_of(config, importance=importance)
    h, context = inputs(1, LENGTH), context_of(config, 1, LENGTH)
    return jax.jit(lambda h: (layer.allocate(h, context), padded(layer, h, context)[1]))(h)


class TestAA23:
    def slopes(self, signal: str, **budget: float) -> dict[str, float]:
        """The largest gradient of a loss to each of the router's parameters."""
        layer = layer_of(model_config(signal=signal, **budget))
        h, context = inputs(1, LENGTH), context_of(layer.config, 1, LENGTH)
        graphdef, params = nnx.split(layer)
        loss = lambda params: (nnx.merge(graphdef, params)(h, context)[0] ** 2).sum()  # noqa: E731
        router = jax.jit(jax.grad(loss))(params)["router"]
        return {name: float(jnp.abs(leaf[...]).max()) for name, leaf in jax.tree.map(lambda x: x, router).items()}

    def test_the_signal_of_one_kind_can_be_stopped(self):
        """W_c scores chunks alone, the embeddings experts alone."""
        joint, context, experts = (self.slopes(s) for s in ("joint", "context_stopped", "experts_stopped"))
        assert min(joint.values()) > 0
        assert context == {name: pytest.approx(joint[name] if "expert" in name else 0.0) for name in joint}
        assert experts == {name: pytest.approx(0.0 if "expert" in name else joint[name]) for name in joint}

    def test_it_is_stopped_in_prices_too(self):
        """What experts were wanted before is in the price of every expert."""
        joint, experts = (self.slopes(signal, load_price=0.5, beta=5.0) for signal in ("joint", "experts_stopped"))
        assert min(joint.values()) > 0
        assert [name for name, slope in experts.items() if slope == 0] == ["expert_embeddings"]

    def test_separate_probabilities_sum_to_one_over_each_kind(self):
        """With a budget that affords everything, P of chunks sums to 1, and so does that of experts."""
        config = model_config(signal="separate", beta=1000.0, slack=10_000, importance="uniform")
        allocation, _ = allocated(config)
        chunks, used = LENGTH // M, jnp.arange(allocation.resource.shape[-1]) < allocation.count[..., None]
        probability = jnp.where(used, jnp.exp(allocation.log_prob), 0.0)
        expert = (allocation.resource >= chunks) & used
        expert = expert.at[..., 0].set(False)  # the window
        np.testing.assert_allclose(jnp.where(expert, probability, 0).sum(-1), 1, atol=1e-5)
        np.testing.assert_allclose(jnp.where(expert, 0, probability).sum(-1), 1, atol=1e-5)

    def test_separate_probabilities_are_not_normalised_again_beside_a_null_slot(self):
        """P of each kind adds up to 1 with a null slot, where the bias is normalised, as it does without."""
        config = model_config(
            signal="separate", beta=1000.0, slack=10_000, importance="uniform", null_slot="learned", local="none"
        )
        allocation, _ = allocated(config)
        used = jnp.arange(allocation.resource.shape[-1]) < allocation.count[..., None]
        total = jnp.where(used, jnp.exp(allocation.log_prob), 0.0).sum(-1)[0]
        np.testing.assert_allclose(total[:M], 1, atol=1e-5)  # experts alone
        np.testing.assert_allclose(total[M:], 2, atol=1e-5)  # and chunks


class TestAA24:
    def test_a_gate_weighs_experts_and_chooses_none(self):
        plain, gated = model_config(importance="uniform"), model_config(importance="uniform", expert_gate=True)
        (before, _), (after, _) = allocated(plain), allocated(gated)
        np.testing.assert_array_equal(before.resource, after.resource)
        np.testing.assert_array_equal(before.count, after.count)
        used = jnp.arange(before.resource.shape[-1]) < before.count[..., None]
        changed = np.asarray(before.log_prob != after.log_prob)
        np.testing.assert_array_equal(changed, np.asarray(used & (before.resource >= LENGTH // M)))

    def test_it_starts_where_the_layer_without_is(self):
        h, found = inputs(1, LENGTH), []
        for gate in (False, True):
            config = model_config(expert_gate=gate)
            layer = AAMoELayer(config, rngs=nnx.Rngs(0))
            found.append(apply(layer, h, context_of(config, 1, LENGTH))[0])
        np.testing.assert_array_equal(*found)

    @pytest.mark.parametrize("changes", [{"bias": "none"}, {"num_experts": 0}])
    def test_it_needs_a_bias_of_experts(self, changes):
        with pytest.raises(ConfigError, match=r"AAMoEConfig.expert_gate = True: is added to the bias of experts"):
            model_config(expert_gate=True, **changes)


class TestAA32:
    def test_uniform_budgets_are_beta_whatever_the_importance(self):
        allocation, _ = allocated(model_config(importance="uniform", beta=3.0))
        assert (allocation.count == 3).all()

    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    def test_separate_budgets_buy_the_best_of_each_kind(self, share):
        config = model_config(importance="uniform", beta=5.0, expert_share=share)
        allocation, about = allocated(config)
        free, _ = allocated(model_config(importance="uniform", beta=1000.0, slack=10_000))
        allocation, free = jax.device_get((allocation, free))  # numpy slices compile nothing
        chunks = LENGTH // M
        for i in range(LENGTH):
            resource = allocation.resource[0, i, : allocation.count[0, i]]
            ranked = free.resource[0, i, : free.count[0, i]][1:]
            experts = min(int(share * 5 + 1e-4), 4, E)
            context = min(5 - experts - 1, i // M)
            wanted = [i // M, *ranked[ranked < chunks][:context], *ranked[ranked >= chunks][:experts]]
            assert resource.tolist() == wanted, i
        assert float(about["pairs_expert"]) == LENGTH * experts

    def test_context_that_is_not_there_takes_no_expert_away(self):
        config = model_config(importance="uniform", beta=8.0, expert_share=0.5)
        allocation, _ = allocated(config)
        slots = jnp.arange(allocation.resource.shape[-1])
        used = (slots < allocation.count[..., None]) & (slots > 0)  # beside the window
        experts = (used & (allocation.resource >= LENGTH // M)).sum(-1)
        assert (experts == 4).all()

    def test_each_is_paid_from_its_own_share(self):
        config = model_config(importance="uniform", beta=6.0, expert_share=0.5, local="none", bias="log_prob")
        allocation, _ = allocated(config)
        last, chunks = LENGTH - 1, LENGTH // M
        free, _ = allocated(model_config(importance="uniform", beta=1000.0, slack=10_000, local="none"))
        allocation, free = jax.device_get((allocation, free))
        score = {
            int(j): float(p - jax.nn.log_sigmoid(jnp.float32(1000.0 - k)))
            for k, (j, p) in enumerate(zip(free.resource[0, last], free.log_prob[0, last], strict=True), start=1)
        }
        for slot in range(6):
            j, place = int(allocation.resource[0, last, slot]), slot % 3 + 1
            assert (j >= chunks) == (slot >= 3)
            wanted = score[j] + float(jax.nn.log_sigmoid(jnp.float32(3.0 - place)))
            assert float(allocation.log_prob[0, last, slot]) == pytest.approx(wanted, abs=1e-4)

    @pytest.mark.parametrize("changes", [{"context": "none"}, {"num_experts": 0}])
    def test_shares_need_two_kinds(self, changes):
        with pytest.raises(ConfigError, match=r"BudgetConfig.expert_share = 0.5: there is only one kind of resource"):
            model_config(expert_share=0.5, **changes)


class TestAA39:
    def test_affordability_is_of_the_cumulative_price(self):
        prices, four = jnp.array([[[1.0, 2.5, 1.0, 1.0]]]), jnp.full((1, 1), 4)
        count, cost = pay(prices, four, four)
        assert count.tolist() == [[2]]
        best = Ranking(jnp.zeros((1, 1, 4)), jnp.arange(4)[None, None])
        found = afford(best, count, jnp.full((1, 1, 1), 4.7), cost).log_prob[0, 0]
        np.testing.assert_allclose(found[:2], jax.nn.log_sigmoid(jnp.array([3.7, 1.2])), rtol=1e-6)
        assert found[2:].tolist() == [0.0, 0.0]

    def test_at_price_one_it_is_the_rank(self):
        random = np.random.default_rng(0)
        scores = jnp.asarray(random.normal(size=(2, 9, 5)), jnp.float32)
        own, available = jnp.zeros((2, 9), jnp.int32), jnp.ones((2, 9, 5), bool)
        choice = Candidates(scores, available, None, own, available.sum(-1), 3, 5, UNBOUNDED, False)
        budget = jnp.asarray(random.uniform(0, 6, (2, 9)), jnp.float32)
        count = jnp.minimum(jnp.floor(budget).astype(jnp.int32), 5)
        priced, plain = (how(choice, Budget(budget, count, count)) for how in (Prices(Price()), OneBudget()))
        jax.tree.map(np.testing.assert_array_equal, priced, plain)

    @pytest.mark.parametrize("most", [None, 4])
    def test_a_budget_pays_for_prices_not_for_a_number(self, most):
        """8 buy the window and 3 experts at 2 each in the first chunk, though only 7 resources are there."""
        config = model_config(importance="uniform", beta=8.0, slack=100, expert_price=2.0, max_resources=most)
        allocation, _ = allocated(config)
        assert (allocation.count[0, :M] == 4).all()

    def test_dear_experts_are_bought_less(self):
        cheap, dear = (allocated(model_config(expert_price=price))[1] for price in (1.0, 3.0))
        assert float(dear["pairs_expert"]) < float(cheap["pairs_expert"])
        spent = float(dear["pairs_local"] + dear["pairs_context"] + 3 * dear["pairs_expert"])
        assert spent <= float(dear["capacity"]) + model_config().aamoe.budget.slack

    def test_distance_makes_a_chunk_dearer(self):
        config = model_config(importance="uniform", beta=4.0, num_experts=0, distance_price=0.5, slack=0)
        allocation, _ = allocated(config)
        chunks, count = np.asarray(allocation.resource[0]), np.asarray(allocation.count[0])
        for i in range(LENGTH):
            given = chunks[i, : count[i]]
            assert given[0] == i // M  # the window
            prices = 1 + 0.5 * np.log2(np.maximum(i // M - given, 1))
            assert prices.sum() <= 4.0 + 1e-4
            rest = 4.0 - prices.sum()
            assert rest < 1 + 0.5 * np.log2(max(i // M, 1)) or len(given) == 1 + i // M
        assert count[-1] < 4

    def test_load_is_what_the_tokens_before_wanted(self):
        """Of the token's own document, without the token itself: packed documents pay what they would alone."""
        config = model_config(load_price=0.5)
        layer, segments = layer_of(config), jnp.array([[1] * 2 * M + [2] * 4 * M])
        h = inputs(1, LENGTH)
        packed, whole = context_of(config, 1, LENGTH, segment_ids=segments), context_of(config, 1, LENGTH)
        load = jax.jit(lambda h: layer.forward(h, packed)[1].candidates.load)(h)
        scores = jax.jit(lambda h: layer.router.project(h, whole.rotary(config).tokens)[1])(h)
        wanted, load = np.asarray(jax.nn.softmax(scores, axis=-1))[0], np.asarray(load)
        for start, end in ((0, 2 * M), (2 * M, LENGTH)):
            assert not load[0, start].any()
            for i in range(start + 1, end):
                np.testing.assert_allclose(load[0, i], wanted[start:i].mean(0), atol=1e-6)

    def test_an_expert_costs_more_the_more_it_was_wanted(self):
        load = jnp.array([[[0.5, 0.25, 0.25, 0.0]]])
        choice = Candidates(
            jnp.zeros((1, 1, 6)), jnp.ones((1, 1, 6), bool), None, jnp.zeros((1, 1), jnp.int32),
            jnp.full((1, 1), 6), 2, 6, UNBOUNDED, False, load,
        )  # fmt: skip
        prices = Price(expert=1.5, load=2.0)(jnp.array([[[0, 2, 3, 5]]]), choice)
        np.testing.assert_allclose(prices[0, 0], [1.0, 1.5 + 2 * 4 * 0.5, 1.5 + 2 * 4 * 0.25, 1.5])

    def test_a_price_by_load_buys_fewer_experts(self):
        free, dear = (allocated(model_config(load_price=price, beta=5.0))[1] for price in (0.0, 1.0))
        assert float(dear["pairs_expert"]) < 0.9 * float(free["pairs_expert"])

    def test_refusals_name_the_field(self):
        with pytest.raises(ConfigError, match=r"BudgetConfig.load_price = -1.0: must be a number of at least 0"):
            BudgetConfig(load_price=-1.0)
        with pytest.raises(ConfigError, match=r"BudgetConfig.load_price = 1.0: there are no experts"):
            model_config(load_price=1.0, num_experts=0)
        with pytest.raises(ConfigError, match=r"BudgetConfig.expert_price = 0.5: must be a number of at least 1"):
            BudgetConfig(expert_price=0.5)
        with pytest.raises(ConfigError, match=r"BudgetConfig.distance_price = -1.0: must be a number of at least 0"):
            BudgetConfig(distance_price=-1.0)
        with pytest.raises(ConfigError, match=r"must be 1 where experts have a share of their own"):
            BudgetConfig(expert_price=2.0, expert_share=0.5)
