"""Would a job start? Its flags, its config and its mesh are read as its hosts will, before there are any."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from aamoe_jax.config import ConfigError
from aamoe_jax.extensions import import_mixers
from aamoe_jax.sharding import mesh_sizes, require_divisible, sizes_in_slice
from launch import program
from launch.cluster.job import Job


def check(job: Job, devices: int, slices: int | None) -> None:
    """Parses the flags of the program, and reads its experiment if it takes one and all of its files are here.

    Raises:
      ConfigError: a flag, a file, a field or the mesh does not fit; as the program would say on so many JAX devices of
        so many slices.
    """
    with _flags_of(job.program):
        try:
            words = flags.FLAGS([job.program, *job.arguments])
        except flags.Error as error:
            raise ConfigError(f"{job.program}: {program.describe_flag_error(error)}") from error
        program.refuse_arguments(words)
        if "mesh" in flags.FLAGS and (mesh := program.mesh()):
            sizes_in_slice(mesh_sizes(mesh, devices), slices or 1)
        if "gin_file" not in flags.FLAGS:
            return
        imports = flags.FLAGS["import"].value or []
        files = [*flags.FLAGS.gin_file, *imports]
        elsewhere = [file for file in files if file.startswith("/") and not Path(file).exists()]
        if elsewhere:
            print(f"note: {elsewhere[0]} is not on this machine: the hosts alone read the config", file=sys.stderr)
            return
        for name in imports:
            import_mixers(name)
        experiment = program.experiment_from_flags()
        sizes = mesh_sizes(experiment.mesh, devices)
        require_divisible(experiment, sizes)
        sizes_in_slice(sizes, slices or experiment.mesh.slices or 1)
        if slices is not None and experiment.mesh.slices not in (None, slices):
            raise ConfigError(f"MeshConfig.slices = {experiment.mesh.slices}: the cluster gives {slices}; see --slices")


@contextlib.contextmanager
def _flags_of(name: str) -> Iterator[None]:
    """The flags are those of another program for a while."""
    program_module, kept = importlib.import_module(name), _take_flags()
    try:
        program_module.define_flags()
        yield
    finally:
        _take_flags()
        for flag in kept:
            flags.FLAGS[flag.name] = flag


def _take_flags() -> list[flags.Flag]:
    """Removes all flags but absl's own, and returns them."""
    by_module = flags.FLAGS.flags_by_module_dict()
    taken = [flag for module, found in by_module.items() if not module.startswith("absl.") for flag in found]
    for flag in taken:
        delattr(flags.FLAGS, flag.name)
    return taken
