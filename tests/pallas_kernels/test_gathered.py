"""Path B for TPUs, interpreted; `test_aot_gathered` compiles the same kernels for the chips."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.block_sparse_attention import interface
from pallas_kernels.block_sparse_attention.operation import XLA_WINDOW
from pallas_kernels.block_sparse_attention.tpu import gathered
from tests.pallas_kernels.base import TpuAttentionTest, assert_close
from tests.pallas_kernels.cases import Shape, evaluate, random_inputs
from tests.pallas_kernels.simulated import as_compiled


class TestGathered(TpuAttentionTest):
    implementation = "pallas_tpu_gathered"
    kernels = tuple(f"gathered_{name}" for name in ("forward", "merge", "backward", "add"))

    @pytest.mark.parametrize(
        ("heads", "d", "dtype", "rtol"),
        [
            (5, 256, jnp.float32, 1e-5),  # two groups, the second with a head that is padding
            (5, 64, jnp.bfloat16, 1e-2),  # four heads in a unit, and one alone; results are rounded to bfloat16
            (5, 500, jnp.bfloat16, 1e-2),  # two units a head, two groups
        ],
    )
    def test_whole_units_and_groups_of_heads(self, heads, d, dtype, rtol):
        self.check(*random_inputs(Shape(tokens=140, m=4, num_context=35, heads=heads, d=d), dtype), rtol)

    @pytest.mark.slow
    def test_the_code_that_a_tpu_runs_has_no_races(self, monkeypatch, capfd):
        """Several tiles of pairs and of tokens."""
        inputs, static = random_inputs(Shape(tokens=140, m=4, num_context=35, experts=2, heads=2, d=8, count=4))
        monkeypatch.setitem(interface.PLANS, "alone", (gathered.plan, XLA_WINDOW))
        with as_compiled(gathered, monkeypatch, cores=2):
            actual = jax.block_until_ready(jax.jit(lambda x: evaluate(x, static, "alone"))(inputs))
        assert "RACE DETECTED" not in capfd.readouterr().out
        jax.tree.map(lambda a, e: assert_close(a, e, 1e-5, "simulated"), actual, evaluate(inputs, static, "reference"))

    @pytest.mark.parametrize(
        ("d", "dtype", "message"),
        [(1025, jnp.float32, "head size 1152; wanted at most 1024"), (8, jnp.float16, "dtype float16; wanted float32")],
    )
    def test_what_does_not_go_into_rows_is_refused(self, d, dtype, message):
        with pytest.raises(ValueError, match=message):
            gathered.choose_layout(heads=2, d=d, dtype=jnp.dtype(dtype), rows=8.0)
