"""Attention whose map does not follow the input, or not its context (DEC-06, DEC-07, DEC-08; Xue, Moosavi, Aletras).

Queries and keys come from elsewhere, values from the input. Of a fixed sequence, which runs through the same stack as
the batch does, the map is the same for every input: its products are computed once for all rows, block by block. Of
embeddings it depends on which tokens there are alone, so the maps of all layers are known before the first.

Shapes: b rows, L tokens per row, s of them attend here, H heads, G heads of keys and values, k = d / H.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.layers import merge_heads, split_heads
from aamoe_jax.mixers.attention import CausalAttention, sampled_logits
from aamoe_jax.mixers.base import Context, RotaryTables, Statistics, causal_mask
from aamoe_jax.mixers.cache import fill_value, mix_values, write_value
from aamoe_jax.mixers.costs import FLOAT, Costs, Loop, Setting, projections, saved_norm, saved_rotation
from aamoe_jax.mixers.flash import loop
from aamoe_jax.mixers.weighted_sum import WeightedSum, head_scores, softmax_selected
from aamoe_jax.registry import MIXERS, register
from aamoe_jax.shards import RESOURCE, TENSOR, TOKENS, WHOLE, Shards

TEXT = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and \
dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing whether \
that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great battle-field of that \
war. We have come to dedicate a portion of that field, as a final resting place for those who here gave their lives \
that that nation might live. It is altogether fitting and proper that we should do this. But, in a larger sense, we \
can not dedicate -- we can not consecrate -- we can not hallow -- this ground."""
"""A. Lincoln, 1863: the fixed text where none is given."""


class FixedStreams(NamedTuple):
    """Sequences that no input changes, and how they run through the stack: one row each (DEC-06, DEC-07)."""

    x: Mapping[str, Float[Array, "1 n d"]]
    """By the mixer that reads it: its residual stream at this depth, for the tokens here."""
    embedded: Mapping[str, Float[Array, "1 s d"]]
    """What entered the first block, for the tokens that attend together."""
    rotary_tables: RotaryTables | None = None

    def context_of(self, name: str, context: Context) -> Context:
        """The context of one of the sequences: one row, one document."""
        length = self.x[name].shape[1] * context.shards.count(TOKENS)
        return dataclasses.replace(
            context,
            segment_ids=jnp.ones((1, length), jnp.int32),
            positions=jnp.arange(length)[None],
            detail="sums",
            rotary_tables=self.rotary_tables,
            embedded=self.embedded[name],
        )

    def through(self, block: Any, context: Context) -> tuple[Context, FixedStreams]:
        """The context of a block, with the input that it has of every sequence; and the sequences after it."""
        context = dataclasses.replace(context, fixed=self._replace(x={n: block.norm(x) for n, x in self.x.items()}))
        after = {name: block(x, self.context_of(name, context))[0] for name, x in self.x.items()}
        return context, self._replace(x=after)


def fixed_streams(config: ModelConfig, embed: Callable, length: int, shards: Shards = WHOLE) -> FixedStreams | None:
    """What enters the first block beside the batch: noise or a text, where a mixer makes its map of it.

    Args:
      embed: (tokens, shards) -> their embeddings.
      length: tokens of a row.
    """
    starts = {name: start for _, name in config.mixers if (start := MIXERS[name].fixed_stream) is not None}
    if not starts:
        return None
    rows = dataclasses.replace(Context.of_rows(config, 1, length), shards=shards)
    x = {name: start(embed, config, shards.part(rows.positions, TOKENS), shards) for name, start in starts.items()}
    return FixedStreams(x, {name: shards.gather(row, TENSOR) for name, row in x.items()}, rows.rotary(config))


class MapCache(NamedTuple):
    """Queries and keys of all places of the cache, once for all rows, and values so far.

    No step computes queries and keys again (DEC-22). Laid out, the map would take N numbers in place of k.
    """

    query: Float[Array, "N H k"]
    key: Float[Array, "N G k"]
    value: Float[Array, "B k N"]


