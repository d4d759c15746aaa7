"""The AA-MoE layer: section 2.2 of the paper, in its order (AA-01, AA-41). `reference.py` is the same as a definition.

Shapes: b rows, L tokens per row (whole chunks), m tokens per chunk, E experts, d width, H heads, k = d / H. Over a mesh
n of the L tokens are here, and s of them attend together, with some of the heads (`Context`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.aamoe import allocation, decode, statistics
from aamoe_jax.aamoe.allocation import Allocation
from aamoe_jax.aamoe.attend import attend, attention_map, beside_null
from aamoe_jax.aamoe.budget import IMPORTANCE, BudgetPredictor, budget_of_rows
from aamoe_jax.aamoe.costs import AAMoECosts
from aamoe_jax.aamoe.gate import ExpertGate
from aamoe_jax.aamoe.pooled import PooledRouter
from aamoe_jax.aamoe.resources import LOCAL, available_chunks
from aamoe_jax.aamoe.router import Heads, LearnedRouter
from aamoe_jax.aamoe.statistics import Steps
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.layers import Projection, QueryKeyValue, merge_heads, norm_heads, residual_gain, split_heads
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.convolution import CausalConvolution
from aamoe_jax.registry import register


@register("aamoe", "chunks of context and experts that a budget buys, in one attention", heads="softmax", neurons=True)
class AAMoELayer(AAMoECosts):
    """Every token attends to the B_i resources that its budget affords, chunks and experts alike, in one softmax.

    Parameters: W^Q, W^K, W^V, W^O; W_c and expert embeddings e_l of a learned router; w_B; expert keys and values
    [E, m, d], which bypass W^K, W^V and the rotary embedding (decisions 08-10). One loss reaches them all (AA-22), and
    nothing but attention mixes experts (AA-24), unless `expert_gate` asks for a gate.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        layer, d = config.aamoe, config.d_model
        self.config = config
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(d, d, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config))
        if layer.key_convolution:
            self.convolution = CausalConvolution(d)
        self.router = PooledRouter(config) if layer.router == "pooled" else LearnedRouter(config, rngs=rngs)
        self.importance = nnx.Param(jnp.zeros(d), axes=(None,))
        # Experts (AA-08). Standard deviation 1 is that of W^K h and W^V h (decision 29).
        shape, axes = (layer.num_experts, layer.chunk_size, d), ("resources", "storage", "heads")
        keys, values = (jax.random.normal(rngs.params(), shape) for _ in range(2))
        if layer.num_experts:  # a checkpoint cannot hold an array without elements
            self.expert_keys, self.expert_values = nnx.Param(keys, axes=axes), nnx.Param(values, axes=axes)
        if layer.expert_gate:
            self.expert_gate = ExpertGate(config)
        if layer.budget.normalizer == "row":
            self.predictor = BudgetPredictor(d, rngs=rngs)
        null = nnx.Param(jnp.zeros(config.num_heads), axes=("heads",)) if layer.null_slot == "learned" else None
        self.null_logit = null
        self.allocator = allocation.allocator(layer)
        self.local = LOCAL[layer.local]

    empty_cache, prefill, decode = decode.empty_cache, decode.prefill, decode.decode

    def __call__(self, h: Float[Array, "b n d"], context: Context) -> tuple[Float[Array, "b n d"], Statistics]:
        """The layer's output, 0 for tokens without budget (AA-26), and its statistics."""
        output, steps = self.forward(h, context)
        guessed = context.budget == "row" and self.config.aamoe.budget.normalizer == "row"
        predicted = self.predictor(h, context.beta) if guessed else None
        found = statistics.of_layer(steps, context, predicted, self.allocator)
        if context.detail == "maps":
            found["attention_map"] = self.attention_map(steps, context)
        return output, found

    def attention_map(self, steps: Steps, context: Context) -> Float[Array, "b H L L"]:
        """What every token weighs every token by: see `attend.attention_map`."""
        lse = steps.found.attention.lse
        lse = lse if self.null_logit is None else jnp.logaddexp(lse, self.null_logit[...])
        return attention_map(steps.heads, steps.allocation, lse, context, self.config)

    def allocate(self, h: Float[Array, "b n d"], context: Context) -> Allocation:
        """Which resources every token gets, and log P of each."""
        return self.forward(h, context)[1].allocation

    def forward(self, h: Float[Array, "b n d"], context: Context) -> tuple[Float[Array, "b n d"], Steps]:
        """The output, and what led to it."""
        layer = self.config.aamoe
        heads = self.project(h, context)  # eq 5, 6, 9
        own, chunks = available_chunks(layer, context)
        scores, heads = self.router.scores(h, heads, chunks, context)  # eq 4
        own, chunks = (context.move(x, "attending", "here") for x in (own, chunks))
        candidates = allocation.candidates(layer, scores, own, chunks, context)
        signal, limit = self.budget_signal(h, context), self.allocator.limit(candidates)
        budget = budget_of_rows(signal, limit, layer.budget.slack, context)  # B_i = floor(B b_i)
        allocated = self.allocator(candidates, budget)  # eq 8, 10-15
        if layer.expert_gate:
            allocated = self.expert_gate(h, allocated, candidates.num_chunks, context.shards)
        found = attend(heads, allocated, context, self.config, self.qkv.max_score())  # eq 7, 16
        output = context.sum_over_heads(self.output(merge_heads(beside_null(found.attention, self.null_logit))))
        return output, Steps(heads, candidates, budget, allocated, found)

    def project(
        self, h: Float[Array, "b n d"], context: Context, convolved: Float[Array, "b s d"] | None = None
    ) -> Heads:
        """Queries, keys and values of the tokens that attend together, and of experts.

        Chunk keys are projected, then rotated; expert rows are neither (eq 9, AA-16).

        Args:
          convolved: the convolution of h, where tokens before these are known.
        """
        h, layer = context.move(h, "here", "attending"), self.config.aamoe
        if convolved is None and layer.key_convolution:
            convolved = self.convolution(h, context).astype(h.dtype)
        table, of_queries = context.rotary(self.config).attending, convolved if layer.query_convolution else h
        query, rotated, *grouped = self.qkv.rotated(h, table, of_queries, convolved, keep_normed=True)
        key, value = (jnp.repeat(x, self.qkv.group, axis=-2) for x in grouped)
        expert_key, expert_value = (x.astype(h.dtype) for x in self.expert_rows(key.shape[-2]))
        return Heads(h, query, rotated, key, value, norm_heads(expert_key, self.qkv.norms[1]), expert_value)

    def expert_rows(self, heads: int) -> tuple[Float[Array, "E m H k"], Float[Array, "E m H k"]]:
        """Keys, not yet normed like those of chunks, and values."""
        layer, size = self.config.aamoe, self.config.head_dim
        if not layer.num_experts:
            nothing = jnp.zeros((0, layer.chunk_size, heads, size))
            return nothing, nothing
        return split_heads(self.expert_keys[...], size), split_heads(self.expert_values[...], size)

    def budget_signal(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b L"]:
        """What budgets are made of: w_B . h, or the budget that the predictor guesses."""
        config = self.config.aamoe.budget
        if not context.budget.startswith("predictor"):
            # Divided by sqrt(d) like the router's scores: an optimizer moves all entries of w_B at once.
            return IMPORTANCE[config.importance](h.astype(jnp.float32) @ self.importance[...] * h.shape[-1] ** -0.5)
        if config.normalizer != "row":
            raise ConfigError(
                "BudgetConfig.normalizer = 'prefix': this model has no budget predictor; "
                "evaluate it with its own causal 'prefix' budgets"
            )
        return self.predictor(h, context.beta)
