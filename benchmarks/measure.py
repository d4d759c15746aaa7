"""What benchmarks share: their models, time, memory, the limit of the machine, and the machine itself."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.stages import Compiled

from aamoe_jax.config import AAMoEConfig, BudgetConfig, ModelConfig
from aamoe_jax.training.checkpoints import library_versions
from benchmarks.cases import Case

FLAGS = flags.FLAGS
PRODUCT_WIDTH = 2048


def define_model_flags() -> None:
    """The flags of benchmarks of this library's models."""
    flags.DEFINE_integer("width", 256, "d.", lower_bound=1)
    flags.DEFINE_integer("heads", 4, "H.", lower_bound=1)
    flags.DEFINE_integer("chunk_size", 64, "m.", lower_bound=1)
    flags.DEFINE_integer("experts", 64, "E of AA-MoE.", lower_bound=0)
    flags.DEFINE_float("beta", 4.0, "Mean number of resources per token.")
    flags.DEFINE_integer("max_resources", None, "K_max; 4 * beta if not given.", lower_bound=1)


def model_config(**fields: Any) -> ModelConfig:
    """The model as the flags describe it, and these fields."""
    layer = AAMoEConfig(
        chunk_size=FLAGS.chunk_size,
        num_experts=FLAGS.experts,
        max_resources=FLAGS.max_resources or round(4 * FLAGS.beta),
        budget=BudgetConfig(beta=FLAGS.beta),
    )
    return ModelConfig(d_model=FLAGS.width, num_heads=FLAGS.heads, aamoe=layer, **fields)


def sizes(config: ModelConfig) -> str:
    """Of a model, in words."""
    layer = config.aamoe
    return (
        f"d = {config.d_model}, H = {config.num_heads}, m = {layer.chunk_size}, E = {layer.num_experts}, "
        f"beta = {layer.budget.beta:g}"
    )


def compile_case(case: Case) -> Compiled:
    """The step of a case as one executable."""
    return jax.jit(case.step()).lower(*case.shapes()).compile()


def seconds(function: Callable[[], Any]) -> float:
    """Wall clock of one call, its results computed."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every function in each round: what disturbs the machine for a while disturbs all of them."""
    for function in functions.values():
        jax.block_until_ready(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return times


def product(dtype: str) -> Callable[[], Any]:
    """A big matrix product: what the device can do at best."""
    x = jax.random.normal(jax.random.key(0), (PRODUCT_WIDTH, PRODUCT_WIDTH), dtype)
    multiply = jax.jit(jnp.matmul)
    return lambda: multiply(x, x)


def product_flops() -> float:
    """FLOPs of `product`."""
    return 2.0 * PRODUCT_WIDTH**3


def compiled_bytes(compiled: Compiled) -> int:
    """Arguments, outputs and temporaries that the compiler has laid out."""
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return total - memory.alias_size_in_bytes


def compiled_flops(compiled: Compiled) -> float:
    """The compiler's count. It sees the body of a loop once, however often it runs."""
    return float(compiled.cost_analysis()["flops"])


def process_peak_bytes(case: Case) -> int:
    """Peak resident memory that a process of its own needs for the case, beyond what it held before (Linux)."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak_of_this_process, (case,))


def _peak_of_this_process(case: Case) -> int:
    compiled = compile_case(case)
    before = _status_bytes("VmRSS")
    # Sets the high-water mark back to the present: compiling took more than small cases do.
    Path("/proc/self/clear_refs").write_text("5")
    arguments = case.arguments()
    for _ in range(2):
        jax.block_until_ready(compiled(*arguments))
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def available_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def closing(command: str, notes: Mapping[str, str] | str) -> str:
    """What reports end with: the command, and versions by name, or a remark."""
    if not isinstance(notes, str):
        notes = ", ".join(f"{name} {version}" for name, version in notes.items())
    return f"```\n{command}\n```\n\n{notes}\n"


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    device = jax.devices()[0]
    name = _processor() if device.platform == "cpu" else device.device_kind
    return {
        "device": name,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(available_bytes() / 2**30, 1),
        "system": platform.system(),
        "versions": library_versions(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
