"""Projections of heads: those that a TPU's kernels norm and rotate are those of XLA."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import QueryKeyValue, merge_heads, norm_heads, rotary_table
from pallas_kernels import chips
from tests.pallas_kernels.base import assert_close


@pytest.mark.parametrize(("qk_norm", "keep_normed"), [("rms", True), ("rms", False), ("none", True)])
def test_heads_by_the_kernels_are_those_of_xla(qk_norm, keep_normed, monkeypatch):
    """Values and gradients, with keys of fewer heads and a learned scale."""
    config = ModelConfig(d_model=256, num_heads=2, num_kv_heads=1, qk_norm=qk_norm)
    module = QueryKeyValue(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(module)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), params)
    h, experts = (jax.random.normal(jax.random.key(seed), (2, 48, 256)) for seed in (2, 3))
    table = rotary_table(jnp.broadcast_to(jnp.arange(48), (2, 48)), config.head_dim, 1e4)

    def run(params, h, experts):
        made = nnx.merge(graphdef, params)
        heads = made.rotated(h, table, of_keys=h + 1, keep_normed=keep_normed)
        return *heads, norm_heads(experts.reshape(2, 48, 2, 128), made.norms[1])

    def both(params, h, experts):
        found, pull_back = jax.vjp(run, params, h, experts)
        return found, pull_back(jax.tree.map(jnp.sin, found))

    wanted = jax.jit(both)(params, h, experts)
    monkeypatch.setattr(chips, "kernels_by_default", lambda: True)
    again = lambda *given: both(*given)  # noqa: E731  (a function of its own: what was traced before is kept)
    kernels = re.findall(r"name=norm_rotary_forward", str(jax.make_jaxpr(again)(params, h, experts)))
    assert len(kernels) == 2 * (2 + (qk_norm == "rms"))  # to be compiled, and to be interpreted
    found = jax.jit(again)(params, h, experts)
    assert len(found[0]) == 4 + keep_normed
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "heads"), found, wanted)
    assert merge_heads(found[0][-1]).shape == (2, 48, 256)
