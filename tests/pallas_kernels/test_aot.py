"""The real TPU compilers, where libtpu is installed: `make test-aot`."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import aot, schedule

here = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not here, reason="libtpu is not installed: make test-aot")


def doubling(rows: int):
    """A kernel of one vector operation a row block."""

    def kernel(x, y):
        y[...] = x[...] * 2.0

    def double(x):
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(
            kernel, grid=(rows // 8,), in_specs=[block], out_specs=block, out_shape=shape, name="doubling"
        )(x)

    return double, (jax.ShapeDtypeStruct((rows, 128), jnp.float32),)


@pytest.mark.skipif(here, reason="libtpu is installed")
def test_without_libtpu_the_error_says_what_to_install():
    with pytest.raises(aot.CompileError, match=r"pip install -e '\.\[aot\]'"):
        aot.compile_apart("v5e", "tests.pallas_kernels.test_aot:doubling", {"rows": 64})


@needs_libtpu
@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_every_chip_compiles_and_leaves_its_schedule(chip, tmp_path):
    compiled = aot.compile_apart(chip, "tests.pallas_kernels.test_aot:doubling", {"rows": 64}, dump_to=tmp_path)
    assert compiled.argument_bytes == compiled.output_bytes == 64 * 128 * 4
    read = schedule.read(tmp_path, "doubling")
    assert 0 < read.cycles_a_step < read.bundles
    assert read.spills == 0


@needs_libtpu
@pytest.mark.parametrize("name", ["forward", "forward_running", "backward"])
@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_block_sparse_attention_compiles_for_every_chip(chip, name, tmp_path):
    aot.compile_apart(chip, "tests.pallas_kernels.chip_cases:kernel", {"name": name}, dump_to=tmp_path)
    bundles_a_pair = schedule.read(tmp_path, f"block_sparse_attention_{name}").cycles_a_step / 512
    assert 5 < bundles_a_pair < 18


@needs_libtpu
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 16},
        {"d": 64, "heads": 16},
        {"d": 256, "heads": 4},
        {"m": 64},
        {"m": 512, "tile": 256},
        {"dtype": "float32", "tile": 256},
    ],
    ids=str,
)
def test_block_sparse_attention_compiles_for_other_shapes(shape, name):
    aot.compile_apart("v5e", "tests.pallas_kernels.chip_cases:kernel", {"name": name, **shape})


@needs_libtpu
def test_the_whole_of_it_compiles_tables_and_gradients_included():
    shape = {"tokens": 1024, "heads": 8, "d": 128, "m": 128, "experts": 8, "rows": 512}
    aot.compile_apart("v5e", "tests.pallas_kernels.chip_cases:attention", shape)


@needs_libtpu
def test_the_compiler_s_words_are_passed_on():
    with pytest.raises(aot.CompileError, match=r"nowhere"):
        aot.compile_apart("v5e", "tests.pallas_kernels.test_aot:nowhere", {})
