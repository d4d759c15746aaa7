"""One function, two implementations: the resources that every token's budget buys, best first.

Shapes: b rows, L tokens a row, A resources, K slots a token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import chips
from pallas_kernels.selection import tpu


class Selection(NamedTuple):
    """Slot k - 1 holds rank k. Slots at or past the token's count hold resource 0 and score -inf."""

    resource: Int[Array, "b L K"]
    score: Float[Array, "b L K"]


IMPLEMENTATIONS = ("xla", "pallas_tpu")


def select(
    score: Float[Array, "b L A"],
    slots: int,
    count: Int[Array, "b L"] | None = None,
    *,
    implementation: str | None = None,
) -> Selection:
    """The first `count` resources of every token by descending score; of equal ones the lower index comes first.

    Scores are compared as `jax.lax.top_k` does, in the total order of float32: NaN, numbers, 0, -0, numbers, -inf. So
    a resource that a token cannot have has score -inf, and a count leaves those out.

    Args:
      score: float32.
      slots: K, at most A.
      count: how many slots of each token are wanted; None: all. On a TPU the work follows the largest count of every
        1024 tokens.
      implementation: a name in IMPLEMENTATIONS; None picks the best for the device and the number of resources.

    Returns:
      `Selection`; bit for bit the same from every implementation. Its scores carry gradients to the selected entries.
    """
    name = implementation
    if name is None:  # the kernel where kernels are the default and fast memory holds what it works on
        name = "pallas_tpu" if chips.kernels_by_default() and tpu.fits(score.shape[2], slots) else "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} is unknown; available: {', '.join(sorted(IMPLEMENTATIONS))}")
    if score.dtype != jnp.float32:
        raise ValueError(f"score.dtype is {score.dtype}; wanted float32")
    if not 0 <= slots <= score.shape[2]:
        raise ValueError(f"slots={slots}; wanted 0 to {score.shape[2]}, the number of resources")
    if count is None:
        count = jnp.full_like(score, slots, jnp.int32, shape=score.shape[:2])
    if name == "pallas_tpu":
        return Selection(*tpu.select(score, count, slots))
    best, resource = jax.lax.top_k(score, slots)  # sorts all resources on a TPU
    used = jnp.arange(slots) < count[..., None]
    return Selection(jnp.where(used, resource, 0), jnp.where(used, best, -jnp.inf))
