"""Dense attention under a bias row per resource, and the local window as a kernel: interpreted here.

`test_aot_dense` compiles them for the chips.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import Pairs, types
from pallas_kernels.block_sparse_attention.operation import XLA_WINDOW, LocalWindow, Problem
from pallas_kernels.block_sparse_attention.tpu import dense, window_kernels
from pallas_kernels.block_sparse_attention.tpu import window as tpu_window
from tests.pallas_kernels.base import TpuAttentionTest, assert_close
from tests.pallas_kernels.cases import Inputs, Shape, evaluate, random_inputs
from tests.pallas_kernels.simulated import as_compiled


class TestPallasTpuDense(TpuAttentionTest):
    implementation = "pallas_tpu_dense"
    kernels = ("dense_attention_forward", "dense_attention_backward")
    random_shapes = 2

    def test_groups_of_heads(self):
        self.check(*random_inputs(Shape(tokens=16, m=8, num_context=2, heads=5, d=256)))

    def test_several_tiles_and_blocks(self):
        self.check(*random_inputs(Shape(tokens=780, m=6, num_context=130, experts=40, heads=1, slots=2, segments=9)))

    def test_the_code_that_a_tpu_runs_stays_within_its_arrays(self, monkeypatch, capfd):
        """Over several blocks."""
        inputs, static = random_inputs(Shape(tokens=260, m=13, num_context=20, heads=2, d=8, count=4))
        with as_compiled(dense, monkeypatch):
            actual = jax.block_until_ready(jax.jit(lambda x: evaluate(x, static, self.implementation))(inputs))
        assert "RACE DETECTED" not in capfd.readouterr().out
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, "simulated"), actual, evaluate(inputs, static, "reference"))


PROBLEM = Problem(4096, 8, 128, 96, 128, 8, jnp.dtype("bfloat16"), 32, 4096 * 8, 0.1)


def test_only_blocks_that_some_token_of_the_tile_chose_are_visited():
    path = dense.plan(PROBLEM._replace(tokens=1024, m=256, slots=2, max_pairs=2048))
    assert (path.layout.tiles, path.layout.block) == (2, 2)
    resource = jnp.zeros((1024, 2), jnp.int32).at[700].set(jnp.array([5, 40]))
    pairs = Pairs(resource, 0.0 * resource, resource, jnp.zeros(1024, jnp.int32).at[700].set(2))
    tables = path.tables(pairs)
    steps = [(int(t), int(b)) for t, b, _ in zip(*tables.by_tile[:2], range(tables.by_tile.number), strict=False)]
    assert steps == [(0, 0), (1, 2), (1, 20)]  # the first tile chose nothing, and has to be written
    steps = {(int(t), int(b)) for t, b, _ in zip(*tables.by_block[:2], range(tables.by_block.number), strict=False)}
    assert steps == {(0, b) for b in range(48) if b not in (2, 20)} | {(1, 2), (1, 20)}


def test_many_tokens_make_small_groups_of_heads_and_too_many_are_refused():
    with chips.assume("v5e"):
        groups = [dense.plan(PROBLEM._replace(tokens=tokens)).layout.groups for tokens in (4096, 16384, 32768)]
    assert groups[0] == 1
    assert groups == sorted(groups)
    assert groups[-1] > 1
    with pytest.raises(ValueError, match=r"1048576 tokens .* need \d+ MiB of VMEM in one call; wanted at most 56"):
        dense.plan(PROBLEM._replace(tokens=2**20))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(tokens=24, m=8, num_context=3, segments=3),
        Shape(tokens=390, m=130, num_context=3, experts=0, slots=3),  # two tiles, the window one and a bit of registers
        Shape(tokens=384, m=128, num_context=3, heads=3, d=512, segments=2),  # three tiles, two groups of heads
        Shape(tokens=256, m=64, num_context=4, heads=3, d=128, experts=3),  # experts' rows end within a tile
        Shape(tokens=256, m=128, num_context=2, heads=2, d=256, experts=3),  # and here they do not
    ],
    ids=lambda shape: f"{shape.tokens} tokens, m={shape.m}",
)
@pytest.mark.parametrize("local", [tpu_window.LOCAL, tpu_window.BY_TOKEN], ids=["by lanes", "by token"])
def test_the_window_kernels_are_the_window(shape, local):
    inputs, _ = random_inputs(shape)
    with chips.assume("v5e"):  # one core: heads are not divided further
        here, there = (_window(inputs, x) for x in (XLA_WINDOW, local))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(there), jax.tree.leaves(here), strict=True):
        assert_close(a, b, 1e-5, jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        (Shape(tokens=390, m=130, num_context=3, experts=0, slots=3), tpu_window.LOCAL),
        (Shape(tokens=256, m=128, num_context=2, heads=2, d=256, experts=3), tpu_window.BY_TOKEN),
    ],
    ids=["by lanes", "by token"],
)
def test_the_window_kernels_stay_within_their_arrays(shape, local, monkeypatch, capfd):
    inputs, _ = random_inputs(shape)
    monkeypatch.setattr(window_kernels, "_flat", Flat)
    with chips.assume("v5e"), as_compiled(tpu_window, monkeypatch):
        layout = tpu_window.choose_layout(inputs.query.shape, shape.m, by_token=local is tpu_window.BY_TOKEN)
        assert layout.by_token == (local is tpu_window.BY_TOKEN)
        simulated = jax.block_until_ready(_window.__wrapped__(inputs, local))
    assert "RACE DETECTED" not in capfd.readouterr().out
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "simulated"), simulated, _window(inputs, XLA_WINDOW))


class Flat:
    """A reference by another shape, as far as it is written: the simulator has none."""

    def __init__(self, ref, layout: window_kernels.Layout):
        self.ref, self.shape = ref, (layout.tile * layout.lanes // 128, 128)

    def __setitem__(self, index, value):
        rows, _ = index
        flat = self.ref[...].reshape(self.shape)
        flat = flat.at[rows.start + rows.stride * jnp.arange(rows.size)].set(value)
        self.ref[...] = flat.reshape(self.ref.shape)


@functools.partial(jax.jit, static_argnums=1)
def _window(inputs: Inputs, local: LocalWindow):
    """Output, log-sum-exp, and the gradients through it."""
    given = types.Inputs(*inputs[:5], None)
    output, lse = local.attention(given, inputs.window, 0.5)
    lse = jnp.logaddexp(jnp.where(lse > -jnp.inf, lse, 0.0), 0.3)
    cotangents = types.Cotangents(inputs.d_output, lse, inputs.d_lse)
    return output, lse, local.gradients(given, inputs.window, cotangents, 0.5)
