"""What mixers cost, in closed form: the terms that several of them share. Each mixer adds them up in its `costs`.

Two conventions stand side by side, because they answer two questions.

Model FLOPs (for MFU, and for experiments of equal size) are what the model asks for: projections, and scores and values
over the (L + 1) / 2 keys that a token sees on average, whatever documents hide.

All other figures are those of this code. FLOPs are those of matrix products, also of what a mask then hides: attention
computes whole blocks of scores, mixers whose coefficients are no softmax whole squares, and decoding its whole cache.
Activation bytes are what the forward pass leaves for the backward pass as automatic differentiation chooses it, without
recomputation and without parameters. Cache bytes are those of the arrays of `empty_cache`.

A multiply-add is two FLOPs. Norms, softmaxes, rotary embeddings, sorting and sums are left out of all FLOPs.

Notation: d width, k size of a head, H heads, L tokens per row, s bytes of an activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from aamoe_jax.config import ModelConfig

Number = int | float

FLOAT = 4
"""Bytes of float32: norms, scores and softmax statistics whatever the type of activations."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one mixer in one layer."""

    prefill_flops: Number = 0
    """Forward pass over all rows."""
    decode_flops: Number = 0
    """One more token in every row, with caches for a whole row."""
    activation_bytes: Number = 0
    """What all rows leave for the backward pass."""
    cache_bytes: int = 0
    """Of the caches of all rows."""
    model_flops: Number = 0
    """Forward pass, per token, by the convention of MFU."""

    def __add__(self, other: Costs) -> Costs:
        """Both together."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Costs(*(one + two for one, two in pairs))


@dataclasses.dataclass(frozen=True)
class Setting:
    """A config, and so many rows of so many tokens."""

    config: ModelConfig
    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def width(self) -> int:
        return self.config.d_model

    @property
    def kv_width(self) -> int:
        """Of all keys of a token, and of all its values."""
        return self.config.kv_heads * self.config.head_dim

    @property
    def size(self) -> int:
        """s."""
        return jnp.dtype(self.config.dtype).itemsize

    def per_token(self, flops: Number, saved: Number, cached: int = 0, *, model_flops: Number | None = None) -> Costs:
        """Of what every token costs alike, in a row or after it.

        Args:
          flops, saved, cached: FLOPs, activation bytes and cache bytes of one token.
          model_flops: by the convention of MFU; None: `flops`.
        """
        model_flops = flops if model_flops is None else model_flops
        return Costs(self.tokens * flops, self.rows * flops, self.tokens * saved, self.tokens * cached, model_flops)


def saved_norm(config: ModelConfig, width: int) -> int:
    """Bytes of a QK-norm's backward pass: the vector twice, and normed, in float32."""
    return 3 * FLOAT * width if config.qk_norm == "rms" else 0


def saved_rotation(width: int) -> int:
    """Bytes of the cosines and sines that rotate vectors of this width."""
    return FLOAT * width


def mixer_input(at: Setting) -> Costs:
    """The normed input, which all parts of a mixer share."""
    return at.per_token(0, at.size * at.width)


def projections(at: Setting) -> Costs:
    """W^Q, W^K, W^V and W^O: 4 d (d + d_kv). Saved are normed queries and keys, and the heads that W^O takes."""
    config, d, kv = at.config, at.width, at.kv_width
    saved = saved_norm(config, d) + saved_norm(config, kv) + at.size * d
    return at.per_token(4 * d * (d + kv), saved)


def key_value_cache(at: Setting, tokens: int | None = None) -> Costs:
    """A cache of the keys and values of so many tokens of a row; None: of all."""
    return Costs(cache_bytes=2 * at.rows * (at.length if tokens is None else tokens) * at.kv_width * at.size)


def rotated(at: Setting) -> Costs:
    """Queries and keys with rotary embeddings."""
    return at.per_token(0, at.size * (at.width + at.kv_width) + 2 * saved_rotation(at.config.head_dim))


class Loop(NamedTuple):
    """A loop over blocks of scores in a row, counted for one head."""

    scores: Number
    """All that it computes."""
    turn: Number
    """Of one block."""


def blocks(at: Setting, loops: Sequence[Loop], *, decoded: int, visible: Number) -> Costs:
    """Scores and weighted values of `flash_attention`, which saves values, the output and its log-sum-exp.

    Args:
      decoded: keys that one more token meets.
      visible: keys that a token sees on average, of one document.
    """
    flops, scores = 4 * at.width, sum(loop.scores for loop in loops)
    saved = at.size * (at.width + at.kv_width) + FLOAT * at.config.num_heads
    return Costs(at.rows * flops * scores, at.rows * flops * decoded, at.tokens * saved, 0, flops * visible)
