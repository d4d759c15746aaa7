"""The layer benchmark: its dense candidates are the dense layer, and it reports what it measures."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import AAMoEConfig, BudgetConfig, ModelConfig
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import build_mixer, costs
from aamoe_jax.mixers.costs import Setting
from benchmarks import report
from benchmarks.cases import Case
from benchmarks.dense import CANDIDATES, flash, over_rows, query_blocks, triangle

LENGTH = 64
CONFIG = ModelConfig(d_model=16, num_heads=2, num_layers=1, aamoe=AAMoEConfig(chunk_size=16, num_experts=4))
ROOT = Path(__file__).parents[2]


def gradients(attend):
    generator = np.random.default_rng(0)
    arrays = [jnp.asarray(generator.normal(size=(2, LENGTH, 2, 8)), jnp.float32) for _ in range(4)]

    @jax.jit
    def both_passes(query, key, value, cotangent):
        output, pull_back = jax.vjp(attend, query, key, value)
        return output, *pull_back(cotangent)

    return both_passes(*arrays)


class TestDense:
    @pytest.mark.parametrize("ways", [(query_blocks, over_rows), (triangle, over_rows), (flash, lambda x: x)])
    def test_blocks_are_causal_attention(self, ways):
        blockwise, of_rows = ways
        several = of_rows(partial(blockwise, block=16))
        for got, wanted in zip(gradients(several), gradients(CANDIDATES["causal"]), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)

    def test_refuses_a_broken_block(self):
        with pytest.raises(ValueError, match="length = 64: must be a multiple of the block of 48"):
            gradients(over_rows(partial(triangle, block=48)))

    @pytest.mark.parametrize("name", ["masked", "causal", "flash_64"])
    def test_the_case_is_the_layer_of_the_library(self, name):
        case = Case(name, CONFIG, LENGTH, 1.0)
        arguments = params, h, cotangent, _ = case.arguments()
        output, got, statistics = jax.jit(case.step())(*arguments)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: build_mixer("parallel", CONFIG, rngs=nnx.Rngs(0))))
        context = Context.of_rows(CONFIG, 1, LENGTH)

        @jax.jit
        def library(params, h):
            output, pull_back = jax.vjp(lambda params, h: nnx.merge(graphdef, params)(h, context)[0], params, h)
            return output, pull_back(cotangent)

        expected = library(params, h)
        jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4), (output, got), expected)
        assert statistics == {}
        assert case.training_flops({}) == 3 * LENGTH * costs("parallel", Setting(CONFIG, 1, LENGTH)).model_flops


class TestAAMoE:
    def test_importance_varies_budgets(self):
        def spent(importance):
            config = ModelConfig(
                d_model=16,
                num_heads=2,
                num_layers=1,
                kernel="reference",
                aamoe=AAMoEConfig(chunk_size=16, num_experts=8, budget=BudgetConfig(beta=2.0)),
            )
            case = Case("aamoe", config, LENGTH, importance)
            _, h, *_ = case.arguments()
            allocate = jax.jit(lambda h: case.build().allocate(h, Context.of_rows(config, 1, LENGTH)))
            return np.asarray(allocate(h).count)

        assert set(np.unique(spent(0.0))) == {2}
        # exp(s) of s ~ N(0, 1) exceeds 2.5 times its mean for one token in twelve, and is below half of it for many.
        assert spent(1.0).min() <= 1
        assert spent(1.0).max() >= 5


def rows(**seconds):
    """Rows of a report for AA-MoE whose time and memory are linear in L."""
    result = []
    for length in (4096, 8192, 16384):
        aamoe = {"milliseconds": seconds.get("growth", 1.0) ** np.log2(length / 4096) * length / 100}
        dense = {"milliseconds": length**2 / 1e5, "layer": "flash_64"}
        for kind, power in ((aamoe, 1), (dense, 2)):
            kind.update(flops=1e6 * length**power, compiled_flops=1e9, compiled_bytes=1024 * length, process_bytes=None)
            kind["gflops_per_second"] = kind["flops"] / kind["milliseconds"] / 1e6
        speed_up, flop_ratio = dense["milliseconds"] / aamoe["milliseconds"], length / 1024
        row = {"length": length, "aamoe": aamoe, "dense": dense, "speed_up": speed_up, "flop_ratio": flop_ratio}
        row |= {"efficiency": speed_up / flop_ratio, "pairs_per_token": 3.0, "clip_rate": 0.1}
        result.append(row | {"candidates": {"masked": None, "flash_64": dense["milliseconds"]}})
    return result


class TestReport:
    def test_says_what_was_reached(self):
        efficiency, growth, memory = report.verdicts(rows())
        assert "at least 1.02 (reached" in efficiency
        assert "4096 to 16384: 4.00 x (reached" in growth
        assert "1.00 x" in memory

    def test_says_what_was_not_reached(self):
        efficiency, growth, _ = report.verdicts(rows(growth=2.0))
        assert "NOT reached" in efficiency
        assert "16.00 x (NOT reached" in growth

    def test_short_lengths_promise_nothing(self):
        assert report.verdicts([dict(rows()[0], length=256)]) == []

    def test_compares_with_the_attention_that_jax_has(self):
        row = dict(rows()[-1], candidates={"masked": 300.0, "causal": 200.0, "flash_64": 1.0})
        assert report.own_milliseconds(row) == 200.0
        wanted = 200.0 / row["aamoe"]["milliseconds"] / row["flop_ratio"]
        assert report.own_efficiency(row) == pytest.approx(wanted)
        assert "JAX's own attention" in report.verdicts([row])[1]

    def test_marks_what_did_not_fit(self):
        table = report.candidate_table(rows())
        assert [line.split("|")[2].strip() for line in table.splitlines()] == ["masked", "-" * 7 + ":", "-", "-", "-"]


@pytest.mark.slow
def test_the_program_measures_and_writes(tmp_path):
    command = [sys.executable, "-m", "benchmarks.layer", "--lengths=64", "--rounds=1", "--memory=compiler"]
    command += ["--width=16", "--heads=2", "--chunk_size=16", "--experts=4", f"--output={tmp_path / 'x.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "x.json").read_text())
    assert done.stdout == (tmp_path / "x.md").read_text() == report.report(record)
    (row,) = record["rows"]
    assert set(row["candidates"]) == set(CANDIDATES)
    assert row["efficiency"] == pytest.approx(row["speed_up"] / row["flop_ratio"])
    assert 0 < row["pairs_per_token"] <= 4
    assert row["aamoe"]["compiled_bytes"] > 0
