"""Two arrays of bfloat16 as the halves of words, one register a token: what the resident kernels pick tokens from.

XLA widens both arrays, copies them to the other layout and writes the words in three passes over main memory.

Shapes: N tokens, whole tiles of t; D lanes, whole registers of 8 rows of 128; Q = D / 128 rows of a token.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt32

from pallas_kernels.tpu import F32, LANES, call, compiled_or_interpreted, round_up

TILE = 128  # tokens of a step
PACKED_ROWS = 16  # of a register of bfloat16


def words(low: Float[Array, "N D"], high: Float[Array, "N D"]) -> UInt32[Array, "N Q 128"]:
    """`low` in the lower halves."""
    tokens = len(low)
    tile = min(TILE, round_up(tokens, PACKED_ROWS))
    both = (jnp.pad(x, ((0, -tokens % tile), (0, 0))) for x in (low, high))
    return compiled_or_interpreted(_run, *both, tile=tile).reshape(-1, low.shape[1] // LANES, LANES)[:tokens]


def _kernel(low, high, out):
    rows = low.shape[1] // LANES
    for row in range(rows):
        lanes = slice(row * LANES, (row + 1) * LANES)
        # A bfloat16 is the upper half of a float32.
        lower, upper = (jax.lax.bitcast_convert_type(x[:, lanes].astype(F32), jnp.uint32) for x in (low, high))
        out[pl.ds(row, low.shape[0], stride=rows), :] = (lower >> 16) | upper


def _run(low, high, *, tile: int, interpret: bool) -> UInt32[Array, "NQ 128"]:
    tokens, width = low.shape
    rows = width // LANES
    block = pl.BlockSpec((tile, width), lambda step: (step, 0))
    result = pl.BlockSpec((tile * rows, LANES), lambda step: (step, 0)), (tokens * rows, LANES), jnp.uint32
    size = tile * width * (2 + 2 + 4)
    return call(
        _kernel,
        "token_words",
        (tokens // tile,),
        (),
        [(block, low), (block, high)],
        [result],
        semantics=("parallel",),
        vmem_bytes=2 * size + 2**20,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=tokens * width * 8),
        interpret=interpret,
    )[0]
