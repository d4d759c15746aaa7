"""Every implementation against the definition, and the definition against loops in float64."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import BlockSizes, block_sparse_attention, interface, operation
from pallas_kernels.block_sparse_attention.tpu import resident, resident_kernels
from pallas_kernels.block_sparse_attention.tpu import slots as slots_module
from pallas_kernels.block_sparse_attention.tpu.layout import Layout
from pallas_kernels.block_sparse_attention.tpu.slots import row_of_tokens, token
from pallas_kernels.tpu import BOUNDS_CHECKS, ROWS
from tests.pallas_kernels.base import (
    BlockSparseAttentionTest,
    TpuAttentionTest,
    assert_close,
    attend,
    unknown_resources,
    without_other_rows,
)
from tests.pallas_kernels.cases import (
    Inputs,
    Shape,
    Static,
    attention_and_gradients,
    evaluate,
    naive,
    random_inputs,
)
from tests.pallas_kernels.simulated import as_compiled, with_bug


class TestReference(BlockSparseAttentionTest):
    implementation = "reference"

    def expected(self, inputs: Inputs, static: Static):
        return naive(inputs, static)


class TestXla(BlockSparseAttentionTest):
    implementation = "xla"

    def test_a_window_of_chunks_that_are_not_a_multiple_of_a_step(self):
        self.check(*random_inputs(Shape(tokens=6 * 130, m=6, num_context=130, heads=1, slots=2, segments=9)))

    def test_pairs_past_the_bound_are_dropped_from_the_last_tokens(self):
        inputs, static = random_inputs(Shape(count=2))
        short = attend(inputs, static._replace(max_pairs=31), "xla")
        count = inputs.pairs.count.at[15:].set(0).at[15].set(1)
        expected = attend(inputs._replace(pairs=inputs.pairs._replace(count=count)), static, "xla")
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), short, expected)

    def test_memory_does_not_hold_the_scores(self):
        """Temporary memory grows by less than one copy of the scores of all pairs; a careless form keeps several."""
        sizes = []
        for tokens in (512, 2048):
            shape = Shape(tokens=tokens, m=128, num_context=tokens // 128, experts=32, heads=4, d=16, slots=4, count=4)
            inputs, static = random_inputs(shape)
            compiled = jax.jit(lambda x, s=static: evaluate(x, s, "xla")).lower(inputs).compile()
            sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        score_bytes = 4 * 128 * 4 * 4 * (2048 - 512)  # pairs a token, keys, heads, bytes
        assert sizes[1] - sizes[0] < score_bytes


COPIES = {
    "no wait before a buffer is filled again": ("pl.when(i >= 2)(lambda: copy(i - 2).wait())", "pass"),
    "the other buffer leaves": ("buffers.at[buffer, here]", "buffers.at[1 - buffer, here]"),
}
"""Bugs of `tpu/slots.py`: a text, and what it becomes."""


class TestPallasTpuResident(TpuAttentionTest):
    implementation = "pallas_tpu_resident"
    kernels = (
        *(f"block_sparse_attention_{name}" for name in ("forward", "forward_running", "mass", "backward")),
        *("pairs_of_resources", "tiles_of_slots", "slots_of_tiles", "slots_of_tiles"),
    )

    def test_whole_registers_and_groups_of_heads(self):
        self.check(*random_inputs(Shape(tokens=16, m=8, num_context=2, heads=5, d=256)))

    def test_more_tokens_than_fast_memory_holds_come_in_windows(self, monkeypatch):
        """Small windows: the same tables and kernels as when a chip's memory makes them necessary. The two cores of a
        v5p take two at a time, the last of which has no tokens here."""
        inputs, static = random_inputs(Shape(tokens=48, m=8, num_context=6, d=8, count=4))
        unknown, hidden = unknown_resources(inputs)
        fixed = resident.vmem_bytes(Layout(128, 1, 0, 1, 2, 8), m=8, itemsize=4)
        few = functools.partial(resident.plan, vmem=fixed + 16 * 2**14)
        monkeypatch.setitem(interface.PLANS, "few", (few, operation.XLA_WINDOW))
        with chips.assume("v5p"):
            assert few(problem_of(inputs, static)).layout.windows == 4
            actual, expected = (evaluate(unknown, static, "few"), evaluate(hidden, static, "reference"))
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, "windows"), actual, expected)

    @pytest.mark.parametrize(("chip", "pairs", "columns"), [("v5e", 256, 128), ("v6e", 512, 256)])
    def test_tiles_that_fill_the_matrix_units_twice(self, chip, pairs, columns):
        inputs, static = random_inputs(Shape(tokens=144, m=8, num_context=18, experts=1, heads=3, d=64, count=4))
        sizes = static._replace(block_sizes=BlockSizes(pairs=pairs))
        with chips.assume(chip):
            assert (
                resident.plan(problem_of(inputs, static)._replace(block_sizes=sizes.block_sizes)).layout.columns
                == columns
            )
            actual = evaluate(inputs, sizes, self.implementation)
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, chip), actual, evaluate(inputs, static, "reference"))

    @pytest.mark.parametrize(("size", "experts"), [(40, 0), (16, 3)])
    def test_windows_of_several_rows_and_of_parts_of_one(self, size, experts):
        """A window numbers the chunks of its rows alone; the empty tile is none of them, where there is no expert."""
        inputs, static = random_inputs(Shape(tokens=96, num_context=12, experts=experts, count=4))
        rows = static._replace(row_chunks=4, block_sizes=BlockSizes(tokens=size))
        actual = evaluate(inputs, rows, self.implementation)
        expected = self.expected(without_other_rows(inputs, rows), static)
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, "windows"), actual, expected)

    @pytest.mark.slow
    @pytest.mark.parametrize(("bounded", "cores"), [(True, 2), (False, 1)])
    def test_the_code_that_a_tpu_runs_has_no_races(self, bounded, cores, monkeypatch, capfd):
        """Over windows of several tiles with both kinds of queries, the last one shorter, or of two cores."""
        actual, expected = self.simulated(bounded, cores, slots_module, monkeypatch)
        assert "RACE DETECTED" not in capfd.readouterr().out
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, "simulated"), actual, expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("bug", [None, "no wait before a buffer is filled again"])
    def test_the_same_bits_whenever_copies_arrive_and_whichever_window_is_first(self, bug, monkeypatch):
        """With the bug they are not, so that the test can fail."""
        slots = slots_module
        if bug:
            slots = with_bug(slots_module, *COPIES[bug])
            monkeypatch.setattr(resident_kernels, "Memory", slots.Memory)
        late, _ = self.simulated(True, 2, slots, monkeypatch)
        at_once, _ = self.simulated(True, 2, slots, monkeypatch, dma_execution_mode="eager", random_seed=5)
        same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (late, at_once)), strict=True)]
        assert all(same) == (bug is None), same

    @pytest.mark.slow
    @pytest.mark.parametrize("bug", COPIES)
    def test_the_simulation_notices_a_bug_in_the_copies(self, bug, monkeypatch, capfd):
        broken = with_bug(slots_module, *COPIES[bug])
        monkeypatch.setattr(resident_kernels, "Memory", broken.Memory)
        actual, expected = self.simulated(True, 1, broken, monkeypatch)
        alike = [np.allclose(a, e, atol=1e-4) for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True)]
        assert "RACE DETECTED" in capfd.readouterr().out or not all(alike)

    def simulated(self, bounded: bool, cores: int, slots, monkeypatch, **options):
        """Attention and gradients by the compiled kernels with these `slots`, and by the definition."""
        inputs, static = random_inputs(Shape(tokens=56, m=8, num_context=7, d=8, count=4, bounded=bounded))
        layout = Layout(tile=16, windows=2 + cores, tokens=24, groups=1, heads=2, d=8, cores=cores)
        monkeypatch.setitem(interface.PLANS, "few", (lambda p: resident.Path(p, layout), operation.XLA_WINDOW))
        for module, function in ((resident_kernels, token), (slots, row_of_tokens)):
            interpreted = lambda *arguments, function=function: function(*arguments[:-1], True)  # noqa: E731
            monkeypatch.setattr(module, function.__name__, interpreted)
        with as_compiled(resident, monkeypatch, cores, **options):
            actual = jax.block_until_ready(jax.jit(lambda x: attention_and_gradients(x, static, "few"))(inputs))
        return actual, evaluate(inputs, static, "reference")

    @pytest.mark.parametrize("size", [1, 8, 16])
    def test_a_token_is_where_it_is_in_an_interpreter(self, size):
        """Compiled code takes it from another shape of its window, which interpreters can read at least."""
        shape = (24, 128) if size == 1 else (24, size, 128)
        slots = jnp.arange(24 * size * 128.0).reshape(shape)

        def kernel(row, slots, compiled, interpreted):
            compiled[...] = token(slots, row[0], interpret=False)[...].reshape(size, 128)
            interpreted[...] = token(slots, row[0], interpret=True)[...].reshape(size, 128)

        memory = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
        result = [jax.ShapeDtypeStruct((size, 128), jnp.float32)] * 2
        for number in (0, 13, 23):
            call = pl.pallas_call(kernel, result, in_specs=memory, interpret=True)
            for found in call(jnp.array([number * ROWS]), slots):
                np.testing.assert_array_equal(found, slots[number].reshape(size, 128))

    def test_a_row_of_some_tokens_is_where_it_is_in_an_interpreter(self):
        slots = jnp.arange(24 * 8 * 128.0).reshape(24, 8, 128)

        def kernel(first, slots, compiled, interpreted):
            compiled[...] = row_of_tokens(slots, 3, first[0], 8, False)
            interpreted[...] = row_of_tokens(slots, 3, first[0], 8, True)

        memory = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)
        result = [jax.ShapeDtypeStruct((8, 128), jnp.float32)] * 2
        for found in pl.pallas_call(kernel, result, in_specs=memory, interpret=True)(jnp.array([16]), slots):
            np.testing.assert_array_equal(found, slots[16:, 3])

    def test_a_window_without_context_or_without_experts_is_written(self, monkeypatch):
        """Windows of 16 tokens: one meets experts alone, one context alone, one nothing. What nobody writes is NaN."""
        inputs, static = random_inputs(Shape(tokens=48, m=8, num_context=6, experts=3, d=8, slots=3, count=3))
        window, slot = jnp.divmod(jnp.arange(48), 16)[0][:, None], jnp.arange(3)
        pairs = inputs.pairs._replace(
            resource=jnp.where(window == 0, 6 + slot, slot),
            count=jnp.where(window[:, 0] == 2, 0, jnp.where(window[:, 0] == 1, 2, 3)),
        )
        inputs = inputs._replace(pairs=pairs)
        nothing = lambda like, dtype=None: jnp.full(like.shape, jnp.nan, dtype or like.dtype)  # noqa: E731
        monkeypatch.setattr(resident, "unwritten", nothing)
        monkeypatch.setitem(interface.PLANS, "written", (resident.plan, operation.XLA_WINDOW))
        actual = evaluate(inputs, static._replace(block_sizes=BlockSizes(tokens=16)), "written")
        expected = evaluate(inputs, static, "reference")
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, "windows"), actual, expected)

    def test_a_resource_that_is_not_in_the_table_is_in_no_tile(self):
        """Of no window: a tile adds to the sums of several rows at once, which must be of different tokens."""
        inputs, static = random_inputs(Shape(tokens=48, m=8, num_context=6, d=8, slots=3, count=3))
        path = resident.Path(problem_of(inputs, static), Layout(128, 3, 16, 1, 2, 8))
        unknown = jnp.arange(48 * 3).reshape(48, 3) % 5 == 1
        pairs = inputs.pairs._replace(resource=jnp.where(unknown, len(inputs.key), inputs.pairs.resource))
        places, tiles, _ = path.tables(pairs)
        slot = np.asarray(tiles.row)[1:-1, 0] // ROWS
        n, row = np.nonzero(slot < 16)
        token = slot[n, row] + np.asarray(places.resource)[n] // len(inputs.key) * 16
        is_slot = np.asarray(pairs.resource)[token] == np.asarray(tiles.resource)[n, None]
        assert np.all(is_slot.sum(1) == 1)
        np.testing.assert_array_equal(np.sort(3 * token + is_slot.argmax(1)), np.flatnonzero(~np.asarray(unknown)))

    def test_the_empty_tile_is_of_a_resource_in_the_table(self):
        """The last window begins in the last of three rows: of the two that a window may have there is one."""
        inputs, static = random_inputs(Shape(tokens=96, num_context=12, experts=0, count=4))
        path = resident.Path(problem_of(inputs, static)._replace(row_chunks=4), Layout(128, 3, 40, 1, 2, 4))
        tiles = path.tables(inputs.pairs).tiles
        assert tiles.resource.min() >= 0
        assert tiles.resource.max() < 12
        assert not np.any(np.asarray(tiles.row)[[0, -2, -1]] < 40 * ROWS)

    def test_keys_that_fast_memory_cannot_hold_are_refused(self):
        inputs, static = random_inputs(Shape())
        problem = problem_of(inputs, static)._replace(m=4096, heads=16, d=128)
        with pytest.raises(ValueError, match=r"m=4096 rows need \d+ MiB of VMEM.*implementation='xla'"):
            resident.plan(problem)


def problem_of(inputs: Inputs, static: Static) -> operation.Problem:
    """What `block_sparse_attention` asks an implementation to plan for."""
    shapes = *inputs.query.shape, *inputs.key.shape[:2], inputs.pairs.resource.shape[1], inputs.query.dtype
    return operation.Problem(*shapes, static.num_context, static.max_pairs, 1.0)


def test_default_is_an_implementation_for_this_device():
    inputs, static = random_inputs(Shape())
    default, xla = (attend(inputs, static, name) for name in (None, "xla"))
    jax.tree.map(np.testing.assert_array_equal, default, xla)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "implementation='cuda'.*reference.*xla"),
        ({"num_context": 6}, "num_context=6; wanted 0 to 5"),
        ({"max_pairs": -1}, "max_pairs=-1"),
        ({"num_context": 2}, "number of tokens is 24; wanted 16"),
        ({"row_chunks": 2}, "row_chunks=2; wanted a number of chunks that divides num_context=3 into rows"),
    ],
)
def test_refusals_name_the_argument(change, message):
    inputs, static = random_inputs(Shape())
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(*inputs[:5], window=inputs.window, **{**static._asdict(), **change})


def test_mixed_dtypes_are_refused():
    inputs, static = random_inputs(Shape())
    with pytest.raises(ValueError, match=r"key\.dtype is bfloat16; wanted float32"):
        attend(inputs._replace(key=inputs.key.astype(jnp.bfloat16)), static, "xla")


@pytest.mark.parametrize(
    ("implementation", "dtype", "message"),
    [
        (name, jnp.int32, r"query\.dtype is int32; wanted a float: cast it to bfloat16 or float32")
        for name in ("reference", "xla", "pallas_gpu", "pallas_tpu", "pallas_tpu_resident")
    ]
    + [
        (name, jnp.float16, r"query\.dtype is float16; the TPU kernels take bfloat16 or float32: .*'xla' takes it")
        for name in ("pallas_tpu", "pallas_tpu_resident", "pallas_tpu_gathered", "pallas_tpu_dense")
    ],
)
def test_types_that_cannot_be_multiplied_are_refused(implementation, dtype, message):
    inputs, static = random_inputs(Shape())
    arrays = (x.astype(dtype) for x in inputs[:4])
    untyped = inspect.unwrap(block_sparse_attention)  # the tests' own check of annotations would come first
    with pytest.raises(ValueError, match=message):
        untyped(*arrays, inputs.pairs, implementation=implementation, **static._asdict())


def test_xla_takes_float16_as_its_refusal_says():
    inputs, static = random_inputs(Shape(), jnp.float16)
    exact, _ = random_inputs(Shape())
    found, wanted = attend(inputs, static, "xla"), attend(exact, static, "reference")
    assert_close(found.output.astype(jnp.float32), wanted.output, 5e-3, "output")


@pytest.mark.parametrize("implementation", ["pallas_tpu_resident", "pallas_tpu_gathered"])
def test_one_variable_turns_bounds_checks_on(monkeypatch, implementation):
    """Those two go without: their addresses come from tables."""
    inputs, static = random_inputs(Shape(window=False))

    def disabled() -> set[bool]:
        given = set()

        def record(*args, compiler_params, **options):
            given.add(compiler_params.disable_bounds_checks)
            return called(*args, compiler_params=compiler_params, **options)

        with monkeypatch.context() as patch:
            called = pl.pallas_call
            patch.setattr(pl, "pallas_call", record)
            jax.eval_shape(lambda x: attend.__wrapped__(x, static, implementation), inputs)
        return given

    assert True in disabled()
    monkeypatch.setenv(BOUNDS_CHECKS, "1")
    assert disabled() == {False}
