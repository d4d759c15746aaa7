"""One function, two implementations: attention of one token per sequence over its own few pages and shared experts.

Shapes: b sequences, l pages a sequence, m keys a page or expert, E experts, K slots, H heads, d head size.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.paged import tpu, xla
from pallas_kernels.block_sparse_attention.types import Cache, Slots, require_float

IMPLEMENTATIONS = {"xla": xla.attend, "pallas_tpu": tpu.attend}


def paged_attention(
    query: Float[Array, "b H d"],
    query_expert: Float[Array, "b H d"],
    page_key: Float[Array, "b l m H d"],
    page_value: Float[Array, "b l m H d"],
    expert_key: Float[Array, "E m H d"],
    expert_value: Float[Array, "E m H d"],
    slots: Slots,
    *,
    norm_expert_key: Callable[[Array], Array] = lambda key: key,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "b H d"], Float[Array, "b H"]]:
    """Output and log-sum-exp of one softmax over all keys that the slots show: `block_sparse_attention` for decoding.

    Reads the chosen pages and experts alone. Shapes are static, the work follows the budgets: those of all sequences
    together ("pallas_tpu"), or the largest of them ("xla").

    Args:
      query: (rotated) meets pages. bfloat16 or float32; the kernel for TPUs alone refuses float16.
      query_expert: (un-rotated) meets experts.
      slots: one whose resource is none of 0..l+E-1 is hidden, by every implementation: no share, and nothing outside
        the tables is read.
      norm_expert_key: applied to the rows of expert keys that were fetched, in the type of the query. It sees whole
        heads, [..., d], and must treat all alike: how many it is given at a time is not its business.
      scale: of the scores; None is d ** -0.5.
      implementation: a name in IMPLEMENTATIONS; None picks the best for the device.

    Returns:
      A token without slots has output 0 and log-sum-exp -inf. Softmax statistics are float32.
    """
    name = ("pallas_tpu" if chips.kernels_by_default() else "xla") if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} is unknown; available: {', '.join(sorted(IMPLEMENTATIONS))}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    require_float(name, query=query, query_expert=query_expert)
    cache = Cache(page_key, page_value, expert_key, expert_value)
    return IMPLEMENTATIONS[name](query, query_expert, cache, _hide_unknown(slots, cache), norm_expert_key, scale)


def _hide_unknown(slots: Slots, cache: Cache) -> Slots:
    """A slot whose resource is in no table shows no key of some other."""
    resources = cache.page_key.shape[1] + len(cache.expert_key)
    known = (slots.resource >= 0) & (slots.resource < resources)
    return slots._replace(
        resource=jnp.where(known, slots.resource, 0),
        begin=jnp.where(known, slots.begin, 0),
        end=jnp.where(known, slots.end, 0),
    )
