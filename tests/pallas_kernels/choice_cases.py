"""What the chips' compilers are given of the router's softmax: both passes, and XLA's of the same."""

import jax
import jax.numpy as jnp

from pallas_kernels.choice import attention_shares

shape = jax.ShapeDtypeStruct


def choice(
    *,
    length: int,
    chunks: int,
    experts: int,
    heads: int,
    d: int,
    pooled: int,
    implementation: str,
    rows: int = 1,
    dtype: str = "bfloat16",
    precision: str = "high",
):
    """With the gradients of all its arrays."""

    def both(query, query_expert, chunk_key, expert_key, available, cotangent):
        def run(*arrays):
            return attention_shares(*arrays, available, precision=precision, implementation=implementation)

        found, pull_back = jax.vjp(run, query, query_expert, chunk_key, expert_key)
        return found[0], pull_back((cotangent, *found[1:]))

    query = shape((rows, length, heads, d), jnp.dtype(dtype))
    keys = shape((rows, chunks, pooled, heads, d), jnp.float32), shape((experts, pooled, heads, d), jnp.float32)
    available = shape((rows, length, chunks), bool)
    return both, (query, query, *keys, available, shape((rows, length, chunks + experts), jnp.float32))
