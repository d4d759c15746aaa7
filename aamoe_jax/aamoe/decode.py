"""Decoding: one more token of an AA-MoE layer, from a cache of pages (AA-40).

What a token is given here is what the layer gives it in a row of all tokens so far. The functions are methods of
`AAMoELayer`.

Shapes: b rows, L tokens of a prompt (whole chunks), d width, K slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from aamoe_jax.aamoe import allocation
from aamoe_jax.aamoe.allocation import Allocation
from aamoe_jax.aamoe.attend import beside_null
from aamoe_jax.aamoe.budget import next_budget
from aamoe_jax.aamoe.cache import Cache, new_cache
from aamoe_jax.aamoe.parallel import Softmax
from aamoe_jax.layers import merge_heads, split_heads
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.convolution import last_tokens
from pallas_kernels.block_sparse_attention import Slots, paged_attention

if TYPE_CHECKING:
    from aamoe_jax.aamoe.layer import AAMoELayer


def empty_cache(layer: AAMoELayer, rows: int, length: int) -> Cache:
    """An empty cache for `length` tokens in every row."""
    config = layer.config
    expert_key = layer.expert_rows(config.num_heads)[0].astype(config.dtype)
    expert_key = layer.router.expert_keys(layer.qkv.norm_key(expert_key))
    return new_cache(config, rows, length)._replace(expert_key=expert_key)


def prefill(
    layer: AAMoELayer, h: Float[Array, "b L d"], context: Context, cache: Cache
) -> tuple[Float[Array, "b L d"], Cache]:
    """The layer over prompts, and the cache after them. Every row is one document and its padding."""
    output, steps = layer.forward(h, context)
    heads, importance = steps.heads, jnp.where(context.real, layer.budget_signal(h, context), -jnp.inf)
    log_mean = jax.nn.logsumexp(importance, axis=-1) - jnp.log(context.real.sum(-1))
    router_key = layer.router.page_keys(heads, context)
    cache = cache.fill(merge_heads(heads.key), merge_heads(heads.value), router_key)
    load = cache.load
    if layer.config.aamoe.budget.load_price:
        load = jnp.where(context.real[..., None], steps.candidates.wanted(), 0).sum(1)
    return output, cache._replace(
        log_mean=jnp.stack([log_mean, jnp.zeros_like(log_mean)], axis=1),
        spent=steps.budget.granted.sum(-1),
        load=load,
        before=last_tokens(h, context) if layer.config.aamoe.looks_back else cache.before,
    )


def decode(
    layer: AAMoELayer, h: Float[Array, "b 1 d"], context: Context, cache: Cache
) -> tuple[Float[Array, "b 1 d"], Cache]:
    """One more token in every row, at `context.positions`."""
    config, convolved = layer.config, None
    if config.aamoe.key_convolution:
        convolved = layer.convolution.decode(h, cache.before)[0].astype(h.dtype)
    heads = layer.project(h, context, convolved)
    cache = cache.write(context.positions, merge_heads(heads.key), merge_heads(heads.value))
    own = context.positions // config.aamoe.chunk_size
    chunks = jnp.arange(cache.key.shape[1]) < own[..., None]
    chunks &= config.aamoe.context == "routed"
    scores, cache = layer.router.next_scores(h, heads, chunks, context, cache)
    load = None
    if config.aamoe.budget.load_price:
        load = (cache.load / jnp.maximum(context.positions, 1))[:, None]
    candidates = allocation.candidates(config.aamoe, scores, own, chunks, context, load)
    if load is not None:
        cache = cache._replace(load=cache.load + candidates.wanted()[:, 0])
    signal, limit, slack = layer.budget_signal(h, context), layer.allocator.limit(candidates), config.aamoe.budget.slack
    budget, log_mean = next_budget(signal, limit, slack, context, cache.log_mean, cache.spent)
    before = jnp.concatenate([cache.before, h], axis=1)[:, 1:]
    cache = cache._replace(log_mean=log_mean, spent=cache.spent + budget.granted[:, 0], before=before)
    expert_key, expert_value = layer.expert_rows(config.num_heads)
    allocated = layer.allocator(candidates, budget)
    if config.aamoe.expert_gate:
        allocated = layer.expert_gate(h, allocated, candidates.num_chunks, context.shards)
    output, lse = paged_attention(
        heads.rotated_query[:, 0],
        heads.query[:, 0],
        split_heads(cache.key, config.head_dim),
        split_heads(cache.value, config.head_dim),
        expert_key,
        expert_value,
        slots_of(layer, allocated, context.positions),
        norm_expert_key=layer.qkv.norm_key,
    )
    attention = Softmax(output[:, None], lse[:, None])
    return layer.output(merge_heads(beside_null(attention, layer.null_logit))), cache


def slots_of(layer: AAMoELayer, allocated: Allocation, positions: Int[Array, "b 1"]) -> Slots:
    """One token's allocation as ranges of keys. A window is two slots: the own page so far, the rest of the one
    before."""
    config = layer.config.aamoe
    own, offset = jnp.divmod(positions, config.chunk_size)
    resource, log_prob, count = (x[:, 0] for x in allocated)
    bias = log_prob if config.bias == "log_prob" else jnp.zeros_like(log_prob)
    end = jnp.where(resource == own - layer.local.partial, offset + 1, config.chunk_size)
    begin = jnp.zeros_like(end)
    if layer.local.window:
        before = jnp.maximum(own - 1, 0)
        rest = jnp.where(own > 0, config.chunk_size, 0)
        resource = jnp.concatenate([own, before, resource[:, 1:]], axis=1)
        bias = jnp.concatenate([bias[:, :1], bias], axis=1)
        begin = jnp.concatenate([jnp.zeros_like(offset), offset + 1, begin[:, 1:]], axis=1)
        end = jnp.concatenate([offset + 1, rest, end[:, 1:]], axis=1)
        count = jnp.where(count > 0, count + 1, 0)
    return Slots(resource, bias, begin, end, count)
