"""Attention to a static selection of earlier tokens: a router whose priorities are positions (UNI-08).

Each computes what it keeps, in time that grows with what it keeps; windows and sinks remember no more than they keep.

Shapes: b rows, S tokens per row, q of them attend here, H heads, G heads of keys and values, k = d / H, n blocks of t
queries, s sinks.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from aamoe_jax.config import ModelConfig, require_positive
from aamoe_jax.layers import merge_heads
from aamoe_jax.mixers.attention import CausalAttention, attend_cached, sampled_logits
from aamoe_jax.mixers.base import Cache, Context
from aamoe_jax.mixers.cache import KeyValueCache, Ring, empty_cache
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Number, Setting, blocks, key_value_cache, projections, rotated
from aamoe_jax.mixers.flash import BLOCK, LOWEST, Attended, Band, flash_attention, loop, merged
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import register

BEFORE = Band(nearest=1)
"""Of tokens `stride` apart: the token itself is in its window."""


@dataclasses.dataclass(frozen=True)
class SparseAttentionConfig:
    """Which earlier tokens `local_attention`, `strided_attention` and `sink_attention` see (UNI-08)."""

    window: int = 128
    """Of `local_attention` and `sink_attention`: tokens seen, the token itself included."""
    stride: int = 32
    """Of `strided_attention`: the last so many tokens are seen, and every so-many-th before them."""
    sinks: int = 4
    """Of `sink_attention`: first tokens of the document that everyone sees."""

    def __post_init__(self) -> None:
        require_positive(self, "window", "stride", "sinks")


def _weighted_sums(selection: str) -> tuple[WeightedSum, ...]:
    return (CausalAttention.weighted_sums[0]._replace(selection=selection),)


class SparseAttention(CausalAttention):
    """Attention to what `_keeps` says; a subclass computes it."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.sparse = config.of(SparseAttentionConfig)

    def _keeps(self, distance: Int[Array, "*#b"], position: Int[Array, "*#b"]) -> Bool[Array, "*#b"]:
        """The definition: of earlier tokens at these distances, and at these positions of their document."""
        raise NotImplementedError


class RingAttention(SparseAttention):
    """One whose cache forgets what no later token sees."""

    @property
    def ring(self) -> Ring:
        """Where it keeps tokens."""
        return Ring(0, self.sparse.window)

    def empty_cache(self, rows: int, length: int) -> Cache:
        """An empty cache for as many tokens of every row as are seen at a time."""
        return empty_cache(self.config, rows, min(length, self.ring.places))

    def fill(self, h: Float[Array, "b S d"], context: Context, cache: KeyValueCache) -> KeyValueCache:
        """The cache after a prompt: what of it is still seen."""
        _, key, value = self._rotated(h, context)
        held = self.ring.held(context.real.sum(-1) - 1, cache.key.shape[1])[..., None, None]
        return cache.fill(*(jnp.take_along_axis(x, held, axis=1) for x in (key, value)))

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row."""
        query, key, value = self._rotated(h, context)
        cache = cache.write(self.ring.place(context.positions), key, value)
        return self.output(merge_heads(attend_cached(query, cache, context.positions))), cache


@register("local_attention", "attention to the last `window` tokens", heads="softmax", config=SparseAttentionConfig)
class LocalAttention(RingAttention):
    """Attention to a sliding window (Longformer): its time is linear, its cache of one size."""

    weighted_sums = _weighted_sums("the last `window` tokens")

    @property
    def reach(self) -> int:
        return self.sparse.window

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Blocks of queries against those that their windows reach; a cache of one window."""
        window = at.config.of(SparseAttentionConfig).window
        return _costs(at, LocalAttention.loops(at), min(window, at.length), _mean_window(at.length, window))

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        return (_window_loop(at.length, at.config.of(SparseAttentionConfig).window),)

    @staticmethod
    def decode_bytes(at: Setting) -> Number:
        """Four projections, and one window."""
        return _decode_bytes(at, at.config.of(SparseAttentionConfig).window)

    def _keeps(self, distance: Int[Array, "*#b"], position: Int[Array, "*#b"]) -> Bool[Array, "*#b"]:
        return distance < self.sparse.window


