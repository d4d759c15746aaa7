"""Which path a TPU takes, and that it is told apart from the others by nothing but time."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import interface, operation, xla
from pallas_kernels.block_sparse_attention.tpu import dispatch, resident
from pallas_kernels.block_sparse_attention.tpu import layout as layout_lib
from tests.pallas_kernels.base import attend
from tests.pallas_kernels.cases import Shape, random_inputs


def problem(length: int, pairs: int, experts: int = 64, m: int = 128) -> operation.Problem:
    """One row of 1024 lanes, with so many pairs a token."""
    chunks = length // m
    slots = chunks + experts
    return operation.Problem(
        length, 8, 128, chunks + experts, m, slots, jnp.dtype(jnp.bfloat16), chunks, pairs * length, 0.1
    )


@pytest.mark.parametrize("chip", chips.TPUS)
def test_every_chip_goes_from_dense_to_resident_as_pairs_become_few(chip):
    with chips.assume(chip):
        everything, few = (dispatch.fastest(problem(2048, pairs)) for pairs in (70, 4))
    assert (everything, few) == ("dense", "resident")


def test_long_rows_are_gathered_where_fast_memory_is_small():
    ratios = []
    for length in (4096, 2**20):
        long = problem(length, 4)
        plans = {path: dispatch.PLANS[path](long) for path in ("resident", "gathered")}
        times = dispatch.modelled(long, "v5p", plans)
        ratios.append(times["resident"] / times["gathered"])
    assert ratios[0] < 1 < ratios[1]


def test_few_tokens_of_many_experts_take_what_moving_the_experts_takes():
    """Keys and values of all in bfloat16 in both passes, and their gradients in float32, read and written."""
    few = problem(128, 1, experts=4096)
    moved = 4096 * 128 * 1024 * (2 * 2 * 2 + 2 * 2 * 4)
    for chip, cores in (("v5e", 1), ("v5p", 2)):  # each core has all keys for its half of the tokens
        with chips.assume(chip):
            plans = {"resident": dispatch.PLANS["resident"](few)}
        time = dispatch.modelled(few, chip, plans)["resident"]
        limits = chips.TPUS[chip]
        assert time == pytest.approx(cores * moved / (limits.bandwidth * limits.device_cores) * 1e9, rel=0.001)


@pytest.mark.parametrize("heads", [1, 8, 24])
@pytest.mark.parametrize("path", dispatch.PLANS)
def test_every_core_of_a_device_has_work(path, heads):
    """A v5p's two take as many groups of heads, or a window of tokens each; of one head, `resident` alone has two."""
    wanted = problem(4096, 1)._replace(heads=heads)
    for chip in ("v5e", "v5p"):
        with chips.assume(chip):
            layout = dispatch.PLANS[path](wanted).layout
        windows = layout.cores if path == "resident" else 1
        shares, cores = layout.groups * windows, chips.TPUS[chip].device_cores
        assert shares % cores == 0 or (path != "resident" and heads == 1)
        if path == "resident":
            assert layout.windows % layout.cores == 0


@pytest.mark.parametrize("chip", chips.TPUS)
def test_chips_are_what_jax_takes_them_for(chip):
    theirs = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(chip.removeprefix("tpu")), 1)  # one core
    ours = chips.TPUS[chip]
    assert (ours.vmem, ours.bandwidth) == (theirs.vmem_capacity_bytes, theirs.mem_bw_bytes_per_second)
    assert ours.flops == pytest.approx(theirs.bf16_ops_per_second, rel=0.005)  # 918 or 920 TFLOP/s


@pytest.mark.parametrize(
    ("windows", "row_chunks", "chunks"),
    [
        (1, None, 12),
        (1, 3, 12),
        (4, None, 3 + 6 + 9 + 12),  # those before a window too
        (2, 3, 6 + 6),  # whole rows
        (3, 6, 4 + 8 + 6),  # the second begins within a row, and ends within the next
        (24, None, 0.5 * sum(range(1, 25))),  # half a chunk each
    ],
)
def test_a_window_meets_all_experts_and_the_chunks_of_its_rows_up_to_its_end(windows, row_chunks, chunks):
    flat = problem(12 * 128, 7, experts=5)._replace(row_chunks=row_chunks)
    assert flat.met(windows) == pytest.approx(5 * windows + chunks)


def test_without_context_a_window_meets_the_experts_alone():
    assert problem(12 * 128, 7)._replace(resources=64, num_context=0).met(3) == 3 * 64


