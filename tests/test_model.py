"""The language model: stacks of mixers, their statistics, and what must not change them (AA-30, AA-31)."""

import collections
import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax import cost
from aamoe_jax import model as model_module
from aamoe_jax.aamoe.statistics import summarize
from aamoe_jax.config import ConfigError
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.statistics import combine
from aamoe_jax.model import LanguageModel, merge, split, structure
from pallas_kernels import chips
from tests.aamoe.helpers import D, E, M, apply, model_config
from tests.evaluation.helpers import random_params


def tokens_of(rows: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, length), 3, 259)


def run(config, params, tokens, **options):
    return jax.jit(lambda params, tokens: merge(structure(config), params)(tokens, **options))(params, tokens)


@functools.cache
def initial(config):
    return jax.jit(lambda key: split(LanguageModel(config, rngs=nnx.Rngs(key)))[1])(jax.random.key(0))


def params_of(config):
    """Parameters with unequal budgets: w_B starts at 0."""
    return random_params(config)


def test_layers_of_a_pattern_run_in_order_and_report_in_order():
    """The scan over periods equals the blocks applied one after the other."""
    config = model_config(num_layers=4, pattern=("aamoe", "parallel"))
    params, tokens = params_of(config), tokens_of(2, 3 * M)
    model = merge(structure(config), params)
    logits, statistics = run(config, params, tokens, detail="tokens")

    graphdef, stacked = nnx.split(model.periods)
    x = params["embedding"][tokens] * D**0.5
    spent = []
    context = Context(jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(3 * M), tokens.shape), "prefix", 0.0, "tokens")
    for period in range(2):
        part = nnx.merge(graphdef, jax.tree.map(lambda leaf, period=period: leaf[period], stacked))
        for block in part.blocks.values():
            x, about = apply(block, x, dataclasses.replace(context, beta=jnp.float32(config.betas[0])))
            spent += [about["spent"]] if "spent" in about else []
    np.testing.assert_allclose(logits, model.norm(x) @ params["readout"].T, atol=1e-4)
    np.testing.assert_array_equal(statistics["spent"], jnp.stack(spent))
    assert summarize(statistics)["spent"] == pytest.approx([float(s.mean()) for s in spent])


@pytest.mark.parametrize("remat", ["dots", "attention", "full"])
def test_recomputation_changes_no_gradient(remat):
    tokens, found = tokens_of(1, 3 * M), []
    for policy in ("none", remat):
        config = model_config(remat=policy)

        def loss(params, config=config):
            return jax.nn.logsumexp(merge(structure(config), params)(tokens)[0], axis=-1).sum()

        found.append(jax.jit(jax.grad(loss))(params_of(config)))
    for plain, recomputed in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(recomputed, plain, atol=1e-4 * max(1.0, float(jnp.abs(plain).max())))


def gradient_program(config, tokens):
    """Gradients of a loss as they are lowered for this CPU."""

    def loss(params, tokens):
        return jax.nn.logsumexp(merge(structure(config), params)(tokens)[0], axis=-1).sum()

    return jax.jit(jax.grad(loss)).lower(params_of(config), tokens)


def test_unrolled_layers_change_no_gradient(monkeypatch):
    config, tokens, loops, found = model_config(), tokens_of(2, 4 * M), [], []
    for fewest in (tokens.size, tokens.size + 1):
        monkeypatch.setattr(model_module, "LARGE_BATCH", fewest)
        lowered = gradient_program(config, tokens)
        loops.append(lowered.as_text().count("stablehlo.while"))
        found.append(lowered.compile()(params_of(config), tokens))
    assert loops[1] == loops[0] + 2, "the loops over layers, forward and backward"
    for unrolled, rolled in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(unrolled, rolled, atol=1e-4 * max(1.0, float(jnp.abs(rolled).max())))


def test_layers_stay_a_loop_for_a_chip_that_is_assumed(monkeypatch):
    monkeypatch.setattr(model_module, "LARGE_BATCH", 1)
    config, tokens = model_config(pattern=("feed_forward",)), tokens_of(2, 4 * M)
    assert gradient_program(config, tokens).as_text().count("stablehlo.while") == 0
    with chips.assume("v5e"):
        assert gradient_program(config, tokens).as_text().count("stablehlo.while") == 2, "forward and backward"


def test_rotary_tables_are_computed_once_where_layers_are_unrolled(monkeypatch):
    """In the program that XLA compiles for a CPU: those of heads, of tokens and of the ends of chunks, which the
    learned router has."""
    monkeypatch.setattr(model_module, "LARGE_BATCH", 1)
    config = model_config()
    assert config.aamoe.router == "learned"
    program = gradient_program(config, tokens_of(2, 4 * M)).compile().as_text()
    assert program.count(" cosine(") == 3


@pytest.mark.parametrize("remat", ["dots", "attention"])
def test_no_kernel_runs_twice_where_what_attention_gives_is_kept(remat):
    """In a step as a TPU gets it: sparse and dense attention, tables and selection."""
    with chips.assume("v5e"):
        step = gradient_of_wide_heads(remat=remat, pattern=("attention", "aamoe"))
        program = step.lower(lowering_platforms=("tpu",)).as_text()
    kernels = collections.Counter(re.findall(r'kernel_name = "(\w+)"', program))
    assert kernels.pop("token_words") == 1 + 1  # both kinds of query; and each with the gradient of the output
    # Made again, as XLA would make a cast again: one pass over what is kept.
    assert kernels.pop("token_rounded") == 2
    assert kernels.pop("norm_rotary_forward") == 2 * kernels.pop("norm_rotary_backward")
    assert set(kernels.values()) == {1}
    forward = "selection", "tiles_of_slots", "block_sparse_attention_forward", "splash_mha_fwd_segmented_residuals"
    assert {*forward, "local_window_forward", "token_dots"} <= set(kernels)


