"""The local window: token i sees keys i - m < j <= i, that is chunks c - 1 and c under a band. Regular: no gathers.

Shapes: T = C*m tokens, C chunks, m keys a chunk, H heads, d head size, g chunks a step, j = 2m keys of two chunks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_sparse_attention.tile import partial_attention, partial_gradients, step_scores
from pallas_kernels.block_sparse_attention.types import Cotangents, Inputs, Partial, Window


def chunks_a_step(chunks: int, heads: int, m: int) -> int:
    """g, of so many chunks in all."""
    return max(1, min(chunks, step_scores() // (heads * m * 2 * m)))


def _step(i, size: int, key, value, segment: Int[Array, "C m"]):
    """The chunks [g] of step i and each with the one before it [g, 2]; which of them no earlier step had [g], as the
    last step is moved back to stay in range; keys and values of both [g, H, j, d], and which are seen [g, 1, m, j].
    """
    m, chunk = key.shape[1], jnp.minimum(i * size, len(segment) - size) + jnp.arange(size)
    both = jnp.stack([jnp.maximum(chunk - 1, 0), chunk], axis=1)  # the first stands in for its own predecessor, masked
    # A query's offset in its chunk, and a key's from the start of that chunk.
    query, at = jnp.arange(m)[:, None], jnp.arange(2 * m) - m
    exists = (chunk > 0)[:, None, None] | (at >= 0)
    together = segment[chunk][:, :, None] == segment[both].reshape(-1, 1, 2 * m)
    seen = ((query - m < at) & (at <= query) & exists & together)[:, None]
    two = size, 2 * m, *key.shape[2:]
    keys, values = key[both].reshape(two).swapaxes(1, 2), value[both].reshape(two).swapaxes(1, 2)
    return chunk, both, chunk >= i * size, keys, values, seen


def window_attention(inputs: Inputs, window: Window, scale: float) -> Partial:
    """Softmax attention over the window alone, and its log-sum-exp with the bias of the window."""
    query, _, key, value, *_ = inputs
    m, heads, d = key.shape[1:]
    arrays = query, window.bias.astype(jnp.float32), window.segment
    query, bias, segment = (x.reshape(-1, m, *x.shape[1:]) for x in arrays)
    size = chunks_a_step(len(query), heads, m)

    def step(i, state):
        chunk, _, _, k, v, seen = _step(i, size, key, value, segment)
        output, lse = partial_attention(query[chunk].swapaxes(1, 2), k, v, seen, scale)
        lse = lse.swapaxes(1, 2) + bias[chunk][..., None]
        return state[0].at[chunk].set(output.swapaxes(1, 2)), state[1].at[chunk].set(lse)

    state = jnp.zeros_like(query, jnp.float32), jnp.zeros_like(query[..., 0], jnp.float32)
    output, lse = jax.lax.fori_loop(0, -(-len(query) // size), step, state)
    return Partial(output.reshape(-1, heads, d), lse.reshape(-1, heads))


def window_gradients(
    inputs: Inputs, window: Window, cotangents: Cotangents, scale: float
) -> tuple[Float[Array, "T H d"], Float[Array, "R m H d"], Float[Array, "R m H d"], Float[Array, "T"]]:
    """Gradients of (query, key, value, window.bias) through the window; see `tile.partial_gradients`."""
    query, _, key, value, *_ = inputs
    m, heads, d = key.shape[1:]
    arrays = query, window.bias.astype(jnp.float32), window.segment, *cotangents
    query, bias, segment, d_output, lse, delta = (x.reshape(-1, m, *x.shape[1:]) for x in arrays)
    size = chunks_a_step(len(query), heads, m)

    def step(i, state):
        chunk, both, fresh, k, v, seen = _step(i, size, key, value, segment)
        q, do, dl = (x[chunk].swapaxes(1, 2) for x in (query, d_output, delta))
        shift = (bias[chunk][..., None] - lse[chunk]).swapaxes(1, 2)
        dq, dk, dv, db = partial_gradients(q, k, v, do, shift, dl, seen & fresh[:, None, None, None], scale)
        dk, dv = (x.swapaxes(1, 2).reshape(-1, 2, *key.shape[1:]) for x in (dk, dv))
        d_query, d_key, d_value, d_bias = state
        # One chunk of the two after the other: where places repeat, a GPU adds to them in any order. Now only the first
        # does, as its own predecessor, whose gradients are zero.
        for own, at in enumerate(both.T):
            d_key, d_value = d_key.at[at].add(dk[:, own]), d_value.at[at].add(dv[:, own])
        return d_query.at[chunk].add(dq.swapaxes(1, 2)), d_key, d_value, d_bias.at[chunk].add(db)

    state = tuple(jnp.zeros_like(x, jnp.float32) for x in (query, key, value, bias))
    d_query, d_key, d_value, d_bias = jax.lax.fori_loop(0, -(-len(query) // size), step, state)
    return d_query.reshape(-1, heads, d), d_key, d_value, d_bias.reshape(-1)
