"""Paged attention in plain JAX: a loop over groups of slots that ends with the longest sequence's last slot.

Shapes: b sequences, l pages a sequence, m keys a page or expert, E experts, K slots, H heads, d head size; G slots are
attended to at a time.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.types import Cache, Slots

GROUP = 4


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
    number = slots.resource.shape[1]
    padding = max(GROUP, number + -number % GROUP) - number  # a group to slice, if nobody has a slot
    padded = [jnp.pad(x, ((0, 0), (0, padding))) for x in slots[:4]]

    def rows_of(pages, experts, resource, norm):
        """Every slot reads both tables; the one that does not matter reads a first row: [b, G, m, H, d]."""
        is_expert = resource >= num_pages
        page = jnp.arange(rows)[:, None] * num_pages + jnp.where(is_expert, 0, resource)
        from_pages = jnp.take(pages.reshape(-1, *pages.shape[2:]), page, axis=0, mode="clip")
        if len(experts) == 0:
            return from_pages
        expert = jnp.where(is_expert, resource - num_pages, 0)
        from_experts = norm(jnp.take(experts, expert, axis=0, mode="clip").astype(query.dtype))
        return jnp.where(is_expert[..., None, None, None], from_experts, from_pages)

    def attend_group(step, so_far):
        """The softmax over more slots: its maximum, sum of exp(score - top), and sum of the values weighted so."""
        top, total, output = so_far
        first = step * GROUP
        resource, bias, begin, end = (jax.lax.dynamic_slice_in_dim(x, first, GROUP, axis=1) for x in padded)
        key = rows_of(cache.page_key, cache.expert_key, resource, norm)
        value = rows_of(cache.page_value, cache.expert_value, resource, lambda value: value)
        is_expert = (resource >= num_pages)[..., None, None]
        either = jnp.where(is_expert, query_expert[:, None], query[:, None])
        score = jnp.einsum("bghd,bgmhd->bhgm", either, key, preferred_element_type=jnp.float32)
        at, used = jnp.arange(m), jnp.arange(GROUP) < (slots.count - first)[:, None]
        seen = (used[..., None] & (begin[..., None] <= at) & (at < end[..., None]))[:, None]
        score = jnp.where(seen, scale * score + bias[:, None, :, None], -jnp.inf)
        new = jnp.maximum(top, score.max((2, 3)))
        # Until a key has been seen there is no maximum to subtract.
        finite = jnp.where(new > -jnp.inf, new, 0.0)
        weight, keep = jnp.exp(score - finite[..., None, None]), jnp.exp(top - finite)
        added = jnp.einsum("bhgm,bgmhd->bhd", weight.astype(value.dtype), value, preferred_element_type=jnp.float32)
        return new, keep * total + weight.sum((2, 3)), keep[..., None] * output + added

    lowest, zeros = jnp.full(query.shape[:2], -jnp.inf), jnp.zeros(query.shape, jnp.float32)
    start = lowest, zeros[..., 0], zeros
    top, total, output = jax.lax.fori_loop(0, (slots.count.max() + GROUP - 1) // GROUP, attend_group, start)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)
    return (output / total[..., None]).astype(query.dtype), lse
