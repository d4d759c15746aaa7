"""The real TPU compilers, where libtpu is installed: `make test-aot`."""

import importlib.metadata
import importlib.util
import json
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import aot, chips, schedule
from pallas_kernels.block_sparse_attention.operation import Problem
from pallas_kernels.block_sparse_attention.tpu import resident
from tests.pallas_kernels import golden

HERE, CASES = "tests.pallas_kernels.test_aot", "tests.pallas_kernels.chip_cases"
KERNEL = f"{CASES}:kernel"
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
        aot.compile_apart("v5e", f"{HERE}:doubling", {"rows": 64})


def test_a_compiler_that_is_killed_leaves_its_exit_status(monkeypatch):
    killed = subprocess.CompletedProcess([], returncode=-9, stdout="", stderr="")
    monkeypatch.setattr(aot, "require_compiler", lambda chip: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: killed)
    with pytest.raises(aot.CompileError, match="for v5e: the compiler ended with exit status -9 and said nothing"):
        aot.compile_apart("v5e", f"{HERE}:doubling", {"rows": 64})


@needs_libtpu
def test_a_compiled_kernel_leaves_its_schedule(tmp_path):
    compiled = aot.compile_apart("v5e", f"{HERE}:doubling", {"rows": 64}, dump_to=tmp_path)
    assert compiled.argument_bytes == compiled.output_bytes == 64 * 128 * 4
    read = schedule.read(tmp_path, "doubling")
    assert 0 < read.cycles_a_step < read.bundles
    assert read.spills == 0


def most_tokens(chip: str, heads: int) -> int:
    """Of a window of path A: `layout.choose` takes the largest tiles, and so many tokens that rounding is no matter."""
    problem = Problem(2**24, heads, 128, 32, 128, 16, jnp.dtype(jnp.bfloat16), 32, 2**27, 0.1)
    with chips.assume(chip):
        return resident.plan(problem).layout.tokens


@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "heads", "least", "name"),
    [
        ("v5e", 8, 12288, "forward_running"),
        ("v5e", 8, 12288, "backward"),
        ("v5p", 16, 5568, "forward_running"),
        ("v5p", 16, 5568, "backward"),
        ("v6e", 8, 12288, "backward"),  # gradients leave in pieces of 8 tokens of bfloat16, half a register
    ],
)
def test_the_largest_window_fits_fast_memory(chip, heads, least, name, tmp_path):
    """Two tiles of rows are there at once beside it: the next one is gathered while this one attends."""
    tokens = most_tokens(chip, heads)
    assert tokens >= least
    compiled = aot.compile_apart(chip, KERNEL, {"name": name, "tokens": tokens, "heads": heads}, dump_to=tmp_path)
    assert compiled.temporary_bytes < 2**20  # nothing that is accumulated in place is copied first
    assert schedule.read(tmp_path, f"block_sparse_attention_{name}").cycles_a_step > 0


