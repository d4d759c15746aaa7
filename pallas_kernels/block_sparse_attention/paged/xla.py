"""Paged attention in plain JAX: a loop over groups of slots that ends with the longest sequence's last slot.

Shapes: b sequences, l pages a sequence, m keys a page or expert, E experts, K slots, H heads, d head size; G slots are
attended to at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.paged.types import Slots

GROUP = 4


class Partial(NamedTuple):
    """A softmax over the slots so far: sum of exp(score - top) and of the values weighted so."""

    top: Float[Array, "b H"]
    total: Float[Array, "b H"]
    output: Float[Array, "b H d"]


def attend(
    query: Float[Array, "b H d"],
    query_expert: Float[Array, "b H d"],
    page_key: Float[Array, "b l m H d"],
    page_value: Float[Array, "b l m H d"],
    expert_key: Float[Array, "E m H d"],
    expert_value: Float[Array, "E m H d"],
    slots: Slots,
    *,
    norm: Callable[[Array], Array],
    scale: float,
) -> tuple[Float[Array, "b H d"], Float[Array, "b H"]]:
    """See `interface.paged_attention`."""
    padding = -slots.resource.shape[1] % GROUP
    padded = Slots(*(jnp.pad(x, ((0, 0), (0, padding))) for x in slots[:4]), slots.count)

    def attend_group(step: Array, partial: Partial) -> Partial:
        first = step * GROUP
        group = Slots(*(jax.lax.dynamic_slice_in_dim(x, first, GROUP, axis=1) for x in padded[:4]), slots.count - first)
        is_expert = _is_expert(group, page_key)
        key = _gather(page_key, expert_key, group, query.dtype, norm)
        value = _gather(page_value, expert_value, group, query.dtype, lambda value: value)
        either = jnp.where(is_expert[..., None, None], query_expert[:, None], query[:, None])
        score = jnp.einsum("bghd,bgmhd->bhgm", either, key, preferred_element_type=jnp.float32)
        return _merge(partial, scale * score + group.bias[:, None, :, None], _seen(group, key.shape[2]), value)

    rows, heads, size = query.shape
    nothing = Partial(
        jnp.full((rows, heads), -jnp.inf), jnp.zeros((rows, heads)), jnp.zeros((rows, heads, size), jnp.float32)
    )
    groups = (slots.count.max() + GROUP - 1) // GROUP
    partial = jax.lax.fori_loop(0, groups, attend_group, nothing)
    some = partial.total > 0
    total = jnp.where(some, partial.total, 1.0)
    lse = jnp.where(some, jnp.log(total) + partial.top, -jnp.inf)
    return (partial.output / total[..., None]).astype(query.dtype), lse


def _is_expert(group: Slots, pages: Float[Array, "b l m H d"]) -> Array:
    return group.resource >= pages.shape[1]


def _gather(
    pages: Float[Array, "b l m H d"],
    experts: Float[Array, "E m H d"],
    group: Slots,
    dtype: jnp.dtype,
    norm: Callable[[Array], Array],
) -> Float[Array, "b G m H d"]:
    """Rows of the group's resources. Every slot reads both tables; the one that does not matter reads a first row."""
    rows, num_pages = pages.shape[:2]
    is_expert = _is_expert(group, pages)
    page = jnp.arange(rows)[:, None] * num_pages + jnp.where(is_expert, 0, group.resource)
    from_pages = jnp.take(pages.reshape(-1, *pages.shape[2:]), page, axis=0, mode="clip")
    if experts.shape[0] == 0:
        return from_pages
    expert = jnp.where(is_expert, group.resource - num_pages, 0)
    from_experts = norm(jnp.take(experts, expert, axis=0, mode="clip").astype(dtype))
    return jnp.where(is_expert[..., None, None, None], from_experts, from_pages)


def _seen(group: Slots, keys: int) -> Array:
    """Which keys of a group the token sees [b, 1, G, m]."""
    key = jnp.arange(keys)
    used = jnp.arange(GROUP) < group.count[:, None]
    return (used[..., None] & (group.begin[..., None] <= key) & (key < group.end[..., None]))[:, None]


def _merge(partial: Partial, score: Float[Array, "b H G m"], seen: Array, value: Float[Array, "b G m H d"]) -> Partial:
    """The softmax over what was there and what the group adds."""
    score = jnp.where(seen, score, -jnp.inf)
    top = jnp.maximum(partial.top, score.max((2, 3)))
    # Until a key has been seen there is no maximum to subtract.
    finite = jnp.where(top > -jnp.inf, top, 0.0)
    weight = jnp.exp(score - finite[..., None, None])
    keep = jnp.exp(partial.top - finite)
    added = jnp.einsum("bhgm,bgmhd->bhd", weight.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return Partial(top, keep * partial.total + weight.sum((2, 3)), keep[..., None] * partial.output + added)
