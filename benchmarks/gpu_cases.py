"""What the GPU compiler is given: each kernel of block-sparse attention alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.gpu import path
from pallas_kernels.block_sparse_attention.gpu.common import Plan, Queries, Rows, Tiles
from pallas_kernels.block_sparse_attention.types import Problem

PAIRS, RESOURCES = 65536, 128
"""64 context chunks and 64 experts, 512 pairs each."""


def planned(chip: str, *, heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16") -> path.Path:
    """How the kernels are cut for `chip`."""
    problem = Problem(64 * m, heads, d, RESOURCES, m, 16, jnp.dtype(dtype), 64, PAIRS, d**-0.5)
    with chips.assume(chip):
        return path.plan(problem)


def plan_of(chip: str, name: str, **shape) -> Plan:
    """The same for `forward`, `d_query` or `d_key`."""
    cut = planned(chip, **shape)
    return {"forward": cut.forward_plan, "d_query": cut.query_plan, "d_key": cut.key_plan}[name]


def more_gathered(name: str, *, heads: int = 8, d: int = 128, m: int = 128) -> int:
    """Bytes that a kernel reads beyond its arguments: it gathers a token's row once for each of its pairs, of a query
    and, in the gradients, of an output gradient; its arguments have the two arrays of queries once."""
    gathered = 1 if name == "forward" else 2
    return (gathered * PAIRS - (gathered + 1) * 64 * m) * heads * d * 2


def kernel(name: str, *, chip: str = "h200", heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16"):
    """The kernel and its arguments."""
    cut = planned(chip, heads=heads, d=d, m=m, dtype=dtype)
    shape, rows = jax.ShapeDtypeStruct, cut.kernels.ROWS
    tiles, keys = PAIRS // rows, -(-m // rows) * rows
    table = shape((RESOURCES, keys, heads, d), dtype)
    statistics = shape((tiles, heads, rows), jnp.float32)
    of_rows = Rows(shape((RESOURCES + 1,), jnp.int32), shape((tiles, rows), jnp.int32))
    d_output = shape((64 * m, heads, d), dtype)
    query = Queries(shape((tiles, rows), jnp.int32), d_output, d_output)
    gradients = Tiles(query, table, table, d_output, statistics, statistics, of_rows)
    run, arguments = {
        "forward": (cut.kernels.forward, (query, table, table, of_rows)),
        "d_query": (cut.kernels.query_gradients, (gradients,)),
        "d_key": (cut.kernels.key_gradients, (gradients,)),
    }[name]
    return functools.partial(run, plan=plan_of(chip, name, heads=heads, d=d, m=m, dtype=dtype)), arguments
