"""p V_g ReLU(K_g x) for rows that lie group by group: the feed-forward of every expert, for its own tokens alone.

One loop goes through the groups, and inside of it loops through blocks of their rows, large blocks first. Block by
block an expert's two products, and five in the backward pass, follow each other while their operands are in the cache;
hidden units are kept. The last block of a group reaches into the rows of the next one, which come later and write over
it. A product over all experts with zeros in it, which is what XLA makes of `jax.lax.ragged_dot` on CPUs, would save
nothing.

Shapes: S rows, G groups, d width, w hidden units of each group here, n rows of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.varying import varying

BLOCKS = (512, 256, 128, 64)
"""Rows of a block. A large one makes the most of an expert's weights; the smallest one is filled up."""


class Operands(NamedTuple):
    """What the sums are made of."""

    rows: Float[Array, "S d"]
    weight: Float[Array, "S"]
    keys: Float[Array, "G d w"]
    values: Float[Array, "G w d"]


class Block(NamedTuple):
    """Some of the rows of a group, and maybe of what follows it."""

    first: Int[Array, ""]
    size: int
    end: Int[Array, ""]
    """Of the group's rows."""

    def of(self, x: Float[Array, "S ..."]) -> Float[Array, "n ..."]:
        """Its rows."""
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.size)

    def put(self, x: Float[Array, "S ..."], rows: Float[Array, "n ..."]) -> Float[Array, "S ..."]:
        """In place of its rows."""
        return jax.lax.dynamic_update_slice_in_dim(x, rows.astype(x.dtype), self.first, axis=0)

    def weights_of(self, weight: Float[Array, "S"]) -> Float[Array, "n 1"]:
        """Of its rows; 0 for those of other groups."""
        return jnp.where(self.first + jnp.arange(self.size) < self.end, self.of(weight), 0)[:, None]


def blocks_of(tokens: int) -> tuple[int, ...]:
    """The sizes of blocks where a group has so many rows at most."""
    return tuple(size for size in BLOCKS if size <= tokens) or (tokens,)


def room_for(rows: int, tokens: int) -> int:
    """S: so many rows, of at most so many `tokens` a group, and the end of the last block."""
    return rows + blocks_of(tokens)[-1]


def grouped_feed_forward(
    rows: Float[Array, "S d"],
    weight: Float[Array, "S"],
    keys: Float[Array, "G d w"],
    values: Float[Array, "G w d"],
    sizes: Int[Array, "G"],
    tokens: int,
) -> Float[Array, "S d"]:
    """p V_g ReLU(K_g x) for every row, in float32; 0 where weights are, as they must be after all groups.

        start = 0
        for g, size in enumerate(sizes):
            at = slice(start, start := start + size)
            output[at] = (weight[at] * relu(rows[at] @ keys[g])) @ values[g]

    Args:
      sizes: rows of each group, one group after the other; S is `room_for` their sum.
      tokens: at least the rows of every group.
    """
    operands = varying((*Operands(rows, weight, keys.astype(rows.dtype), values.astype(rows.dtype)), sizes))
    return _feed_forward(tokens, Operands(*operands[:4]), operands[4])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(tokens: int, operands: Operands, sizes: Int[Array, "G"]) -> Float[Array, "S d"]:
    return _forward(tokens, operands, sizes)[0]


Kept = tuple[Operands, Int[Array, "G"], Float[Array, "S w"]]


def _forward(tokens: int, operands: Operands, sizes: Int[Array, "G"]) -> tuple[Float[Array, "S d"], Kept]:
    rows, weight, keys, values = operands

    def add(block: Block, found: tuple[Array, Array], _: Any, key: Array, value: Array) -> tuple[Any, tuple[()]]:
        hidden = jax.nn.relu(block.of(rows) @ key)
        output = _dot((block.weights_of(weight) * hidden).astype(rows.dtype), value, 1, 0)
        return (block.put(found[0], output), block.put(found[1], hidden)), ()

    empty = _zeros(rows.shape, rows, jnp.float32), _zeros((len(rows), keys.shape[2]), rows)
    (output, hidden), _ = _over_groups(add, empty, (), (keys, values), sizes, tokens)
    return output, (operands, sizes, hidden)


def _backward(tokens: int, kept: Kept, d_output: Float[Array, "S d"]) -> tuple[Operands, None]:
    (rows, weight, keys, values), sizes, hidden = kept

    def add(
        block: Block, found: tuple[Array, Array], of_group: tuple[Array, Array], key: Array, value: Array
    ) -> tuple[Any, Any]:
        at, on, d_out = block.weights_of(weight), block.of(hidden), block.of(d_output).astype(rows.dtype)
        d_weighted = _dot(d_out, value, 1, 1)
        d_weight = (on * d_weighted).sum(-1, dtype=jnp.float32)
        d_hidden = jnp.where(on > 0, at * d_weighted, 0).astype(rows.dtype)
        d_key = of_group[0] + _dot(block.of(rows), d_hidden, 0, 0)
        d_value = of_group[1] + _dot((at * on).astype(rows.dtype), d_out, 0, 0)
        return (block.put(found[0], _dot(d_hidden, key, 1, 1)), block.put(found[1], d_weight)), (d_key, d_value)

    empty = _zeros(rows.shape, rows), _zeros(weight.shape, weight)
    of_group = tuple(_zeros(x.shape[1:], x, jnp.float32) for x in (keys, values))
    (d_rows, d_weight), (d_keys, d_values) = _over_groups(add, empty, of_group, (keys, values), sizes, tokens)
    return Operands(d_rows, d_weight, d_keys.astype(keys.dtype), d_values.astype(values.dtype)), None


_feed_forward.defvjp(_forward, _backward)


def _over_groups(
    step: Callable, found: Any, of_group: Any, parameters: tuple[Array, ...], sizes: Int[Array, "G"], tokens: int
) -> tuple[Any, Any]:
    """step(block, found, of_group, *parameters of the group) -> (found, of_group), from block to block.

    Args:
      of_group: what every group begins with; it is returned for each of them.
    """

    def group(found: Any, given: tuple[Any, Array, Array]) -> tuple[Any, Any]:
        own, end, size = given
        state, first = (found, of_group), end - size
        *large, smallest = blocks_of(tokens)
        for n in (*large, smallest):
            count = (end - first) // n if n in large else -(-(end - first) // n)
            turn = lambda i, state, n=n, first=first: step(Block(first + i * n, n, end), *state, *own)  # noqa: E731
            state = jax.lax.fori_loop(0, count, turn, state)
            first += count * n
        return state

    return jax.lax.scan(group, found, (parameters, jnp.cumsum(sizes), sizes))


def _dot(x: Float[Array, "..."], y: Float[Array, "..."], i: int, j: int) -> Float[Array, "..."]:
    """The product that contracts dimension i of x and j of y, in float32."""
    return jax.lax.dot_general(x, y, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


def _zeros(shape: tuple[int, ...], like: Array, dtype: Any = None) -> Array:
    """Zeros that vary over the mesh as `like` does, so that loops keep their types."""
    return varying((jnp.zeros(shape, dtype or like.dtype), like))[0]
