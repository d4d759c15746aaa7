"""Norm and rotary embedding of heads by a kernel, against the definition in float64: values, gradients, edges."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rotary
from pallas_kernels.rotary import norm_rotary
from tests.pallas_kernels.base import assert_close
from tests.pallas_kernels.simulated import as_compiled

EPS = 1e-5


def inputs_of(rows: int, tokens: int, heads: int, k: int, dtype=jnp.float32):
    """x, scale, angles, and cotangents of both results."""
    rng = np.random.default_rng(rows + tokens + heads + k)
    draw = lambda *size: jnp.asarray(rng.normal(size=size), jnp.float32)  # noqa: E731
    x, *cotangents = (draw(rows, tokens, heads * k).astype(dtype) for _ in range(3))
    angle = 10 * draw(rows, tokens, k // 2)
    return x, 1 + 0.3 * draw(k), (jnp.cos(angle), jnp.sin(angle)), cotangents


def definition(x, k, scale, angles):
    """Head by head: normed, and its pairs as complex numbers that are turned."""
    heads = x.reshape(*x.shape[:-1], -1, k)
    if scale is not None:
        heads = heads / jnp.sqrt(jnp.square(heads).mean(-1, keepdims=True) + EPS) * scale
    rotated = heads
    if angles is not None:
        cos, sin = (y[..., None, :] for y in angles)
        pairs = jax.lax.complex(heads[..., : k // 2], heads[..., k // 2 :]) * jax.lax.complex(cos, sin)
        rotated = jnp.concatenate([pairs.real, pairs.imag], -1)
    return heads.reshape(x.shape), rotated.reshape(x.shape)


def both_passes(run, x, scale, cotangents):
    """Results, and the gradients of x and of the scale."""
    found, pull_back = jax.vjp(run, x, scale)
    return found, pull_back(tuple(cotangents[-len(found) :]))


SHAPES = {
    "ragged: two tiles, rows that end within one": (3, 200, 3, 128),
    "two groups of heads": (1, 64, 12, 128),
    "heads of two registers": (1, 512, 2, 256),
}


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_the_definition(shape, normed):
    x, scale, angles, cotangents = inputs_of(*shape)
    k, chosen = shape[-1], lambda scale: scale if normed else None
    run = jax.jit(lambda x, scale: norm_rotary(x, k, chosen(scale), angles, eps=EPS))
    wanted = both_passes(lambda x, scale: definition(x, k, chosen(scale), angles), x, scale, cotangents)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "both"), both_passes(run, x, scale, cotangents), wanted)


@pytest.mark.parametrize(("rotated", "keep_normed"), [(True, False), (False, True)])
def test_one_result_alone(rotated, keep_normed):
    x, scale, angles, cotangents = inputs_of(1, 100, 2, 128)
    run = lambda x, scale: norm_rotary(x, 128, scale, angles if rotated else None, keep_normed=keep_normed, eps=EPS)  # noqa: E731
    which = slice(1, 2) if rotated else slice(0, 1)
    wanted = both_passes(lambda x, scale: definition(x, 128, scale, angles)[which], x, scale, cotangents)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "one"), both_passes(run, x, scale, cotangents), wanted)


def test_bfloat16():
    """Half a unit in the last place of every value; what is rotated was rounded before."""
    x, scale, angles, cotangents = inputs_of(2, 100, 2, 128, jnp.bfloat16)
    run = lambda x, scale: norm_rotary(x, 128, scale, angles, eps=EPS)  # noqa: E731
    wide = [y.astype(jnp.float32) for y in cotangents]
    (normed, rotated), (d_x, d_scale) = both_passes(run, x, scale, cotangents)
    wanted = both_passes(lambda x, scale: definition(x, 128, scale, angles), x.astype(jnp.float32), scale, wide)
    assert_close(normed, wanted[0][0], 1e-6, "normed", rounding=2.0**-8)
    assert_close(
        rotated, definition(normed.astype(jnp.float32), 128, None, angles)[1], 1e-6, "turned", rounding=2.0**-8
    )
    assert_close(d_x, wanted[1][0], 1e-6, "gradient", rounding=2.0**-8)
    assert_close(d_scale, wanted[1][1], 1e-5, "gradient of the scale")
    assert {y.dtype for y in (normed, rotated, d_x)} == {jnp.dtype(jnp.bfloat16)}


def test_the_code_that_a_tpu_runs_has_no_races(monkeypatch, capfd):
    """Several tiles and groups of heads."""
    x, scale, angles, cotangents = inputs_of(1, 300, 2, 128)
    monkeypatch.setattr(rotary, "TILE", 128)
    monkeypatch.setattr(rotary, "GROUP", 128)
    run = functools.partial(both_passes, lambda x, scale: norm_rotary(x, 128, scale, angles, eps=EPS), x, scale)
    with as_compiled(rotary, monkeypatch, cores=2):
        found = jax.block_until_ready(run(cotangents))
    assert "RACE DETECTED" not in capfd.readouterr().out
    wanted = both_passes(lambda x, scale: definition(x, 128, scale, angles), x, scale, cotangents)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "simulated"), found, wanted)


@pytest.mark.parametrize(
    ("tokens", "dtype", "k"), [(63, jnp.float32, 128), (64, jnp.float16, 128), (64, jnp.float32, 64)]
)
def test_what_the_kernels_cannot_do_is_refused(tokens, dtype, k):
    assert rotary.fits(jnp.dtype(jnp.float32), 64, 128)
    assert not rotary.fits(jnp.dtype(dtype), tokens, k)
    x, scale, angles, _ = inputs_of(1, tokens, 2, k, dtype)
    with pytest.raises(ValueError, match=rf"{tokens} tokens of {jnp.dtype(dtype)}, heads of {k}; wanted 64 or more"):
        norm_rotary(x, k, scale, angles)


def test_each_device_of_a_mesh_takes_its_rows():
    command = [sys.executable, "-m", "tests.pallas_kernels.sharded_rotary"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["2 devices agree"], result.stderr
