"""One program on one slice, in figures: what the compiler found, and the time that the chip's limits allow it."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, Literal

from aamoe_jax.preflight.buffers import Buffer
from aamoe_jax.preflight.collectives import Collective
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.work import Kernel

Mode = Literal["train", "eval"]
TRILLION = 1e12
DAY = 86_400


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device's main memory."""

    arguments: int
    output: int
    """New ones; those in place of arguments are `aliased`."""
    aliased: int
    temporaries: int
    code: int
    limit: float
    """What the compiler gives a program."""

    @property
    def peak(self) -> int:
        """All of it together, when temporaries take most."""
        return self.arguments + self.output + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Network:
    """A kind of collective with the time that its bytes take."""

    collective: Collective
    seconds: float
    """On the links of a slice."""
    dcn_seconds: float = 0.0
    """On the network between slices."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Of one device in one step, unless said otherwise."""

    topology: str
    mode: Mode
    mesh: dict[str, int]
    devices: int
    tokens: int
    """Of all devices."""
    parameters: int
    memory: Memory
    buffers: tuple[Buffer, ...]
    """The biggest of those alive at the peak."""
    refusal: str
    """The compiler's words where it would not compile; empty where it did."""
    model_flops: float
    """What the model must do, in closed form: recomputation and padding are not in it."""
    product_flops: int
    """Matrix products of the program."""
    pass_flops: int
    """The same as the matrix units do them: float32 products take several passes."""
    kernel_flops: float
    """Products inside kernels: in closed form the pairs that the budget buys and dense attention, once more where they
    are recomputed; those of a pooled router as attached to its kernels."""
    compiler_flops: float
    """What the compiler counts: bodies of loops once, kernels by the estimate attached to them."""
    kernel_seconds: float
    """Modelled: those of the kernels' schedules, times what a chip is assumed to need over them."""
    moved_bytes: int
    """Through main memory."""
    kernels: tuple[Kernel, ...]
    network: tuple[Network, ...]
    compile_seconds: float

    @property
    def fits(self) -> bool:
        """As the compiler judges."""
        return not self.refusal

    @property
    def spent_flops(self) -> float:
        """Recomputation, padding and the passes of float32 products included."""
        return self.pass_flops + self.kernel_flops

    @property
    def slice(self) -> Slice:
        return Slice.parse(self.topology)

    @property
    def limits(self) -> dict[str, float]:
        """Modelled seconds of a step at each of the chip's limits."""
        device = self.slice.device
        return {
            "compute": self.pass_flops / device.flops + self.kernel_seconds,
            "HBM": self.moved_bytes / device.bandwidth,
            "ICI": sum(part.seconds for part in self.network),
            "DCN": sum(part.dcn_seconds for part in self.network),
        }

    @property
    def bound(self) -> str:
        """The limit that is met first."""
        return max(self.limits, key=self.limits.__getitem__)

    @property
    def best_seconds(self) -> float:
        """Modelled: everything at the same time. No step is faster."""
        return max(self.limits.values())

    @property
    def step_seconds(self) -> float:
        """Modelled: compute, memory and network one after the other."""
        return sum(self.limits.values())

    @property
    def chips(self) -> float:
        return self.devices / self.slice.devices_per_chip

    def mfu(self, seconds: float) -> float:
        """Share of the peak that the model's FLOPs are, in a step that takes so long."""
        return self.model_flops / (self.slice.device.flops * seconds)

    @property
    def tokens_per_second_per_chip(self) -> float:
        return self.tokens / self.step_seconds / self.chips

    @property
    def days_per_trillion(self) -> float:
        """Days in which the slice sees 1e12 tokens."""
        return TRILLION / self.tokens * self.step_seconds / DAY

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal summary."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """The inverse of `to_json`."""
        return _revived(cls, json.loads(text))


def _revived(hint: Any, value: Any) -> Any:
    """What JSON has made of a value of this type: dataclasses have become dicts, and tuples lists."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _revived(inner, value[name]) for name, inner in hints.items() if name in value})
    if typing.get_origin(hint) is tuple:
        return tuple(_revived(typing.get_args(hint)[0], item) for item in value)
    return value
