"""A name for what the kernels' backward passes need and is dear to compute again."""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

RESIDUALS = "attention"
"""Under `jax.checkpoint` with the policy `save_only_these_names(RESIDUALS)`, no kernel of a forward pass runs twice."""


def keep(tree: Any) -> Any:
    """The arrays, by the name."""
    return jax.tree.map(functools.partial(checkpoint_name, name=RESIDUALS), tree)
