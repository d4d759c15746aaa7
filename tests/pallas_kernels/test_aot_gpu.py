"""The real GPU compilers, where the CUDA plug-in is installed: `make test-aot`."""

import importlib.util

import pytest

from pallas_kernels import aot, chips, ptx

CASES = "tests.pallas_kernels.gpu_chip_cases"

here = importlib.util.find_spec("jax_cuda12_plugin") is not None
needs_plugin = pytest.mark.skipif(not here, reason="the CUDA plug-in is not installed: make test-aot")

PTXAS = """ptxas info    : Compiling entry function 'squares' for 'sm_90a'
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 58 registers, used 2 barriers, 1 bytes smem
"""
LAUNCH = (
    "gpu.launch_func async [%10] @squares blocks in (%c16, %c1, %c1) threads in (%c128, %c1, %c1)  "
    "dynamic_shared_memory_size %c8200_i32 {"
)
PTX = """.target sm_90a
@%p2 cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1, {%r5,%r5}], [%r1];
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r7,%r8}, %rd2, %rd2, p, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r7,%r8}, %rd2, %rd2, p, 1, 1, 0, 0;
@%p2 cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd6, {%r5, %r5}], [%r4];
@%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd6], [%r4], 256;
cp.async.cg.shared.global [%r7], [%rd8], 16;
"""


BLACKWELL_PTX = """.target sm_100a
mov.b32 	%r65, 512;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 	[__dynamic_shmem__0+201784], %r65;
@%p16 cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r9], [%rd1, {%r3}], [%r8];
tcgen05.mma.cta_group::1.kind::f16 [%r410], a_desc, b_desc, %r371, %p22;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 	[%rd20];
tcgen05.ld.sync.aligned.16x256b.x8.b32 {%r378,%r379}, [%r410];
"""


def test_the_notes_are_read():
    counts = {"wgmma": 2, "tma_loads": 1, "tma_stores": 2, "row_copies": 1, "threads": 128}
    counts |= {"shared_bytes": 8200}
    counts |= dict.fromkeys(("tcgen05_mma", "tcgen05_ld", "tma_gathers", "tensor_columns"), 0)
    assert ptx.parse(PTX, PTXAS, LAUNCH) == ptx.Kernel("sm_90a", 58, stack_bytes=16, spill_bytes=12, **counts)
    counts |= {"tcgen05_mma": 1, "tcgen05_ld": 1, "tma_gathers": 1, "tensor_columns": 512}
    counts |= dict.fromkeys(("wgmma", "tma_loads", "tma_stores", "row_copies"), 0)
    blackwell = ptx.Kernel("sm_100a", 58, stack_bytes=16, spill_bytes=12, **counts)
    assert ptx.parse(BLACKWELL_PTX, PTXAS, LAUNCH) == blackwell


def test_the_last_notes_of_a_kernel_are_the_ones_that_count(tmp_path):
    for number, registers in enumerate((10, 20)):
        (tmp_path / f"squares_{number}.ptx").write_text(PTX)
        (tmp_path / f"squares_{number}.mlir-passes.log").write_text(LAUNCH)
        (tmp_path / f"squares_{number}.ptxas").write_text(PTXAS.replace("58", str(registers)))
    assert ptx.read(tmp_path, "squares").registers == 20
    with pytest.raises(FileNotFoundError, match="roots"):
        ptx.read(tmp_path, "roots")


@pytest.mark.skipif(here, reason="the CUDA plug-in is installed")
def test_without_the_plugin_the_error_says_what_to_install():
    with pytest.raises(aot.CompileError, match=r"jax_cuda12_plugin .* pip install -e '\.\[aot\]'"):
        aot.compile_apart("h200", f"{CASES}:squares", {"blocks": 2})


@needs_plugin
@pytest.mark.parametrize("chip", chips.HOPPERS)
def test_every_hopper_compiles_and_leaves_its_assembly(chip, tmp_path):
    compiled = aot.compile_apart(chip, f"{CASES}:squares", {"blocks": 16}, dump_to=tmp_path)
    assert compiled.argument_bytes == compiled.output_bytes == 16 * 64 * 64 * 2
    kernel = ptx.read(tmp_path, "squares")
    assert kernel.target == "sm_90a"
    assert (kernel.wgmma, kernel.tma_loads, kernel.tma_stores) == (4, 1, 1)
    assert kernel.spill_bytes == kernel.stack_bytes == 0
    assert (kernel.threads, kernel.shared_bytes >= 64 * 64 * 2) == (128, True)


