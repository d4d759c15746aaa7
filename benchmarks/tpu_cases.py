"""What the TPU compilers are given beside this project's kernels: JAX's splash attention, the dense one to beat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from aamoe_jax.mixers.splash import splash_kernel


def splash(*, tokens: int, heads: int, d: int, tile: int) -> tuple[Callable, tuple[Any, ...]]:
    """Its forward and backward pass, without a mask: every step is a whole block, of `tile` queries and as many keys.

    Queries, keys and values, and the output's gradient, are bfloat16 [heads, tokens, d].
    """
    attend = splash_kernel(splash_attention_mask.FullMask((tokens, tokens)), heads, tile, fused=True)

    def both_passes(query, key, value, cotangent):
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, *pull_back(cotangent)

    return both_passes, (jax.ShapeDtypeStruct((heads, tokens, d), jnp.bfloat16),) * 4
