"""Attention of another mathematical form, with a state in place of a cache (DEC-04, DEC-05; Xue, Moosavi, Aletras).

Shapes: b rows, L tokens per row, s of them attend here, H heads, G heads of keys and values, k = d / H.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.layers import merge_heads
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context, Statistics, causal_mask
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Setting, projections
from aamoe_jax.mixers.flash import token_blocks
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_mix, head_scores, largest_logit, softmax_selected
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE
from pallas_kernels.varying import varying

LEAST_MEAN = 0.5
"""1 + x + x^2 / 2 = (1 + (1 + x)^2) / 2 is never less; with the second order of each dimension by itself it can be."""


class TaylorState(NamedTuple):
    """Sums over the tokens so far, in float32: of v, k, k^2 (element-wise), and of k v^T and k^2 v^T."""

    value: Float[Array, "b G k"]
    key: Float[Array, "b G k"]
    square: Float[Array, "b G k"]
    key_value: Float[Array, "b G k k"]
    square_value: Float[Array, "b G k k"]


@register("approximate", "the second-order series of softmax attention")
class ApproximateAttention(CausalAttention):
    """Weights 1 + q . k / sqrt(k) + q^2 . k^2 / (2 k) with element-wise squares, divided by their sum.

    The second order of softmax's exponential without its mixed terms, and one normalisation of all orders together, as
    softmax has. Without the mixed terms a weight can be negative, and so can their sum; so no sum counts as less than
    half the number of tokens, which no sum with the mixed terms could be. Queries and keys have the
    rotary embedding of standard attention; of the squares it does not depend on distances alone.

    A weight is a product of something of the query and something of the key, so what earlier tokens add is in sums
    over them. A row is computed chunk by chunk: squares of weights within, sums over what is before. Time and memory
    are linear in its length, forward and backward.
    """

    weighted_sums = (
        WeightedSum(
            "earlier tokens", "q . k / sqrt(k)", "all", "its second-order series over the sum", "x W^V, then W^O"
        ),
    )

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """A turn is a chunk of every row: its FLOPs over the 4 d of a score and a weighted value."""
        turn = _chunk_flops(at) // (4 * at.width)
        return (Loop(-(-at.length // _chunk(at.length)) * turn, turn),)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Chunks, and two k x k sums per head, which are saved where a chunk begins."""
        d, kv, size, chunk = at.width, at.kv_width, at.config.head_dim, _chunk(at.length)
        chunks, sums = -(-at.length // chunk), FLOAT * (3 * kv + 2 * kv * size)
        saved = at.rows * (chunks * (sums + at.size * chunk * (d + 2 * kv)) + 2 * FLOAT * size * at.length)
        series = Costs(
            prefill_flops=at.rows * chunks * _chunk_flops(at),
            decode_flops=at.rows * (4 * kv * size + 4 * d * size),
            activation_bytes=saved,
            cache_bytes=at.rows * sums,
            model_flops=4 * kv * size + 4 * d * size,
        )
        return projections(at) + series

    def __call__(self, h: Float[Array, "b s d"], context: Context) -> tuple[Float[Array, "b s d"], Statistics]:
        query, key, value = self._rotated(h, context)
        segments = context.shards.part(context.segment_ids, RESOURCE)
        before = self._before(key, value, segments, context)
        return self.output(merge_heads(_series(before, query, key, value, segments))), {}

    def attention_map(self, h: Float[Array, "b s d"], context: Context) -> Float[Array, "b H s L"]:
        """Laid out, in its parallel form: coefficients add up to 1 where no sum was too small; some may be negative."""
        query, key, _ = self._rotated(h, context)
        mask = context.shards.part(causal_mask(context.segment_ids), RESOURCE)
        weights = _weights(query, context.shards.gather(key, RESOURCE), mask)
        return weights / jnp.maximum(weights.sum(-1, keepdims=True), LEAST_MEAN * mask.sum(-1)[:, None, :, None])

    def empty_cache(self, rows: int, length: int) -> TaylorState:
        """The state before any token, of one size for all lengths."""
        return _no_tokens(rows, self.config.kv_heads, self.config.head_dim)

    def fill(self, h: Float[Array, "b s d"], context: Context, cache: TaylorState) -> TaylorState:
        """The state after a prompt."""
        return _added(cache, *self._rotated(h, context)[1:], context.real.astype(jnp.float32))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: TaylorState
    ) -> tuple[Float[Array, "b 1 d"], TaylorState]:
        """One more token in every row: the recurrent form."""
        query, key, value = self._rotated(h, context)
        state = _added(cache, key, value, jnp.ones(h.shape[:2]))
        mixed, total = _read(state, query)
        seen = context.positions[:, :, None] + 1.0
        heads = (mixed / jnp.maximum(seen + total, LEAST_MEAN * seen)[..., None]).astype(h.dtype)
        return self.output(merge_heads(heads)), state

    def _before(
        self,
        key: Float[Array, "b s G k"],
        value: Float[Array, "b s G k"],
        segments: Int[Array, "b s"],
        context: Context,
    ) -> Before:
        """What the tokens here find: the sums that other devices have of earlier tokens of the row.

        Documents are contiguous: of what is before, only that of the last token before can go on here, and any device
        that has tokens of it, save the last, ends in it. So every device sums its last document alone.
        """
        shards, rows = context.shards, len(key)
        devices = shards.count(RESOURCE)
        if devices == 1:
            nothing = _no_tokens(rows, *key.shape[2:])
            return Before(nothing, jnp.zeros(rows), jnp.full(rows, NO_DOCUMENT))
        last = (segments == segments[:, -1:]).astype(jnp.float32)
        sums = _added(_no_tokens(rows, *key.shape[2:]), key, value, last), last.sum(1)
        every = jax.tree.map(lambda x: shards.gather(x[:, None], RESOURCE), sums)
        ends = context.segment_ids.reshape(rows, devices, -1)[:, :, -1]
        first = context.attending_from
        document = jnp.where(first > 0, context.segment_ids[:, first - 1], NO_DOCUMENT)
        goes_on = (ends == document[:, None]) & (jnp.arange(devices) < first // segments.shape[1])
        state, tokens = jax.tree.map(lambda x: jnp.einsum("bn,bn...->b...", goes_on.astype(x.dtype), x), every)
        return Before(state, tokens, document)


class Before(NamedTuple):
    """What a chunk finds: sums over the last document before it, its tokens so far, which it is."""

    state: TaylorState
    tokens: Float[Array, "b"]
    document: Int[Array, "b"]


NO_DOCUMENT = -1
"""Of a row that has not begun."""
CHUNK = 128
"""Tokens of a chunk at most: within it work grows with its square, and at every one sums are saved."""


def _chunk(length: int) -> int:
    """At most CHUNK, and such that the last chunk of a row is nearly full."""
    return -(-length // -(-length // CHUNK))


def _chunk_flops(at: Setting) -> int:
    """Of one chunk of a row: two kinds of scores and the weighted values; four products with k x k sums."""
    d, kv, size, chunk = at.width, at.kv_width, at.config.head_dim, _chunk(at.length)
    return chunk * (6 * d * chunk + 4 * d * size + 4 * kv * size)


def _series(
    before: Before,
    query: Float[Array, "b s H k"],
    key: Float[Array, "b s G k"],
    value: Float[Array, "b s G k"],
    segments: Int[Array, "b s"],
) -> Float[Array, "b s H k"]:
    """Weighted values of all tokens, chunk by chunk; what is within a chunk is computed again in the backward pass."""

    @jax.checkpoint
    def step(before: Before, chunk: tuple[Array, ...]) -> tuple[Before, Float[Array, "b t H k"]]:
        query, key, value, segments = chunk
        same = segments == before.document[:, None]
        mask = jnp.tril(segments[:, :, None] == segments[:, None, :])
        seen = mask.sum(-1) + jnp.where(same, before.tokens[:, None], 0)
        mixed, total = _read(before.state, query)
        weights = _weights(query, key, mask)
        mixed = jnp.where(same[..., None, None], mixed, 0) + head_mix(weights, value.astype(jnp.float32))
        total = jnp.where(same, before.tokens[:, None], 0)[..., None] + jnp.where(same[..., None], total, 0)
        total = total + weights.sum(-1).swapaxes(1, 2)
        heads = mixed / jnp.maximum(total, LEAST_MEAN * seen[..., None])[..., None]
        last = segments[:, -1]
        goes_on = (last == before.document).astype(jnp.float32)
        state = jax.tree.map(lambda x: jnp.einsum("b,b...->b...", goes_on, x), before.state)
        state = _added(state, key, value, (segments == last[:, None]).astype(jnp.float32))
        return Before(state, seen[:, -1].astype(jnp.float32), last), heads.astype(query.dtype)

    length = query.shape[1]
    chunks = tuple(token_blocks(x, _chunk(length), "edge") for x in (query, key, value, segments))
    before, chunks = varying((before, chunks))
    _, heads = jax.lax.scan(step, before, chunks)
    return heads.swapaxes(0, 1).reshape(len(query), -1, *query.shape[2:])[:, :length]


def _weights(
    query: Float[Array, "b s H k"], key: Float[Array, "b n G k"], mask: Bool[Array, "b s n"]
) -> Float[Array, "b H s n"]:
    """1 + q . k / sqrt(k) + q^2 . k^2 / (2 k) of what is seen, 0 of the rest; not yet divided."""
    query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    # `head_scores` divides by sqrt(k), and the squares by k.
    second = head_scores(query**2, key**2) * query.shape[-1] ** -0.5 / 2
    return jnp.where(mask[:, None], 1 + head_scores(query, key) + second, 0)


def _read(state: TaylorState, query: Float[Array, "b s H k"]) -> tuple[Float[Array, "b s H k"], Float[Array, "b s H"]]:
    """Values weighted by the series of what is in the state, and the sum of the weights less 1 each."""
    rows, tokens, heads, size = query.shape
    first = query.astype(jnp.float32).reshape(rows, tokens, state.key.shape[1], -1, size) * size**-0.5
    second = first**2 / 2
    of_values = functools.partial(jnp.einsum, "bsgrk,bgkv->bsgrv")
    of_ones = functools.partial(jnp.einsum, "bsgrk,bgk->bsgr")
    mixed = state.value[:, None, :, None] + of_values(first, state.key_value) + of_values(second, state.square_value)
    total = of_ones(first, state.key) + of_ones(second, state.square)
    return mixed.reshape(query.shape), total.reshape(rows, tokens, heads)


def _no_tokens(rows: int, groups: int, size: int) -> TaylorState:
    vector = jnp.zeros((rows, groups, size))
    matrix = jnp.zeros((*vector.shape, size))
    return TaylorState(vector, vector, vector, matrix, matrix)


def _added(
    state: TaylorState,
    key: Float[Array, "b s G k"],
    value: Float[Array, "b s G k"],
    counts: Float[Array, "b s"],
) -> TaylorState:
    """The state after more tokens of every row, of which some count and others do not."""
    key, value = key.astype(jnp.float32), value.astype(jnp.float32) * counts[..., None, None]
    over_tokens = functools.partial(jnp.einsum, "bsgk,bsgv->bgkv")
    return TaylorState(
        state.value + value.sum(1),
        state.key + jnp.einsum("bsgk,bs->bgk", key, counts),
        state.square + jnp.einsum("bsgk,bs->bgk", key**2, counts),
        state.key_value + over_tokens(key, value),
        state.square_value + over_tokens(key**2, value),
    )


class Tally(NamedTuple):
    """A softmax under way, in float32: sums of e^(s_j - top) and of e^(s_j - top) v_j."""

    top: Float[Array, "*b H"]
    """The largest s_j so far."""
    total: Float[Array, "*b H"]
    mixed: Float[Array, "*b H k"]

    def joined(self, later: Tally) -> Tally:
        """The tally of both together."""
        top = jnp.maximum(self.top, later.top)
        left, right = jnp.exp(self.top - top), jnp.exp(later.top - top)
        return Tally(
            top,
            left * self.total + right * later.total,
            left[..., None] * self.mixed + right[..., None] * later.mixed,
        )

    @property
    def mean(self) -> Float[Array, "*b H k"]:
        """The values so far, weighted."""
        return self.mixed / self.total[..., None]


def tally(logits: Float[Array, "*b H"], value: Float[Array, "*b H k"]) -> Tally:
    """Of single tokens."""
    top = jax.lax.stop_gradient(logits)  # divided out in the end: no gradient goes through it
    total = jnp.exp(logits - top)
    return Tally(top, total, total[..., None] * value.astype(jnp.float32))


def running(single: Tally, segment_ids: Int[Array, "b L"]) -> Tally:
    """The tally of every token's document up to itself: an associative scan, so of log L steps."""

    def join(left: tuple[Tally, Array], right: tuple[Tally, Array]) -> tuple[Tally, Array]:
        (before, document), (after, same) = left, right
        # Documents are contiguous: what ends in another one holds nothing that is needed.
        top = jnp.where((document == same)[..., None], before.top, -jnp.inf)
        return before._replace(top=top).joined(after), same

    return jax.lax.associative_scan(join, (single, segment_ids), axis=1)[0]


@register("non_approximate", "one logit per token, whichever token looks at it")
class NonApproximateAttention(CausalAttention):
    """o_i = sum_{j <= i} e^(s_j) v_j / sum_{j <= i} e^(s_j), s_j = SiLU(q_j) . k_j / sqrt(k): one per head and token.

    The weight of a token does not depend on the query: a state of d + 2 H numbers goes from token to token.
    Query and key are of one token, so a rotary embedding of both would change nothing, and there is none. The norm of
    queries, where there is one, comes before SiLU, which makes nothing longer: it bounds s_j all the same.
    """

    weighted_sums = (WeightedSum("earlier tokens", "SiLU(q_j) . k_j / sqrt(k)", "all", "softmax", "x W^V, then W^O"),)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        return ()

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Beyond the projections nothing but elementwise work: of model FLOPs logits, 2 d, and the running sum, 2 d."""
        d, heads = at.width, at.config.num_heads
        elementwise = at.per_token(0, 4 * FLOAT * d + 2 * at.size * d, model_flops=4 * d)
        return projections(at) + elementwise + Costs(cache_bytes=at.rows * FLOAT * (d + 2 * heads))

    def __call__(self, h: Float[Array, "b s d"], context: Context) -> tuple[Float[Array, "b s d"], Statistics]:
        found = self._running(h, context)
        heads = context.shards.part(found.mean, RESOURCE).astype(h.dtype)
        real = context.shards.part(context.segment_ids, RESOURCE)[..., None] > 0
        statistics = {"logit_absmax": largest_logit(self._logits(h)[0], real)}
        return self.output(merge_heads(heads)), statistics

    def attention_map(self, h: Float[Array, "b s d"], context: Context) -> Float[Array, "b H s L"]:
        """The same row of exponentials for every token, over its own sum."""
        logits = context.shards.gather(self._logits(h)[0], RESOURCE).swapaxes(1, 2)[:, :, None]
        return softmax_selected(logits, context.shards.part(causal_mask(context.segment_ids), RESOURCE)[:, None])

    def empty_cache(self, rows: int, length: int) -> Tally:
        """The state before any token, of one size for all lengths."""
        heads = jnp.zeros((rows, self.config.num_heads))
        return Tally(heads - jnp.inf, heads, jnp.zeros((*heads.shape, self.config.head_dim)))

    def fill(self, h: Float[Array, "b s d"], context: Context, cache: Tally) -> Tally:
        """The state after a prompt: that of its last token."""
        last = context.real.sum(1) - 1
        rows = jnp.arange(len(last))
        return Tally(*(x[rows, last] for x in self._running(h, context)))

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Tally) -> tuple[Float[Array, "b 1 d"], Tally]:
        """One more token in every row."""
        logits, value = self._logits(h)
        state = cache.joined(tally(logits[:, 0], value[:, 0]))
        return self.output(merge_heads(state.mean.astype(h.dtype)))[:, None], state

    def _running(self, h: Float[Array, "b s d"], context: Context) -> Tally:
        logits, value = (context.shards.gather(x, RESOURCE) for x in self._logits(h))
        return running(tally(logits, value), context.segment_ids)

    def _logits(self, h: Float[Array, "b s d"]) -> tuple[Float[Array, "b s H"], Float[Array, "b s H k"]]:
        """s_j in float32, and v_j."""
        query, key, value = self.qkv(h)
        key, value = (jnp.repeat(x, self.qkv.group, axis=-2) for x in (key, value))
        products = jax.nn.silu(query).astype(jnp.float32) * key.astype(jnp.float32)
        return products.sum(-1) * query.shape[-1] ** -0.5, value
