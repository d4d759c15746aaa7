"""TPU slices by name: how many chips, in which shape, on how many hosts.

Sources: the pages v4, v5e, v5p, v6e and tpu7x of the Cloud TPU documentation (shapes, hosts, what the number in a name
counts), its page of runtime versions, and the tables of xpk 1.16 (node labels and machine types of GKE). That a chip of
TPU7x is two JAX devices is how the TPU compiler describes it.
"""

from __future__ import annotations

import dataclasses
import math
import re

from aamoe_jax.config import ConfigError

FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
ALIASES = {"v5e": "v5litepod", "v5lite": "v5litepod", "v7x": "tpu7x", "tpu7": "tpu7x"}


@dataclasses.dataclass(frozen=True)
class Generation:
    """One kind of TPU."""

    counted: int  # what the number in a name counts, for each chip: TensorCores (2) or chips (1)
    devices: int  # JAX devices of a chip
    shapes: tuple[str, ...]  # the usual one for every number of chips
    most: int  # chips of the largest slice
    whole: int  # a slice of at most so many chips is one host; larger ones have 4 to a host
    node: str  # label cloud.google.com/gke-tpu-accelerator
    runtime: str | None  # software of a TPU VM; None: to be had through GKE alone


GENERATIONS = {
    "v4": Generation(2, 1, CUBES, 4096, 4, "tpu-v4-podslice", "tpu-ubuntu2204-base"),
    "v5litepod": Generation(1, 1, FLAT, 256, 8, "tpu-v5-lite-podslice", "v2-alpha-tpuv5-lite"),
    "v5p": Generation(2, 1, (*CUBES, "16x16x24"), 6144, 4, "tpu-v5p-slice", "v2-alpha-tpuv5"),
    "v6e": Generation(1, 1, FLAT, 256, 8, "tpu-v6e-slice", "v2-alpha-tpuv6e"),
    "tpu7x": Generation(2, 2, CUBES, 9216, 4, "tpu7x", None),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are connected with each other."""

    generation: Generation
    topology: str

    @property
    def chips(self) -> int:
        """Of the whole slice."""
        return size(self.topology)

    @property
    def hosts(self) -> int:
        """Machines, each with one process of the job."""
        return 1 if self.chips <= self.generation.whole else self.chips // 4

    @property
    def chips_per_host(self) -> int:
        """What a pod asks for as google.com/tpu."""
        return self.chips // self.hosts

    @property
    def devices(self) -> int:
        """`jax.device_count()`."""
        return self.chips * self.generation.devices

    @property
    def devices_per_host(self) -> int:
        """`jax.local_device_count()` of each process."""
        return self.chips_per_host * self.generation.devices


def size(topology: str) -> int:
    """Chips of a shape such as 4x4x8."""
    return math.prod(int(length) for length in topology.split("x"))


def known() -> list[str]:
    """The accelerators that have a usual shape, by name."""
    return [
        f"{name}-{size(shape) * generation.counted}"
        for name, generation in GENERATIONS.items()
        for shape in generation.shapes
    ]


def parse(accelerator: str, topology: str | None = None) -> Slice:
    """The slice of an accelerator, in its usual shape or in a given one.

    Args:
      accelerator: such as v5p-1024 (512 chips: v4, v5p and tpu7x count TensorCores) or v5litepod-256 (256 chips).
      topology: such as 8x8x8. Must be given where the number of chips has no usual shape.
    """
    match = re.fullmatch(r"(\w+)-(\d{1,9})", accelerator, re.ASCII)
    if match is None or match[1] not in GENERATIONS:
        raise ConfigError(f"--accelerator = {accelerator!r}: is unknown{_suggestion(accelerator)}")
    generation, number = GENERATIONS[match[1]], int(match[2])
    chips, rest = divmod(number, generation.counted)
    usual = {size(shape): shape for shape in generation.shapes}
    if topology is not None:
        return Slice(generation, _checked(topology, accelerator, chips, generation))
    if rest or chips not in usual:
        counts = "TensorCores, two a chip" if generation.counted == 2 else "chips"
        raise ConfigError(
            f"--accelerator = {accelerator!r}: {number} {counts}, has no usual shape{_suggestion(accelerator)}; "
            "for other shapes give --topology too, such as 4x4x12"
        )
    return Slice(generation, usual[chips])


def _suggestion(accelerator: str) -> str:
    """The next smaller and larger slices of the generation that a name begins with."""
    match = re.fullmatch(r"(\w+?)[-_](\d{1,9})", accelerator.lower(), re.ASCII)
    generation = ALIASES.get(match[1], match[1]) if match else None
    if match is None or generation not in GENERATIONS:
        return f"; there are {', '.join(GENERATIONS)}, such as v5p-1024"
    sizes = [size(shape) * GENERATIONS[generation].counted for shape in GENERATIONS[generation].shapes]
    below = max((each for each in sizes if each <= int(match[2])), default=None)
    above = min((each for each in sizes if each >= int(match[2])), default=None)
    close = [f"{generation}-{each}" for each in dict.fromkeys((below, above)) if each is not None]
    return f"; did you mean {' or '.join(map(repr, close))}?"


def _checked(topology: str, accelerator: str, chips: int, generation: Generation) -> str:
    """The topology, if slices of this kind come in it."""
    dimensions = generation.shapes[0].count("x") + 1
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", topology, re.ASCII) or topology.count("x") + 1 != dimensions:
        raise ConfigError(
            f"--topology = {topology!r}: {accelerator} has {dimensions} dimensions, such as {generation.shapes[-1]}"
        )
    if size(topology) != chips:
        raise ConfigError(
            f"--topology = {topology!r}: has {size(topology)} chips, but {accelerator} has {chips}; "
            f"name {accelerator.partition('-')[0]}-{size(topology) * generation.counted} or another topology"
        )
    lengths = [int(length) for length in topology.split("x")]
    # Larger slices are made of cubes of 4x4x4, the shortest side first.
    cubes = dimensions == 3 and lengths == sorted(lengths) and not any(length % 4 for length in lengths)
    if topology not in generation.shapes and not (cubes and chips <= generation.most):
        raise ConfigError(
            f"--topology = {topology!r}: {accelerator} does not come in it; there are {', '.join(generation.shapes)}"
            + (", and multiples of 4x4x4 with the shortest side first" if dimensions == 3 else "")
        )
    return topology
