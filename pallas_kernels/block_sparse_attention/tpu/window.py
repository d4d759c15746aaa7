"""The local window on a TPU: the functions of `block_sparse_attention.window` as kernels.

Shapes: T = C*m tokens, W tokens padded to whole tiles, m keys a chunk, R resources, H heads, d head size,
G head groups, h heads a group, E lanes of a token.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.operation import XLA_WINDOW, LocalWindow, dots, rounded
from pallas_kernels.block_sparse_attention.tpu import window_kernels
from pallas_kernels.block_sparse_attention.tpu.lanes import from_lanes, group_heads, pad_rows, to_lanes, to_stats
from pallas_kernels.block_sparse_attention.tpu.outputs import token_dots, token_rounded
from pallas_kernels.block_sparse_attention.tpu.window_kernels import Arrays, Layout
from pallas_kernels.block_sparse_attention.types import Cotangents, Inputs, Partial, Window
from pallas_kernels.tpu import LANES, ROWS, compiled_or_interpreted, round_up

MOST_KEYS = 512  # of a chunk: tiles grow with it, and fast memory does not
GROUP_ELEMENTS = 512 * 1024  # tokens of a tile times lanes of a group: what fast memory holds of ten or so arrays


def window_attention(inputs: Inputs, window: Window, scale: float, by_token: bool = False) -> Partial:
    """See `block_sparse_attention.window.window_attention`.

    Args:
      by_token: every token of the output, and of the gradient of the queries, has registers of its own, as kernels that
        pick tokens take it; only where a head fills registers. Else heads lie side by side, as matrix products take it.
    """
    tokens, heads, d = shape = inputs.query.shape
    layout = choose_layout(shape, inputs.key.shape[1], by_token)
    given = _arrays(inputs, window, layout)
    output, lse = compiled_or_interpreted(window_kernels.forward, given, layout=layout, scale=scale)
    lse = lse.reshape(-1, lse.shape[-1])[:heads, :tokens].T + window.bias.astype(jnp.float32)[:, None]
    return Partial(_heads(output[:tokens], layout, heads, d), lse)


def window_gradients(
    inputs: Inputs, window: Window, cotangents: Cotangents, scale: float, by_token: bool = False
) -> tuple[Float[Array, "T H d"], Float[Array, "R m H d"], Float[Array, "R m H d"], Float[Array, "T"]]:
    """See `block_sparse_attention.window.window_gradients`; `by_token` as in `window_attention`."""
    (tokens, heads, d), shape = inputs.query.shape, inputs.key.shape
    layout, rows = choose_layout(inputs.query.shape, shape[1], by_token), shape[0] * shape[1]
    all_tokens, (d_output, lse, delta) = layout.tiles * layout.tile, cotangents
    rest = lse - window.bias.astype(jnp.float32)[:, None]  # inf where there is no window: no weight
    stats = (to_stats(x, layout, all_tokens, fill=0.0) for x in (rest, delta))
    given = _arrays(inputs, window, layout), pad_rows(to_lanes(d_output, layout), all_tokens), *stats
    d_query, *d_tables, d_bias = compiled_or_interpreted(window_kernels.backward, *given, layout=layout, scale=scale)
    # The window is of context chunks, the first rows of the tables. They are padded as they lie: splitting
    # the heads first would cost a copy, and whatever adds to these gradients wants them in lanes again.
    d_tables = (x if len(x) == rows else pad_rows(x[:tokens], rows) for x in d_tables)
    d_key, d_value = (from_lanes(x.reshape(*shape[:2], -1), layout, heads, d) for x in d_tables)
    return _heads(d_query[:tokens], layout, heads, d), d_key, d_value, d_bias.sum((0, 1))[:tokens]


LOCAL = LocalWindow(window_attention, window_gradients)
BY_TOKEN = LocalWindow(
    functools.partial(window_attention, by_token=True),
    functools.partial(window_gradients, by_token=True),
    token_rounded,
    token_dots,
)


def _on_tpus(kernel: Callable, elsewhere: Callable) -> Callable:
    def either(inputs: Inputs, *arguments):
        *arrays, scale = arguments
        if inputs.key.shape[1] > MOST_KEYS:
            return elsewhere(inputs, *arguments)
        tpu, default = (functools.partial(function, scale=scale) for function in (kernel, elsewhere))
        return jax.lax.platform_dependent(inputs, *arrays, tpu=tpu, default=default)

    return either


def _rounded_on_tpus(output: Float[Array, "T H d"], dtype: jnp.dtype) -> Float[Array, "T H d"]:
    tpu, default = (functools.partial(function, dtype=dtype) for function in (token_rounded, rounded))
    return jax.lax.platform_dependent(output, tpu=tpu, default=default)


def _dots_on_tpus(output: Float[Array, "T H d"], d_output: Float[Array, "T H d"]) -> Float[Array, "T H"]:
    return jax.lax.platform_dependent(output, d_output, tpu=token_dots, default=dots)


ON_TPUS = LocalWindow(
    _on_tpus(LOCAL.attention, XLA_WINDOW.attention),
    _on_tpus(LOCAL.gradients, XLA_WINDOW.gradients),
)
BY_TOKEN_ON_TPUS = LocalWindow(
    _on_tpus(BY_TOKEN.attention, XLA_WINDOW.attention),
    _on_tpus(BY_TOKEN.gradients, XLA_WINDOW.gradients),
    _rounded_on_tpus,
    _dots_on_tpus,
)
"""The kernels on a TPU; plain XLA for longer chunks, and elsewhere, where kernels would be interpreted."""


def choose_layout(shape: tuple[int, ...], m: int, by_token: bool = False) -> Layout:
    """The shortest tiles in which no token sees past the one before: more than a window is wasted work."""
    tokens, heads, d = shape
    tile = round_up(m, LANES)
    lanes, cores = GROUP_ELEMENTS // max(tile, 512), chips.current_chip().device_cores
    layout = Layout(tile, -(-tokens // tile), m, *group_heads(heads, d, lanes, cores))
    whole = layout.d % LANES == 0 and (layout.groups == 1 or layout.lanes % (ROWS * LANES) == 0)
    return layout._replace(by_token=by_token and whole)


def _heads(x: Float[Array, "T *X"], layout: Layout, heads: int, d: int) -> Float[Array, "T H d"]:
    """Of a result: registers of a token are its heads, or rows of them."""
    return from_lanes(x.reshape(len(x), -1), layout, heads, d)


def _arrays(inputs: Inputs, window: Window, layout: Layout) -> Arrays:
    """Segments, queries, and keys and values a row a token: the table as it is, unless its rows end within a tile."""
    length, tokens = len(inputs.query), layout.tiles * layout.tile
    lanes = (to_lanes(x, layout) for x in (inputs.query, *inputs[2:4]))
    query, key, value = (x.reshape(-1, x.shape[-1]) for x in lanes)
    if tokens > length:
        query, key, value = (pad_rows(x[:length], tokens) for x in (query, key, value))
    return Arrays(pad_rows(window.segment, tokens), query, key, value)
