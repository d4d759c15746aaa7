"""The AA-MoE layer, top to bottom: resources -> scores -> budget -> allocation -> attention (section 2.2; AA-01).

Shapes: b rows, L tokens per row (padded to whole chunks), m tokens per chunk, l chunks per row, E experts, A = l + E
resources to choose from, K slots per token, T = b L, d width, H heads, k = d / H. Over a mesh (`shards.py`): n of the L
tokens are here, s of them attend together, with some of the heads.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from aamoe_jax.aamoe import allocation as allocation_lib
from aamoe_jax.aamoe import budget as budget_lib
from aamoe_jax.aamoe import parallel, resources, statistics
from aamoe_jax.aamoe.allocation import Allocation, BiasScale, Choices, Kind, Purchase, Ranking
from aamoe_jax.aamoe.cache import Cache, empty_cache
from aamoe_jax.aamoe.costs import AAMoECosts
from aamoe_jax.aamoe.parallel import Given, Softmax
from aamoe_jax.aamoe.pooled import PooledRouter
from aamoe_jax.aamoe.router import Heads, LearnedRouter
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.layers import (
    Projection,
    QueryKeyValue,
    flatten_tokens,
    merge_heads,
    residual_gain,
    rotate_heads,
    split_heads,
)
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.convolution import CausalConvolution, last_tokens
from aamoe_jax.mixers.family import Form
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE, TENSOR, TOKENS
from pallas_kernels.block_sparse_attention import (
    Pairs,
    Slots,
    Window,
    block_sparse_attention,
    paged_attention,
)

UNBOUNDED = 2**30
"""More than any budget."""


@register("aamoe", "chunks of context and experts that a budget buys, in one attention", heads="softmax", neurons=True)
class AAMoELayer(AAMoECosts):
    """Every token attends to the B_i resources that its budget affords, chunks and experts alike, in one call (AA-41).

    Parameters: W^Q, W^K, W^V, W^O; W_c and expert embeddings e_l of a learned router; w_B; expert keys and values
    [E, m, d], which bypass W^K, W^V and the rotary positions (decisions 08-10). One loss reaches them all (AA-22), and
    nothing but attention mixes experts (AA-24).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        layer, width = config.aamoe, config.d_model
        shape = (layer.num_experts, layer.chunk_size, width)
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(width, width, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config))
        if layer.key_convolution:
            self.convolution = CausalConvolution(width)
        self.router = PooledRouter(config) if layer.router == "pooled" else LearnedRouter(config, rngs=rngs)
        self.importance = nnx.Param(jnp.zeros(width), axes=(None,))
        # Experts (AA-08). Standard deviation 1 is that of W^K h and W^V h (decision 29).
        keys, values = (jax.random.normal(rngs.params(), shape) for _ in range(2))
        if layer.num_experts:  # a checkpoint cannot hold an array without elements
            axes = ("resources", "storage", "heads")
            self.expert_keys, self.expert_values = nnx.Param(keys, axes=axes), nnx.Param(values, axes=axes)
        if layer.budget.normalizer == "row":
            self.predictor = budget_lib.BudgetPredictor(width, rngs=rngs)
        if layer.null_slot == "learned":
            self.null_logit = nnx.Param(jnp.zeros(config.num_heads), axes=("heads",))

    @staticmethod
    def form() -> Form:
        """The instance of the family of mixers."""
        return Form(
            "chunks of earlier tokens, and experts",
            "q . k / sqrt(k) + log P(i, j)",
            "the best that the budget buys",
            "softmax over the kept",
            "x W^V and experts' rows, then W^O",
        )

    def __call__(self, h: Float[Array, "b n d"], context: Context) -> tuple[Float[Array, "b n d"], Statistics]:
        """The layer's output, 0 for tokens without budget (AA-26), and its statistics."""
        length = h.shape[1]
        h, context = self._prepare(h, context)
        heads = self._project(h, context)
        allocation, about_budget = self._allocate(h, heads, context)
        attention, mass, overflow = self._attend(heads, allocation, context)
        output = context.shards.scatter_sum(self.output(merge_heads(attention)), TENSOR)
        about = statistics.spending(
            allocation,
            mass,
            about_budget.pop("wanted"),
            context.real,
            context.beta * context.real.sum().astype(jnp.float32),
            num_chunks=self._num_chunks(context),
            num_experts=self.config.aamoe.num_experts,
            local_first=self._local_first,
        )
        about_budget.pop("paid")
        about["overflow"] = overflow / context.shards.tensor  # every part of the heads has the same pairs
        per_token = {"spent": allocation.count, "budget": about_budget.pop("budget")}
        if context.detail == "resources":
            per_token |= {"resource": allocation.resource, "mass": mass, "probability": about_budget.pop("probability")}
        if context.detail != "sums":
            about |= {name: value[:, :length] for name, value in per_token.items()}
        return output[:, :length], about | about_budget

    def allocate(self, h: Float[Array, "b n d"], context: Context) -> Allocation:
        """Which resources every token of h gets (eq 8); rows are padded to whole chunks."""
        h, context = self._prepare(h, context)
        return self._allocate(h, self._project(h, context), context)[0]

    def _project(
        self, h: Float[Array, "b n d"], context: Context, of_keys: Float[Array, "b s d"] | None = None
    ) -> Heads:
        """Heads of the tokens that attend together.

        Args:
          of_keys: what keys are projected from, where tokens before these are known; None: h, or a convolution of it.
        """
        together = context.shards.gather(h, TENSOR)
        if of_keys is None and self.config.aamoe.key_convolution:
            of_keys = self.convolution(together, context).astype(h.dtype)
        query, key, value = self.qkv(together, of_keys)
        turn = context.turns(self.config).heads_here(context.shards)
        # Eq 9 (AA-16): chunk keys are projected, then rotated; expert rows are neither.
        rotated = rotate_heads(query, turn), rotate_heads(key, turn)
        expert_key, expert_value = (x.astype(h.dtype) for x in self._expert_rows(key.shape[-2]))
        return Heads(together, query, *rotated, value, self.qkv.norm_key(expert_key), expert_value)

    def _expert_rows(self, heads: int) -> tuple[Float[Array, "E m H k"], Float[Array, "E m H k"]]:
        """Keys, not yet normed like those of chunks, and values."""
        layer, size = self.config.aamoe, self.config.head_dim
        if not layer.num_experts:
            nothing = jnp.zeros((0, layer.chunk_size, heads, size))
            return nothing, nothing
        return split_heads(self.expert_keys[...], size), split_heads(self.expert_values[...], size)

    def _allocate(self, h: Float[Array, "b n d"], heads: Heads, context: Context) -> tuple[Allocation, Statistics]:
        chunk, chunks = context.index // self.config.aamoe.chunk_size, self._available_chunks(context)
        scores = self.router.scores(h, heads, chunks, context)
        choices = self._choices(*scores, chunk, context.shards.part(chunks, TENSOR), context)
        budget, purse, about = self._budgets(h, self._largest_purse(choices, context), context)
        ranking, bought = self._buy(choices, chunk, budget, purse, context)
        if context.detail == "resources":
            # The log probability of unused slots is set to 0, so that theirs reads 1: it means nothing.
            about["probability"] = jnp.exp(allocation_lib.allocate(ranking, bought, "normalized").log_prob)
        return allocation_lib.allocate(ranking, bought, self._bias_scale), about | {"paid": purse}

    def _available_chunks(self, context: Context) -> Bool[Array, "b s l"]:
        """Which chunks the tokens that attend together can be given."""
        everywhere = jnp.broadcast_to(jnp.arange(context.segment_ids.shape[1]), context.segment_ids.shape)
        index, segment = (context.shards.part(x, RESOURCE) for x in (everywhere, context.segment_ids))
        m = self.config.aamoe.chunk_size
        chunks = resources.available_chunks(index // m, segment, resources.chunk_ends(context.segment_ids, m))
        return self._routed(chunks)

    def _routed(self, chunks: Bool[Array, "b s l"]) -> Bool[Array, "b s l"]:
        """Those of the completed chunks that can be chosen: without routed context none."""
        return jnp.zeros_like(chunks) if self.config.aamoe.context == "none" else chunks

    def _choices(
        self,
        chunk_scores: Float[Array, "b L l"],
        expert_scores: Float[Array, "b L E"],
        local_scores: Float[Array, "b L"],
        chunk: Int[Array, "b L"],
        chunks: Bool[Array, "b L l"],
        context: Context,
    ) -> Choices:
        """The scores of all resources, and which of them every token can have.

        Args:
          chunk: the chunk that each token is in.
          chunks: which chunks it can be given.
        """
        layer, own = self.config.aamoe, chunk[..., None]
        scores = jnp.concatenate([chunk_scores, expert_scores], axis=-1)
        experts = jnp.broadcast_to(context.real[..., None], expert_scores.shape)
        available = jnp.concatenate([chunks, experts], axis=-1)
        if layer.local == "routed":
            is_own = jnp.arange(scores.shape[-1]) == own
            scores = jnp.where(is_own, local_scores[..., None], scores)
            available |= is_own & context.real[..., None]
        slots = self._slots(scores.shape[-1], context.max_scale)
        most = jnp.minimum(available.sum(-1) + self._local_first, self._most(slots, context))
        choices = Choices(scores, available, local_scores if self._local_first else None, most)
        return choices.learning_from(layer.signal, layer.num_experts)

    def _largest_purse(self, choices: Choices, context: Context) -> Int[Array, "b L"]:
        """The most that a budget is worth before anything is bought: the rest is not spent."""
        budget = self.config.aamoe.budget
        if budget.expert_price != 1:  # it pays for prices, not for a number of resources
            return jnp.full_like(choices.most, UNBOUNDED)
        if budget.expert_share is not None:  # each kind has its share of it, whatever there is of the other
            return jnp.full_like(choices.most, self._most(UNBOUNDED, context))
        return choices.most

    def _buy(
        self,
        choices: Choices,
        chunk: Int[Array, "b L"],
        budget: Float[Array, "b L"],
        purse: Int[Array, "b L"],
        context: Context,
    ) -> tuple[Ranking, Purchase]:
        """What every token can have, best first, and how much of it its purse buys: its budget, floored and capped."""
        layer, slots = self.config.aamoe, self._slots(choices.scores.shape[-1], context.max_scale)
        price, share = layer.budget.expert_price, layer.budget.expert_share
        num_chunks = choices.scores.shape[-1] - layer.num_experts
        partition = None
        if self._bias_scale == "normalized" or context.detail == "resources":
            partition = allocation_lib.log_partition(choices.scores, choices.available, choices.local)
            if layer.signal == "separate" or layer.router == "pooled":  # P(choose) adds up to 1 as it is
                partition = jnp.zeros_like(partition)
        if share is not None:
            kinds = allocation_lib.shares(choices, purse, share, layer.num_experts)
            ranked = [Kind(allocation_lib.rank(kind, chunk, most, slots), most) for kind, most in kinds]
            ranking, bought = allocation_lib.one_after_the_other(*ranked, budget, share, slots, num_chunks)
            return ranking._replace(log_partition=partition), bought
        most = jnp.minimum(purse, choices.most)
        ranking = allocation_lib.rank(choices, chunk, most, slots)._replace(log_partition=partition)
        if price == 1:
            return ranking, allocation_lib.purchase(ranking, budget, most)
        prices = jnp.where(ranking.resource >= num_chunks, price, 1.0)
        return ranking, allocation_lib.purchase_at(prices, budget, purse, most)

    def _budgets(
        self, h: Float[Array, "b n d"], most: Int[Array, "b n"], context: Context
    ) -> tuple[Float[Array, "b n"], Int[Array, "b n"], Statistics]:
        """Real budgets, resources given (at most `most`), and statistics of the budget.

        Budgets are a matter of the whole row: one number of every token is gathered, and all shards compute the same.
        """
        config, shards, real = self.config.aamoe.budget, context.shards, context.segment_ids > 0
        if context.budget == "prefix":
            importance = shards.gather(self._importance(h), TOKENS)
            budget = budget_lib.prefix_budgets(importance, context.segment_ids, context.beta)
        elif context.budget == "row":
            budget = budget_lib.row_budgets(shards.gather(self._importance(h), TOKENS), real, context.beta)
        else:
            budget = jnp.where(real, shards.gather(self._predict(h, context), TOKENS), 0.0)
        floor = budget_lib.floor_row_budgets if context.budget == "row" else budget_lib.floor_causal_budgets
        wanted = floor(budget)
        count = jnp.where(real, jnp.minimum(wanted, shards.gather(most, TOKENS)), 0)
        if context.budget in budget_lib.CAPPED:
            count = budget_lib.cap_spending(count, real, context.beta, config.slack)
        budget, wanted, count = (shards.part(x, TOKENS) for x in (budget, wanted, count))
        about = {"wanted": wanted, "budget": budget}
        if context.budget == "row" and config.normalizer == "row":
            predicted, slots = self._predict(h, context), self._slots_of(context)
            guess = budget_lib.floor_causal_budgets(predicted)
            about |= statistics.prediction(predicted, guess, wanted, context.real, slots)
            about["predictor_loss"] = budget_lib.predictor_loss(predicted, wanted, context.real, slots)
        return budget, count, about

    def _importance(self, h: Float[Array, "b L d"]) -> Float[Array, "b L"]:
        """w_B . h, divided by sqrt(d) like the router's scores: an optimizer moves all entries of w_B at once."""
        kind = self.config.aamoe.budget.importance
        if kind == "uniform":
            return jnp.zeros(h.shape[:2])
        importance = h.astype(jnp.float32) @ self.importance[...] * h.shape[-1] ** -0.5
        return importance if kind == "learned" else budget_lib.bounded(importance)

    def _predict(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L"]:
        if self.config.aamoe.budget.normalizer != "row":
            raise ConfigError(
                "BudgetConfig.normalizer = 'prefix': this model has no budget predictor; "
                "evaluate it with its own causal 'prefix' budgets"
            )
        return self.predictor(h, context.beta)

    def _attend(
        self, heads: Heads, allocation: Allocation, context: Context
    ) -> tuple[Float[Array, "b s H k"], Float[Array, "b n K"], Num[Array, ""] | int]:
        """Heads of the tokens that attend together, attention mass of every slot, and pairs that had no room."""
        shards = context.shards
        given = Given(allocation.resource, self._bias(allocation), allocation.count)
        given = Given(*(shards.gather(x, TOKENS) for x in given))
        attend = self._attend_here if shards.resource == 1 else self._attend_everywhere
        attention, mass, overflow = attend(heads, given, context)
        mass = shards.scatter_sum(mass, TENSOR) / shards.tensor  # the mean over heads
        used = jnp.arange(mass.shape[-1]) < allocation.count[..., None]
        return self._beside_null(attention), jnp.where(used, mass, 0), overflow

    def _attend_here(
        self,
        heads: Heads,
        given: Given,
        context: Context,
    ) -> tuple[Softmax, Float[Array, "b L K"], int]:
        """All resources are here: one call, the window in it (AA-17)."""
        rows, length = context.segment_ids.shape
        keys = resources.representation_tensor(heads.key, heads.expert_key)
        values = resources.representation_tensor(heads.value, heads.expert_value)
        window, routed = self._window_apart(given)
        if window is not None:
            segment = (length + 1) * jnp.arange(rows)[:, None] + context.segment_ids
            window = Window(window.reshape(-1), segment.reshape(-1))
        resource = resources.flat_index(routed.resource, self._num_chunks(context))
        visible = routed.visible(self._prefix_of(context), self.config.aamoe.chunk_size)
        attention = block_sparse_attention(
            flatten_tokens(heads.rotated_query),
            flatten_tokens(heads.query),
            keys,
            values,
            Pairs(*map(flatten_tokens, (resource, routed.bias, visible, routed.count))),
            num_context=keys.shape[0] - self.config.aamoe.num_experts,
            max_pairs=self._max_pairs(context, routed.resource.shape[-1]),
            window=window,
            max_score=self.qkv.max_score(),
            row_chunks=self._num_chunks(context),
            implementation=self.config.kernel,
        )
        output, lse, mass = (x.reshape(rows, length, *x.shape[1:]) for x in attention)
        if window is not None:  # the window's share is what the routed resources leave over
            mass = jnp.concatenate([1.0 - mass.sum(-1, keepdims=True), mass], axis=-1)
        return Softmax(output, lse), mass, 0

    def _attend_everywhere(
        self,
        heads: Heads,
        given: Given,
        context: Context,
    ) -> tuple[Softmax, Float[Array, "b s K"], Int[Array, ""]]:
        """Resources are divided over the mesh (`parallel.py`)."""
        turns, shards = context.turns(self.config), context.shards
        how = {"max_score": self.qkv.max_score(), "kernel": self.config.kernel}
        window, rest = self._window_apart(given)
        prefix_of = self._prefix_of(context)
        max_pairs = self._max_pairs(context, rest.resource.shape[-1])
        chunks, experts = (heads.key, heads.value), (heads.expert_key, heads.expert_value)
        routed = parallel.routed_attention(
            heads.query, chunks, experts, rest, prefix_of, turns.heads, shards, max_pairs=max_pairs, **how
        )
        if window is None:
            return routed
        window = shards.part(window, RESOURCE)
        m = self.config.aamoe.chunk_size
        near = parallel.window_attention(heads.rotated_query, chunks, window, context.segment_ids, shards, m=m, **how)
        whole = parallel.together(routed.attention, near)
        left = jax.lax.stop_gradient(jnp.exp(routed.attention.lse - whole.lse)).mean(-1, keepdims=True)
        mass = jnp.concatenate([1.0 - left, left * routed.mass], axis=-1)
        return whole, mass, routed.overflow

    def _beside_null(self, attention: Softmax) -> Float[Array, "b s H k"]:
        """A key with value 0 and logit n takes exp(n) / (exp(n) + exp(lse)) of the attention."""
        if self.config.aamoe.null_slot == "none":
            return attention.output
        kept = jax.nn.sigmoid(attention.lse - self.null_logit[...])
        return attention.output * kept[..., None].astype(attention.output.dtype)

    def _window_apart(self, given: Given) -> tuple[Float[Array, "b L"] | None, Given]:
        """The bias of the window, which the first slot buys, and the slots that are routed."""
        if self.config.aamoe.local != "window":
            return None, given
        resource, bias, count = given
        routed = Given(resource[..., 1:], bias[..., 1:], jnp.maximum(count - 1, 0))
        return jnp.where(count > 0, bias[..., 0], -jnp.inf), routed

    def _prefix_of(self, context: Context) -> Int[Array, "L"]:
        """`_partial_chunk` of every token of a row."""
        return self._partial_chunk(jnp.arange(context.segment_ids.shape[1]) // self.config.aamoe.chunk_size)

    def _partial_chunk(self, own: Int[Array, "*tokens"]) -> Int[Array, "*tokens"]:
        """The chunk of which a token sees a prefix alone: its own up to itself; with a window, of the one before what
        the window leaves over (keys in both would count twice)."""
        return own - 1 if self.config.aamoe.local == "window" else own

    def _bias(self, allocation: Allocation) -> Float[Array, "b L K"]:
        """What is added to the attention scores (eq 15-16, AA-21)."""
        unbiased = self.config.aamoe.bias == "none"
        return jnp.zeros_like(allocation.log_prob) if unbiased else allocation.log_prob

    def empty_cache(self, rows: int, length: int) -> Cache:
        """Room for `length` tokens in every row."""
        expert_key = self._expert_rows(self.config.num_heads)[0].astype(self.config.dtype)
        expert_key = self.router.expert_keys(self.qkv.norm_key(expert_key))
        return empty_cache(self.config, rows, length)._replace(expert_key=expert_key)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt: its pages, and what it spent. Every row is one document and its padding."""
        h, context = self._prepare(h, context)
        heads = self._project(h, context)
        importance = jnp.where(context.real, self._importance(h), -jnp.inf)
        log_mean = jax.nn.logsumexp(importance, axis=-1) - jnp.log(context.real.sum(-1))
        spent = self._allocate(h, heads, context)[1]["paid"].sum(-1)
        router_key = self.router.page_keys(heads, context)
        return cache.fill(merge_heads(heads.key), merge_heads(heads.value), router_key)._replace(
            log_mean=jnp.stack([log_mean, jnp.zeros_like(log_mean)], axis=1),
            spent=spent,
            before=last_tokens(h, context) if self.config.aamoe.key_convolution else cache.before,
        )

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row, at `context.positions`: what the layer would give it in a row of all of them."""
        context, layer, size = self._scaled(context), self.config.aamoe, self.config.head_dim
        of_keys = None
        if layer.key_convolution:
            of_keys, before = self.convolution.decode(h, cache.before)
            of_keys, cache = of_keys.astype(h.dtype), cache._replace(before=before)
        heads = self._project(h, context, of_keys)
        cache = cache.write(context.positions, merge_heads(heads.key), merge_heads(heads.value))
        chunk = context.positions // layer.chunk_size
        chunks = self._routed(jnp.arange(cache.key.shape[1]) < chunk[..., None])
        scores, cache = self.router.next_scores(h, heads, chunks, context, cache)
        choices = self._choices(*scores, chunk, chunks, context)
        budget, purse, cache = self._next_budget(h, self._largest_purse(choices, context), context, cache)
        allocation = allocation_lib.allocate(*self._buy(choices, chunk, budget, purse, context), self._bias_scale)
        output, lse = paged_attention(
            heads.rotated_query[:, 0],
            heads.query[:, 0],
            split_heads(cache.key, size),
            split_heads(cache.value, size),
            *self._expert_rows(self.config.num_heads),
            self._paged_slots(allocation, context.positions),
            norm_expert_key=self.qkv.norm_key,
        )
        attention = self._beside_null(Softmax(output[:, None], lse[:, None]))
        return self.output(merge_heads(attention)), cache

    def _next_budget(
        self, h: Float[Array, "b 1 d"], most: Int[Array, "b 1"], context: Context, cache: Cache
    ) -> tuple[Float[Array, "b 1"], Int[Array, "b 1"], Cache]:
        """`_budgets` of one more token, from what the cache knows of those before."""
        if context.budget == "prefix":
            importance, positions = self._importance(h), context.positions
            budget, log_mean = budget_lib.next_prefix_budget(importance, cache.log_mean, positions, context.beta)
            cache = cache._replace(log_mean=log_mean)
        else:
            budget = self._predict(h, context)
        count = jnp.minimum(budget_lib.floor_causal_budgets(budget), most)
        if context.budget in budget_lib.CAPPED:
            tokens, slack = context.positions + 1, self.config.aamoe.budget.slack
            allowance = budget_lib.total_allowance(tokens, context.beta, slack)
            # Where the dial was turned down, more may have been spent than is allowed by now.
            count = jnp.clip(allowance - cache.spent[:, None], 0, count)
        return budget, count, cache._replace(spent=cache.spent + count[:, 0])

    def _paged_slots(self, allocation: Allocation, positions: Int[Array, "b 1"]) -> Slots:
        """One token's allocation as ranges of keys. A window is two slots: the own page so far, the rest of the one
        before."""
        layer = self.config.aamoe
        own, offset = jnp.divmod(positions, layer.chunk_size)
        resource, bias, count = allocation.resource[:, 0], self._bias(allocation)[:, 0], allocation.count[:, 0]
        end = jnp.where(resource == self._partial_chunk(own), offset + 1, layer.chunk_size)
        begin = jnp.zeros_like(end)
        if layer.local == "window":
            before = jnp.maximum(own - 1, 0)
            rest = jnp.where(own > 0, layer.chunk_size, 0)
            resource = jnp.concatenate([own, before, resource[:, 1:]], axis=1)
            bias = jnp.concatenate([bias[:, :1], bias], axis=1)
            begin = jnp.concatenate([jnp.zeros_like(offset), offset + 1, begin[:, 1:]], axis=1)
            end = jnp.concatenate([offset + 1, rest, end[:, 1:]], axis=1)
            count = jnp.where(count > 0, count + 1, 0)
        return Slots(resource, bias, begin, end, count)

    @property
    def _local_first(self) -> bool:
        """Whether rank 1 is the local resource, bought before any other (decision 03)."""
        return self.config.aamoe.local in ("window", "chunk")

    def _num_chunks(self, context: Context) -> int:
        return context.segment_ids.shape[1] // self.config.aamoe.chunk_size

    @property
    def _bias_scale(self) -> BiasScale:
        """Only a key without bias beside the resources makes the partition of eq 14 matter (decision 15)."""
        return "normalized" if self.config.aamoe.null_slot == "learned" else "unnormalized"

    def _slots(self, choices: int, max_scale: float) -> int:
        """K: no token can use more slots than there are resources."""
        most = choices + self._local_first
        limit = self.config.aamoe.max_resources
        return most if limit is None else min(math.floor(limit * max(max_scale, 1.0)), most)

    def _slots_of(self, context: Context) -> int:
        return self._slots(self._num_chunks(context) + self.config.aamoe.num_experts, context.max_scale)

    def _most(self, slots: int, context: Context) -> Int[Array, ""] | int:
        """Most resources of one token: K_max, which grows with a dial above 1."""
        limit = self.config.aamoe.max_resources
        if limit is None:
            return slots
        scale = jnp.clip(context.scale, 1.0, max(context.max_scale, 1.0))
        return jnp.minimum(jnp.floor(limit * scale + 1e-4).astype(jnp.int32), slots)

    def _max_pairs(self, context: Context, slots: int) -> int:
        """Static bound on the pairs of the batch: sum_i B_i <= B in a row, plus the slack of causal budgets (decision
        26)."""
        rows, length = context.segment_ids.shape
        if context.budget == "predictor_uncapped":
            return rows * length * slots
        slack = 0 if context.budget == "row" else self.config.aamoe.budget.slack
        per_row = math.floor(max(self.config.betas) * context.max_scale * length + 0.5) + slack
        return rows * min(per_row, length * slots)

    def _prepare(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b M d"], Context]:
        """Rows as whole chunks, and the beta that the dial makes."""
        return self._pad_to_chunks(h, self._scaled(context))

    def _scaled(self, context: Context) -> Context:
        """beta times the dial, as far as the static bound on pairs covers it."""
        beta = jnp.minimum(context.beta * context.scale, max(self.config.betas) * context.max_scale)
        return dataclasses.replace(context, beta=beta)

    def _pad_to_chunks(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b M d"], Context]:
        """Rows as whole chunks. Padding has segment 0: no budget, and no chunk that ends in it is available."""
        extra = -context.segment_ids.shape[1] % self.config.aamoe.chunk_size
        if extra == 0:
            return h, context
        pad = ((0, 0), (0, extra))
        segment_ids, positions = jnp.pad(context.segment_ids, pad), jnp.pad(context.positions, pad)
        # Rotations of the shorter rows are dropped with the rest.
        padded = dataclasses.replace(context, segment_ids=segment_ids, positions=positions, known_turns=None)
        return jnp.pad(h, (*pad, (0, 0))), padded
