"""The definition, slow on purpose: every token scores every key of every resource, and a mask decides.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size, J = R*m (+ window keys) columns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.block_sparse_attention.types import Attention, Inputs, Pairs, Problem, Window


def attend(inputs: Inputs, window: Window | None, problem: Problem) -> Attention:
    """softmax over the concatenated keys of a token's resources of q.k * scale + bias, in float32 throughout."""
    query, query_expert, key, value = (x.astype(jnp.float32) for x in inputs[:4])
    tokens, heads, _, resources, m, *_ = problem
    is_context_R1 = (jnp.arange(resources) < problem.num_context)[:, None]
    rotated, unrotated = (jnp.einsum("thd,rmhd->thrm", q, key) for q in (query, query_expert))
    score_THJ = jnp.where(is_context_R1, rotated, unrotated).reshape(tokens, heads, resources * m) * problem.scale
    bias_TJ, seen_TJ = _routed(inputs.pairs, resources, m)
    value_JHd = value.reshape(resources * m, heads, -1)
    if window is not None:  # the window's keys are more columns: a key may be seen both ways, and then counts twice
        i, j = jnp.arange(tokens)[:, None], jnp.arange(tokens)
        seen_TT = (i - m < j) & (j <= i) & (window.segment[:, None] == window.segment)
        bias_TT = jnp.broadcast_to(window.bias.astype(jnp.float32)[:, None], seen_TT.shape)
        score_THJ = jnp.concatenate([score_THJ, score_THJ[:, :, :tokens]], axis=2)
        bias_TJ = jnp.concatenate([bias_TJ, bias_TT], axis=1)
        seen_TJ = jnp.concatenate([seen_TJ, seen_TT], axis=1)
        value_JHd = jnp.concatenate([value_JHd, value_JHd[:tokens]], axis=0)

    probability_THJ, lse = _softmax(score_THJ, bias_TJ[:, None], seen_TJ[:, None])
    output = jnp.einsum("thj,jhd->thd", probability_THJ, value_JHd)
    mass_TR = probability_THJ[:, :, : resources * m].mean(1).reshape(-1, resources, m).sum(-1)
    used_TK = jnp.arange(problem.slots) < inputs.pairs.count[:, None]
    used_TK &= inputs.pairs.resource < resources
    picked_TK = jnp.take_along_axis(mass_TR, jnp.where(used_TK, inputs.pairs.resource, 0), axis=1)
    return Attention(output.astype(problem.dtype), lse, jnp.where(used_TK, picked_TK, 0.0))


def _routed(pairs: Pairs, resources: int, m: int) -> tuple[Float[Array, "T J"], Bool[Array, "T J"]]:
    """Bias and visibility of every key of every resource; a resource that no slot names has no visible key."""
    slots = pairs.resource.shape[1]
    used_TK = jnp.arange(slots) < pairs.count[:, None]
    hit_TKR = used_TK[:, :, None] & (pairs.resource[:, :, None] == jnp.arange(resources))
    # `where`, not a product: an unused slot may hold anything, infinities included.
    bias_TR = jnp.where(hit_TKR, pairs.bias.astype(jnp.float32)[:, :, None], 0.0).sum(1)
    visible_TR = jnp.where(hit_TKR, pairs.visible[:, :, None], 0).sum(1)
    seen_TRm = jnp.arange(m) < visible_TR[:, :, None]
    return jnp.repeat(bias_TR, m, axis=1), seen_TRm.reshape(-1, resources * m)


def _softmax(
    score: Float[Array, "T H J"], bias: Float[Array, "T 1 J"], seen: Bool[Array, "T 1 J"]
) -> tuple[Float[Array, "T H J"], Float[Array, "T H"]]:
    """Softmax and log-sum-exp over the seen columns; all zero and -inf where there is none, without a NaN gradient."""
    seen &= bias > -jnp.inf
    score = jnp.where(seen, score + jnp.where(seen, bias, 0.0), -jnp.inf)
    top = jax.lax.stop_gradient(score.max(-1, initial=-jnp.inf, keepdims=True))
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, score - jnp.where(top > -jnp.inf, top, 0.0), 0.0)), 0.0)
    total = weight.sum(-1)
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    return weight / safe[..., None], jnp.where(some, jnp.log(safe) + top[..., 0], -jnp.inf)
