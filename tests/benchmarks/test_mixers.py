"""The benchmark of mixers: it times what trains a mixer, refuses what does not fit, reports what it measures."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app
from flax import nnx

from aamoe_jax.config import AAMoEConfig, ModelConfig
from aamoe_jax.ledger.compiled import Trial
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import costs
from aamoe_jax.mixers.costs import Setting
from aamoe_jax.mixers.experts import MoEConfig
from benchmarks import mixers
from experiments.binding import load_experiment
from pallas_kernels import aot

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(d_model=16, num_heads=2, num_layers=1, aamoe=AAMoEConfig(chunk_size=16, num_experts=4))


def test_the_step_is_the_output_and_its_gradients():
    """Along a random direction of parameters and inputs, by differences."""
    trial = Trial("static_qk", CONFIG)
    params, inputs, row = trial.arguments(1, 32)
    cotangent = inputs.h[:, ::-1]
    output, gradients = jax.jit(mixers.both_passes(trial))(params, inputs, row, cotangent)
    forward = jax.jit(lambda params, inputs: (trial.forward(params, inputs, row)[0] * cotangent).sum())
    leaves, structure = jax.tree.flatten((params, inputs))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    steps = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    ends = [
        jax.tree.unflatten(structure, [x + sign * 1e-3 * y for x, y in zip(leaves, steps, strict=True)])
        for sign in (1, -1)
    ]
    difference = (forward(*ends[0]) - forward(*ends[1])) / 2e-3
    slope = sum((x * y).sum() for x, y in zip(jax.tree.leaves(gradients), steps, strict=True))
    np.testing.assert_allclose(slope, difference, rtol=2e-2)
    assert output.shape == inputs.h.shape


def test_masked_attention_is_standard_attention():
    context, h = Context.of_rows(CONFIG, 1, 24), jax.random.normal(jax.random.key(0), (1, 24, 16))
    found, wanted = (
        part(CONFIG, rngs=nnx.Rngs(0))(h, context)[0] for part in (mixers.MaskedAttention, CausalAttention)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize(("rounds", "room"), [(1, 0.0), (0, 1e12)])
def test_what_does_not_fit_or_is_not_to_be_timed_is_not_run(rounds, room):
    names = ["attention", "feed_forward"]
    row = mixers.measure_length(CONFIG, names, 64, rounds, room)
    for name in names:
        assert row["mixers"][name]["milliseconds"] is None
        assert row["mixers"][name]["compiled_bytes"] > 0
    lines = mixers.length_table(row).splitlines()
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    at = Setting(CONFIG, 1, 64)
    flops = costs("feed_forward", at).prefill_flops / costs("attention", at).prefill_flops
    assert cells[:4] == ["feed_forward", "not run", "-", f"{flops:.2f}"]


@pytest.mark.slow
def test_the_program_measures_and_writes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.mixers",
        "--lengths=32,64",
        "--rounds=1",
        "--mixers=moe,masked_attention",
    ]
    command += ["--width=16", "--heads=2", "--chunk_size=16", "--experts=4", f"--output={tmp_path / 'x.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "x.json").read_text())
    assert done.stdout == (tmp_path / "x.md").read_text() == mixers.report(record)
    assert [row["length"] for row in record["rows"]] == [32, 64]
    for row in record["rows"]:
        assert list(row["mixers"]) == ["attention", "masked_attention", "moe"]
        for name, figures in row["mixers"].items():
            assert figures["milliseconds"] > 0
            at = Setting(ModelConfig(d_model=16, num_heads=2, num_layers=1, aamoe=CONFIG.aamoe), 1, row["length"])
            wanted = mixers.MaskedAttention.costs(at) if name == "masked_attention" else costs(name, at)
            assert figures["flops"] == pytest.approx(3 * wanted.prefill_flops)


def test_the_standard_is_among_those_chosen_and_unknown_ones_are_refused():
    assert mixers.chosen(["moe", "aamoe"]) == ["aamoe", "attention", "moe"]
    assert mixers.chosen(["moe"], "feed_forward") == ["feed_forward", "moe"]
    with pytest.raises(app.UsageError, match="there is no none"):
        mixers.chosen(["none"])


def test_fields_of_a_mixer_may_be_bound_and_no_others():
    own = mixers.own_configs(["MoEConfig.num_experts = 4"])
    assert ModelConfig(own=own).of(MoEConfig).num_experts == 4
    assert mixers.own_configs([]) == load_experiment().model.own
    with pytest.raises(app.UsageError, match=r"--gin_param: ModelConfig.d_model = 64: wanted fields of configs"):
        mixers.own_configs(["ModelConfig.d_model = 64"])


def test_caches_stand_beside_time_and_memory():
    row = mixers.measure_length(CONFIG, ["attention", "approximate", "mlp"], 64, 0, 0.0)
    cells = [line.split("|")[-2].strip() for line in mixers.length_table(row).splitlines()[2:]]
    at = Setting(CONFIG, 1, 64)
    assert cells == [
        f"{costs(name, at).cache_bytes / costs('attention', at).cache_bytes:.2f}"
        for name in ("attention", "approximate", "mlp")
    ]
    assert cells[0] == "1.00"
    assert cells[2] == "0.00"


def test_ratios_are_to_the_one_that_is_asked_for():
    entries = {
        name: {"milliseconds": time, "flops": 1.0, "compiled_bytes": 1} for name, time in (("a", 2.0), ("b", 4.0))
    }
    lines = mixers.length_table({"mixers": entries}, "b").splitlines()
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["0.50", "1.00"]


def test_a_chip_that_is_not_there_has_memory_and_no_time(monkeypatch):
    """Each mixer is compiled by `compile_apart`, whose case this runs here; one that is refused has a dash."""
    cases = []

    def compile_apart(chip, case, options):
        if options["name"] == "moe":
            raise aot.CompileError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")
        cases.append((chip, case, options["name"], options["length"]))
        return aot.Compiled(1.0, 100, 20, 3, 40, 1000)

    monkeypatch.setattr(aot, "compile_apart", compile_apart)
    row = mixers.compile_length(CONFIG, ["attention", "moe"], 64, "v5e")
    assert cases == [("v5e", "benchmarks.mixers:chip_case", "attention", 64)]
    assert [figures["compiled_bytes"] for figures in row["mixers"].values()] == [83, None]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in mixers.length_table(row).splitlines()[2:]]
    assert [line[4:6] for line in cells] == [["0", "1.00"], ["-", "-"]]
    monkeypatch.setattr(aot, "compile_apart", lambda *_: (_ for _ in ()).throw(aot.CompileError("INTERNAL: no")))
    with pytest.raises(aot.CompileError, match="INTERNAL"):
        mixers.compile_length(CONFIG, ["attention"], 64, "v5e")
