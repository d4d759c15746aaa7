"""Block-sparse attention for GPUs, on a CPU: the path around the kernels, and the kernels interpreted.

What this cannot show: products are computed by NumPy here, not by WGMMA or tcgen05, and a gather is a loop over rows.
`test_aot_gpu` compiles the kernels for the chips; only a run on one joins the two (`test_gpu_chip`).
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot, chips
from pallas_kernels.block_sparse_attention import BlockSizes, interface, tables, window, xla
from pallas_kernels.block_sparse_attention.gpu import blackwell, common, elsewhere, gather, kernels, path
from pallas_kernels.block_sparse_attention.gpu.common import Plan, Queries, Rows, Tiles, unpacked
from pallas_kernels.block_sparse_attention.operation import XLA_WINDOW, Problem
from tests.pallas_kernels.base import NAMED, BlockSparseAttentionTest, assert_close, attend
from tests.pallas_kernels.cases import SHARDED, Shape, evaluate, over_heads, random_inputs


class TestPath(BlockSparseAttentionTest):
    implementation = "pallas_gpu"
    random_shapes = 2
    chip = "h200"
    kernels = kernels

    @classmethod
    def setup_class(cls):
        jax.clear_caches()  # of what was traced for another chip

    @pytest.fixture(autouse=True)
    def a_gpu(self):
        """Assumed: XLA computes the tiles."""
        with chips.assume(self.chip):
            assert path.plan(TestPlan.PROBLEM).kernels is self.kernels
            yield

    @pytest.mark.parametrize("m", [65, 576])  # 576 = 9 * 64 keys do not fit at once: three parts
    def test_resources_longer_than_a_block_of_keys(self, m):
        self.check(*random_inputs(Shape(tokens=70, m=m, num_context=2, d=66, heads=1, window=False)))


class TestPathOfABlackwell(TestPath):
    chip = "b200"
    kernels = blackwell


class TestXlaOnAGpu:
    """Large steps, and searches without a loop."""

    @pytest.fixture(autouse=True)
    def a_blackwell(self):
        with chips.assume("b200"):
            yield

    @pytest.mark.parametrize(
        "shape",
        [NAMED["plain"], NAMED["no pairs at all"], Shape(tokens=1024, m=64, num_context=16, experts=4, heads=4, d=8)],
        ids=["plain", "no pairs", "a step that would be several on a CPU"],
    )
    def test_the_definition(self, shape):
        inputs, static = random_inputs(shape)
        for actual, expected in zip(*(evaluate(inputs, static, x) for x in ("xla", "reference")), strict=True):
            for name, a, e in zip(actual._fields, actual, expected, strict=True):
                assert_close(a, e, 1e-5, name)

    def test_steps_are_larger_than_on_a_cpu(self):
        assert xla.plan(TestPlan.PROBLEM).group == 512
        assert window.chunks_a_step(1024, heads=8, m=64) == 512

    def test_searches_are_no_loops(self):
        inputs, _ = random_inputs(Shape())
        build = functools.partial(tables.build, num_resources=5, max_pairs=96, tile=8)
        program = jax.jit(build).trace(inputs.pairs.resource, inputs.pairs.count).lower().as_text()
        assert "stablehlo.while" not in program


class TestWhoGetsTheKernels:
    """By stand-ins for the device."""

    def planned(
        self,
        monkeypatch,
        kind: str | None = None,
        capability: str = "",
        *,
        wanted="pallas_gpu",
        d=4,
        dtype=jnp.bfloat16,
    ) -> str:
        """Which implementation the wanted one turns out to be."""
        if kind is not None:
            device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
            monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
            monkeypatch.setattr(jax, "devices", lambda: [device])
        found = []
        for name in ("pallas_gpu", "xla"):

            def plan(problem, name=name):
                found.append(name)
                return xla.plan(problem)

            monkeypatch.setitem(interface.PLANS, name, (plan, XLA_WINDOW))
        inputs, static = random_inputs(Shape(d=d), dtype)
        jax.eval_shape(lambda inputs: attend.__wrapped__(inputs, static, wanted), inputs)
        return "".join(found)

    @pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
    def test_a_hopper_does(self, monkeypatch, caplog, kind):
        assert self.planned(monkeypatch, kind, "9.0") == "pallas_gpu"
        assert not caplog.records

    def test_a_blackwell_does_only_if_asked_and_one_line_each_says_that_none_ever_did(self, monkeypatch, caplog):
        chips._say_once.cache_clear()
        b200 = "NVIDIA B200", "10.0"
        assert [self.planned(monkeypatch, *b200, wanted=None) for _ in range(2)] == ["xla", "xla"]
        assert [self.planned(monkeypatch, *b200) for _ in range(2)] == ["pallas_gpu", "pallas_gpu"]
        default, asked = [record.getMessage() for record in caplog.records if record.name == "pallas_kernels"]
        assert default.startswith("NVIDIA B200 gets 'xla'; implementation='pallas_gpu' may be asked for")
        assert default.endswith("untested on hardware")
        assert "implementation='pallas_gpu': these kernels have never run on a NVIDIA B200" in asked

    @pytest.mark.parametrize(
        ("kind", "capability"), [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA RTX PRO 6000", "12.0")]
    )
    def test_any_other_gpu_gets_xla_and_one_line_says_so(self, monkeypatch, caplog, kind, capability):
        chips._say_once.cache_clear()
        assert [self.planned(monkeypatch, kind, capability) for _ in range(2)] == ["xla", "xla"]
        (line,) = [record.getMessage() for record in caplog.records if record.name == "pallas_kernels"]
        assert "implementation='pallas_gpu'" in line
        assert line.endswith(f"{kind} has {capability} and gets 'xla'")

    def test_they_are_the_default_on_a_hopper_for_what_they_take(self, monkeypatch, caplog):
        hopper, ampere = ("NVIDIA H200", "9.0"), ("NVIDIA A100-SXM4-80GB", "8.0")
        assert self.planned(monkeypatch, *hopper, wanted=None) == "pallas_gpu"
        assert self.planned(monkeypatch, *hopper, wanted=None, dtype=jnp.float32) == "xla"
        assert self.planned(monkeypatch, *hopper, wanted=None, d=256) == "xla"
        assert self.planned(monkeypatch, *ampere, wanted=None) == "xla"
        monkeypatch.setattr(jax, "device_count", lambda: 2)  # and no mesh: the compiler cannot divide a kernel
        assert self.planned(monkeypatch, *hopper, wanted=None) == "xla"
        assert not caplog.records

    def test_a_cpu_is_refused(self, monkeypatch):
        with pytest.raises(
            ValueError, match=r"implementation='pallas_gpu' needs a Hopper GPU.*runs on a cpu: leave it"
        ):
            self.planned(monkeypatch)

    def test_an_assumed_gpu_is_no_tpu(self):
        with chips.assume("h100"):
            assert chips.takes_gpu_kernels("")
            assert not chips.kernels_by_default()
            assert chips.current() == "v5p"
        with chips.assume("b200"):
            assert chips.takes_gpu_kernels("")
            assert not chips.gpu_kernels_by_default()
            assert not chips.kernels_by_default()
        assert {*chips.HOPPERS, *chips.BLACKWELLS} == set(aot.GPUS)


class TestPlan:
    PROBLEM = Problem(
        tokens=8192,
        heads=8,
        d=128,
        resources=128,
        m=128,
        slots=16,
        dtype=jnp.dtype("bfloat16"),
        num_context=64,
        max_pairs=65536,
        scale=0.1,
    )

    @pytest.mark.parametrize(
        ("d", "m", "part", "blocks", "slots"),
        [
            (128, 128, 128, (128, 64), 2),
            (128, 64, 64, (64, 64), 2),
            (128, 256, 256, (64, 64), 1),
            (128, 512, 256, (64, 64), 1),
            (80, 100, 128, (128, 64), 2),
            (64, 512, 512, (128, 64), 1),
            (64, 256, 256, (128, 64), 2),
            (128, 320, 64, (64, 64), 2),
        ],
    )
    def test_what_is_in_shared_memory_at_once(self, d, m, part, blocks, slots):
        planned = path.plan(self.PROBLEM._replace(d=d, m=m))
        assert planned.forward_plan.part == planned.query_plan.part == part
        assert (planned.forward_plan.block, planned.query_plan.block) == blocks
        assert planned.query_plan.slots == slots

    @pytest.mark.parametrize(
        ("d", "m", "parts", "slots"),
        [
            (128, 128, (128, 128), (2, 1)),
            (128, 64, (128, 128), (2, 1)),
            (128, 256, (256, 128), (1, 1)),
            (128, 512, (256, 128), (1, 1)),
            (64, 512, (512, 256), (2, 2)),
            (80, 320, (128, 128), (2, 1)),
        ],
    )
    def test_what_is_in_shared_memory_of_a_blackwell(self, d, m, parts, slots):
        with chips.assume("b200"):
            planned = path.plan(self.PROBLEM._replace(d=d, m=m))
        plans = planned.forward_plan, planned.query_plan
        assert tuple(plan.part for plan in plans) == parts
        assert tuple(plan.slots for plan in plans) == slots
        for plan, operands in zip(plans, (1, 2), strict=True):
            tiles = operands * plan.warpgroups * plan.slots * blackwell.ROWS
            assert (2 * plan.part + tiles) * planned.head_size * 2 <= path.SHARED_BYTES

    def test_blocks_of_keys_that_tensor_memory_has_no_room_for_are_refused(self):
        with chips.assume("b200"):
            wide = self.PROBLEM._replace(block_sizes=BlockSizes(keys=128))
            assert path.plan(wide._replace(d=64)).forward_plan.block == 128
            with pytest.raises(ValueError, match=r"block_sizes.keys=128; wanted 64"):
                path.plan(wide)

    def test_popular_resources_are_shared_by_blocks_of_threads(self):
        # 65536 pairs are 8 tiles a resource: half as many as one block of threads takes.
        assert path.plan(self.PROBLEM).forward_plan.splits == 1
        assert path.plan(self.PROBLEM._replace(max_pairs=8 * 65536)).forward_plan.splits == 4

    @pytest.mark.parametrize(("d", "m", "warpgroups"), [(128, 128, 3), (64, 64, 3), (128, 320, 3), (128, 256, 2)])
    def test_a_third_warpgroup_where_all_keys_of_a_part_are_taken_at_once(self, d, m, warpgroups):
        planned = path.plan(self.PROBLEM._replace(d=d, m=m))
        assert planned.forward_plan.warpgroups == warpgroups
        assert planned.query_plan.warpgroups == 2

    def test_large_heads_are_refused(self):
        with pytest.raises(ValueError, match=r"head size d=256; on a GPU wanted at most 128; implementation='xla'"):
            path.plan(self.PROBLEM._replace(d=256))

    @pytest.mark.parametrize("chip", ["h200", "b200"])
    def test_float32_is_refused_on_a_gpu(self, monkeypatch, chip):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        with chips.assume(chip):
            path.plan(self.PROBLEM)
            with pytest.raises(ValueError, match=r"dtype=float32; wanted bfloat16 or float16.*implementation='xla'"):
                path.plan(self.PROBLEM._replace(dtype=jnp.dtype("float32")))


def random_tiles(module, begin: tuple[int, ...], dtype, m: int = 128, heads: int = 1) -> Tiles:
    """One tile more than `begin` tells of belongs to nobody, and its rows see nothing."""
    tiles, resources, d, tokens = begin[-1] + 1, len(begin) - 1, 64, 100
    rng = np.random.default_rng(0)
    normal = lambda *size: jnp.asarray(rng.normal(size=size), dtype)  # noqa: E731
    query, table, rows = (tokens, heads, d), (resources, m, heads, d), (tiles, heads, module.ROWS)
    token = jnp.asarray(rng.integers(0, tokens, (tiles, module.ROWS)), jnp.int32)
    queries = Queries(token, normal(*query), normal(*query))
    arrays = queries, normal(*table), normal(*table), normal(*query)
    shift, delta = normal(*rows).astype(jnp.float32) - 3, normal(*rows).astype(jnp.float32)
    visible = rng.integers(0, m + 1, (tiles, module.ROWS))
    visible[1, 40:] = visible[-1] = 0
    return Tiles(*arrays, shift, delta, Rows(jnp.asarray(begin, jnp.int32), jnp.asarray(visible, jnp.int32)))


def results(module, name: str, tiles: Tiles, plan: Plan):
    """What the kernel, or its model, gives; without the last tile, whose results mean nothing."""
    given = (tiles.query, tiles.key, tiles.value, tiles.rows) if name == "forward" else (tiles,)
    both = jax.jit(functools.partial(getattr(module, name), plan=plan))(*given)
    if name == "forward":
        both = unpacked(both.fraction) * both.size.swapaxes(2, 3)[..., None], both.lse
    if name == "query_gradients":
        both = both[0], both[1].sum(2)  # of the biases only the sum over heads is wanted
    return both if name == "key_gradients" else tuple(x[:, :-1] for x in both)


class TestInAMesh:
    """JAX takes an axis of a kernel for one of the mesh if they have the same name: the kernel then asks which device
    it runs on, by a library that XLA does not have."""

    def program(self, chip: str = "h200") -> str:
        axes = "data", "fsdp", "resource", "tensor"
        mesh = jax.sharding.AbstractMesh((1, 1, 1, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 4)
        inputs, static = random_inputs(SHARDED, jnp.bfloat16)
        with chips.assume(chip):
            run = jax.jit(over_heads(mesh, static, "pallas_gpu"))
            return run.trace(inputs).lower(lowering_platforms=("cuda",)).as_text()

    @pytest.mark.parametrize("chip", ["h200", "b200"])
    def test_kernels_have_axes_of_their_own(self, chip):
        program = self.program(chip)
        assert program.count("custom_call @mosaic_gpu") == 3
        assert "collective_metadata_used" not in program

    def test_places_of_rows_are_computed_once(self):
        """XLA keeps what barriers enclose out of the sums that read it: `_tiles` in both passes, and the shares."""
        assert self.program().count("optimization_barrier") == 3

    def test_which_is_how_one_would_see_it(self, monkeypatch):
        monkeypatch.setattr(common, "own", lambda axis: axis)
        assert "collective_metadata_used" in self.program()


class TestPartialOutputs:
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_they_are_off_by_half_a_step_of_the_largest_value(self, dtype):
        x = jax.random.normal(jax.random.key(0), (50, 128)) * jnp.logspace(-6, 6, 50)[:, None]
        size = common.size_of_rows(x)[:, None]
        off = jnp.abs(common.unpacked(common.packed(x / size, dtype)) - x / size)
        assert 0 < off.max() < 0.51 / common.FIXED_POINT_ONE

    def test_zeros_stay_and_what_is_not_finite_is_not_lost(self):
        x = jnp.array([[0.0, 0.0], [1.0, jnp.nan], [1.0, jnp.inf], [-jnp.inf, 0.0]])
        size = common.size_of_rows(x)[:, None]
        back = common.unpacked(common.packed(x * (1.0 / size), jnp.bfloat16)) * size
        np.testing.assert_array_equal(back[0], 0.0)
        assert not np.isfinite(back[1:]).any()


@pytest.mark.parametrize("d", [64, 128])
def test_rows_are_gathered_to_where_the_tensor_cores_read_them(d):
    """Tiles of 8 rows and 64 columns, one after the other; in each, 16 bytes move by the row's bits."""
    rows, tile = 64, (8, 64)
    place = np.arange(rows * d).reshape(rows // 8, d // 64, *tile)
    row, chunk = np.divmod(np.arange(rows * d // 8), d // 8)
    for swizzled, x, y in zip(gather.swizzled_offset(row, chunk, d // 64), row, 8 * chunk, strict=True):
        byte = 2 * place[x // 8, y // 64, x % 8, y % 64]
        assert swizzled == byte ^ (byte >> 7 & 7) << 4


KERNELS = ["forward", "query_gradients", "key_gradients"]
RESOURCES = (0, 3, 3, 4)  # the second has no tile
LOOPS = Plan(scale=0.125, part=128, block=64, splits=2, slots=2, warpgroups=1, products="dot", num_context=2)
PARTS = Plan(scale=0.125, part=64, block=64, splits=1, slots=1, warpgroups=1, products="dot")
# A thread for every warpgroup: the interpreter compiles anew for each of them and each block of threads.
TWO = Plan(scale=0.125, part=128, block=128, splits=1, slots=2, warpgroups=2, products="dot")
CASES = {
    "hopper, blocks of keys": (kernels, RESOURCES, 128, LOOPS),
    "hopper, parts": (kernels, RESOURCES, 128, PARTS),
    "hopper, two warpgroups": (kernels, (0, 3), 128, TWO),
    "blackwell, blocks of keys": (blackwell, RESOURCES, 128, LOOPS),
    "blackwell, parts": (blackwell, (0, 2), 256, PARTS._replace(part=128)),
    "blackwell, two warpgroups": (blackwell, (0, 3), 128, TWO._replace(block=64, slots=1)),
}


@pytest.mark.slow
class TestKernels:
    @pytest.fixture
    def interpreted(self):
        """Memory that nobody wrote is NaN; reads and writes that nothing orders are races."""
        reason = "this JAX has no interpreter of Mosaic GPU kernels where it is expected"
        params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params", reason=reason)
        calls = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call", reason=reason)
        with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
            yield
        assert not calls.get_races().races_found
        calls.reset_gpu_interpret_mode_state()

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("name", KERNELS)
    def test_kernels_compute_what_their_models_do(self, interpreted, name, case):
        module, begin, m, plan = CASES[case]
        if name == "key_gradients":
            plan = plan._replace(slots=2)  # as it is always planned
        tiles = random_tiles(module, begin, jnp.float32, m)
        for actual, expected in zip(*(results(x, name, tiles, plan) for x in (module, elsewhere)), strict=True):
            assert_close(actual, expected, 1e-5, name)

    def test_three_warpgroups(self, interpreted):
        """One has two tiles of four, the others one."""
        tiles, plan = random_tiles(kernels, (0, 4), jnp.float32), TWO._replace(warpgroups=3)
        for actual, expected in zip(*(results(x, "forward", tiles, plan) for x in (kernels, elsewhere)), strict=True):
            assert_close(actual, expected, 1e-5, "forward")

    @pytest.mark.parametrize("name", KERNELS)
    @pytest.mark.parametrize("module", [kernels, blackwell], ids=["hopper", "blackwell"])
    def test_bfloat16_and_two_heads(self, interpreted, module, name):
        tiles = random_tiles(module, (0, 1), jnp.bfloat16, heads=2)
        for actual, expected in zip(*(results(x, name, tiles, LOOPS) for x in (module, elsewhere)), strict=True):
            assert actual.dtype == expected.dtype
            # Probabilities are rounded relative to another maximum here and there: half a unit in the last place.
            assert_close(actual.astype(jnp.float32), expected.astype(jnp.float32), 2.0**-9, name)

    def test_warpgroups_that_add_to_the_same_sums_give_the_same_bits_every_time(self, interpreted):
        tiles, plan = random_tiles(blackwell, (0, 2), jnp.float32), CASES["blackwell, two warpgroups"][-1]
        first, second = (results(blackwell, "key_gradients", tiles, plan) for _ in range(2))
        jax.tree.map(np.testing.assert_array_equal, first, second)

    @pytest.mark.parametrize(("chip", "module"), [("h200", kernels), ("b200", blackwell)])
    def test_the_definition_of_a_whole_call(self, interpreted, monkeypatch, chip, module):
        """Every kernel interpreted in its place on the path: tables, gather and sums per token around them."""
        jax.clear_caches()
        simple = {"products": "dot", "warpgroups": 1}
        run = {
            name: lambda *given, plan, name=name: getattr(module, name)(*given, plan=plan._replace(**simple))
            for name in KERNELS
        }
        monkeypatch.setattr(path, "elsewhere", types.SimpleNamespace(**run))
        inputs, static = random_inputs(Shape(tokens=30, m=70, num_context=1, experts=1, slots=2, window=False))
        with chips.assume(chip):
            actual = evaluate(inputs, static, "pallas_gpu")
        expected = evaluate(inputs, static, "reference")
        for (name, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
            assert_close(a, e, 1e-5, jax.tree_util.keystr(name))
