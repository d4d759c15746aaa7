"""Runs before any test module: the device, quick compilation, and shape checks of every annotated function."""

import os

from tests import compiling

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = compiling.flags(os.environ.get("XLA_FLAGS", ""))
# grain reads absl flags before a test could parse them (google/grain#1360).
from absl import flags
from jaxtyping import install_import_hook

flags.FLAGS.mark_as_parsed()
install_import_hook(["aamoe_jax", "pallas_kernels"], "beartype.beartype")
