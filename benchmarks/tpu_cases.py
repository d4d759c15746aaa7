"""What the TPU compilers are given beside this project's kernels: JAX's splash attention, the dense one to beat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask


def splash(*, tokens: int, heads: int, d: int, tile: int) -> tuple[Callable, tuple[Any, ...]]:
    """Its forward and backward pass, without a mask: every step is a whole block, of `tile` queries and as many keys.

    Queries, keys and values, and the output's gradient, are bfloat16 [heads, tokens, d].
    """
    sizes = splash_attention_kernel.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_kv_compute=tile,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_kv_dkv_compute=tile,
        use_fused_bwd_kernel=True,
    )
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.FullMask((tokens, tokens))] * heads)
    attend = splash_attention_kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def both_passes(query, key, value, cotangent):
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, *pull_back(cotangent)

    return both_passes, (jax.ShapeDtypeStruct((heads, tokens, d), jnp.bfloat16),) * 4
