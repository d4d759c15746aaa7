"""How an implementation cuts its work: sizes that have names, which planners choose and callers may set."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """How an implementation cuts its work. None: its planner chooses, by shape and chip.

    `Path.block_sizes` has what was chosen, and None for sizes that an implementation does not have.

    Raises:
      ValueError: a size is no positive integer.
    """

    pairs: int | None = None
    """Pairs of one resource that are computed at once: a tile of "xla", and of "pallas_tpu_resident" and
    "pallas_tpu_gathered", whose tiles are multiples of 128."""
    tokens: int | None = None
    """Tokens whose queries and sums are in fast memory at once ("pallas_tpu_resident"; it takes windows of equal size),
    or that a tile has ("pallas_tpu_dense"; a multiple of 128)."""
    keys: int | None = None
    """Keys that a tile meets at once: whole resources ("pallas_tpu_dense"), or 64 or 128 of one ("pallas_gpu")."""
    tiles: int | None = None
    """Tiles that one step of the loop takes ("xla"), or one block of threads on average ("pallas_gpu")."""

    def __post_init__(self) -> None:
        for name, size in self.given().items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"block_sizes.{name}={size!r}; wanted a positive integer, or None for the default")

    def given(self) -> dict[str, int]:
        """The sizes that are not None, by name."""
        return {name: size for name, size in vars(self).items() if size is not None}

    def require_multiple(self, name: str, of: int) -> None:
        """Raises a ValueError unless a size is a multiple of `of`, or None."""
        size = vars(self)[name]
        if size is not None and size % of:
            raise ValueError(f"block_sizes.{name}={size}; wanted a multiple of {of}")


DEFAULT = BlockSizes()
"""The planner chooses."""


def pairs_a_tile(rows: float) -> int:
    """The default of TPU kernels: large where resources have `rows` (on average) to fill a tile."""
    return 512 if rows >= 1024 else 256 if rows >= 256 else 128