def test_tiles_are_for_the_resources_that_a_window_meets():
    """Windows of a v5e: of one row each meets two thirds of the chunks, of 32 rows little more than its own."""
    for rows, windows, tile in ((1, 3, 128), (32, 4, 256)):
        with chips.assume("v5e"):
            layout = resident.plan(problem(2**15, 4)._replace(row_chunks=256 // rows)).layout
        assert (layout.windows, layout.tile) == (windows, tile)


@pytest.mark.parametrize(("chip", "windows"), [("v5e", [3, 4, 4, 4, 3]), ("v5p", [6, 8, 8, 8, 6])])
def test_windows_end_with_rows_where_that_takes_few_more(chip, windows):
    """As many tokens in 1, 2, 4 and 16 rows; and five rows, which no such number of windows fits."""
    with chips.assume(chip):
        layouts = [
            resident.plan(problem(128 * rows * chunks, 4)._replace(row_chunks=chunks)).layout
            for rows, chunks in ((1, 256), (2, 128), (4, 64), (16, 16), (5, 51))
        ]
    assert [layout.windows for layout in layouts] == windows


def test_what_a_path_refuses_is_not_chosen():
    """Dense attention keeps the gradients of all queries in fast memory: a long batch of short rows does not fit."""
    long = problem(2**18, 10, experts=8)
    with pytest.raises(ValueError, match="VMEM"):
        dispatch.PLANS["dense"](long)
    assert dispatch.fastest(long._replace(row_chunks=4)) in ("resident", "gathered")


def test_fast_memory_is_what_the_compiler_uses_or_a_little_more():
    """Of the backward pass over 4,096 tokens, m = 512: the compiler for a TPU7x refused it for wanting 65.8 MiB."""
    layout = layout_lib.choose(4096, 8, 128, rows=1024.0, most_tokens=4096)
    assert layout.tile == 512
    assert 65.8 < resident.vmem_bytes(layout, 512, itemsize=2) / 2**20 < 1.05 * 65.8


def test_short_rows_in_a_batch_are_dense_although_the_batch_is_long():
    with chips.assume("v6e"):
        whole, rows = (dispatch.fastest(problem(2**16, 10, experts=8)._replace(row_chunks=n)) for n in (512, 4))
    assert whole != "dense"
    assert rows == "dense"


def test_a_chip_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"chip='v9'.*v5e"), chips.assume("v9"):
        pass


def test_the_choice_is_handed_on(monkeypatch):
    """Through the interface, with a name of its own for what was picked."""
    called = []

    def record(name, problem):
        called.append(name)
        return xla.plan(problem)

    for name in ("resident", "gathered", "dense"):
        plan = functools.partial(record, name)
        monkeypatch.setitem(interface.PLANS, f"pallas_tpu_{name}", (plan, operation.XLA_WINDOW))
    monkeypatch.setattr(dispatch, "fastest", lambda problem: "gathered")
    inputs, static = random_inputs(Shape())
    jax.eval_shape(lambda inputs: attend.__wrapped__(inputs, static, "pallas_tpu"), inputs)
    assert called == ["gathered"]


def test_kernels_are_the_default_where_the_compiler_need_not_divide_them(monkeypatch):
    def pretend(kind, count):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])
        monkeypatch.setattr(jax, "device_count", lambda: count)

    found = []

    def inside(x):
        found.append((chips.kernels_by_default(), chips.gpu_kernels_by_default()))
        return x

    assert not chips.kernels_by_default()  # a CPU
    assert not chips.gpu_kernels_by_default()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for kind, count, expected in (("TPU v5 lite", 1, True), ("TPU v6 lite", 2, False), ("TPU v4", 1, False)):
        pretend(kind, count)
        assert chips.kernels_by_default() == expected
    pretend("TPU v5p", 8)
    jax.eval_shape(sharded, jax.ShapeDtypeStruct((2,), jnp.float32))
    hopper = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [hopper])
    assert not chips.gpu_kernels_by_default()  # eight of them, and no mesh
    jax.clear_caches()
    jax.eval_shape(sharded, jax.ShapeDtypeStruct((2,), jnp.float32))
    assert found == [(True, False), (False, True)]
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert chips.gpu_kernels_by_default()


def test_peaks_are_those_of_the_data_sheets():
    """Of a device as JAX counts them: both cores of a v5p chip, one of a TPU7x."""
    peaks = {kind: chips.peak_flops(kind) for kind in ("TPU v5p", "TPU v6 lite", "TPU7x", "NVIDIA H200", "cpu")}
    assert peaks == {"TPU v5p": 459e12, "TPU v6 lite": 918e12, "TPU7x": 1153.5e12, "NVIDIA H200": 989e12, "cpu": None}
