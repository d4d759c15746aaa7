"""How the tests compile: quickly, since to compile small programs is most of what they do.

XLA's optimiser and the fusions that it emits through MLIR are left out: a third of the time, the same operations. A
test of the optimised program itself, of its memory or its bits, compiles it `AS_USERS_DO`. What one test has compiled,
another one, or a program that it starts, does not compile again (`conftest.py`).
"""

import importlib.metadata
import importlib.util

QUICKLY = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # parts compiled in parallel take longer than the whole
]
AS_USERS_DO = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_parallel_codegen_split_count": 32,
}
"""For `jax.jit(..., compiler_options=AS_USERS_DO)`."""

if importlib.metadata.version("jaxlib").startswith("0.10."):  # a newer XLA has no such choice, and ends on its flag
    QUICKLY.append("--xla_cpu_use_fusion_emitters=false")
    AS_USERS_DO["xla_cpu_use_fusion_emitters"] = True


def flags(given: str) -> str:
    """XLA_FLAGS for the tests and the programs that they start; what is `given` comes last, so that it wins.

    As given where compilers for other chips are installed, which read them too.
    """
    other_chips = any(importlib.util.find_spec(name) for name in ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin"))
    return given if other_chips or QUICKLY[0] in given else " ".join([*QUICKLY, given]).strip()
