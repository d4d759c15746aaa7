"""Flags of XLA's TPU compiler, by chip: what jobs on TPUs are started with, in LIBTPU_INIT_ARGS.

Sources: JAX, the page "XLA compiler flags" of its documentation; MaxText, `benchmarks/xla_flags_library.py` and the
scripts of `configs/v5p`, Apache 2.0. Nothing here was measured by this project.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from launch.cluster import accelerators
from launch.cluster.job import refuse

BY_CHIP = "by_chip"
NONE = "none"
HELP = (
    f"XLA's flags for the TPU compiler: {BY_CHIP}, the table of docs/pods.md; {NONE}; or flags such as "
    "'--xla_enable_async_all_gather=true'."
)


class Flag(NamedTuple):
    """One row of the table."""

    name: str
    value: str
    does: str
    source: str
    chips: tuple[str, ...] = tuple(accelerators.GENERATIONS)
    """The generations that get it."""
    several: bool = False
    """Whether only jobs of several slices get it."""


TABLE = (
    Flag("xla_enable_async_all_gather", "true", "all-gathers in the background of computation", "JAX, MaxText"),
    Flag(
        "xla_tpu_enable_async_collective_fusion",
        "true",
        "computation between the start and the end of a collective is fused with it",
        "JAX, MaxText",
    ),
    Flag("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", "the same for all-gathers", "JAX, MaxText"),
    Flag(
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "true",
        "one collective goes on through several fusions",
        "JAX, MaxText",
    ),
    Flag(
        "xla_tpu_overlap_compute_collective_tc",
        "true",
        "computation and collectives overlap on one TensorCore",
        "JAX, MaxText",
    ),
    Flag(
        "xla_tpu_megacore_fusion_allow_ags",
        "false",
        "all-gathers are not fused with convolutions and all-reduces",
        "JAX, MaxText (v5p)",
        chips=("v5p",),
    ),
    Flag(
        "xla_tpu_scoped_vmem_limit_kib",
        "98304",
        "fusions may use 96 MiB of the 128 MiB of VMEM",
        "MaxText (v6e)",
        chips=("v6e",),
    ),
    Flag(
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "true",
        "all-reduces between slices overlap with more",
        "JAX, MaxText",
        several=True,
    ),
    Flag(
        "xla_tpu_data_parallel_opt_different_sized_ops",
        "true",
        "the same for those of different sizes, for more memory",
        "JAX, MaxText",
        several=True,
    ),
)


def by_chip(generation: str, slices: int) -> str:
    """The flags of the table for a generation of `accelerators.GENERATIONS`, as LIBTPU_INIT_ARGS has them."""
    rows = (row for row in TABLE if generation in row.chips and (slices > 1 or not row.several))
    return " ".join(f"--{row.name}={row.value}" for row in rows)


def environment(cluster: Any) -> dict[str, str]:
    """What `--xla_flags`, `--accelerator` and `--slices` of a cluster make of the environment of its jobs."""
    given = cluster.xla_flags
    if given == BY_CHIP:
        given = by_chip(cluster.accelerator.partition("-")[0], cluster.slices)
    elif given != NONE and not all(word.startswith("--") for word in given.split()):
        refuse(cluster, "xla_flags", f"must be {BY_CHIP}, {NONE}, or flags that begin with --")
    return {} if given in (NONE, "") else {"LIBTPU_INIT_ARGS": given}
