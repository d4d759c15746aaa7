"""One function, two implementations: P(choose) of every resource for every token.

Shapes: b rows, T tokens, l chunks of context, E experts, R = l + E, g pooled keys of each, H heads, k head size.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import chips
from pallas_kernels.choice import tpu
from pallas_kernels.tpu import LOWEST

IMPLEMENTATIONS = ("xla", "pallas_tpu")


def attention_shares(
    query: Float[Array, "b T H k"],
    query_expert: Float[Array, "b T H k"],
    chunk_key: Float[Array, "b l g H k"],
    expert_key: Float[Array, "E g H k"],
    available: Bool[Array, "b T l"],
    *,
    precision: str,
    implementation: str | None = None,
) -> tuple[Float[Array, "b T R"], Float[Array, "b T H k"], Float[Array, "b T H k"]]:
    """The mean over heads of a softmax of q . k / sqrt(k) over all pooled keys, those of one resource added up.

    Args:
      query: meets the keys of chunks, `query_expert` those of experts. bfloat16 or float32.
      chunk_key: float32, as `expert_key`.
      available: which chunks a token can be given; of the others the result means nothing.
      precision: of the scores on a TPU, "default", "high" or "highest" as in `jax.lax.Precision`. "pallas_tpu" takes
        one pass of bfloat16 for each of one, two or three parts of the keys: with queries in bfloat16 there is nothing
        else to split. Its gradients take one.
      implementation: a name in IMPLEMENTATIONS; None picks the best for the device and the shapes.

    Returns:
      The shares, float32, chunks first; and both queries, unchanged. Read these afterwards in place of the arguments:
      the backward kernel then adds its gradients to theirs. The forward kernel keeps no scores; the backward pass
      computes them again.
    """
    name = implementation
    if name is None:  # the kernels where kernels are the default and can do it
        shapes = query.shape, query.dtype, chunk_key.shape, len(expert_key)
        name = "pallas_tpu" if chips.kernels_by_default() and tpu.fits(*shapes, precision) else "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r} is unknown; available: {', '.join(sorted(IMPLEMENTATIONS))}")
    if name == "pallas_tpu":
        return tpu.attention_shares(query, query_expert, chunk_key, expert_key, available, precision)
    scale = query.shape[-1] ** -0.5
    scaled, scaled_expert = (scale * x.astype(jnp.float32) for x in (query, query_expert))
    keys = chunk_key.swapaxes(1, 2).reshape(len(chunk_key), -1, *chunk_key.shape[3:])
    of_chunks = jnp.einsum("bshk,bnhk->hbsn", scaled, keys, precision=precision)
    of_experts = scores_of_experts(scaled_expert, expert_key, precision)
    share = attention_shares_of_scores(of_chunks, of_experts, available, chunk_key.shape[2])
    return share, query, query_expert


def scores_of_experts(
    query: Float[Array, "b T H k"], key: Float[Array, "E g H k"], precision: str
) -> Float[Array, "H b T gE"]:
    """Products with the first pooled key of every expert, then with the second. Queries are scaled already."""
    keys = key.swapaxes(0, 1).reshape(-1, *key.shape[2:])
    return jnp.einsum("bshk,nhk->hbsn", query, keys, precision=precision)


def attention_shares_of_scores(
    chunks: Float[Array, "H b T gl"], experts: Float[Array, "H b T gE"], available: Bool[Array, "b T l"], groups: int
) -> Float[Array, "b T R"]:
    """The same from the scores: of every resource by its first pooled key, then by the second."""
    chunks = jnp.where(jnp.tile(available, groups), chunks, LOWEST)
    tops = [jax.lax.stop_gradient(x).max(-1, initial=LOWEST, keepdims=True) for x in (chunks, experts)]
    top = jnp.maximum(*tops)
    # Added slice by slice: a sum over an axis of g would not be vectorised.
    weights = [sum(jnp.split(jnp.exp(x - top), groups, axis=-1)) for x in (chunks, experts)]
    weight = jnp.concatenate(weights, axis=-1)
    return (weight / weight.sum(-1, keepdims=True)).mean(0)
