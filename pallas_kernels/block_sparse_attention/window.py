"""The local window: token i sees keys i - m < j <= i, that is chunks c - 1 and c under a band. Regular: no gathers.

Shapes: T = C*m tokens, C chunks, m keys a chunk, H heads, d head size, g chunks a step, j = 2m keys of two chunks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.block_sparse_attention.tile import head_major, partial_attention, partial_gradients
from pallas_kernels.block_sparse_attention.types import Window

STEP_SCORES = 2**18  # scores of one step: in cache, and enough of them for every core


def window_attention(
    query: Float[Array, "T H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    window: Window,
    scale: float,
) -> tuple[Float[Array, "T H d"], Float[Array, "T H"]]:
    """Softmax attention over the window alone, and its log-sum-exp with the bias of the window."""
    query, bias, segment = (_chunks(x, key.shape[1]) for x in (query, window.bias.astype(jnp.float32), window.segment))

    def step(i, state):
        chunk, _ = _step_chunks(i, query)
        output, lse = partial_attention(
            head_major(query[chunk]), _two(key, chunk), _two(value, chunk), _seen(segment, chunk), scale
        )
        lse = lse.swapaxes(1, 2) + bias[chunk][..., None]
        return state[0].at[chunk].set(head_major(output)), state[1].at[chunk].set(lse)

    state = jnp.zeros_like(query, jnp.float32), jnp.zeros_like(query[..., 0], jnp.float32)
    output, lse = jax.lax.fori_loop(0, _steps(query), step, state)
    return output.reshape(-1, *output.shape[2:]), lse.reshape(-1, lse.shape[2])


def window_gradients(
    query: Float[Array, "T H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    window: Window,
    d_output: Float[Array, "T H d"],
    lse: Float[Array, "T H"],
    delta: Float[Array, "T H"],
    state: tuple[Float[Array, "T H d"], Float[Array, "R m H d"], Float[Array, "R m H d"], Float[Array, "T"]],
    scale: float,
) -> tuple[Float[Array, "T H d"], Float[Array, "R m H d"], Float[Array, "R m H d"], Float[Array, "T"]]:
    """Adds the window's part to the gradients of (query, key, value, window.bias); see `tile.partial_gradients`."""
    m = key.shape[1]
    query, bias, segment, d_output, lse, delta = (
        _chunks(x, m) for x in (query, window.bias.astype(jnp.float32), window.segment, d_output, lse, delta)
    )

    def step(i, state):
        d_query, d_key, d_value, d_bias = state
        chunk, fresh = _step_chunks(i, query)
        dq, dk, dv, db = partial_gradients(
            head_major(query[chunk]),
            _two(key, chunk),
            _two(value, chunk),
            head_major(d_output[chunk]),
            (bias[chunk][..., None] - lse[chunk]).swapaxes(1, 2),
            delta[chunk].swapaxes(1, 2),
            _seen(segment, chunk) & fresh[:, None, None, None],
            scale,
        )
        dk, dv = (head_major(x).reshape(-1, 2, *key.shape[1:]) for x in (dk, dv))
        return (
            d_query.at[chunk].add(head_major(dq)),
            d_key.at[_previous(chunk)].add(dk),
            d_value.at[_previous(chunk)].add(dv),
            d_bias.at[chunk].add(db),
        )

    d_query, d_key, d_value, d_bias = state
    state = _chunks(d_query, m), d_key, d_value, _chunks(d_bias, m)
    d_query, d_key, d_value, d_bias = jax.lax.fori_loop(0, _steps(query), step, state)
    return d_query.reshape(-1, *d_query.shape[2:]), d_key, d_value, d_bias.reshape(-1)


def _chunks(x: Shaped[Array, "T *U"], m: int) -> Shaped[Array, "C m *U"]:
    return x.reshape(-1, m, *x.shape[1:])


def _chunks_a_step(query: Float[Array, "C m H d"]) -> int:
    chunks, m, heads, _ = query.shape
    return max(1, min(chunks, STEP_SCORES // (heads * m * 2 * m)))


def _steps(query: Float[Array, "C m H d"]) -> int:
    return -(-len(query) // _chunks_a_step(query))


def _step_chunks(i: Int[Array, ""], query: Float[Array, "C m H d"]) -> tuple[Int[Array, "g"], Bool[Array, "g"]]:
    """The chunks of step i, and which of them no earlier step had: the last step is moved back to stay in range."""
    size = _chunks_a_step(query)
    chunk = jnp.minimum(i * size, len(query) - size) + jnp.arange(size)
    return chunk, chunk >= i * size


def _previous(chunk: Int[Array, "g"]) -> Int[Array, "g 2"]:
    """Every chunk after the one before it; the first chunk stands in for its own predecessor, whose keys are masked."""
    return jnp.stack([jnp.maximum(chunk - 1, 0), chunk], axis=1)


def _two(x: Float[Array, "R m H d"], chunk: Int[Array, "g"]) -> Float[Array, "g H j d"]:
    return head_major(x[_previous(chunk)].reshape(len(chunk), -1, *x.shape[2:]))


def _seen(segment: Int[Array, "C m"], chunk: Int[Array, "g"]) -> Bool[Array, "g 1 m j"]:
    """Query at offset i of the chunk and key at offset j, counted from the start of the chunk before."""
    m = segment.shape[1]
    i, j = jnp.arange(m)[:, None], jnp.arange(2 * m) - m
    exists = (chunk > 0)[:, None, None] | (j >= 0)
    together = segment[chunk][:, :, None] == segment[_previous(chunk)].reshape(-1, 1, 2 * m)
    return ((i - m < j) & (j <= i) & exists & together)[:, None]
