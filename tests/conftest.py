"""Runs before any test module: the device, and shape checks of every annotated function at run time."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# grain reads absl flags before a test could parse them (google/grain#1360).
from absl import flags
from jaxtyping import install_import_hook

flags.FLAGS.mark_as_parsed()
install_import_hook(["aamoe_jax", "pallas_kernels"], "beartype.beartype")
