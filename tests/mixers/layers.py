"""All mixers in a few layers, so that what is asked of every one is compiled a few times."""

from aamoe_jax.registry import MIXERS

LAYERS = ["+".join(sorted(MIXERS)[start::6]) for start in range(6)]
"""Names for a pattern: each mixer is in one of them."""
