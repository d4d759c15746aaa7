"""The AA-MoE layer, top to bottom: resources -> scores -> budget -> allocation -> attention (section 2.2).

Shapes: b rows, L tokens per row (padded to whole chunks), m tokens per chunk, l chunks per row, E experts, A = l + E
resources to choose from, K slots per token, T = b L, d width, H heads, k = d / H.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.aamoe import allocation as allocation_lib
from aamoe_jax.aamoe import budget as budget_lib
from aamoe_jax.aamoe import resources, statistics
from aamoe_jax.aamoe.allocation import Allocation, BiasScale, Choices, Ranking
from aamoe_jax.aamoe.cache import Cache, empty_cache
from aamoe_jax.aamoe.router import Router
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.layers import (
    Projection,
    QueryKeyValue,
    Rotation,
    merge_heads,
    residual_gain,
    rotate_heads,
    split_heads,
)
from aamoe_jax.mixers.base import Context, Statistics
from pallas_kernels.block_sparse_attention import (
    Attention,
    Pairs,
    Slots,
    Window,
    block_sparse_attention,
    paged_attention,
)


class AAMoELayer(nnx.Module):
    """Every token attends to the B_i resources that its budget affords, chunks of context and experts alike.

    Parameters: W^Q, W^K, W^V, W^O; the router's W_c and expert embeddings e_l; w_B; expert keys and values [E, m, d],
    which bypass W^K, W^V and the rotary positions (decisions 08-10).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        layer, width = config.aamoe, config.d_model
        shape = (layer.num_experts, layer.chunk_size, width)
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(width, width, rngs=rngs, gain=residual_gain(config))
        self.router = Router(config, rngs=rngs)
        self.importance = nnx.Param(jnp.zeros(width))
        # Standard deviation 1 is that of W^K h and W^V h (decision 29).
        self.expert_keys = nnx.Param(jax.random.normal(rngs.params(), shape))
        self.expert_values = nnx.Param(jax.random.normal(rngs.params(), shape))
        if layer.budget.normalizer == "row":
            self.predictor = budget_lib.BudgetPredictor(width, layer.budget, rngs=rngs)
        if layer.null_slot == "learned":
            self.null_logit = nnx.Param(jnp.zeros(config.num_heads))

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        """The layer's output, 0 for tokens without budget, and its statistics."""
        length = h.shape[1]
        h, context = self._prepare(h, context)
        allocation, about_budget = self._allocate(h, context)
        attention = self._attend(h, allocation, context)
        output = self.output(merge_heads(attention.output.reshape(*h.shape[:2], self.config.num_heads, -1)))
        mass = self._slot_mass(attention, allocation)
        about = statistics.spending(
            allocation,
            mass,
            about_budget.pop("wanted"),
            context.real,
            context.beta * context.real.sum().astype(jnp.float32),
            num_chunks=self._num_chunks(h),
            num_experts=self.config.aamoe.num_experts,
            local_first=self._local_first,
        )
        per_token = {"spent": allocation.count, "budget": about_budget.pop("budget")}
        if context.detail == "resources":
            per_token |= {"resource": allocation.resource, "mass": mass, "probability": about_budget.pop("probability")}
        if context.detail != "sums":
            about |= {name: value[:, :length] for name, value in per_token.items()}
        return output[:, :length], about | about_budget

    def allocate(self, h: Float[Array, "b L d"], context: Context) -> Allocation:
        """Which resources every token of h gets (eq 8); rows are padded to whole chunks."""
        return self._allocate(*self._prepare(h, context))[0]

    def _allocate(self, h: Float[Array, "b L d"], context: Context) -> tuple[Allocation, Statistics]:
        layer = self.config.aamoe
        scores = self.router(h, context.rotation(self.config, self.config.d_model))
        chunk = jnp.broadcast_to(resources.chunk_of(h.shape[1], layer.chunk_size), h.shape[:2])
        chunks = resources.available_chunks(context.segment_ids, layer.chunk_size)
        choices = self._choices(*scores, chunk, chunks, context)
        budget, count, about = self._budgets(h, choices.most, context)
        ranking = self._rank(choices, chunk, count, context)
        if context.detail == "resources":
            # The log probability of unused slots is set to 0, so that theirs reads 1: it means nothing.
            about["probability"] = jnp.exp(allocation_lib.allocate(ranking, budget, count, "normalized").log_prob)
        return allocation_lib.allocate(ranking, budget, count, self._bias_scale), about

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
          chunks: which chunks of its document are completed.
        """
        layer, own = self.config.aamoe, chunk[..., None]
        scores = jnp.concatenate([chunk_scores, expert_scores], axis=-1)
        if layer.context == "none":
            chunks = jnp.zeros_like(chunks)
        experts = jnp.broadcast_to(context.real[..., None], expert_scores.shape)
        available = jnp.concatenate([chunks, experts], axis=-1)
        if layer.local == "routed":
            is_own = jnp.arange(scores.shape[-1]) == own
            scores = jnp.where(is_own, local_scores[..., None], scores)
            available |= is_own & context.real[..., None]
        slots = self._slots(scores.shape[-1], context.max_scale)
        most = jnp.minimum(available.sum(-1) + self._local_first, self._most(slots, context))
        return Choices(scores, available, local_scores if self._local_first else None, most)

    def _rank(self, choices: Choices, chunk: Int[Array, "b L"], count: Int[Array, "b L"], context: Context) -> Ranking:
        """The `count` resources of every token: its local one first where there is one, then by score."""
        scores, available, local, _ = choices
        slots = self._slots(scores.shape[-1], context.max_scale) - self._local_first
        best, index = allocation_lib.top_resources(scores, available, slots, count - self._local_first)
        if self._local_first:
            best = jnp.concatenate([local[..., None], best], axis=-1)
            index = jnp.concatenate([chunk[..., None], index], axis=-1)
        partition = None
        if self._bias_scale == "normalized" or context.detail == "resources":
            partition = allocation_lib.log_partition(scores, available, local)
        return Ranking(best, index, partition)

    def _budgets(
        self, h: Float[Array, "b L d"], most: Int[Array, "b L"], context: Context
    ) -> tuple[Float[Array, "b L"], Int[Array, "b L"], Statistics]:
        """Real budgets, resources given (at most `most`), and statistics of the budget."""
        config, real = self.config.aamoe.budget, context.real
        if context.budget == "prefix":
            budget = budget_lib.prefix_budgets(self._importance(h), context.segment_ids, context.beta)
        elif context.budget == "row":
            budget = budget_lib.row_budgets(self._importance(h), real, context.beta)
        else:
            budget = jnp.where(real, self._predict(h, context), 0.0)
        floor = budget_lib.floor_row_budgets if context.budget == "row" else budget_lib.floor_causal_budgets
        wanted = floor(budget)
        count = jnp.where(real, jnp.minimum(wanted, most), 0)
        if context.budget in budget_lib.CAPPED:
            count = budget_lib.cap_spending(count, real, context.beta, config.slack)
        about = {"wanted": wanted, "budget": budget}
        if context.budget == "row" and config.normalizer == "row":
            predicted, slots = self._predict(h, context), self._slots_of(h, context)
            guess = budget_lib.floor_causal_budgets(predicted)
            about |= statistics.prediction(predicted, guess, wanted, real, slots)
            about["predictor_loss"] = budget_lib.predictor_loss(predicted, wanted, real, slots)
        return budget, count, about

    def _importance(self, h: Float[Array, "b L d"]) -> Float[Array, "b L"]:
        """w_B . h, divided by sqrt(d) like the router's scores: an optimizer moves all entries of w_B at once."""
        return h.astype(jnp.float32) @ self.importance[...] * h.shape[-1] ** -0.5

    def _predict(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L"]:
        if self.config.aamoe.budget.normalizer != "row":
            raise ConfigError(
                "BudgetConfig.normalizer = 'prefix': this model has no budget predictor; "
                "evaluate it with its own causal 'prefix' budgets"
            )
        return self.predictor(h, context.beta)

    def _attend(self, h: Float[Array, "b L d"], allocation: Allocation, context: Context) -> Attention:
        layer, turn = self.config.aamoe, context.rotation(self.config, self.config.head_dim)
        query, key, value = self.qkv(h)
        expert_keys = self.qkv.norm_key(split_heads(self.expert_keys[...].astype(h.dtype), self.config.num_heads))
        # Eq 9: chunk keys are projected, then rotated; expert rows are neither.
        keys = resources.representation_tensor(merge_heads(rotate_heads(key, turn)), merge_heads(expert_keys))
        values = resources.representation_tensor(merge_heads(value), self.expert_values[...])
        pairs, window = self._pairs(allocation, context)
        attention = block_sparse_attention(
            _flatten_tokens(rotate_heads(query, turn)),
            _flatten_tokens(query),
            split_heads(keys, self.config.num_heads),
            split_heads(values, self.config.num_heads),
            pairs,
            num_context=keys.shape[0] - layer.num_experts,
            max_pairs=self._max_pairs(h, pairs.resource.shape[-1], context),
            window=window,
            max_score=self.qkv.max_score(),
            row_chunks=allocation.count.shape[1] // layer.chunk_size,
            implementation=self.config.kernel,
        )
        return attention._replace(output=self._beside_null(attention.output, attention.lse))

    def _beside_null(self, output: Float[Array, "T H k"], lse: Float[Array, "T H"]) -> Float[Array, "T H k"]:
        """A key with value 0 and logit n takes exp(n) / (exp(n) + exp(lse)) of the attention."""
        if self.config.aamoe.null_slot == "none":
            return output
        kept = jax.nn.sigmoid(lse - self.null_logit[...])
        return output * kept[..., None].astype(output.dtype)

    def _pairs(self, allocation: Allocation, context: Context) -> tuple[Pairs, Window | None]:
        """The allocation as the kernel wants it: flat tokens, flat resources, visible prefixes, the window apart."""
        layer = self.config.aamoe
        length, chunk = allocation.count.shape[1], layer.chunk_size
        own = resources.chunk_of(length, chunk)[None, :, None]
        offset = (jnp.arange(length) % chunk)[None, :, None]
        visible = jnp.where(allocation.resource == self._partial_chunk(own), offset + 1, chunk)
        resource = resources.flat_index(allocation.resource, length // chunk)
        pairs = Pairs(*map(_flatten_tokens, (resource, self._bias(allocation), visible)), allocation.count.reshape(-1))
        if layer.local != "window":
            return pairs, None
        rows = jnp.arange(context.segment_ids.shape[0])[:, None]
        segment = rows * (length + 1) + context.segment_ids
        window = Window(jnp.where(pairs.count > 0, pairs.bias[:, 0], -jnp.inf), segment.reshape(-1))
        routed = Pairs(*(x[:, 1:] for x in pairs[:3]), jnp.maximum(pairs.count - 1, 0))
        return routed, window

    def _partial_chunk(self, own: Int[Array, "*tokens"]) -> Int[Array, "*tokens"]:
        """The chunk of which a token sees a prefix alone: its own up to itself; with a window, of the one before what
        the window leaves over (keys in both would count twice)."""
        return own - 1 if self.config.aamoe.local == "window" else own

    def _bias(self, allocation: Allocation) -> Float[Array, "b L K"]:
        """What is added to the attention scores (eq 15-16)."""
        unbiased = self.config.aamoe.bias == "none"
        return jnp.zeros_like(allocation.log_prob) if unbiased else allocation.log_prob

    def empty_cache(self, rows: int, length: int) -> Cache:
        """Room for `length` tokens in every row."""
        return empty_cache(self.config, rows, length)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt: its pages, and what it spent. Every row is one document and its padding."""
        h, context = self._prepare(h, context)
        _, key, value = self.qkv(h)
        key = rotate_heads(key, context.rotation(self.config, self.config.head_dim))
        chunk_size, turn = self.config.aamoe.chunk_size, context.rotation(self.config, self.config.d_model)
        ends = Rotation(*(resources.chunk_ends(x, chunk_size) for x in turn))
        router_key = self.router.chunk_keys(resources.chunk_ends(h, chunk_size), ends)
        importance = jnp.where(context.real, self._importance(h), -jnp.inf)
        log_mean = jax.nn.logsumexp(importance, axis=-1) - jnp.log(context.real.sum(-1))
        spent = self._allocate(h, context)[0].count.sum(-1)
        return cache.fill(merge_heads(key), merge_heads(value), router_key)._replace(
            log_mean=jnp.stack([log_mean, jnp.zeros_like(log_mean)], axis=1), spent=spent
        )

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row, at `context.positions`: what the layer would give it in a row of all of them."""
        context, layer, heads = self._scaled(context), self.config.aamoe, self.config.num_heads
        query, key, value = self.qkv(h)
        turn_heads = context.rotation(self.config, self.config.head_dim)
        turn = context.rotation(self.config, self.config.d_model)
        keys = (merge_heads(rotate_heads(key, turn_heads)), merge_heads(value), self.router.chunk_keys(h, turn))
        cache = cache.write(context.positions, *keys)
        chunk = context.positions // layer.chunk_size
        completed = jnp.arange(cache.key.shape[1]) < chunk[..., None]
        query_router, expert_scores, local_scores = self.router.project(h, turn)
        chunk_scores = cache.chunk_scores(query_router)
        choices = self._choices(chunk_scores, expert_scores, local_scores, chunk, completed, context)
        budget, count, cache = self._next_budget(h, choices.most, context, cache)
        ranking = self._rank(choices, chunk, count, context)
        allocation = allocation_lib.allocate(ranking, budget, count, self._bias_scale)
        output, lse = paged_attention(
            rotate_heads(query, turn_heads)[:, 0],
            query[:, 0],
            split_heads(cache.key, heads),
            split_heads(cache.value, heads),
            split_heads(self.expert_keys[...], heads),
            split_heads(self.expert_values[...], heads),
            self._paged_slots(allocation, context.positions),
            norm_expert_key=self.qkv.norm_key,
        )
        return self.output(merge_heads(self._beside_null(output, lse)))[:, None], cache

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

    def _slot_mass(self, attention: Attention, allocation: Allocation) -> Float[Array, "b L K"]:
        """Attention mass of every slot; the window's is what the routed ones leave over."""
        mass = attention.mass
        if self.config.aamoe.local == "window":
            mass = jnp.concatenate([1.0 - mass.sum(-1, keepdims=True), mass], axis=-1)
        mass = mass.reshape(allocation.resource.shape)
        return jnp.where(jnp.arange(mass.shape[-1]) < allocation.count[..., None], mass, 0.0)

    @property
    def _local_first(self) -> bool:
        """Whether rank 1 is the local resource, bought before any other (decision 03)."""
        return self.config.aamoe.local in ("window", "chunk")

    def _num_chunks(self, h: Float[Array, "b L d"]) -> int:
        return h.shape[1] // self.config.aamoe.chunk_size

    @property
    def _bias_scale(self) -> BiasScale:
        """Only a key without bias beside the resources makes the partition of eq 14 matter (decision 15)."""
        return "normalized" if self.config.aamoe.null_slot == "learned" else "unnormalized"

    def _slots(self, choices: int, max_scale: float) -> int:
        """K: no token can use more slots than there are resources."""
        most = choices + self._local_first
        limit = self.config.aamoe.max_resources
        return most if limit is None else min(math.floor(limit * max(max_scale, 1.0)), most)

    def _slots_of(self, h: Float[Array, "b L d"], context: Context) -> int:
        return self._slots(self._num_chunks(h) + self.config.aamoe.num_experts, context.max_scale)

    def _most(self, slots: int, context: Context) -> Int[Array, ""] | int:
        """Most resources of one token: K_max, which grows with a dial above 1."""
        limit = self.config.aamoe.max_resources
        if limit is None:
            return slots
        scale = jnp.clip(context.scale, 1.0, max(context.max_scale, 1.0))
        return jnp.minimum(jnp.floor(limit * scale + 1e-4).astype(jnp.int32), slots)

    def _max_pairs(self, h: Float[Array, "b L d"], slots: int, context: Context) -> int:
        """Static bound on the pairs of the batch: sum_i B_i <= B in a row, plus the slack of causal budgets (decision
        26)."""
        rows, length = h.shape[:2]
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
        extra = -h.shape[1] % self.config.aamoe.chunk_size
        if extra == 0:
            return h, context
        pad = ((0, 0), (0, extra))
        segment_ids, positions = jnp.pad(context.segment_ids, pad), jnp.pad(context.positions, pad)
        # Rotations of the shorter rows are dropped with the rest.
        padded = dataclasses.replace(context, segment_ids=segment_ids, positions=positions, rotations={})
        return jnp.pad(h, (*pad, (0, 0))), padded


def _flatten_tokens(x: Float[Array, "b L *rest"] | Int[Array, "b L *rest"]) -> Array:
    """[b, L, ...] -> [b L, ...]: tokens of all rows share the experts' work."""
    return x.reshape(-1, *x.shape[2:])
