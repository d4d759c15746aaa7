"""Two arrays of bfloat16 as the halves of words, one register a token: what the resident kernels pick tokens from.

XLA widens both arrays, copies them to the other layout and writes the words in three passes over main memory. One array
can be put beside each of several: it is then read once.

Shapes: N tokens, whole tiles of t; D lanes, whole registers of 8 rows of 128; Q = D / 128 rows of a token.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt32

from pallas_kernels.tpu import F32, LANES, call, compiled_or_interpreted, round_up

TILE = 128  # tokens of a step
PACKED_ROWS = 16  # of a register of bfloat16


def words(high: Float[Array, "N D"], *lows: Float[Array, "N D"]) -> tuple[UInt32[Array, "N Q 128"], ...]:
    """`high` in the upper halves of words, and one array after the other in the lower ones."""
    tokens = len(high)
    tile = min(TILE, round_up(tokens, PACKED_ROWS))
    padded = (jnp.pad(x, ((0, -tokens % tile), (0, 0))) for x in (high, *lows))
    found = compiled_or_interpreted(_run, *padded, tile=tile)
    return tuple(x.reshape(-1, high.shape[1] // LANES, LANES)[:tokens] for x in found)


def _kernel(high, *others):
    lows, results = others[: len(others) // 2], others[len(others) // 2 :]
    rows = high.shape[1] // LANES
    for row in range(rows):
        lanes = slice(row * LANES, (row + 1) * LANES)
        # A bfloat16 is the upper half of a float32.
        upper, *lower = (jax.lax.bitcast_convert_type(x[:, lanes].astype(F32), jnp.uint32) for x in (high, *lows))
        for low, out in zip(lower, results, strict=True):
            out[pl.ds(row, high.shape[0], stride=rows), :] = (low >> 16) | upper


def _run(high, *lows, tile: int, interpret: bool) -> tuple[UInt32[Array, "NQ 128"], ...]:
    tokens, width = high.shape
    rows = width // LANES
    block = pl.BlockSpec((tile, width), lambda step: (step, 0))
    result = pl.BlockSpec((tile * rows, LANES), lambda step: (step, 0)), (tokens * rows, LANES), jnp.uint32
    element_bytes = 2 + (2 + 4) * len(lows)
    return call(
        _kernel,
        "token_words",
        (tokens // tile,),
        (),
        [(block, x) for x in (high, *lows)],
        [result] * len(lows),
        semantics=("parallel",),
        vmem_bytes=2 * tile * width * element_bytes + 2**20,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=tokens * width * element_bytes),
        interpret=interpret,
    )
