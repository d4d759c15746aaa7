"""sum_l p_l(x) h_l(x) over the experts that each token chose, without capacity and without work for the others.

The tokens of every expert are listed, and one loop goes through blocks of these lists: as many turns as there are
tokens to fill them, whatever their shares. A product over all experts with zeros in it, which is what XLA makes of
`jax.lax.ragged_dot` on CPUs, would save nothing.

Shapes: T tokens, E experts, d width, w hidden units of each expert here, n tokens of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.varying import varying

BLOCK = 128
"""Tokens of a block at most: its product with an expert's weights should cost more than reading them."""

Operands = tuple[Float[Array, "T d"], Float[Array, "E d w"], Float[Array, "E w d"], Float[Array, "T E"]]


class Lists(NamedTuple):
    """Which tokens chose each expert."""

    token: Int[Array, "S E"]
    """In their order; T, which is no token, past the end of a list."""
    blocks: Int[Array, "E"]
    """How many blocks each list fills."""
    size: int
    """Tokens of a block."""

    def block(self, index: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, "n"]]:
        """The expert of a block, counted over all lists, and its tokens."""
        ends = jnp.cumsum(self.blocks)
        expert = jnp.searchsorted(ends, index, side="right")
        first = self.size * (index - ends[expert] + self.blocks[expert])
        return expert, jax.lax.dynamic_slice(self.token, (first, expert), (self.size, 1))[:, 0]


def expert_sum(
    x: Float[Array, "T d"],
    keys: Float[Array, "E d w"],
    values: Float[Array, "E w d"],
    coefficients: Float[Array, "T E"],
    chosen: Bool[Array, "T E"],
) -> Float[Array, "T d"]:
    """sum_l p_l V_l ReLU(K_l x) over the chosen, in the type of x; 0 where nothing was (UNI-03, eq 5).

    Its cost is that of the (token, expert) pairs that were chosen, rounded up to blocks.
    """
    operands = varying((x, keys.astype(x.dtype), values.astype(x.dtype), coefficients))
    return _sum(operands, chosen)


@jax.custom_vjp
def _sum(operands: Operands, chosen: Bool[Array, "T E"]) -> Float[Array, "T d"]:
    x = operands[0]
    lists = _lists(chosen)

    def add(index: Int[Array, ""], total: Float[Array, "T d"]) -> Float[Array, "T d"]:
        expert, tokens = lists.block(index)
        return total.at[tokens].add(_one_expert(*_of_block(operands, expert, tokens)), mode="drop")

    total = jax.lax.fori_loop(0, lists.blocks.sum(), add, _zeros_like(x))
    return total.astype(x.dtype)


def _sum_forward(operands: Operands, chosen: Bool[Array, "T E"]) -> tuple[Array, tuple[Operands, Array]]:
    return _sum(operands, chosen), (operands, chosen)


def _sum_backward(kept: tuple[Operands, Array], gradient: Float[Array, "T d"]) -> tuple[Operands, None]:
    """The same loop once more: of the hidden units nothing is kept."""
    operands, chosen = kept
    lists = _lists(chosen)

    def add(index: Int[Array, ""], total: Operands) -> Operands:
        expert, tokens = lists.block(index)
        _, pull = jax.vjp(_one_expert, *_of_block(operands, expert, tokens))
        found = pull(gradient.at[tokens].get(mode="fill", fill_value=0).astype(jnp.float32))
        places = tokens, expert, expert, (tokens, expert)
        x, keys, values, coefficients = (
            x.at[at].add(y, mode="drop") for x, at, y in zip(total, places, found, strict=True)
        )
        return x, keys, values, coefficients

    total = jax.lax.fori_loop(0, lists.blocks.sum(), add, tuple(map(_zeros_like, operands)))
    return tuple(x.astype(like.dtype) for x, like in zip(total, operands, strict=True)), None


_sum.defvjp(_sum_forward, _sum_backward)


def _zeros_like(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """What a sum in float32 begins with; it varies over the mesh as x does, so that the loop keeps its type."""
    return varying((jnp.zeros(x.shape, jnp.float32), x))[0]


def _one_expert(
    x: Float[Array, "n d"], key: Float[Array, "d w"], value: Float[Array, "w d"], coefficient: Float[Array, "n"]
) -> Float[Array, "n d"]:
    return coefficient[:, None] * (jax.nn.relu(x @ key) @ value).astype(jnp.float32)


def _of_block(operands: Operands, expert: Int[Array, ""], tokens: Int[Array, "n"]) -> tuple[Array, Array, Array, Array]:
    """What `_one_expert` takes; zeros where there is no token."""
    x, keys, values, coefficients = operands
    rows = x.at[tokens].get(mode="fill", fill_value=0)
    return rows, keys[expert], values[expert], coefficients.at[tokens, expert].get(mode="fill", fill_value=0)


def _lists(chosen: Bool[Array, "T E"]) -> Lists:
    tokens, experts = chosen.shape
    size = min(BLOCK, tokens)
    place = jnp.where(chosen, jnp.cumsum(chosen, axis=0) - 1, tokens + size)  # which is dropped
    padded = -(-tokens // size) * size
    empty = jnp.full((padded, experts), tokens)
    token = jnp.broadcast_to(jnp.arange(tokens)[:, None], chosen.shape)
    listed = empty.at[place, jnp.arange(experts)].set(token, mode="drop")
    return Lists(listed, -(-chosen.sum(0) // size), size)
