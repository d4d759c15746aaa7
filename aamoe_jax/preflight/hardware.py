"""Slices of TPUs: what a device may hold, and how fast its links are.

Rates of compute and main memory are those of `pallas_kernels.chips`. Links: Google's system architecture pages of v5e,
v5p, v6e and TPU7x ("bidirectional inter-chip interconnect bandwidth per chip": 400, 1200, 800, 1200 GB/s), shared by
the links of a chip (4 in the flat torus of v5e and v6e, 6 in the cubic one of v5p and TPU7x) and the two directions of
each. Memory: what the compiler says is available to a program (libtpu 0.0.42), less than the chip has. Network between
slices (DCN): the same pages have 50 Gbit/s a chip for v5p, and 6.4 and 25.6 Tbit/s for the 256 chips of a v5e or v6e
pod; for TPU7x that of v6e is assumed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aamoe_jax.config import ConfigError
from pallas_kernels.chips import TPUS, Chip

GIB = 2**30
BETWEEN_CORES = 6
"""The two halves of a TPU7x are joined by links that are so many times as fast as one between chips (GKE's page on
Ironwood)."""


class Kind(NamedTuple):
    """What a device of a chip has, beyond `Chip`."""

    memory: float  # bytes for a program
    link: float  # bytes/s in one direction of one link between chips
    dcn: float  # bytes/s that a chip sends to other slices
    whole_ring: int  # an axis of the slice closes to a ring where its size is a multiple of this


KINDS = {
    "v5e": Kind(15.75 * GIB, 50e9, 3.125e9, 16),
    "v5p": Kind(95.74 * GIB, 100e9, 6.25e9, 4),
    "v6e": Kind(31.25 * GIB, 100e9, 12.5e9, 16),
    "tpu7x": Kind(94.75 * GIB, 100e9, 12.5e9, 4),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """The devices of a topology such as `v5p:8x8x8`; or of several such slices, `2xv5p:8x8x8`."""

    topology: str
    chip: str
    sizes: tuple[int, ...]
    """Of one slice."""
    count: int
    """Slices."""

    @classmethod
    def parse(cls, topology: str) -> Slice:
        """The slice called so.

        Raises:
          ConfigError: it is no topology of a chip in the table.
        """
        match = re.fullmatch(r"(?:([1-9]\d*)x)?(\w+):(\d+(?:x\d+){1,2})", topology)
        if match is None or match[2] not in KINDS:
            raise ConfigError(
                f"topology {topology!r}: expected such as v5p:8x8x8, of one of {', '.join(KINDS)}, or 2xv5p:8x8x8 for "
                "two slices"
            )
        return cls(topology, match[2], tuple(int(size) for size in match[3].split("x")), int(match[1] or 1))

    @property
    def name(self) -> str:
        """Of one slice, as the TPU compiler calls it."""
        return f"{self.chip}:{'x'.join(map(str, self.sizes))}"

    @property
    def kind(self) -> Kind:
        return KINDS[self.chip]

    @property
    def chips(self) -> int:
        return self.count * int(np.prod(self.sizes))

    @property
    def devices_per_chip(self) -> int:
        """Devices as JAX counts them."""
        core = TPUS[self.chip]
        return core.cores // core.device_cores

    @property
    def device(self) -> Chip:
        """Rates of one device: of all its cores."""
        core = TPUS[self.chip]
        return core._replace(flops=core.flops * core.device_cores, bandwidth=core.bandwidth * core.device_cores)

    def group_bandwidth(self, places: Sequence[Sequence[int]]) -> float:
        """Bytes/s that a device sends while a group of devices exchanges along rings: a model.

        Every axis of the torus along which the group extends gives one link, or two where it closes to a ring;
        members that are n chips apart share their links with n - 1 other groups.

        Args:
          places: (x, y, z, core) of the members.
        """
        varying = np.asarray(places)
        links = 0.0
        for axis, size in enumerate((*self.sizes, *(1,) * (3 - len(self.sizes)))):
            taken = np.unique(varying[:, axis])
            if len(taken) < 2:
                continue
            closes = len(taken) > 2 and size % self.kind.whole_ring == 0 and len(taken) * np.diff(taken).min() == size
            links += (2 if closes else 1) / np.diff(taken).min()
        if links == 0:
            return BETWEEN_CORES * self.kind.link
        return links * self.kind.link / len(np.unique(varying[:, 3]))
