"""Block-sparse attention as one differentiable operation: what all fast implementations share.

An implementation is a `Path`: it computes the routed pairs, forward and backward, and starts from what the local window
has given. The window, the custom derivative of the whole, scales and casts are here.

Shapes: T tokens, K slots, R resources, m keys a resource, H heads, d head size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.tile import finite
from pallas_kernels.block_sparse_attention.types import Attention, Pairs, Window
from pallas_kernels.block_sparse_attention.window import window_attention, window_gradients
from pallas_kernels.varying import equally_varying


class Inputs(NamedTuple):
    """What the routed pairs are computed from."""

    query: Float[Array, "T H d"]
    query_expert: Float[Array, "T H d"]
    key: Float[Array, "R m H d"]
    value: Float[Array, "R m H d"]
    pairs: Pairs
    max_score: Float[Array, ""] | None  # no |scale * q . k| exceeds it; None: nobody knows


class Partial(NamedTuple):
    """A softmax over some of the keys; 0 and -inf for a token that has seen none."""

    output: Float[Array, "T H d"]
    lse: Float[Array, "T H"]


class Cotangents(NamedTuple):
    """What gradients of scores follow from: d score = p (d output . v - delta), p = exp(scale q.k + bias - lse)."""

    output: Float[Array, "T H d"]
    lse: Float[Array, "T H"]  # over all keys of the token; 0 where there are none
    delta: Float[Array, "T H"]  # output . d output - d lse


class Gradients(NamedTuple):
    """In float32; those of queries and keys still lack the factor `scale`."""

    query: Float[Array, "T H d"]
    query_expert: Float[Array, "T H d"]
    key: Float[Array, "R m H d"]
    value: Float[Array, "R m H d"]
    bias: Float[Array, "T K"]


class Problem(NamedTuple):
    """The static numbers of a call."""

    tokens: int
    heads: int
    d: int
    resources: int
    m: int
    slots: int
    dtype: jnp.dtype
    num_context: int  # resources below meet `query`, the others `query_expert`
    max_pairs: int  # at least 1
    scale: float


class Path(Protocol):
    """One way to compute the routed pairs: a frozen tuple of static numbers."""

    @property
    def problem(self) -> Problem:
        """What it was planned for."""

    def tables(self, pairs: Pairs) -> Any:
        """Integers that forward and backward pass share, from pairs.resource and pairs.count."""

    def forward(self, inputs: Inputs, tables: Any, start: Partial) -> tuple[Partial, Float[Array, "T K"]]:
        """Adds the routed pairs to `start`; and the share of the whole on every pair, mean over heads."""

    def backward(self, inputs: Inputs, tables: Any, cotangents: Cotangents, start: Gradients) -> Gradients:
        """Adds the gradients through the routed pairs to `start`."""


class NoPairs(NamedTuple):
    """The path of tokens without slots: what the window has given is all there is."""

    problem: Problem

    def tables(self, pairs: Pairs) -> None:
        """None are needed."""

    def forward(self, inputs: Inputs, tables: None, start: Partial) -> tuple[Partial, Float[Array, "T K"]]:
        """Adds nothing; a window that its bias hides gives nothing either."""
        start = start._replace(output=jnp.where(start.lse[..., None] > -jnp.inf, start.output, 0))
        return start, jnp.zeros_like(inputs.pairs.bias, jnp.float32)

    def backward(self, inputs: Inputs, tables: None, cotangents: Cotangents, start: Gradients) -> Gradients:
        """Adds nothing."""
        return start


class LocalWindow(NamedTuple):
    """How the local window is computed: the two functions of `window`, or others that do the same."""

    attention: Callable
    gradients: Callable


XLA_WINDOW = LocalWindow(window_attention, window_gradients)


def attend(
    plan: Callable[[Problem], Path],
    query: Float[Array, "T H d"],
    query_expert: Float[Array, "T H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    pairs: Pairs,
    window: Window | None,
    *,
    num_context: int,
    max_pairs: int,
    scale: float,
    max_score: Float[Array, ""] | None,
    local: LocalWindow = XLA_WINDOW,
) -> Attention:
    """See `interface.block_sparse_attention`; `plan` chooses how, and refuses what cannot be done with a ValueError."""
    inputs, window = equally_varying((Inputs(query, query_expert, key, value, pairs, max_score), window))
    numbers = problem(query, key, pairs, num_context=num_context, max_pairs=max_pairs, scale=scale)
    path = plan(numbers) if numbers.slots > 0 else NoPairs(numbers)
    output, lse, mass = _attend((path, local), inputs, window, path.tables(inputs.pairs))
    return Attention(output, lse, jax.lax.stop_gradient(mass))


def problem(query, key, pairs: Pairs, *, num_context: int, max_pairs: int, scale: float) -> Problem:
    """The static numbers of `attend`'s arguments; no more pairs than there are slots."""
    slots = pairs.resource.shape[1]
    max_pairs = max(1, min(max_pairs, pairs.resource.size))
    return Problem(*query.shape, *key.shape[:2], slots, query.dtype, num_context, max_pairs, float(scale))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how, inputs, window, tables):
    return _forward(how, inputs, window, tables)[0]


def _forward(how, inputs, window, tables):
    """Output, log-sum-exp and mass; what the backward pass needs of them."""
    path, local = how
    query, key, value = inputs.query, inputs.key, inputs.value
    if window is None:
        start = Partial(jnp.zeros_like(query, jnp.float32), jnp.full_like(query[..., 0], -jnp.inf, jnp.float32))
    else:
        start = Partial(*local.attention(query, key, value, window, path.problem.scale))
    whole, mass = path.forward(inputs, tables, start)
    # The float32 output is kept: from a rounded one the gradient of every bias would be off by the rounding.
    return (whole.output.astype(query.dtype), whole.lse, mass), (inputs, window, tables, whole)


def _backward(how, residuals, cotangents):
    """Gradients from the saved global log-sum-exp: scores are recomputed, nothing of size pairs x m was kept."""
    path, local = how
    inputs, window, tables, whole = residuals
    query, _, key, value, pairs, _ = inputs
    d_output, d_lse, _ = cotangents
    some = whole.lse > -jnp.inf  # a token that attends to nothing: every gradient exactly 0, whatever its cotangents
    d_output = jnp.where(some[..., None], d_output, 0)
    delta = jnp.einsum("thd,thd->th", whole.output, d_output, preferred_element_type=jnp.float32)
    given = Cotangents(d_output, finite(whole.lse), jnp.where(some, delta - d_lse, 0.0))

    start = Gradients(*(jnp.zeros_like(x, jnp.float32) for x in (*inputs[:4], pairs.bias)))
    d_window = None
    if window is not None:
        state = start.query, start.key, start.value, jnp.zeros_like(window.bias, jnp.float32)
        d_query, d_key, d_value, d_bias = local.gradients(query, key, value, window, *given, state, path.problem.scale)
        start = start._replace(query=d_query, key=d_key, value=d_value)
        d_window = Window(d_bias.astype(window.bias.dtype), None)

    *d_arrays, d_bias = path.backward(inputs, tables, given, start)
    scales = path.problem.scale, path.problem.scale, path.problem.scale, 1.0
    d_arrays = ((x * scale).astype(query.dtype) for x, scale in zip(d_arrays, scales, strict=True))
    return Inputs(*d_arrays, Pairs(None, d_bias.astype(pairs.bias.dtype), None, None), None), d_window, None


_attend.defvjp(_forward, _backward)
