"""Stacks that are thinned although standard attention is not all that they have (PM-15)."""

import jax
import jax.numpy as jnp
import numpy as np

from aamoe_jax.analysis import thinning
from tests.evaluation.helpers import random_params
from tests.training.helpers import model_config

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 259, (2, 8)), jnp.int32)


def test_attention_of_other_names_stays_what_it_is():
    config = model_config("local_attention+attention")
    params = jax.tree.map(jnp.asarray, random_params(config))
    blocks = thinning.with_centroids(params, config, TOKENS, 3)["periods"]["blocks"]
    assert set(blocks) == {"0_local_attention", "1_clustered_attention"}
    assert blocks["0_local_attention"] is params["periods"]["blocks"]["0_local_attention"]
    assert blocks["1_clustered_attention"]["mixer"]["parts"]["attention"]["centroids"].shape == (2, 3, 32)
