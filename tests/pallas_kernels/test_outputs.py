"""Outputs of tokens with registers of their own, rounded, and their products with gradients: against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention.tpu import outputs as module
from pallas_kernels.block_sparse_attention.tpu.outputs import fits, token_dots, token_rounded
from tests.pallas_kernels.simulated import as_compiled

SHAPES = {
    "less than a tile": (24, 8, 128),
    "several tiles, the last not full": (300, 16, 128),
    "two rows a head": (136, 4, 256),
}


def inputs_of(shape, dtype):
    rng = np.random.default_rng(len(str(shape)))
    output, d_output = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    d_output = d_output.astype(dtype)
    wanted = (np.asarray(output, np.float64) * np.asarray(d_output.astype(jnp.float32), np.float64)).sum(-1)
    return output, d_output, wanted


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_the_definition(shape, dtype):
    output, d_output, wanted = inputs_of(shape, dtype)
    assert "token_dots" in str(jax.make_jaxpr(token_dots)(output, d_output))
    np.testing.assert_allclose(jax.jit(token_dots)(output, d_output), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rounded(shape, dtype):
    output, *_ = inputs_of(shape, dtype)
    run = jax.jit(lambda x: token_rounded(x, jnp.dtype(dtype)))
    assert "token_rounded" in str(jax.make_jaxpr(run)(output))
    np.testing.assert_array_equal(run(output), output.astype(dtype))


@pytest.mark.parametrize("shape", [(20, 3, 64), (20, 3, 128), (20, 8, 384), (2, 256, 128)])
def test_where_a_token_s_heads_do_not_fit_a_square_it_is_plain_xla(shape):
    output, d_output, wanted = inputs_of(shape, jnp.float32)
    assert not fits(*shape[1:])
    np.testing.assert_array_equal(token_rounded(output, jnp.dtype(jnp.bfloat16)), output.astype(jnp.bfloat16))
    np.testing.assert_allclose(jax.jit(token_dots)(output, d_output), wanted, rtol=1e-5, atol=1e-5)


def test_the_code_that_a_tpu_runs_has_no_races(monkeypatch, capfd):
    output, d_output, wanted = inputs_of((300, 8, 128), jnp.bfloat16)
    with as_compiled(module, monkeypatch, cores=2):
        rounded, found = jax.block_until_ready(
            (token_rounded(output, jnp.dtype(jnp.bfloat16)), token_dots(output, d_output))
        )
    assert "RACE DETECTED" not in capfd.readouterr().out
    np.testing.assert_array_equal(rounded, output.astype(jnp.bfloat16))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