def test_a_router_without_gradients_has_no_backward_pass():
    with chips.assume("v5e"):
        program = str(gradient_of_wide_heads(num_layers=1, router="pooled", bias="none").jaxpr)
    assert "name=choice_forward" in program
    assert "name=choice_backward" not in program


def gradient_of_wide_heads(**options):
    """Of the logits, traced: heads as wide as a register, which kernels for TPUs are made for."""
    wide = {"d_model": 1024, "num_heads": 8, "dtype": "bfloat16", "kernel": "pallas_tpu_resident"}
    config = model_config(**wide, **options)
    params = jax.eval_shape(lambda: split(LanguageModel(config, rngs=nnx.Rngs(0)))[1])

    def loss(params, tokens):
        return jax.nn.logsumexp(merge(structure(config), params)(tokens)[0], axis=-1).sum()

    return jax.jit(jax.grad(loss)).trace(params, tokens_of(1, 128))


def test_every_layer_has_its_own_budget():
    config = model_config(beta=(1.0, 4.0))
    _, statistics = run(config, initial(config), tokens_of(1, 4 * M))
    assert summarize(statistics)["spent"] == [1.0, 4.0]


def test_bfloat16_stays_near_float32():
    params = params_of(model_config())
    tokens = tokens_of(2, 4 * M)
    # Dense stack: rounding moves no choice there, so the difference is rounding alone.
    exact, rounded = (
        run(
            model_config(dtype=dtype, pattern=("all_attention",)),
            params_of(model_config(pattern=("all_attention",))),
            tokens,
        )[0]
        for dtype in ("float32", "bfloat16")
    )
    assert rounded.dtype == jnp.float32
    np.testing.assert_allclose(rounded, exact, atol=0.05)
    assert jnp.isfinite(run(model_config(dtype="bfloat16", kernel=None), params, tokens)[0]).all()


def test_parameters_round_trip_under_their_own_names():
    config = model_config()
    graphdef, params = split(LanguageModel(config, rngs=nnx.Rngs(0)))
    assert set(params) == {"embedding", "periods", "norm", "readout"}
    block = params["periods"]["blocks"]["0_aamoe"]["mixer"]
    assert block["expert_keys"].shape == (2, E, M, D)
    assert structure(config) == graphdef
    for name in ("embedding", "readout"):
        np.testing.assert_array_equal(split(merge(graphdef, params))[1][name], params[name])


def test_predictor_budgets_without_a_predictor_are_refused():
    config = model_config()
    with pytest.raises(ConfigError, match="has no budget predictor"):
        LanguageModel(config, rngs=nnx.Rngs(0))(tokens_of(1, M), budget="predictor")


def test_statistics_of_two_halves_combine_to_those_of_the_whole():
    config = model_config(normalizer="row")
    params, tokens = params_of(config), tokens_of(4, 3 * M)
    whole = run(config, params, tokens)[1]
    halves = combine(run(config, params, tokens[:2])[1], run(config, params, tokens[2:])[1])
    for name in whole:
        np.testing.assert_allclose(halves[name], whole[name], rtol=1e-5)


def test_flops_are_counted_by_hand():
    config = model_config(pattern=("aamoe", "parallel"), d_ff=48)
    d, length, rows = D, 4 * M, 3
    statistics = {
        f"pairs_{kind}": np.array([pairs]) for kind, pairs in (("local", 90), ("context", 50), ("expert", 60))
    }
    aamoe = 8 * d**2 + 2 * d**2 + 2 * d * (E + 4 + 1) + 2 * d
    parallel = 8 * d**2 + 4 * d * 48 + 4 * d * (length + 1) / 2
    expected = rows * length * (aamoe + parallel + 2 * d * 384) + 200 * 4 * M * d
    assert cost.forward_flops(config, rows, length, statistics) == expected
    assert cost.training_flops(config, rows, length, statistics) == 3 * expected


PROBE = """
import jax, jax.numpy as jnp
from flax import nnx
from aamoe_jax.config import AAMoEConfig, ModelConfig
from aamoe_jax.model import LanguageModel, merge, split, structure
config = ModelConfig(d_model=16, num_heads=2, num_layers=2, aamoe=AAMoEConfig(chunk_size=4, num_experts=3))
params = jax.jit(lambda key: split(LanguageModel(config, rngs=nnx.Rngs(key)))[1])(jax.random.key(0))
graphdef = structure(config)
step = jax.jit(jax.value_and_grad(lambda p: merge(graphdef, p)(jnp.arange(12)[None])[0].std()))
value, gradient = step(params)
print(float(value), len(jax.tree.leaves(gradient)))
"""


def test_both_graph_modes_of_flax_give_the_same_model():
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROBE],
            env=os.environ | {"NNX_GRAPH_MODE": mode, "JAX_PLATFORMS": "cpu"},
            capture_output=True, text=True, check=True,
        ).stdout
        for mode in ("true", "false")
    ]  # fmt: skip
    assert printed[0] == printed[1] != ""
