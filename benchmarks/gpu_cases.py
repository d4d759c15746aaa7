"""What the GPU compiler is given: each kernel of block-sparse attention alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention.gpu import kernels, path
from pallas_kernels.block_sparse_attention.gpu.kernels import Plan
from pallas_kernels.block_sparse_attention.types import Problem

TILES, RESOURCES = 1024, 128
"""64 context chunks and 64 experts, on average of eight tiles."""


def plan_of(name: str, *, heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16") -> Plan:
    """How `forward`, `d_query` or `d_key` is cut."""
    pairs = TILES // RESOURCES * kernels.ROWS * RESOURCES
    problem = Problem(64 * m, heads, d, RESOURCES, m, 16, jnp.dtype(dtype), 64, pairs, d**-0.5)
    planned = path.plan(problem)
    return {"forward": planned.forward_plan, "d_query": planned.query_plan, "d_key": planned.key_plan}[name]


def kernel(name: str, *, heads: int = 8, d: int = 128, m: int = 128, dtype: str = "bfloat16"):
    """The kernel and its arguments."""
    shape = jax.ShapeDtypeStruct
    queries, table = shape((TILES, kernels.ROWS, heads, d), dtype), shape((RESOURCES, m, heads, d), dtype)
    statistics = shape((TILES, heads, kernels.ROWS), jnp.float32)
    rows = kernels.Rows(shape((RESOURCES + 1,), jnp.int32), shape((TILES, kernels.ROWS), jnp.int32))
    gradients = kernels.Tiles(queries, table, table, queries, statistics, statistics, rows)
    run, arguments = {
        "forward": (kernels.forward, (queries, table, table, rows)),
        "d_query": (kernels.query_gradients, (gradients,)),
        "d_key": (kernels.key_gradients, (gradients,)),
    }[name]
    return functools.partial(run, plan=plan_of(name, heads=heads, d=d, m=m, dtype=dtype)), arguments