@needs_libtpu
def test_a_window_larger_than_fast_memory_is_refused():
    """By the compiler's own account: so what fits above does fit."""
    shape = {"name": "backward", "tokens": most_tokens("v5p", 8) * 9 // 64 * 8, "vmem": chips.TPUS["v5p"].vmem}
    with pytest.raises(aot.CompileError, match=r"Ran out of memory in memory space vmem"):
        aot.compile_apart("v5p", KERNEL, shape)


@needs_libtpu
def test_as_many_heads_as_a_token_has_room_for_compile(tmp_path):
    shape = {"name": "forward_running", "d": 16, "heads": 64, "tile": 128}
    compiled = aot.compile_apart("v5e", KERNEL, shape, dump_to=tmp_path)
    assert compiled.temporary_bytes < 2**20
    assert schedule.read(tmp_path, "block_sparse_attention_forward_running").cycles_a_step > 0


@needs_libtpu
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_float32_takes_six_passes_of_the_matrix_units(name, tmp_path):
    """Other shapes of bfloat16 are in `test_aot_schedule`."""
    shape = {"name": name, "dtype": "float32", "tile": 256}
    compiled = aot.compile_apart("v5e", KERNEL, shape, dump_to=tmp_path)
    assert compiled.temporary_bytes < 2**20
    read, products = schedule.read(tmp_path, f"block_sparse_attention_{name}"), {"forward": 2, "backward": 5}[name]
    least = 6 * products * 256 * 128 * 1024 / (4 * 128 * 128)  # a tile's multiplications, over those of a bundle
    # The backward pass takes 0.1 % less than that; five passes would take 17 % less.
    assert 0.98 * least < read.cycles_a_step < 1.5 * least


@needs_libtpu
def test_the_whole_of_it_compiles_tables_and_gradients_included(tmp_path):
    compiled = aot.compile_apart(golden.CHIP, golden.CASE, golden.SHAPE, dump_to=tmp_path)
    for name in ("forward_running", "mass", "backward"):
        assert schedule.read(tmp_path, f"block_sparse_attention_{name}").cycles_a_step > 0
    assert compiled.temporary_bytes < 16 * 512 * 8 * 128 * 2  # less than a row of bfloat16 for every pair
    known, version = json.loads(golden.FILE.read_text()), importlib.metadata.version("libtpu")
    if version != known["libtpu"]:
        pytest.skip(f"the golden file is libtpu {known['libtpu']}'s, this is {version}: {golden.COMMAND}")
    assert golden.bundles_around_kernels(tmp_path) < 1.05 * known["bundles_around_kernels"]


@needs_libtpu
@pytest.mark.parametrize(("chip", "heads", "tile"), [("v5e", 8, 128), ("v5e", 8, 512), ("tpu7x", 16, 512)])
def test_the_tables_of_the_largest_windows_fit_fast_memory(chip, heads, tile, tmp_path):
    """Of more resources than one square of 128."""
    tokens = most_tokens(chip, heads)
    aot.compile_apart(chip, f"{CASES}:tables", {"tokens": tokens, "heads": heads, "tile": tile}, dump_to=tmp_path)
    for kernel in ("pairs_of_resources", "tiles_of_slots", "slots_of_tiles"):
        assert schedule.read(tmp_path, kernel).cycles_a_step > 0


@needs_libtpu
@pytest.mark.parametrize("path", ["resident", "gathered", "dense"])
def test_both_cores_of_a_v5p_have_work(path, tmp_path):
    """Of heads that fill one register: `resident` gives each core a window of tokens, the others half of the heads."""
    shape = {"tokens": 1024, "heads": 8, "d": 128, "m": 128, "experts": 16, "rows": 384, "window": True}
    aot.compile_apart("v5p", f"{CASES}:attention", {"implementation": f"pallas_tpu_{path}", **shape}, dump_to=tmp_path)
    names = {
        "resident": ["tiles_of_slots", "block_sparse_attention_forward_running", "local_window_forward"],
        "gathered": ["gathered_forward", "gathered_merge", "gathered_backward", "gathered_add"],
        "dense": ["dense_attention_forward", "dense_attention_backward", "local_window_backward"],
    }[path]
    assert [name for name in names if not schedule.on_all_cores(tmp_path, name)] == []


@needs_libtpu
def test_of_splash_attention_a_v5p_divides_the_forward_pass_alone(tmp_path):
    """So the model of a layer counts it (`benchmarks.layer_model`)."""
    shape = {"tokens": 2048, "heads": 8, "d": 128, "tile": 512}
    aot.compile_apart("v5p", "benchmarks.tpu_cases:splash", shape, dump_to=tmp_path)
    assert schedule.on_all_cores(tmp_path, "splash_mha_fwd_residuals")
    assert not schedule.on_all_cores(tmp_path, "splash_mha_dkv_no_residuals")


@needs_libtpu
def test_the_compiler_s_words_are_passed_on():
    with pytest.raises(aot.CompileError, match=r"nowhere"):
        aot.compile_apart("v5e", f"{HERE}:nowhere", {})