@needs_plugin
def test_a_b200_has_no_instructions_of_a_hopper_but_takes_a_product_in_tensor_memory():
    """So that the kernels for a Hopper must not reach its compiler."""
    with pytest.raises(aot.CompileError):
        aot.compile_apart("b200", f"{CASES}:squares", {"blocks": 2})
    aot.compile_apart("b200", f"{CASES}:product_in_tensor_memory", {})


@needs_plugin
def test_a_b200_gets_xla_by_default(tmp_path):
    shape = {"tokens": 512, "heads": 2, "d": 64, "m": 64, "experts": 4, "pairs": 4}
    aot.compile_apart("b200", f"{CASES}:attention", shape | {"implementation": None}, dump_to=tmp_path)
    with pytest.raises(FileNotFoundError, match="block_sparse_attention_forward"):
        ptx.read(tmp_path, "block_sparse_attention_forward")


SHAPES = [{}, {"m": 64}, {"m": 256, "heads": 16}, {"d": 64, "m": 512}, {"dtype": "float16", "m": 320}]


def compiled_kernel(chip: str, name: str, shape: dict, folder) -> ptx.Kernel:
    """Without a spilled register."""
    options = {"name": name, "chip": chip, **shape}
    aot.compile_apart(chip, "benchmarks.gpu_cases:kernel", options, dump_to=folder)
    kernel = ptx.read(folder, f"block_sparse_attention_{name}")
    assert kernel.spill_bytes == kernel.stack_bytes == 0
    assert kernel.shared_bytes <= 227 * 1024
    return kernel


@needs_plugin
@pytest.mark.parametrize("name", ["forward", "d_query", "d_key"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_sparse_attention_compiles_without_a_spilled_register(shape, name, tmp_path):
    kernel = compiled_kernel("h200", name, shape, tmp_path)
    assert kernel.target == "sm_90a"
    # Of 16 rows of the right operand each: 2, 3 or 4 products of a tile of 64 rows and at least 64 keys.
    assert kernel.wgmma >= {"forward": 2, "d_query": 3, "d_key": 4}[name] * 4
    if name == "forward":  # three warpgroups where all keys of a part are taken at once
        assert kernel.threads == (384 if shape.get("m") in (None, 64, 320) else 256)
    assert kernel.tma_loads >= {"forward": 4, "d_query": 7, "d_key": 7}[name]
    assert kernel.tma_stores >= {"forward": 3, "d_query": 2, "d_key": 2}[name]
    # Of 64 rows of 128 or 256 bytes, by 128 threads: from the rotated queries, the others, and the output gradients.
    assert kernel.row_copies >= (2 if name == "forward" else 3) * (4 if shape.get("d") == 64 else 8)


@needs_plugin
@pytest.mark.parametrize("name", ["forward", "d_query", "d_key"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_sparse_attention_compiles_for_a_b200_without_a_spilled_register(shape, name, tmp_path):
    kernel = compiled_kernel("b200", name, shape, tmp_path)
    assert kernel.target == "sm_100a"
    assert kernel.wgmma == 0
    # Of 16 rows of the right operand each, of which there are at least 64: 2, 3 or 4 products of a tile.
    assert kernel.tcgen05_mma >= {"forward": 2, "d_query": 3, "d_key": 4}[name] * 4
    assert kernel.tcgen05_ld >= {"forward": 2, "d_query": 3, "d_key": 4}[name]
    # 128 rows, four at a time, in four warps; from the rotated queries, the others, and the output gradients.
    assert kernel.tma_gathers >= (2 if name == "forward" else 3) * 128 // 4 // 4
    assert kernel.tma_loads >= {"forward": 3, "d_query": 5, "d_key": 5}[name]
    assert 0 < kernel.tensor_columns <= 512


@needs_plugin
@pytest.mark.parametrize(("chip", "rows", "target"), [("h200", 64, "sm_90a"), ("b200", 128, "sm_100a")])
def test_the_whole_of_it_compiles_and_stores_no_copy_of_every_row_or_slot(chip, rows, target, tmp_path):
    shape = {"tokens": 8192, "heads": 8, "d": 128, "m": 128, "experts": 64, "pairs": 8}
    compiled = aot.compile_apart(chip, f"{CASES}:attention", shape, dump_to=tmp_path)
    width, rows = 8 * 128, 8192 * 8 + 128 * rows
    # The result of every row (2 bytes), and the output of every token (4 bytes), with some slack; queries in the order
    # of the rows would be as much again, and 16 slots a token, in float32, 537 MB more.
    assert compiled.temporary_bytes < 1.2 * (rows * 2 + 8192 * 4) * width
    for name in ("forward", "d_query", "d_key"):
        kernel = ptx.read(tmp_path, f"block_sparse_attention_{name}")
        assert (kernel.target, kernel.spill_bytes) == (target, 0)
