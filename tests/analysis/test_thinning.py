"""Stacks that are thinned although standard attention is not all that they have (PM-15)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.analysis import thinning
from aamoe_jax.model import merge, structure
from tests.evaluation.helpers import random_params
from tests.training.helpers import model_config

pytestmark = pytest.mark.slow

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 259, (2, 8)), jnp.int32)


def test_attention_of_other_names_stays_what_it_is():
    config = model_config("local_attention+attention")
    params = jax.tree.map(jnp.asarray, random_params(config))
    blocks = thinning.with_centroids(params, config, TOKENS, 3)["periods"]["blocks"]
    assert set(blocks) == {"0_local_attention", "1_clustered_attention"}
    assert blocks["0_local_attention"] is params["periods"]["blocks"]["0_local_attention"]
    assert blocks["1_clustered_attention"]["mixer"]["parts"]["attention"]["centroids"].shape == (2, 3, 32)


def test_what_enters_a_block_is_what_the_stack_before_it_made():
    """Fixed streams go through every block too: the first block of a period and the second look at one each."""
    config = model_config("random_qk+fixed_qk+attention", num_layers=3)
    params = jax.tree.map(jnp.asarray, random_params(config))
    blocks = params["periods"]["blocks"]
    params["periods"]["blocks"] = {
        name: block | {"norm": {"scale": jnp.tile(params["norm"]["scale"], (3, 1))}} for name, block in blocks.items()
    }  # so that the norm before a block is that of a model that ends there
    inputs = [h for _, _, h, _ in thinning.inputs_of_blocks(params, config, TOKENS)]
    for periods in (1, 2):
        shorter = dataclasses.replace(config, num_layers=periods)
        first = jax.tree.map(lambda leaf, periods=periods: leaf[:periods], params["periods"])
        logits, _ = merge(structure(shorter), params | {"periods": first})(TOKENS)
        np.testing.assert_allclose(inputs[3 * periods] @ params["readout"].T, logits, atol=1e-4)
