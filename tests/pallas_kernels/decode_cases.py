"""What the chips' compilers are given: attention of a decoding step, from pages as the layer's cache holds them."""

import jax
import jax.numpy as jnp

from pallas_kernels.block_sparse_attention import Slots, paged_attention


def decode(
    *,
    rows: int = 8,
    pages: int = 64,
    m: int = 128,
    heads: int = 8,
    d: int = 128,
    experts: int = 16,
    slots: int = 16,
    dtype: str = "bfloat16",
    expert_dtype: str = "float32",
    implementation: str = "pallas_tpu",
):
    """Heads are split off as the layer does; keys of experts are normed and scaled."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.dtype(dtype)

    def attend(query, query_expert, page_key, page_value, expert_key, expert_value, scale, slots):
        split = lambda x: x.reshape(*x.shape[:-1], heads, d)  # noqa: E731

        def norm(x):
            x32 = x.astype(jnp.float32)
            return (x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

        tables = map(split, (page_key, page_value, expert_key, expert_value))
        return paged_attention(query, query_expert, *tables, slots, norm_expert_key=norm, implementation=implementation)

    query, page = shape((rows, heads, d), dtype), shape((rows, pages, m, heads * d), dtype)
    expert = shape((experts, m, heads * d), jnp.dtype(expert_dtype))
    numbers = [shape((rows, slots), kind) for kind in (jnp.int32, jnp.float32, jnp.int32, jnp.int32)]
    given = Slots(*numbers, shape((rows,), jnp.int32))
    return attend, (query, query, page, page, expert, expert, shape((d,), jnp.float32), given)
