"""Pairs of bfloat16 in words: where every bit goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention.tpu import words as module
from pallas_kernels.block_sparse_attention.tpu.words import words
from tests.pallas_kernels.simulated import as_compiled

SHAPES = {"less than a tile": (24, 1024), "several tiles, the last not full": (300, 2048)}


def halves_of(found):
    """What lies in the lower halves, and in the upper."""
    bits = np.asarray(found).reshape(len(found), -1)
    return (bits & 0xFFFF).astype(np.uint16), (bits >> 16).astype(np.uint16)


def inputs_of(shape):
    """Every bit pattern may occur, but those of NaN, whose payload a conversion may change."""
    bits = np.random.default_rng(0).integers(0, 2**16, (3, *shape), dtype=np.uint16)
    bits = np.where((bits & 0x7F80) == 0x7F80, 0x8000, bits).astype(np.uint16)
    bits = np.where((bits & 0x7F80) == 0, bits & 0x8000, bits)  # subnormal numbers are flushed to 0 by some devices
    return bits, [jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.bfloat16) for x in bits]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_bit_of_all_is_there(shape):
    (high, *lows), arrays = inputs_of(shape)
    found = jax.jit(words)(*arrays)
    for low, x in zip(lows, found, strict=True):
        assert x.shape == (shape[0], shape[1] // 128, 128)
        np.testing.assert_array_equal(halves_of(x), (low, high))


def test_the_code_that_a_tpu_runs_has_no_races(monkeypatch, capfd):
    (high, *lows), arrays = inputs_of((300, 1024))
    with as_compiled(module, monkeypatch, cores=2):
        found = jax.block_until_ready(words(*arrays))
    assert "RACE DETECTED" not in capfd.readouterr().out
    for low, x in zip(lows, found, strict=True):
        np.testing.assert_array_equal(halves_of(x), (low, high))
