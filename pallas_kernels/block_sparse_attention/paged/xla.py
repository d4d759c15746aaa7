"""Paged attention in plain JAX: a loop over slots that ends with the longest sequence's last slot.

Shapes: b sequences, l pages a sequence, m keys a page or expert, E experts, K slots, H heads, d head size.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.types import Cache, Slots


def attend(
    query: Float[Array, "b H d"],
    query_expert: Float[Array, "b H d"],
    cache: Cache,
    slots: Slots,
    norm: Callable[[Array], Array],
    scale: float,
) -> tuple[Float[Array, "b H d"], Float[Array, "b H"]]:
    """See `interface.paged_attention`."""
    rows, num_pages, m = cache.page_key.shape[:3]
    if slots.resource.shape[1] == 0:
        return jnp.zeros_like(query), jnp.full(query.shape[:2], -jnp.inf)

    def rows_of(pages, experts, resource, norm):
        """What one slot of every sequence names: [b, m, H, d]."""
        is_expert = resource >= num_pages
        page, expert = jnp.where(is_expert, 0, resource), jnp.where(is_expert, resource - num_pages, 0)

        def from_pages():
            number = jnp.arange(rows) * num_pages + page
            return jnp.take(pages.reshape(-1, *pages.shape[2:]), number, axis=0, mode="clip")

        def from_experts():
            return norm(jnp.take(experts, expert, axis=0, mode="clip").astype(query.dtype))

        if len(experts) == 0:
            return from_pages()
        if rows == 1:  # only one of the tables is read
            return jax.lax.cond(is_expert[0], from_experts, from_pages)
        return jnp.where(is_expert[:, None, None, None], from_experts(), from_pages())

    def attend_slot(slot, so_far):
        """The softmax over one more slot: its maximum, sum of exp(score - top), and sum of the values weighted so."""
        top, total, output = so_far
        given = (jax.lax.dynamic_index_in_dim(x, slot, axis=1, keepdims=False) for x in slots[:4])
        resource, bias, begin, end = given
        key = rows_of(cache.page_key, cache.expert_key, resource, norm)
        value = rows_of(cache.page_value, cache.expert_value, resource, lambda value: value)
        either = jnp.where((resource >= num_pages)[:, None, None], query_expert, query)
        score = jnp.einsum("bhd,bmhd->bhm", either, key, preferred_element_type=jnp.float32)
        at = jnp.arange(m)
        seen = (slot < slots.count)[:, None] & (begin[:, None] <= at) & (at < end[:, None])
        score = jnp.where(seen[:, None], scale * score + bias[:, None, None], -jnp.inf)
        new = jnp.maximum(top, score.max(2))
        # Until a key has been seen there is no maximum to subtract.
        finite = jnp.where(new > -jnp.inf, new, 0.0)
        weight, keep = jnp.exp(score - finite[..., None]), jnp.exp(top - finite)
        added = jnp.einsum("bhm,bmhd->bhd", weight.astype(value.dtype), value, preferred_element_type=jnp.float32)
        return new, keep * total + weight.sum(2), keep[..., None] * output + added

    lowest, zeros = jnp.full(query.shape[:2], -jnp.inf), jnp.zeros(query.shape, jnp.float32)
    start = lowest, zeros[..., 0], zeros
    top, total, output = jax.lax.fori_loop(0, slots.count.max(), attend_slot, start)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)
    return (output / total[..., None]).astype(query.dtype), lse
