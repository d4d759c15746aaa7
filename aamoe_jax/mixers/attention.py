"""Multi-head attention over earlier tokens: all, or those that a static selector keeps (eq 1; UNI-02, UNI-08)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig, require_positive
from aamoe_jax.layers import Projection, QueryKeyValue, apply_rotary, merge_heads, residual_gain
from aamoe_jax.mixers.base import Cache, Context, Statistics, causal_mask
from aamoe_jax.mixers.cache import empty_cache
from aamoe_jax.mixers.costs import FLOAT, Costs, Setting, key_value_cache, projections, rotated, squares
from aamoe_jax.mixers.family import Form, head_mix, head_scores, softmax_selected
from aamoe_jax.mixers.parts import Part
from aamoe_jax.registry import register
from aamoe_jax.shards import RESOURCE

Selector = Literal["all", "window", "strided", "sinks"]


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


@register("attention", "softmax attention to all earlier tokens", heads="softmax")
class CausalAttention(Part):
    """softmax(q K^T / sqrt(k)) V over the token's own document, and W^O over all heads (AA-03, AA-04, DEC-02)."""

    label = "attention"
    forms = (Form("earlier tokens", "q . k / sqrt(k)", "all", "softmax over the kept", "x W^V, then W^O"),)
    has_map = True

    def __init__(self, config: ModelConfig, selector: Selector = "all", *, rngs: nnx.Rngs):
        self.qkv = QueryKeyValue(config, rngs=rngs)
        self.output = Projection(
            config.d_model, config.d_model, axes=("heads", "storage"), rngs=rngs, gain=residual_gain(config)
        )
        self.config = config
        self.selector: Selector = selector
        self.sparse = config.of(SparseAttentionConfig)

    @staticmethod
    def costs(at: Setting) -> Costs:
        """softmax(q K^T) V over all tokens: a static selection is a mask too."""
        return projections(at) + rotated(at) + squares(at) + key_value_cache(at)

    @staticmethod
    def decode_bytes(at: Setting) -> int:
        """Four projections, and all keys and values."""
        return FLOAT * 2 * at.width * (at.width + at.kv_width) + key_value_cache(at).cache_bytes

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        query, key, value = self._rotated(h, context)
        key, value = (context.shards.gather(x, RESOURCE) for x in (key, value))
        mask = context.shards.part(self._visible(context), RESOURCE)
        heads = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
        return self.output(merge_heads(heads)), {}

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        """The attention weights of every token here, head by head; a row of zeros has no token."""
        query, key, _ = self._rotated(h, context)
        mask = context.shards.part(self._visible(context), RESOURCE)
        return softmax_selected(head_scores(query, context.shards.gather(key, RESOURCE)), mask[:, None])

    def empty_cache(self, rows: int, length: int) -> Cache:
        return empty_cache(self.config, rows, length)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt."""
        _, key, value = self._rotated(h, context)
        return cache.fill(key, value)

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row."""
        query, key, value = self._rotated(h, context)
        cache = cache.write(context.positions, key, value)
        scores, earlier = cache.scores(query, context.positions), jnp.arange(cache.key.shape[1])
        keeps = selected(self.selector, self.sparse, context.positions - earlier, earlier)
        weights = jax.nn.softmax(jnp.where(keeps[:, None], scores, -jnp.inf), axis=-1)
        return self.output(merge_heads(cache.mix(weights))), cache

    def _visible(self, context: Context) -> Bool[Array, "b L L"]:
        if self.selector == "all":
            return causal_mask(context.segment_ids)
        token = jnp.arange(context.positions.shape[1])
        distance, position = token[:, None] - token, context.positions[:, None, :]
        return causal_mask(context.segment_ids) & selected(self.selector, self.sparse, distance, position)

    def _rotated(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b L H k"], Float[Array, "b L G k"], Float[Array, "b L G k"]]:
        query, key, value = self.qkv(h)
        rotary = context.rotary(self.config).attending
        return apply_rotary(query, rotary), apply_rotary(key, rotary), value


def selected(
    selector: Selector, config: SparseAttentionConfig, distance: Int[Array, "*#b"], position: Int[Array, "*#b"]
) -> Bool[Array, "*b"]:
    """Which earlier tokens a static selector keeps: a router whose priorities are positions (UNI-08).

    Args:
      distance: from the token to the earlier one, at least 0.
      position: of the earlier one in its document.
    """
    match selector:
        case "all":
            return jnp.broadcast_to(True, jnp.broadcast_shapes(distance.shape, position.shape))
        case "window":  # Longformer
            keeps = distance < config.window
        case "strided":  # Sparse Transformer
            keeps = (distance < config.stride) | (distance % config.stride == 0)
        case "sinks":  # StreamingLLM
            keeps = (distance < config.window) | (position < config.sinks)
    return jnp.broadcast_to(keeps, jnp.broadcast_shapes(distance.shape, position.shape))


for _name, _selector, _summary, _kept in (
    ("local_attention", "window", "the last `window` tokens", "the last `window` tokens"),
    (
        "strided_attention",
        "strided",
        "the last `stride` tokens, and every `stride`-th",
        "the last `stride` tokens, and every `stride`-th before",
    ),
    (
        "sink_attention",
        "sinks",
        "the last `window` and the first `sinks` tokens",
        "the last `window` tokens, and the first `sinks` of the document",
    ),
):
    register(
        _name,
        f"attention to {_summary}",
        heads="softmax",
        config=SparseAttentionConfig,
        forms=(CausalAttention.forms[0]._replace(selection=_kept),),
        selector=_selector,
    )(CausalAttention)


class WeightedAttention(CausalAttention):
    """Attention whose coefficients are no plain softmax, and so are laid out: a subclass has them in `_weigh`."""

    def _weigh(
        self, h: Float[Array, "b L d"], context: Context
    ) -> tuple[Float[Array, "b H L S"], Float[Array, "b S G k"], Statistics]:
        """What every token here weighs every token by, the values of all tokens, statistics."""
        raise NotImplementedError

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        weights, value, about = self._weigh(h, context)
        return self.output(merge_heads(head_mix(weights, value))), about

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        return self._weigh(h, context)[0]
