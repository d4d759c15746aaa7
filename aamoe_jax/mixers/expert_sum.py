"""sum_l p_l(x) h_l(x) over the experts that each token chose, and none of the work for the others.

Copies of the tokens are sorted by expert, one for each that a token chose; all experts work on theirs
(`grouped.py`); every token adds up what its copies came back with. Where experts are divided over the mesh axis
`resource`, copies first travel to the shard of their expert, in buffers of one size for each pair of shards, and what
became of them travels back.

Shapes: T tokens here, c copies of a token, N = T c copies, S slots, G groups, E experts, e of them here, R shards,
d width, w hidden units of each expert here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.mixers.grouped import grouped_feed_forward, room_for
from aamoe_jax.shards import RESOURCE, Shards
from pallas_kernels.varying import varying


class Copies(NamedTuple):
    """The experts that tokens chose."""

    expert: Int[Array, "T c"]
    """E where a token has no more."""
    weight: Float[Array, "T c"]
    """0 where a token has no more."""

    @classmethod
    def of(cls, coefficients: Float[Array, "T E"], chosen: Bool[Array, "T E"], most: int) -> Copies:
        """Of tokens that have at most so many experts each."""
        count = chosen.shape[-1]
        if most == count:
            return cls(jnp.where(chosen, jnp.arange(count), count), jnp.where(chosen, coefficients, 0))
        first = jax.lax.top_k(chosen.astype(jnp.float32), most)[1]  # those that are chosen come before others
        here = (first[..., None] == jnp.arange(count)) & chosen[..., None, :]
        weight = jnp.where(here, coefficients[..., None, :], 0).sum(-1)
        return cls(jnp.where(here.any(-1), first, count), weight)


class Slots(NamedTuple):
    """Where copies are: a rearrangement of tokens that leaves some out and has others more than once."""

    copy: Int[Array, "S"]
    """Which copy is there; N, which is none, where a slot is left over. Copy i is of token i // c."""
    place: Int[Array, "N"]
    """Where a copy is; S or more where it is nowhere."""


def expert_sum(
    x: Float[Array, "T d"],
    keys: Float[Array, "e d w"],
    values: Float[Array, "e w d"],
    copies: Copies,
    shards: Shards,
    room: int,
) -> Float[Array, "T d"]:
    """sum_l p_l V_l ReLU(K_l x) over the chosen; 0 where nothing was (UNI-03, eq 5).

    In float32, for `tensor` divides hidden units: a sum is rounded once it is whole, so that meshes differ by the order
    of float32 sums alone, and the choices of the next layer hardly ever.

    Args:
      room: at least as many as any one shard of `resource` gets of the copies here.
    """
    x, keys, values, *arrays = varying((x, keys, values, *copies))
    copies, count = Copies(*arrays), copies.expert.shape[1]
    if shards.resource == 1:
        return _sum_here(x, keys, values, copies, room)
    shard, expert = jnp.divmod(copies.expert.reshape(-1), len(keys))
    slots = in_buffers(shard, shards.resource, room)
    sent = spread(x, slots, count), *_of_copies(expert, copies.weight, slots, none=len(keys))
    rows, *received = (_exchange(y) for y in sent)
    found = _sum_here(rows, keys, values, Copies(*(y[:, None] for y in received)), len(rows))
    return collect(_exchange(found), slots, count)


def _sum_here(
    x: Float[Array, "T d"],
    keys: Float[Array, "e d w"],
    values: Float[Array, "e w d"],
    copies: Copies,
    room: int,
) -> Float[Array, "T d"]:
    """By experts that are all here."""
    tokens, count = copies.expert.shape
    expert = copies.expert.reshape(-1)
    slots, sizes = in_order(expert, len(keys), room_for(min(room, expert.size), tokens))
    _, weight = _of_copies(expert, copies.weight, slots, none=len(keys))
    rows = spread(x, slots, count)
    return collect(grouped_feed_forward(rows, weight, keys, values, sizes, tokens), slots, count)


def in_order(group: Int[Array, "N"], groups: int, size: int) -> tuple[Slots, Int[Array, "G"]]:
    """Group by group in so many slots, those of no group behind them; and how many are of each."""
    order, place, bounds = _sorted(group, groups)
    copy = jnp.pad(order[:size], (0, max(size - len(order), 0)), constant_values=len(order))
    return Slots(copy, place), jnp.diff(bounds)


def in_buffers(group: Int[Array, "N"], groups: int, room: int) -> Slots:
    """A buffer of one size for each group; those of no group are nowhere."""
    order, place, bounds = _sorted(group, groups)
    buffer, rank = jnp.divmod(jnp.arange(groups * room), room)
    source = bounds[buffer] + rank
    filled = source < bounds[buffer + 1]
    copy = jnp.where(filled, order[jnp.minimum(source, len(order) - 1)], len(order))
    return Slots(copy, jnp.where(group < groups, group * room + place - bounds[group], groups * room))


def _sorted(group: Int[Array, "N"], groups: int) -> tuple[Int[Array, "N"], Int[Array, "N"], Int[Array, "bounds"]]:
    """The order of copies by group, its inverse, and where each group begins in it; the last one ends at the last."""
    index = jnp.arange(len(group))
    order = jnp.argsort(group, stable=True)
    bounds = jnp.searchsorted(group[order], jnp.arange(groups + 1))
    return order, jnp.zeros_like(order).at[order].set(index, unique_indices=True), bounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x: Float[Array, "T d"], slots: Slots, count: int) -> Float[Array, "S d"]:
    """Tokens of so many copies each -> slots; 0 where there is no copy. The transpose of `collect`."""
    return x.at[slots.copy // count].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(y: Float[Array, "S d"], slots: Slots, count: int) -> Float[Array, "T d"]:
    """Slots -> the sum over the copies of each token, in float32 until it is whole."""
    found = y.at[slots.place.reshape(-1, count)].get(mode="fill", fill_value=0)
    return found.sum(1, dtype=jnp.float32).astype(y.dtype)


spread.defvjp(
    lambda x, slots, count: (spread(x, slots, count), slots),
    lambda count, slots, gradient: (collect(gradient, slots, count), None),
)
collect.defvjp(
    lambda y, slots, count: (collect(y, slots, count), slots),
    lambda count, slots, gradient: (spread(gradient, slots, count), None),
)


def _of_copies(
    expert: Int[Array, "N"], weight: Float[Array, "T c"], slots: Slots, none: int
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """The expert of the copy in every slot (`none` without one), and its weight."""
    return expert.at[slots.copy].get(mode="fill", fill_value=none), spread(weight.reshape(-1, 1), slots, 1)[:, 0]


def _exchange(x: Array) -> Array:
    """One buffer for every shard -> one from every shard."""
    return jax.lax.all_to_all(x, RESOURCE, split_axis=0, concat_axis=0, tiled=True)
