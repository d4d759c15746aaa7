"""What the chips can do at best: limits that modelled times stand beside, and that choices are made by.

Peak FLOP/s are those of the vendors' data sheets: Google Cloud's pages on v4, v5e, v5p, v6e and TPU7x
(docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm: 275, 197, 459, 918 and 2307 TFLOP/s a chip in bfloat16), and
NVIDIA's on A100, H100 SXM and H200 (312, 989 and 989 dense). HBM bytes/s and VMEM are those of
`jax/_src/pallas/mosaic/tpu_info.py` (jax 0.10.2), a chip's shared by its cores. Clocks: v5e and v5p, the published peak
over the 4 x 128 x 128 multiply-adds of a cycle; v6e and tpu7x, taken over from others' notes and not checked. A bundle
a cycle is the most that a core issues. Sizes of matrix units are those of `tpu_info.py` too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Chip(NamedTuple):
    """One core."""

    clock: float  # bundles a second
    flops: float  # bfloat16 FLOP/s of the matrix units
    bandwidth: float  # bytes/s of HBM
    vmem: int  # bytes
    cores: int  # of a chip
    device_cores: int  # of a chip that are one device to JAX
    matrix: int  # rows and columns of a matrix unit


TPUS = {
    "v5e": Chip(1.5e9, 197e12, 820e9, 128 * 2**20, 1, 1, 128),
    "v5p": Chip(1.75e9, 459e12 / 2, 2.46e12 / 2, 64 * 2**20, 2, 2, 128),
    "v6e": Chip(1.755e9, 918e12, 1.64e12, 128 * 2**20, 1, 1, 256),
    "tpu7x": Chip(2.2e9, 2307e12 / 2, 7.4e12 / 2, 64 * 2**20, 2, 1, 256),
}
"""By the names of `pallas_kernels.aot.TOPOLOGIES`."""

HOPPERS = ("h100", "h200")
"""GPUs that have "pallas_gpu" by default, by the names of `pallas_kernels.aot.GPUS`."""
BLACKWELLS = ("b200",)
"""GPUs that have kernels of their own for it, which no such GPU has run: only where it is asked for."""
ASSUMED = (*TPUS, *HOPPERS, *BLACKWELLS)
"""What code can be traced for without a chip."""
# Compute capabilities; their kernels use instructions (sm_90a, sm_100a) that no other generation has.
_HOPPER, _BLACKWELL = "9.0", "10.0"

_KINDS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6 lite": "v6e"}
_KINDS |= {"TPU v6e": "v6e", "TPU7x": "tpu7x", "TPU v7x": "tpu7x"}
_OTHERS = {"TPU v4": 275e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
"""Peak bfloat16 FLOP/s of devices without TPU kernels of ours."""
_ANY = "v5p"  # what fits its fast memory fits that of every chip in the table
_assumed: list[str] = []


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of one device, by the kind that JAX gives it; None where it is unknown."""
    if device_kind not in _KINDS:
        return _OTHERS.get(device_kind)
    chip = TPUS[_KINDS[device_kind]]
    return chip.flops * chip.device_cores


def current() -> str:
    """The TPU that code is traced for: the assumed one, or the one there; v5p, the smallest here, for any other."""
    if _assumed and _assumed[-1] in TPUS:
        return _assumed[-1]
    return _KINDS.get(jax.devices()[0].device_kind, _ANY)


def current_chip() -> Chip:
    """Its limits."""
    return TPUS[current()]


def kernels_by_default() -> bool:
    """Whether TPU kernels are called without being asked for: on a TPU in the table above, assumed or there, on one
    device.

    The compiler cannot divide a kernel over a mesh; inside `jax.shard_map` there is nothing left to divide.
    """
    if _assumed:
        there = _assumed[-1] in TPUS
    else:
        there = jax.default_backend() == "tpu" and jax.devices()[0].device_kind in _KINDS
    return there and _on_one_device()


def gpu_kernels_by_default() -> bool:
    """The same of GPU kernels, on a Hopper. A B200 has kernels too, and is told of them, once."""
    if is_blackwell() and not _assumed:
        _say_once(
            f"{jax.devices()[0].device_kind} gets 'xla'; implementation='pallas_gpu' may be asked for: its kernels for "
            f"compute capability {_BLACKWELL} compile, and are untested on hardware"
        )
    return _capability() == _HOPPER and _on_one_device()


def _capability() -> str | None:
    """Of the GPU that code is traced for, assumed or there; None: it is for no GPU. An assumed one has kernels."""
    if _assumed:
        return _HOPPER if _assumed[-1] in HOPPERS else _BLACKWELL if _assumed[-1] in BLACKWELLS else None
    return jax.devices()[0].compute_capability if jax.default_backend() == "gpu" else None


def _on_one_device() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (not mesh.empty and mesh.are_all_axes_manual)


def is_cpu() -> bool:
    """Whether code is traced for the CPU that is there, and no chip is assumed."""
    return not _assumed and jax.default_backend() == "cpu"


def is_gpu() -> bool:
    """Whether code is traced for a GPU, assumed or there."""
    return _assumed[-1] in (*HOPPERS, *BLACKWELLS) if _assumed else jax.default_backend() == "gpu"


def is_blackwell() -> bool:
    """Whether code is traced for a B200, assumed or there."""
    return _capability() == _BLACKWELL


def takes_gpu_kernels(wanted: str) -> bool:
    """Whether the GPU there, or assumed, is a Hopper or a B200; any other GPU is told of it, once.

    Args:
      wanted: what was asked for, as `argument='value'`.

    Raises:
      ValueError: there is no GPU.
    """
    if _assumed:
        return is_gpu()
    if (platform := jax.default_backend()) != "gpu":
        raise ValueError(
            f"{wanted} needs a Hopper GPU (H100, H200) or a B200, and JAX runs on a {platform}: leave it out, and the "
            "best for the device is chosen"
        )
    kind, capability = jax.devices()[0].device_kind, _capability()
    if capability == _BLACKWELL:
        _say_once(f"{wanted}: these kernels have never run on a {kind}; compare them with 'xla'")
    if capability in (_HOPPER, _BLACKWELL):
        return True
    _say_once(
        f"{wanted}: these kernels are for compute capability {_HOPPER} (H100, H200) and {_BLACKWELL} (B200); "
        f"{kind} has {capability} and gets 'xla'"
    )
    return False


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger("pallas_kernels").warning(message)


@contextlib.contextmanager
def assume(chip: str) -> Iterator[None]:
    """Code traced within is for `chip`, a name in ASSUMED: for compiling where the chip is not."""
    if chip not in ASSUMED:
        raise ValueError(f"chip={chip!r} is unknown; there are {', '.join(ASSUMED)}")
    _assumed.append(chip)
    try:
        yield
    finally:
        _assumed.pop()
