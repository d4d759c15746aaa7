"""The search that chose mesh, rows and recomputation of the configs at scale: every candidate compiled for its slice.

    .venv-aot/bin/python -m experiments.preflight_search --gin_file=aamoe_1b.gin

Writes results/preflight_search_NAME.md and .json, the fastest that fits first. All times are modelled.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.program import compile_apart
from aamoe_jax.preflight.report import MODEL_NOTE, OVERVIEW, overview_row, table
from aamoe_jax.preflight.summary import Summary
from experiments.binding import load_experiment
from experiments.program import write

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Space:
    """What is tried, in every combination."""

    topology: str
    meshes: tuple[tuple[int, int, int, int], ...]
    """data, fsdp, resource, tensor."""
    remats: tuple[str, ...]
    rows_per_chip: tuple[float, ...]
    """Rows of a step, over the chips of the slice."""


REMATS = ("none", "dots", "attention")
SPACES = {
    "aamoe_1b.gin": Space("v5p:4x4x4", ((1, 64, 1, 1), (4, 16, 1, 1), (1, 16, 4, 1), (1, 16, 1, 4)), REMATS, (1,)),
    "aamoe_8b.gin": Space("v5p:8x8x8", ((8, 64, 1, 1), (1, 64, 1, 8), (1, 64, 8, 1), (8, 8, 1, 8)), REMATS, (1,)),
    "aamoe_100b.gin": Space("v5p:8x8x8", ((1, 8, 8, 8), (1, 64, 8, 1), (1, 64, 1, 8)), REMATS, (1 / 8,)),
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One of them, as bindings."""

    mesh: tuple[int, int, int, int]
    remat: str
    rows: int

    @property
    def params(self) -> list[str]:
        """For `--gin_param`. `data` is what the slice leaves over, so that the config runs on a larger one too."""
        sizes = zip(("data", "fsdp", "resource", "tensor"), (-1, *self.mesh[1:]), strict=True)
        mesh = [f"MeshConfig.{axis} = {size}" for axis, size in sizes]
        return [*mesh, f"ModelConfig.remat = {self.remat!r}", f"TrainingConfig.batch_size = {self.rows}"]


def candidates(space: Space, chips: int) -> Iterator[Candidate]:
    """All of them whose rows can be divided."""
    for mesh, remat, per_chip in itertools.product(space.meshes, space.remats, space.rows_per_chip):
        rows = round(per_chip * chips)
        if rows % (mesh[0] * mesh[1]) == 0:
            yield Candidate(mesh, remat, rows)


def ranked(found: list[tuple[Candidate, Summary]]) -> list[tuple[Candidate, Summary]]:
    """Those that fit, the fastest per token first; then those that do not."""
    return sorted(found, key=lambda entry: (not entry[1].fits, entry[1].days_per_trillion))


def report(gin_file: str, found: list[tuple[Candidate, Summary]]) -> str:
    """The table, and the command that makes it."""
    rows = [[candidate.remat, str(candidate.rows), *overview_row(summary)] for candidate, summary in ranked(found)]
    command = f"`python -m experiments.preflight_search --gin_file={gin_file}`"
    return f"{command}\n\n{MODEL_NOTE}\n\n{table(['remat', 'rows', *OVERVIEW], rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gin_file", choices=sorted(SPACES), required=True)
    gin_file = parser.parse_args().gin_file
    space, found = SPACES[gin_file], []
    output = RESULTS / f"preflight_search_{Path(gin_file).stem}"
    chips = Slice.parse(space.topology).chips
    for candidate in candidates(space, chips):
        summary = compile_apart(load_experiment([gin_file], candidate.params), space.topology, "train", "placed")
        found.append((candidate, summary))
        entries = [dataclasses.asdict(one) | {"summary": dataclasses.asdict(other)} for one, other in found]
        write(entries, report(gin_file, found), output.with_suffix(".json"))
        print(" | ".join([candidate.remat, str(candidate.rows), *overview_row(summary)]), flush=True)


if __name__ == "__main__":
    main()
