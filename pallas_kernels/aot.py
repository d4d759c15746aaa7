"""Compile for TPUs and GPUs that are not there: the real compilers, memory and schedule included, on any machine.

Needs libtpu, and for GPUs the CUDA plug-in of JAX with ptxas (extra `aot`); no driver. They read their environment
once, when they are loaded, so the work is done in a process of its own: `compile_apart` names a case, a function that
returns what to compile and for which arguments.

    compile_apart("v5e", "package.module:case", {"tokens": 2048}).temporary_bytes
    compile_apart("h200", "package.module:case", {"tokens": 2048}, dump_to=folder)  # leaves PTX, see `ptx`
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from pallas_kernels import chips

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""The smallest slice of every chip; any other name that the compiler knows will do in its place."""

GPUS = {
    "h100": {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "cores": 132,
        "l2_bytes": 52_428_800,
        "bytes": 85_000_000_000,
        "bytes_per_second": 3_350_000_000_000,
    },
    "h200": {
        "name": "NVIDIA H200",
        "major": 9,
        "cores": 132,
        "l2_bytes": 52_428_800,
        "bytes": 144_000_000_000,
        "bytes_per_second": 4_800_000_000_000,
    },
    "b200": {
        "name": "NVIDIA B200",
        "major": 10,
        "cores": 148,
        "l2_bytes": 132_120_576,
        "bytes": 180_000_000_000,
        "bytes_per_second": 8_000_000_000_000,
    },
}
"""The SXM modules, by their data sheets: compute capability, multiprocessors, second-level cache and HBM. A Hopper is
compiled as sm_90a, a B200 as sm_100a."""

GPU_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: 0 }} core_count: {cores} fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: {l2_bytes} memory_bandwidth: {bytes_per_second} device_memory_size: {bytes}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the arrays of this process; with libtpu installed jax would look for a TPU
    "TPU_SKIP_MDS_QUERY": "1",  # no questions to a cloud's metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two such processes would collide on a lock file
}
TPU_DUMP = {
    "LIBTPU_INIT_ARGS": "--xla_jf_dump_to={} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true "
    # The final listings, which `schedule` reads: those of all passes take hundreds of MB for one kernel.
    "--xla_jf_dump_llo_pass_label_regex=final_|deduplication"
}
GPU_DUMP = {"MOSAIC_GPU_DUMP_TO": "{}", "XLA_FLAGS": "--xla_dump_to={}"}


class Compiled(NamedTuple):
    """What the compiler says of a program, in bytes a device."""

    seconds: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    code_bytes: int


class CompileError(RuntimeError):
    """The compiler refused: a program that would not run on the chip either."""


def require_compiler(chip: str) -> None:
    """Says what to install where the compiler for `chip` is missing."""
    modules = ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc") if chip in GPUS else ("libtpu",)
    for module in modules:
        if not _installed(module):
            raise CompileError(
                f"{module} is not installed; in an environment of its own: pip install -e '.[aot]' (BUILD.md)"
            )


def _installed(module: str) -> bool:
    package = module.rpartition(".")[0]
    return (not package or _installed(package)) and importlib.util.find_spec(module) is not None


def topology(chip: str) -> topologies.TopologyDescription:
    """The devices of `chip`: a name in GPUS or TOPOLOGIES, or any topology that the TPU compiler knows."""
    require_compiler(chip)
    if chip not in GPUS:
        return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES.get(chip, chip))
    one = "1x1x1"
    target = GPU_TARGET.format(**GPUS[chip])
    return topologies.get_topology_desc(platform="cuda", topology_name=one, topology=one, target_config=target)


def compile_for(chip: str, function: Callable, arguments: Any) -> jax.stages.Compiled:
    """Compiles function(*arguments), a tree of shapes, for one device of `chip`; this process is in ENVIRONMENT."""
    sharding = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    return jax.jit(function).lower(*arguments).compile()


def compile_apart(chip: str, case: str, options: dict[str, Any], dump_to: Path | None = None) -> Compiled:
    """Compiles `case` ("module:function", called with `options`) in a process of its own.

    Args:
      dump_to: a folder for the compiler's own notes, which `schedule` (TPU) and `ptx` (GPU) read.
    """
    require_compiler(chip)
    environment = os.environ | ENVIRONMENT
    if dump_to is not None:
        dump_to.mkdir(parents=True, exist_ok=True)
        flags = GPU_DUMP if chip in GPUS else TPU_DUMP
        environment |= {name: value.format(dump_to) for name, value in flags.items()}
    command = [sys.executable, "-m", "pallas_kernels.aot", chip, case, json.dumps(options)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise CompileError(f"{case} {options} for {chip}: {_last_words(result.stderr, result.returncode)}")
    return Compiled(**json.loads(result.stdout.splitlines()[-1]))


def _last_words(stderr: str, status: int) -> str:
    """The exception and what follows it; without a traceback, the last lines; where there are none, as of a
    process that is killed for memory, its exit status."""
    if not stderr.strip():
        return f"the compiler ended with exit status {status} and said nothing"
    lines = stderr.splitlines()
    raised = [i for i, line in enumerate(lines) if line and not line[0].isspace() and "Error" in line.split(":")[0]]
    return "\n".join(lines[raised[-1] if raised else -5 :])[:2000]


def _report(chip: str, case: str, options: dict[str, Any]) -> Compiled:
    module, name = case.split(":")
    with chips.assume(chip) if chip in chips.ASSUMED else contextlib.nullcontext():
        function, arguments = getattr(importlib.import_module(module), name)(**options)
        start = time.perf_counter()
        memory: Any = compile_for(chip, function, arguments).memory_analysis()
    seconds, sizes = time.perf_counter() - start, ("argument", "output", "temp", "alias", "generated_code")
    return Compiled(seconds, *(getattr(memory, f"{name}_size_in_bytes") for name in sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chip", help=f"one of {', '.join((*TOPOLOGIES, *GPUS))}, or a topology such as v5p:4x4x4")
    parser.add_argument("case", help="module:function that returns (function, arguments)")
    parser.add_argument("options", nargs="?", default="{}", help="keyword arguments of the case, as JSON")
    given = parser.parse_args()
    print(json.dumps(_report(given.chip, given.case, json.loads(given.options))._asdict()))


if __name__ == "__main__":
    main()
