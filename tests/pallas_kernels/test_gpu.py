"""Block-sparse attention for GPUs, on a CPU: the path around the kernels, and the kernels interpreted.

What this cannot show: products are computed by NumPy here, not by WGMMA. `test_aot_gpu` compiles the kernels for the
chip; only a run on one joins the two (`test_gpu_chip`).
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot, chips
from pallas_kernels.block_sparse_attention import interface, tables, window, xla
from pallas_kernels.block_sparse_attention.gpu import common, elsewhere, kernels, path
from pallas_kernels.block_sparse_attention.gpu.common import Plan, Rows, Tiles
from pallas_kernels.block_sparse_attention.gpu.kernels import ROWS
from pallas_kernels.block_sparse_attention.operation import XLA_WINDOW, Problem
from tests.pallas_kernels.base import NAMED, BlockSparseAttentionTest, assert_close, attend
from tests.pallas_kernels.cases import SHARDED, Shape, evaluate, over_heads, random_inputs


class TestPath(BlockSparseAttentionTest):
    implementation = "pallas_gpu"
    random_shapes = 2

    @pytest.fixture(autouse=True)
    def a_hopper(self):
        """Assumed: XLA computes the tiles."""
        with chips.assume("h200"):
            yield

    @pytest.mark.parametrize("m", [65, 576])  # 576 = 9 * 64 keys do not fit at once: three parts
    def test_resources_longer_than_a_block_of_keys(self, m):
        self.check(*random_inputs(Shape(tokens=70, m=m, num_context=2, d=66, heads=1, window=False)))


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

    @pytest.mark.parametrize(("kind", "capability"), [("NVIDIA A100-SXM4-80GB", "8.0"), ("NVIDIA B200", "10.0")])
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
            assert not chips.takes_gpu_kernels("")
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

    def test_popular_resources_are_shared_by_blocks_of_threads(self):
        # 65536 pairs are 8 tiles a resource: as many as one block of threads takes.
        assert path.plan(self.PROBLEM).forward_plan.splits == 1
        assert path.plan(self.PROBLEM._replace(max_pairs=4 * 65536)).forward_plan.splits == 4

    def test_large_heads_are_refused(self):
        with pytest.raises(ValueError, match=r"head size d=256; on a GPU wanted at most 128; implementation='xla'"):
            path.plan(self.PROBLEM._replace(d=256))

    def test_float32_is_refused_on_a_gpu(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        path.plan(self.PROBLEM)
        with pytest.raises(ValueError, match=r"dtype=float32; wanted bfloat16 or float16.*implementation='xla'"):
            path.plan(self.PROBLEM._replace(dtype=jnp.dtype("float32")))


def random_tiles(begin: tuple[int, ...], dtype) -> Tiles:
    """One tile more than `begin` tells of belongs to nobody, and its rows see nothing."""
    tiles, resources, heads, m, d = begin[-1] + 1, len(begin) - 1, 1, 128, 64
    rng = np.random.default_rng(0)
    normal = lambda *size: jnp.asarray(rng.normal(size=size), dtype)  # noqa: E731
    queries, table, rows = (tiles, ROWS, heads, d), (resources, m, heads, d), (tiles, heads, ROWS)
    arrays = normal(*queries), normal(*table), normal(*table), normal(*queries)
    shift, delta = normal(*rows).astype(jnp.float32) - 3, normal(*rows).astype(jnp.float32)
    visible = rng.integers(0, m + 1, (tiles, ROWS))
    visible[1, 40:] = visible[-1] = 0
    return Tiles(*arrays, shift, delta, Rows(jnp.asarray(begin, jnp.int32), jnp.asarray(visible, jnp.int32)))


def results(module, name: str, tiles: Tiles, plan: Plan):
    """What the kernel, or its model, gives; without the last tile, whose results mean nothing."""
    given = (tiles.query, tiles.key, tiles.value, tiles.rows) if name == "forward" else (tiles,)
    both = jax.jit(functools.partial(getattr(module, name), plan=plan))(*given)
    return both if name == "key_gradients" else tuple(x[:, :-1] for x in both)


class TestInAMesh:
    """JAX takes an axis of a kernel for one of the mesh if they have the same name: the kernel then asks which device
    it runs on, by a library that XLA does not have."""

    def program(self) -> str:
        axes = "data", "fsdp", "resource", "tensor"
        mesh = jax.sharding.AbstractMesh((1, 1, 1, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 4)
        inputs, static = random_inputs(SHARDED, jnp.bfloat16)
        with chips.assume("h200"):
            run = jax.jit(over_heads(mesh, static, "pallas_gpu"))
            return run.trace(inputs).lower(lowering_platforms=("cuda",)).as_text()

    def test_kernels_have_axes_of_their_own(self):
        program = self.program()
        assert program.count("custom_call @mosaic_gpu") == 3
        assert "collective_metadata_used" not in program

    def test_places_of_rows_are_computed_once(self):
        """XLA keeps what barriers enclose out of the sums that read it: `_tiles` in both passes, and the shares."""
        assert self.program().count("optimization_barrier") == 3

    def test_which_is_how_one_would_see_it(self, monkeypatch):
        monkeypatch.setattr(common, "own", lambda axis: axis)
        assert "collective_metadata_used" in self.program()


KERNELS = ["forward", "query_gradients", "key_gradients"]
RESOURCES = (0, 3, 3, 4)  # the second has no tile
LOOPS = Plan(scale=0.125, part=128, block=64, splits=2, slots=2, warpgroups=1, products="dot")
PARTS = Plan(scale=0.125, part=64, block=64, splits=1, slots=1, warpgroups=1, products="dot")
# A thread for every warpgroup: the interpreter compiles anew for each of them and each block of threads.
TWO = Plan(scale=0.125, part=128, block=128, splits=1, slots=2, warpgroups=2, products="dot")


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

    @pytest.mark.parametrize(
        ("begin", "plan"),
        [(RESOURCES, LOOPS), (RESOURCES, PARTS), ((0, 3), TWO)],
        ids=["blocks of keys", "parts", "two warpgroups"],
    )
    @pytest.mark.parametrize("name", KERNELS)
    def test_kernels_compute_what_their_models_do(self, interpreted, name, begin, plan):
        tiles = random_tiles(begin, jnp.float32)
        for actual, expected in zip(*(results(x, name, tiles, plan) for x in (kernels, elsewhere)), strict=True):
            assert_close(actual, expected, 1e-5, name)

    def test_bfloat16(self, interpreted):
        name, tiles = "query_gradients", random_tiles((0, 1), jnp.bfloat16)
        for actual, expected in zip(*(results(x, name, tiles, LOOPS) for x in (kernels, elsewhere)), strict=True):
            assert actual.dtype == expected.dtype
            # Probabilities are rounded relative to another maximum here and there: half a unit in the last place.
            assert_close(actual.astype(jnp.float32), expected.astype(jnp.float32), 2.0**-9, name)