@dataclasses.dataclass(frozen=True)
class FixedQKConfig:
    """The text whose attention map `fixed_qk` uses for all texts."""

    tokens: str | None = None
    """A .npy of token ids. None: a short built-in text."""


class FixedMapAttention(CausalAttention):
    """softmax(q K^T / sqrt(k)) V with q and K of a fixed sequence at this depth, place by place in the row.

    Rotary positions are places in the row: a second document of a row continues the map where it stands.
    """

    def __init__(self, config: ModelConfig, stream: Literal["random_qk", "fixed_qk"], *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.stream = stream

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Scores of one row, block by block; values and W^O of every row. Decoding reads the keys of that row.

        Model FLOPs are those of attention, as if every row made its map: the fixed sequence costs what one more row
        does.
        """
        config, d, kv, length, s = at.config, at.width, at.kv_width, at.length, at.size
        scores = 4 * d * at.rows * sum(loop.scores for loop in FixedMapAttention.loops(at))
        model = projections(at).model_flops + 2 * d * (length + 1)
        saved = s * (2 * d + kv) + FLOAT * config.num_heads
        of_rows = at.per_token(2 * d * (kv + d), saved, s * kv, model_flops=model)
        queries_and_keys = saved_norm(config, d) + saved_norm(config, kv) + s * (2 * d + kv)
        return of_rows + Costs(
            prefill_flops=length * 2 * d * (d + kv) + scores + sampled_logits(at).prefill_flops / at.rows,
            decode_flops=at.rows * 4 * d * length,
            activation_bytes=length * (queries_and_keys + 2 * saved_rotation(config.head_dim)),
            cache_bytes=length * (d + kv) * s,
        )

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """Those of attention, where the scores, which are half of the products, are of one row."""
        whole, share = loop(at.length, at.length), (1 + 1 / at.rows) / 2
        return (Loop(share * whole.scores, share * whole.turn),)

    def __call__(self, h: Float[Array, "b s d"], context: Context) -> tuple[Float[Array, "b s d"], Statistics]:
        query, key = self._fixed(context)
        value = context.shards.gather(self._values(h), RESOURCE)
        # A prompt is shorter than the cache.
        query, key = query[:, : h.shape[1]], key[:, : value.shape[1]]
        statistics = {"logit_absmax": self._largest_logit(query, key, context)}
        return self.output(merge_heads(self._attend(query, key, value, context))), statistics

    def attention_map(self, h: Float[Array, "b s d"], context: Context) -> Float[Array, "b H s L"]:
        """The fixed map, from which every row hides what its documents do not let it see."""
        scores = self.scores(context)[None, :, : h.shape[1], : context.segment_ids.shape[1]]
        return softmax_selected(scores, context.shards.part(causal_mask(context.segment_ids), RESOURCE)[:, None])

    def scores(self, context: Context) -> Float[Array, "H s L"]:
        """q . k / sqrt(k) of the places here with all places."""
        return head_scores(*self._fixed(context))[0]

    def empty_cache(self, rows: int, length: int) -> MapCache:
        """Queries and keys of one row, and space for `length` values in every row."""
        config, (heads, size) = self.config, (self.config.kv_heads, self.config.head_dim)
        shapes = (length, config.num_heads, size), (length, heads, size), (rows * heads, size, length)
        return MapCache(*(jnp.zeros(shape, config.dtype) for shape in shapes))

    def fill(self, h: Float[Array, "b s d"], context: Context, cache: MapCache) -> MapCache:
        """Queries and keys of the whole cache, and the values of the prompt."""
        query, key = self._fixed(context)
        return MapCache(query[0], key[0], fill_value(cache.value, self._values(h)))

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: MapCache
    ) -> tuple[Float[Array, "b 1 d"], MapCache]:
        """One more token in every row, at its place of the map."""
        cache = cache._replace(value=write_value(cache.value, context.positions, self._values(h)))
        query, place = cache.query[context.positions[:, 0]], jnp.arange(len(cache.key))
        scores = head_scores(query[None], cache.key[None])[0].swapaxes(0, 1)
        weights = softmax_selected(scores, place <= context.positions[..., None])
        return self.output(merge_heads(mix_values(cache.value, weights))), cache

    def _fixed(self, context: Context) -> tuple[Float[Array, "1 s H k"], Float[Array, "1 L G k"]]:
        """Queries of the places here and keys of all places."""
        stream = context.shards.gather(context.fixed.x[self.stream], TENSOR)
        table = context.fixed.context_of(self.stream, context).rotary(self.config).attending
        query, key, _ = self.qkv.rotated(stream, table)
        return query, context.shards.gather(key, RESOURCE)

    def _values(self, h: Float[Array, "b s d"]) -> Float[Array, "b s G k"]:
        return split_heads(self.qkv.value(h), self.config.head_dim)


@register("static_qk", "queries and keys of the token embeddings", embeddings=True)
class StaticAttention(CausalAttention):
    """softmax(q K^T / sqrt(k)) V with q and K of the embeddings that entered the first block, and V of the input.

    Rotary positions are those of standard attention. Embeddings enter the stack at unit size, and are not normed again.
    """

    weighted_sums = (
        WeightedSum("earlier tokens", "q . k / sqrt(k) of their embeddings", "all", "softmax", "x W^V, then W^O"),
    )

    @staticmethod
    def costs(at: Setting) -> Costs:
        """Attention whose queries and keys are made of embeddings, which are saved beside the input."""
        return CausalAttention.costs(at) + at.per_token(0, at.size * at.width)

    def _rotated(
        self, h: Float[Array, "b s d"], context: Context
    ) -> tuple[Float[Array, "b s H k"], Float[Array, "b s G k"], Float[Array, "b s G k"]]:
        assert context.embedded is not None, "the model puts them in for mixers that are registered with embeddings"
        query, key, _ = super()._rotated(context.embedded, context)
        return query, key, split_heads(self.qkv.value(h), self.config.head_dim)


def noise_stream(places: Int[Array, "1 n"], width: int) -> Float[Array, "1 n d"]:
    """epsilon ~ N(0, 1), the size of embeddings. Every place has a key of its own, so longer rows only append."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), places[0])
    return jax.vmap(lambda key: jax.random.normal(key, (width,)))(keys)[None]


def fixed_tokens(file: str | None, vocab_size: int, length: int) -> Int[np.ndarray, "length"]:
    """The first tokens of the fixed text, which is repeated where it is too short.

    Args:
      file: a .npy of token ids; None: the bytes of `TEXT`, in the ids of the byte tokenizer.

    Raises:
      ConfigError: the file holds no list of ids of this vocabulary.
    """
    if file is None:
        tokens = (np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32) + 3) % vocab_size
    else:
        try:
            tokens = np.load(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"FixedQKConfig.tokens = {file!r}: cannot be read: {error}") from error
        integers = tokens.ndim == 1 and tokens.size and tokens.dtype.kind in "iu"
        if not integers or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ConfigError(f"FixedQKConfig.tokens = {file!r}: wanted a list of ids below {vocab_size}")
    return np.resize(tokens.astype(np.int32), length)


def _of_noise(embed: Callable, config: ModelConfig, places: Int[Array, "1 n"], shards: Shards) -> Float[Array, "1 n d"]:
    return noise_stream(places, config.d_model).astype(config.dtype)


def _of_text(embed: Callable, config: ModelConfig, places: Int[Array, "1 n"], shards: Shards) -> Float[Array, "1 n d"]:
    length = places.shape[1] * shards.count(("resource", "tensor"))
    return embed(jnp.asarray(fixed_tokens(config.of(FixedQKConfig).tokens, config.vocab_size, length))[places], shards)


for _name, _map, _stream in (("random_qk", "noise", _of_noise), ("fixed_qk", "a fixed text", _of_text)):
    register(
        _name,
        f"the attention map of {_map}",
        config=FixedQKConfig if _name == "fixed_qk" else None,
        weighted_sums=(
            WeightedSum("earlier tokens", f"q . k / sqrt(k) of {_map}", "all", "softmax", "x W^V, then W^O"),
        ),
        fixed_stream=_stream,
        stream=_name,
    )(FixedMapAttention)
