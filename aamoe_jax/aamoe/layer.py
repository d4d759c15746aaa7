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
from jaxtyping import Array, Float, Int

from aamoe_jax.aamoe import allocation as allocation_lib
from aamoe_jax.aamoe import budget as budget_lib
from aamoe_jax.aamoe import resources, statistics
from aamoe_jax.aamoe.allocation import Allocation
from aamoe_jax.aamoe.router import Router
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, merge_heads, residual_gain, rotate_heads, split_heads
from aamoe_jax.mixers.base import Context, Statistics
from pallas_kernels.block_sparse_attention import Attention, Pairs, Window, block_sparse_attention


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
        about = statistics.spending(
            allocation,
            self._slot_mass(attention, allocation),
            about_budget.pop("wanted"),
            context.real,
            context.beta * context.real.sum().astype(jnp.float32),
            num_chunks=self._num_chunks(h),
            num_experts=self.config.aamoe.num_experts,
            local_first=self._local_first,
        )
        if context.detail == "tokens":
            about |= {"spent": allocation.count[:, :length], "budget": about_budget["budget"][:, :length]}
        about_budget.pop("budget")
        return output[:, :length], about | about_budget

    def allocate(self, h: Float[Array, "b L d"], context: Context) -> Allocation:
        """Which resources every token of h gets (eq 8); rows are padded to whole chunks."""
        return self._allocate(*self._prepare(h, context))[0]

    def _allocate(self, h: Float[Array, "b L d"], context: Context) -> tuple[Allocation, Statistics]:
        layer = self.config.aamoe
        chunk_scores, expert_scores, local_scores = self.router(h, context.rotation(self.config, self.config.d_model))
        scores = jnp.concatenate([chunk_scores, expert_scores], axis=-1)
        own = jnp.broadcast_to(resources.chunk_of(h.shape[1], layer.chunk_size)[None, :, None], (*h.shape[:2], 1))
        available = self._available(context, expert_scores.shape[-1])
        if layer.local == "routed":
            is_own = jnp.arange(scores.shape[-1]) == own
            scores = jnp.where(is_own, local_scores[..., None], scores)
            available |= is_own & context.real[..., None]

        slots = self._slots(scores.shape[-1])
        choices = available.sum(-1) + self._local_first
        top_scores, top_index = allocation_lib.top_resources(scores, available, slots - self._local_first)
        if self._local_first:
            top_scores = jnp.concatenate([local_scores[..., None], top_scores], axis=-1)
            top_index = jnp.concatenate([own, top_index], axis=-1)

        budget, count, about = self._budgets(h, jnp.minimum(choices, slots), context)
        result = allocation_lib.allocate(top_scores, top_index, budget, count)
        if layer.null_slot == "learned":
            # Only a key without bias beside the resources makes the partition of eq 14 matter (decision 15).
            local = local_scores if self._local_first else None
            partition = allocation_lib.log_partition(scores, available, local)
            result = result._replace(log_prob=result.log_prob - partition[..., None])
        return result, about

    def _budgets(
        self, h: Float[Array, "b L d"], most: Int[Array, "b L"], context: Context
    ) -> tuple[Float[Array, "b L"], Int[Array, "b L"], Statistics]:
        """Real budgets, resources given (at most `most`), and statistics of the budget."""
        config, real = self.config.aamoe.budget, context.real
        # Divided by sqrt(d) like the router's scores: an optimizer moves all entries of w_B at once.
        importance = h.astype(jnp.float32) @ self.importance[...] * h.shape[-1] ** -0.5
        if context.budget == "prefix":
            budget = budget_lib.prefix_budgets(importance, context.segment_ids, context.beta)
        elif context.budget == "row":
            budget = budget_lib.row_budgets(importance, real, context.beta)
        else:
            budget = jnp.where(real, self._predict(h, context), 0.0)
        floor = budget_lib.floor_row_budgets if context.budget == "row" else budget_lib.floor_causal_budgets
        wanted = floor(budget)
        count = jnp.where(real, jnp.minimum(wanted, most), 0)
        if context.budget != "row":
            count = budget_lib.cap_spending(count, real, context.beta, config.slack)
        about = {"wanted": wanted, "budget": budget}
        if context.budget == "row" and config.normalizer == "row":
            predicted = self._predict(h, context)
            guess = budget_lib.floor_causal_budgets(predicted)
            about |= statistics.prediction(predicted, guess, wanted, real)
            about["predictor_loss"] = budget_lib.predictor_loss(predicted, wanted, real, self._slots_of(h))
        return budget, count, about

    def _predict(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L"]:
        if self.config.aamoe.budget.normalizer != "row":
            raise ConfigError(
                "BudgetConfig.normalizer = 'prefix': this model has no budget predictor; "
                "evaluate it with its own causal 'prefix' budgets"
            )
        return self.predictor(h, context.beta)

    def _available(self, context: Context, num_experts: int) -> Array:
        chunks = resources.available_chunks(context.segment_ids, self.config.aamoe.chunk_size)
        if self.config.aamoe.context == "none":
            chunks = jnp.zeros_like(chunks)
        experts = jnp.broadcast_to(context.real[..., None], (*chunks.shape[:2], num_experts))
        return jnp.concatenate([chunks, experts], axis=-1)

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
            implementation=self.config.kernel,
        )
        if layer.null_slot == "learned":
            # A key with value 0 and logit n takes exp(n) / (exp(n) + exp(lse)) of the attention.
            kept = jax.nn.sigmoid(attention.lse - self.null_logit[...])
            attention = attention._replace(output=attention.output * kept[..., None].astype(h.dtype))
        return attention

    def _pairs(self, allocation: Allocation, context: Context) -> tuple[Pairs, Window | None]:
        """The allocation as the kernel wants it: flat tokens, flat resources, visible prefixes, the window apart."""
        layer = self.config.aamoe
        length, chunk = allocation.count.shape[1], layer.chunk_size
        own = resources.chunk_of(length, chunk)[None, :, None]
        # Of one chunk a token sees a prefix alone: of its own chunk up to itself; with a window, of the chunk before
        # it what the window leaves over (keys in both would count twice).
        partial = own - 1 if layer.local == "window" else own
        offset = (jnp.arange(length) % chunk)[None, :, None]
        visible = jnp.where(allocation.resource == partial, offset + 1, chunk)
        bias = allocation.log_prob if layer.bias == "log_prob" else jnp.zeros_like(allocation.log_prob)
        resource = resources.flat_index(allocation.resource, length // chunk)
        pairs = Pairs(*map(_flatten_tokens, (resource, bias, visible)), allocation.count.reshape(-1))
        if layer.local != "window":
            return pairs, None
        rows = jnp.arange(context.segment_ids.shape[0])[:, None]
        segment = rows * (length + 1) + context.segment_ids
        window = Window(jnp.where(pairs.count > 0, pairs.bias[:, 0], -jnp.inf), segment.reshape(-1))
        routed = Pairs(*(x[:, 1:] for x in pairs[:3]), jnp.maximum(pairs.count - 1, 0))
        return routed, window

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

    def _slots(self, choices: int) -> int:
        """K: no token can use more slots than there are resources."""
        most = choices + self._local_first
        return min(self.config.aamoe.max_resources or most, most)

    def _slots_of(self, h: Float[Array, "b L d"]) -> int:
        return self._slots(self._num_chunks(h) + self.config.aamoe.num_experts)

    def _max_pairs(self, h: Float[Array, "b L d"], slots: int, context: Context) -> int:
        """Static bound on the pairs of the batch: sum_i B_i <= B in a row, plus the slack of causal budgets (decision
        26)."""
        rows, length = h.shape[:2]
        slack = 0 if context.budget == "row" else self.config.aamoe.budget.slack
        per_row = math.floor(max(self.config.betas) * length + 0.5) + slack
        return rows * min(per_row, length * slots)

    def _prepare(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b M d"], Context]:
        """Rows as whole chunks, and a beta that the static bound on pairs covers."""
        beta = jnp.minimum(context.beta, max(self.config.betas))
        return self._pad_to_chunks(h, dataclasses.replace(context, beta=beta))

    def _pad_to_chunks(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b M d"], Context]:
        """Rows as whole chunks. Padding has segment 0: no budget, and no chunk that ends in it is available."""
        extra = -h.shape[1] % self.config.aamoe.chunk_size
        if extra == 0:
            return h, context
        pad = ((0, 0), (0, extra))
        segment_ids, positions = jnp.pad(context.segment_ids, pad), jnp.pad(context.positions, pad)
        padded = Context(segment_ids, positions, context.budget, context.beta, context.detail)
        return jnp.pad(h, (*pad, (0, 0))), padded


def _flatten_tokens(x: Float[Array, "b L *rest"] | Int[Array, "b L *rest"]) -> Array:
    """[b, L, ...] -> [b L, ...]: tokens of all rows share the experts' work."""
    return x.reshape(-1, *x.shape[2:])
