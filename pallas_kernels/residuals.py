"""A name for what the kernels' backward passes need and is dear to compute again."""

RESIDUALS = "attention"
"""Under `jax.checkpoint` with the policy `save_only_these_names(RESIDUALS)`, no kernel of a forward pass runs twice."""
