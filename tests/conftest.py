"""Runs before any test module: the device, quick compilation, and where they are asked for, checks of shapes."""

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import tempfile

import pytest

from tests import compiling

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = compiling.flags(os.environ.get("XLA_FLAGS", ""))
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers, and the programs that tests start, have it from here
    compiled = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, compiled, ignore_errors=True)
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # lowering is quicker without them
# grain reads absl flags before a test could parse them (google/grain#1360).
import jax
from absl import flags
from jaxtyping import install_import_hook

flags.FLAGS.mark_as_parsed()
if os.environ.get("CHECK_SHAPES") == "1":  # of every annotated function, as `make test-newest` does
    install_import_hook(["aamoe_jax", "pallas_kernels"], "beartype.beartype")


gc.disable()  # a sixth of the time of tracing; modules of tests end with a collection


@pytest.fixture(scope="module", autouse=True)
def give_memory_back():
    """What one module has compiled is of no use to the next one. Without this a worker grows by gigabytes: most of them
    are free, but the allocator keeps them."""
    yield
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
