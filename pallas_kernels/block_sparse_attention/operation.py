"""Block-sparse attention as one differentiable operation: what all fast implementations share.

An implementation is a `Path`: it computes the routed pairs, forward and backward, and starts from what the local window
has given. The custom derivative of the whole, scales and casts are here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.block_sparse_attention.block_sizes import DEFAULT, BlockSizes
from pallas_kernels.block_sparse_attention.types import Cotangents, Gradients, Inputs, Pairs, Partial, Problem, Window
from pallas_kernels.block_sparse_attention.window import window_attention, window_gradients
from pallas_kernels.residuals import RESIDUALS
from pallas_kernels.tpu import row_major


def dots(output: Float[Array, "T H d"], d_output: Float[Array, "T H d"]) -> Float[Array, "T H"]:
    """The product of every head's output with its gradient, in float32."""
    return jnp.einsum("thd,thd->th", output, d_output, preferred_element_type=jnp.float32)


def rounded(output: Float[Array, "T H d"], dtype: jnp.dtype) -> Float[Array, "T H d"]:
    """The output in the type of the inputs."""
    return output.astype(dtype)


class LocalWindow(NamedTuple):
    """How the local window is computed: the two functions of `window`, or others that do the same; and what is done
    with the output of the path that it goes with, which has a layout of its own on a TPU."""

    attention: Callable
    gradients: Callable
    rounded: Callable = rounded
    dots: Callable = dots


XLA_WINDOW = LocalWindow(window_attention, window_gradients)


@runtime_checkable
class Path(Protocol):
    """One way to compute the routed pairs: a frozen tuple of static numbers."""

    @property
    def problem(self) -> Problem:
        """What it was planned for."""

    @property
    def block_sizes(self) -> BlockSizes:
        """How it cuts its work; None for sizes that it does not have."""

    def tables(self, pairs: Pairs) -> Any:
        """What forward and backward pass share; nothing is differentiated through it."""

    def forward(self, inputs: Inputs, tables: Any, start: Partial) -> tuple[Partial, Any]:
        """Adds the routed pairs to `start`; and what `mass` is made of, where it is at hand."""

    def mass(self, inputs: Inputs, tables: Any, parts: Any, lse: Float[Array, "T H"]) -> Float[Array, "T K"]:
        """The share of the whole on every pair, mean over heads: from the `parts` of the forward pass and the whole's
        log-sum-exp."""

    def backward(self, inputs: Inputs, tables: Any, cotangents: Cotangents, start: Gradients) -> Gradients:
        """Adds the gradients through the routed pairs to `start`, where those of `query_expert` and `bias` are 0, and
        finishes them."""


class NoPairs(NamedTuple):
    """The path of tokens without slots: what the window has given is all there is."""

    problem: Problem
    block_sizes: BlockSizes = DEFAULT

    def tables(self, pairs: Pairs) -> None:
        return None

    def forward(self, inputs: Inputs, tables: None, start: Partial) -> tuple[Partial, None]:
        # A window that its bias hides gives nothing either.
        return start._replace(output=jnp.where(start.lse[..., None] > -jnp.inf, start.output, 0)), None

    def mass(self, inputs: Inputs, tables: None, parts: None, lse: Float[Array, "T H"]) -> Float[Array, "T 0"]:
        return jnp.zeros_like(inputs.pairs.bias, jnp.float32)

    def backward(self, inputs: Inputs, tables: None, cotangents: Cotangents, start: Gradients) -> Gradients:
        return start.finished(self.problem)


def _attend(how, inputs: Inputs, window: Window | None, tables) -> tuple[Array, Array, Any, Array]:
    """Output and log-sum-exp by a path and a local window, differentiable; what the mass is made of; and the output in
    float32, for the backward pass: from a rounded one the gradient of every bias would be off by the rounding."""
    path, local = how
    query = inputs.query
    if window is None:
        start = Partial(jnp.zeros_like(query, jnp.float32), jnp.full_like(query[..., 0], -jnp.inf, jnp.float32))
    else:
        start = local.attention(inputs, window, path.problem.scale)
    whole, parts = path.forward(inputs, tables, start)
    whole = checkpoint_name(whole, RESIDUALS)
    return local.rounded(whole.output, query.dtype), whole.lse, parts, whole.output


def _forward(how, inputs, window, tables):
    found = _, lse, _, exact = _attend(how, inputs, window, tables)
    return found, (inputs, window, checkpoint_name(tables, RESIDUALS), Partial(exact, lse))


def _backward(how, residuals, cotangents):
    """Gradients from the saved global log-sum-exp: scores are recomputed, nothing of size pairs x m was kept."""
    (path, local), (inputs, window, tables, whole) = how, residuals
    pairs = inputs.pairs
    d_output, d_lse, *_ = cotangents
    some = whole.lse > -jnp.inf  # a token that attends to nothing: every gradient exactly 0, whatever its cotangents
    # All heads of a token attend, or none. Heads in lanes: XLA for TPUs would put tokens there, and copy for kernels.
    d_output = jnp.where(some.any(1)[:, None], d_output.reshape(len(d_output), -1), 0)
    d_output = row_major(d_output).reshape(whole.output.shape)
    delta = local.dots(whole.output, d_output)
    given = Cotangents(d_output, jnp.where(some, whole.lse, 0.0), jnp.where(some, delta - d_lse, 0.0))

    start = Gradients(*(jnp.zeros_like(x, jnp.float32) for x in (*inputs[:4], pairs.bias)))
    d_window = None
    if window is not None:
        *d_arrays, d_bias = local.gradients(inputs, window, given, path.problem.scale)
        start = start._replace(**dict(zip(("query", "key", "value"), d_arrays, strict=True)))
        d_window = Window._make((d_bias.astype(window.bias.dtype), None))

    *d_arrays, d_bias = path.backward(inputs, tables, given, start)
    d_pairs = Pairs._make((None, d_bias.astype(pairs.bias.dtype), None, None))
    return Inputs._make((*d_arrays, d_pairs, None)), d_window, None


attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
attend.defvjp(_forward, _backward)
