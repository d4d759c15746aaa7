"""Keys and values of all tokens so far: what dense attention remembers.

Shapes: b rows, N tokens that fit into the cache, L tokens, H heads, K heads of keys and values, G = b K,
k = d / H.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ModelConfig


class KeyValueCache(NamedTuple):
    """Keys (rotated) and values in the model's type, laid out as a step's products read them.

    Rows and heads are one axis, as the compiler's batched products have it: a product that has to reshape what the
    same step writes costs copies of the whole cache (seen on CPU). What has not been written yet is never seen.
    """

    key: Float[Array, "G N k"]
    value: Float[Array, "G k N"]

    def write(
        self, positions: Int[Array, "b 1"], key: Float[Array, "b 1 K k"], value: Float[Array, "b 1 K k"]
    ) -> KeyValueCache:
        """With one more token in every row, at its own position."""
        row, position = jnp.arange(self.key.shape[0]), jnp.repeat(positions[:, 0], key.shape[2])
        return KeyValueCache(
            self.key.at[row, position].set(flat_heads(key)[:, 0]), write_value(self.value, positions, value)
        )

    def taken(self, places: Int[Array, "b M"]) -> KeyValueCache:
        """Of the tokens at these places alone."""
        heads = self.key.shape[0] // places.shape[0]
        places = jnp.repeat(jnp.maximum(places, 0), heads, axis=0)
        return KeyValueCache(
            jnp.take_along_axis(self.key, places[..., None], axis=1),
            jnp.take_along_axis(self.value, places[:, None], axis=2),
        )

    def fill(self, key: Float[Array, "b L K k"], value: Float[Array, "b L K k"]) -> KeyValueCache:
        """With the first L tokens of every row."""
        return KeyValueCache(self.key.at[:, : key.shape[1]].set(flat_heads(key)), fill_value(self.value, value))

    def scores(self, query: Float[Array, "b 1 H k"], positions: Int[Array, "b 1"]) -> Float[Array, "b H N"]:
        """q . k / sqrt(k) in float32 for the tokens that one at `positions` sees, -inf for the others."""
        rows, _, heads, size = query.shape
        grouped = query.reshape(self.key.shape[0], -1, size)
        scores = jnp.einsum("ghk,gnk->ghn", grouped, self.key, preferred_element_type=jnp.float32)
        scores = size**-0.5 * scores.reshape(rows, heads, -1)
        return jnp.where(jnp.arange(scores.shape[-1]) <= positions[..., None], scores, -jnp.inf)

    def mix(self, weights: Float[Array, "b H N"]) -> Float[Array, "b 1 H k"]:
        """The values, weighted."""
        return mix_values(self.value, weights)


class Ring(NamedTuple):
    """Where tokens lie in a cache that forgets: the first `kept` stay, any other gives its place to the one `window`
    tokens later. So the first N tokens lie in order, and all N places are taken from then on."""

    kept: int
    window: int

    @property
    def places(self) -> int:
        return self.kept + self.window

    def place(self, position: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Of the token at this position."""
        return jnp.where(position < self.kept, position, self.kept + (position - self.kept) % self.window)

    def held(self, last: Int[Array, "b"], places: int) -> Int[Array, "b N"]:
        """The position of the token in every place after the one at `last`; of a place that is still empty, of any
        token up to it."""
        place, last = jnp.arange(places), last[:, None]
        latest = jnp.maximum(last - (last - place) % self.window, 0)
        return jnp.where(place < self.kept, jnp.minimum(place, last), latest)


def write_value(
    values: Float[Array, "G k N"], positions: Int[Array, "b 1"], value: Float[Array, "b 1 K k"]
) -> Float[Array, "G k N"]:
    """With the value of one more token in every row, at its own position."""
    row, size = jnp.arange(values.shape[0])[:, None], jnp.arange(values.shape[1])
    position = jnp.repeat(positions[:, 0], value.shape[2])[:, None]
    return values.at[row, size, position].set(flat_heads(value)[:, 0])


def fill_value(values: Float[Array, "G k N"], value: Float[Array, "b L K k"]) -> Float[Array, "G k N"]:
    """With those of the first L tokens of every row."""
    return values.at[:, :, : value.shape[1]].set(flat_heads(value).swapaxes(1, 2))


def mix_values(values: Float[Array, "G k N"], weights: Float[Array, "b H N"]) -> Float[Array, "b 1 H k"]:
    """The values, weighted."""
    rows, heads, length = weights.shape
    grouped = weights.reshape(values.shape[0], -1, length).astype(values.dtype)
    mixed = jnp.einsum("ghn,gkn->ghk", grouped, values)
    return mixed.reshape(rows, 1, heads, -1)


def flat_heads(x: Float[Array, "b L K k"]) -> Float[Array, "G L k"]:
    """Rows and heads as one axis."""
    return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])


def empty_cache(config: ModelConfig, rows: int, length: int) -> KeyValueCache:
    """An empty cache for `length` tokens in every row."""
    heads, size = rows * config.kv_heads, config.head_dim
    return KeyValueCache(jnp.zeros((heads, length, size), config.dtype), jnp.zeros((heads, size, length), config.dtype))