@register(
    "sink_attention",
    "attention to the last `window` and the first `sinks` tokens",
    heads="softmax",
    config=SparseAttentionConfig,
)
class SinkAttention(RingAttention):
    """Attention to a sliding window and to the first tokens of the document (StreamingLLM)."""

    weighted_sums = _weighted_sums("the last `window` tokens, and the first `sinks` of the document")

    @staticmethod
    def costs(at: Setting) -> Costs:
        """A window, and every block of queries against the sinks of one document."""
        sparse, length = at.config.of(SparseAttentionConfig), at.length
        block = _sink_block(sparse.window, length)
        queries, ring = -(-length // block) * block, min(sparse.sinks + sparse.window, length)
        far = max(0, length - sparse.window)  # tokens whose window leaves the first one out
        visible = _mean_window(length, sparse.window) + _mean_window(far, sparse.sinks) * far / length
        # Queries again, keys and values of the sinks of every block, scores and weights; both parts to be merged.
        gathered = queries // block * sparse.sinks * 2 * at.kv_width * at.size
        maps = queries * at.config.num_heads * sparse.sinks * (3 * FLOAT + at.size)
        joined = length * 3 * at.size * at.width
        beside = Costs(
            at.rows * 4 * at.width * queries * sparse.sinks, activation_bytes=at.rows * (gathered + maps + joined)
        )
        return _costs(at, LocalAttention.loops(at), ring, visible) + beside

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Of the window: sinks are met without one."""
        return LocalAttention.loops(at)

    @staticmethod
    def decode_bytes(at: Setting) -> Number:
        """Four projections, the sinks and one window."""
        sparse = at.config.of(SparseAttentionConfig)
        return _decode_bytes(at, sparse.sinks + sparse.window)

    @property
    def ring(self) -> Ring:
        return Ring(self.sparse.sinks, self.sparse.window)

    def _keeps(self, distance: Int[Array, "*#b"], position: Int[Array, "*#b"]) -> Bool[Array, "*#b"]:
        return (distance < self.sparse.window) | (position < self.sparse.sinks)

    def _attend(
        self,
        query: Float[Array, "b q H k"],
        key: Float[Array, "b S G k"],
        value: Float[Array, "b S G k"],
        context: Context,
    ) -> Float[Array, "b q H k"]:
        band, first = Band(reach=self.sparse.window), context.attending_from
        near = flash_attention(query, key, value, context.segment_ids, band, first=first)
        return merged([near, sinks_before(query, key, value, context, self.sparse)])


def sinks_before(
    query: Float[Array, "b q H k"],
    key: Float[Array, "b S G k"],
    value: Float[Array, "b S G k"],
    context: Context,
    config: SparseAttentionConfig,
) -> Attended:
    """Attention to the first tokens of the document that lie before the window.

    A block of queries is no longer than a window. So whatever document starts within it is seen through windows, and
    the sinks that a block needs are those of the document of its first token, wherever in the row that one starts.
    """
    (rows, queries, heads, size), (length, groups) = query.shape, key.shape[1:3]
    block = _sink_block(config.window, queries)
    place = context.attending_from + jnp.arange(-(-queries // block) * block).reshape(-1, block)
    start = place[:, 0] - context.positions[:, jnp.minimum(place[:, 0], length - 1)]
    at = start[..., None] + jnp.arange(config.sinks)  # [b, n, s]; a document whose start is not in the row has none
    row, found = jnp.arange(rows)[:, None, None], jnp.clip(at, 0, length - 1)
    mine = context.segment_ids[:, jnp.minimum(place, length - 1)]
    is_sink = (at >= 0) & (context.positions[row, found] < config.sinks)
    far = place[..., None] - found[:, :, None] >= config.window
    seen = far & is_sink[:, :, None] & (mine[..., None] == context.segment_ids[row, found][:, :, None])
    filled = jnp.pad(query, ((0, 0), (0, place.size - queries), (0, 0), (0, 0)))
    grouped = filled.reshape(rows, -1, block, groups, heads // groups, size)
    scores = jnp.einsum("bntgrk,bnsgk->bntgrs", grouped, key[row, found], preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, :, :, None, None], size**-0.5 * scores, LOWEST)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None]).astype(value.dtype)
    output = jnp.einsum("bntgrs,bnsgk->bntgrk", weights, value[row, found])
    return Attended(output.reshape(rows, -1, heads, size)[:, :queries], lse.reshape(rows, -1, heads)[:, :queries])


def _sink_block(window: int, queries: int) -> int:
    return min(window, BLOCK, queries)


@register(
    "strided_attention",
    "attention to the last `stride` tokens, and every `stride`-th",
    heads="softmax",
    config=SparseAttentionConfig,
)
class StridedAttention(SparseAttention):
    """Attention to a window and to every `stride`-th token before it (Sparse Transformer).

    Tokens `stride` apart see each other: a row is laid out with `stride` columns, each of which is a row of its own.
    Some later token sees every earlier one, so the cache holds all; a step reads its column and its window alone.
    """

    weighted_sums = _weighted_sums("the last `stride` tokens, and every `stride`-th before")

    @staticmethod
    def costs(at: Setting) -> Costs:
        """A window, and causal attention in every column."""
        stride, length = at.config.of(SparseAttentionConfig).stride, at.length
        per_column = [max(0, -(-(length - at) // stride)) for at in range(stride)]
        visible = _mean_window(length, stride) + sum(n * (n - 1) / 2 for n in per_column) / length
        # Queries, keys, values and outputs once more by columns, and both parts to be merged.
        beside = at.tokens * at.size * (4 * at.width + 2 * at.kv_width)
        attended = _costs(at, StridedAttention.loops(at), _strided_keys(stride, length), visible, length)
        return attended + Costs(activation_bytes=beside)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Of the window, and of the columns, whose blocks are computed together."""
        stride = at.config.of(SparseAttentionConfig).stride
        rows = -(-at.length // stride)
        column = loop(rows, rows + 1, BEFORE, 1)
        return _window_loop(at.length, stride), Loop(stride * column.scores, stride * column.turn)

    @staticmethod
    def decode_bytes(at: Setting) -> Number:
        """Four projections, one window and one column."""
        return _decode_bytes(at, _strided_keys(at.config.of(SparseAttentionConfig).stride, at.length))

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row."""
        query, key, value = self._rotated(h, context)
        cache, stride, length = cache.write(context.positions, key, value), self.sparse.stride, cache.key.shape[1]
        distance = jnp.concatenate([jnp.arange(min(stride, length)), jnp.arange(stride, length, stride)])
        seen = cache.taken(context.positions - distance)
        # The nearest come first, so that those before the start of the row are behind all others.
        last = jnp.sum(distance <= context.positions, axis=1, keepdims=True) - 1
        return self.output(merge_heads(attend_cached(query, seen, last))), cache

    def _keeps(self, distance: Int[Array, "*#b"], position: Int[Array, "*#b"]) -> Bool[Array, "*#b"]:
        return (distance < self.sparse.stride) | (distance % self.sparse.stride == 0)

    def _attend(
        self,
        query: Float[Array, "b q H k"],
        key: Float[Array, "b S G k"],
        value: Float[Array, "b S G k"],
        context: Context,
    ) -> Float[Array, "b q H k"]:
        stride, first, segments = self.sparse.stride, context.attending_from, context.segment_ids
        near = flash_attention(query, key, value, segments, Band(reach=stride), first=first)
        mine = jax.lax.dynamic_slice_in_dim(segments, first, query.shape[1], axis=1)
        # The first query is at the head of its column, with one row of keys in front of those that start the row.
        key, value, segments = (_columns(x, stride, first % stride, stride) for x in (key, value, segments + 1))
        far = flash_attention(
            _columns(query, stride),
            key,
            value,
            segments,
            BEFORE,
            first=first // stride + 1,
            query_segments=_columns(mine + 1, stride),
        )
        return merged([near, Attended(*(_in_order(x, stride, query.shape[1]) for x in far))])


def _columns(
    x: Shaped[Array, "b L *rest"], stride: int, start: Int[Array, ""] | int = 0, before: int = 0
) -> Shaped[Array, "bs n *rest"]:
    """Every `stride`-th token as a row of its own, from the token at `start` on, with zeros `before` and behind."""
    count = before + -(-x.shape[1] // stride) * stride
    filled = jnp.pad(x, [(0, 0), (before, count - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    rows = jax.lax.dynamic_slice_in_dim(filled, start, count, axis=1).reshape(len(x), -1, stride, *x.shape[2:])
    return rows.swapaxes(1, 2).reshape(len(x) * stride, -1, *x.shape[2:])


def _in_order(x: Shaped[Array, "bs n *rest"], stride: int, length: int) -> Shaped[Array, "b L *rest"]:
    """The inverse of `_columns`."""
    rows = x.reshape(-1, stride, *x.shape[1:]).swapaxes(1, 2)
    return rows.reshape(len(rows), -1, *x.shape[2:])[:, :length]


def _strided_keys(stride: int, length: int) -> int:
    """Places of a window and of a column."""
    return min(stride, length) + max(0, -(-length // stride) - 1)


def _window_loop(length: int, window: int) -> Loop:
    return loop(length, length, Band(reach=window))


def _mean_window(length: int, window: int) -> float:
    """Keys of a window that are in the row, on average over its tokens."""
    window = min(window, length)
    return window - window * (window - 1) / 2 / max(length, 1)


def _costs(at: Setting, loops: tuple[Loop, ...], decoded: int, visible: Number, cached: int | None = None) -> Costs:
    """As `costs.blocks`. `cached`: tokens in the cache; None: those that are decoded with."""
    attended = blocks(at, loops, decoded=decoded, visible=visible) + sampled_logits(at)
    return projections(at) + rotated(at) + attended + key_value_cache(at, decoded if cached is None else cached)


def _decode_bytes(at: Setting, keys: int) -> Number:
    """Four projections, and so many keys and values."""
    cached = key_value_cache(at, min(keys, at.length)).cache_bytes
    return FLOAT * 2 * at.width * (at.width + at.kv_width) + cached
