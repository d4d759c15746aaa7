"""What the shipped configs promise about the models that they describe."""

from __future__ import annotations

import math

import jax
import pytest
from flax import nnx

from aamoe_jax.model import LanguageModel
from experiments.binding import load_experiment

BASELINES = (
    "aamoe_literal.gin",
    "dense.gin",
    "all_attention.gin",
    "hybrid.gin",
    "context_only.gin",
    "uniform.gin",
    "separate.gin",
    "mixture_of_depths.gin",
    "moe.gin",
    "moe_local.gin",
    "switch.gin",
    "relu_moe.gin",
)


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Of the parameters of the model that a shipped config describes, which are not made."""
    config = load_experiment([name]).model
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    return [leaf.shape for leaf in jax.tree.leaves(nnx.state(model))]


def num_parameters(name: str) -> int:
    return sum(map(math.prod, shapes_of(name)))


@pytest.mark.parametrize("name", BASELINES)
def test_no_parameter_is_without_elements(name):
    """Orbax refuses to write one."""
    assert all(map(math.prod, shapes_of(name)))


def test_baselines_have_as_many_parameters_as_aamoe():
    """Within 1 % (decision 36); `aamoe_literal.gin` adds the predictor of its budgets."""
    wanted = num_parameters("aamoe.gin")
    for name in BASELINES:
        assert abs(num_parameters(name) / wanted - 1) < 0.01, name
