"""The local window on a TPU: the functions of `block_sparse_attention.window` as kernels.

Shapes: T = C*m tokens, W tokens padded to whole tiles, m keys a chunk, R resources, H heads, d head size,
G head groups, h heads a group, E lanes of a token.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from pallas_kernels.block_sparse_attention import operation
from pallas_kernels.block_sparse_attention.tpu import window_kernels
from pallas_kernels.block_sparse_attention.tpu.lanes import group_heads, pad_rows, side_by_side, to_stats
from pallas_kernels.block_sparse_attention.tpu.window_kernels import Layout
from pallas_kernels.block_sparse_attention.types import Window
from pallas_kernels.tpu import LANES, compiled_or_interpreted, round_up

MOST_KEYS = 512  # of a chunk: tiles grow with it, and fast memory does not
GROUP_ELEMENTS = 512 * 1024  # tokens of a tile times lanes of a group: what fast memory holds of ten or so arrays


def window_attention(
    query: Float[Array, "T H d"],
    key: Float[Array, "R m H d"],
    value: Float[Array, "R m H d"],
    window: Window,
    scale: float,
) -> tuple[Float[Array, "T H d"], Float[Array, "T H"]]:
    """See `block_sparse_attention.window.window_attention`."""
    (tokens, heads, d), layout = query.shape, choose_layout(query.shape, key.shape[1])
    kernel = functools.partial(window_kernels.forward, layout=layout, scale=scale)
    output, lse = compiled_or_interpreted(kernel, *_arrays(query, key, value, window, layout))
    lse = lse.reshape(-1, lse.shape[-1])[:heads, :tokens].T
    return _tokens(output, layout)[:tokens, :heads, :d], lse + window.bias.astype(jnp.float32)[:, None]


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
    """See `block_sparse_attention.window.window_gradients`."""
    (tokens, heads, d), layout = query.shape, choose_layout(query.shape, key.shape[1])
    arrays = _arrays(query, key, value, window, layout)
    rest = lse - window.bias.astype(jnp.float32)[:, None]  # inf where there is no window: no weight
    stats = (to_stats(x, layout, fill=0.0) for x in (rest, delta))
    given = pad_rows(side_by_side(d_output, layout), layout.tiles * layout.tile), *stats
    kernel = functools.partial(window_kernels.backward, layout=layout, scale=scale)
    *d_arrays, d_bias = compiled_or_interpreted(kernel, *arrays, *given)
    d_query, d_key, d_value = (_tokens(x, layout)[:tokens, :heads, :d] for x in d_arrays)

    def add(table, rows):
        return table.reshape(-1, heads, d).at[:tokens].add(rows).reshape(table.shape)

    return state[0] + d_query, add(state[1], d_key), add(state[2], d_value), state[3] + d_bias.sum((0, 1))[:tokens]


LOCAL = operation.LocalWindow(window_attention, window_gradients)


def _on_tpus(kernel: Callable, elsewhere: Callable) -> Callable:
    def either(*arguments):
        *arrays, scale = arguments
        if arrays[1].shape[1] > MOST_KEYS:
            return elsewhere(*arguments)
        tpu, default = (functools.partial(function, scale=scale) for function in (kernel, elsewhere))
        return jax.lax.platform_dependent(*arrays, tpu=tpu, default=default)

    return either


ON_TPUS = operation.LocalWindow(*map(_on_tpus, LOCAL, operation.XLA_WINDOW))
"""The kernels on a TPU; plain XLA for longer chunks, and elsewhere, where kernels would be interpreted."""


def choose_layout(shape: tuple[int, int, int], m: int) -> Layout:
    """The shortest tiles in which no token sees past the one before: more than a window is wasted work."""
    tokens, heads, d = shape
    tile = round_up(m, LANES)
    return Layout(tile, -(-tokens // tile), m, *group_heads(heads, d, GROUP_ELEMENTS // max(tile, 512)))


def _arrays(query, key, value, window: Window, layout: Layout):
    """Segments, queries, and keys and values a row a token: the table as it is, unless its rows end within a tile."""
    tokens = layout.tiles * layout.tile

    def table(x: Float[Array, "R m H d"]) -> Num[Array, "S E"]:
        x = side_by_side(x.reshape(-1, *x.shape[2:]), layout)
        return x if tokens == len(query) else pad_rows(x[: len(query)], tokens)

    return pad_rows(window.segment, tokens), pad_rows(side_by_side(query, layout), tokens), table(key), table(value)


def _tokens(x: Float[Array, "W E"], layout: Layout) -> Float[Array, "W e D"]:
    return x.reshape(len(x), -1, layout.d)
