"""What the chips can do at best, per core: the limits that modelled times stand beside.

Sources: peak FLOP/s, HBM bytes/s and VMEM are those of `jax/_src/pallas/mosaic/tpu_info.py` (jax 0.10.2), a chip's
shared by its cores. Clocks: v5e and v5p, the published peak over the 4 x 128 x 128 multiply-adds of a cycle; v6e and
tpu7x, as vendors and profiles of these chips report them. A bundle a cycle is the most that a core issues.
"""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """One core."""

    clock: float  # bundles a second
    flops: float  # bfloat16 FLOP/s of the matrix units
    bandwidth: float  # bytes/s of HBM
    vmem: int  # bytes
    cores: int  # of a chip


TPUS = {
    "v5e": Chip(1.5e9, 197e12, 820e9, 128 * 2**20, 1),
    "v5p": Chip(1.75e9, 459e12 / 2, 2.46e12 / 2, 64 * 2**20, 2),
    "v6e": Chip(1.755e9, 920e12, 1.64e12, 128 * 2**20, 1),
    "tpu7x": Chip(2.2e9, 2310e12 / 2, 7.4e12 / 2, 64 * 2**20, 2),
}
"""By the names of `pallas_kernels.aot.TOPOLOGIES`."""
