"""What the programs here share beside experiments/program.py: the flags that choose an experiment, and imports.

if __name__ == "__main__":
    define_experiment_flags()   # in programs that take an experiment
    run(main)
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from aamoe_jax.bucket import AnyPath, BucketPath, location
from aamoe_jax.config import ConfigError, DataConfig, ExperimentConfig, MeshConfig
from aamoe_jax.extensions import import_mixers
from aamoe_jax.shards import AXES
from aamoe_jax.training import distributed
from aamoe_jax.training.checkpoints import Checkpoint, Which, load_checkpoint
from aamoe_jax.training.state import Placement, place_params
from experiments import program as shared
from experiments.binding import load_experiment
from experiments.program import command_line as command_line
from experiments.program import describe_flag_error as describe_flag_error
from experiments.program import refuse_arguments as refuse_arguments
from experiments.program import shorten as shorten


def define_experiment_flags() -> None:
    """Defines --gin_file and --gin_param. A program that takes no experiment does not call it, and so refuses them."""
    flags.DEFINE_multi_string(
        "gin_file",
        [],
        "Path of a gin file, or the name of a shipped config such as aamoe.gin. Repeat it: later files win.",
    )
    flags.DEFINE_multi_string(
        "gin_param",
        [],
        "One binding, such as 'ModelConfig.d_model = 128'. Repeat it: params win over files, later ones too.",
    )
    _claim("gin_file", "gin_param")
    define_import_flag()


def read_text(name: str) -> bytes:
    """The bytes of the file that --text names, or of standard input.

    Raises:
      ConfigError: it cannot be read, or is empty.
    """
    try:
        text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--text={name}: cannot be read: {error.strerror}") from error
    if not text:
        raise ConfigError(f"--text={name}: is empty")
    return text


def define_import_flag() -> None:
    """Defines --import, which `run` obeys before the program begins: for programs that build models."""
    flags.DEFINE_multi_string(
        "import", [], "A module, or the path of a .py file, that registers mixers of your own. Repeat it for several."
    )
    _claim("import")


def define_distributed_flag() -> None:
    """Defines --distributed."""
    flags.DEFINE_string(
        "distributed",
        None,
        "This process is one of several: auto (TPU, SLURM, Open MPI, Kubernetes), or HOST:PORT,NUM,INDEX, where "
        "HOST:PORT is of process 0.",
    )
    _claim("distributed")


def define_mesh_flags() -> None:
    """Defines --mesh and --distributed, for programs that load a checkpoint and run by `run_on_mesh`."""
    flags.DEFINE_string(
        "mesh",
        None,
        "Sizes of the axes data x fsdp x resource x tensor, such as 1x4x2x1: the devices that the model is divided "
        "over. One may be -1, for the rest. If not given, one device; with --distributed all of them, 1x-1x1x1.",
    )
    _claim("mesh")
    define_distributed_flag()


def mesh() -> MeshConfig | None:
    """What --mesh asks for; None: one device.

    Raises:
      ConfigError: --mesh is not four sizes.
    """
    given = flags.FLAGS.mesh or ("1x-1x1x1" if flags.FLAGS.distributed else None)
    if given is None:
        return None
    if not re.fullmatch(r"(-1|[1-9]\d*)(x(-1|[1-9]\d*)){3}", given) or given.count("-1") > 1:
        raise ConfigError(f"--mesh={given}: wanted four sizes, {' x '.join(AXES)}, such as 1x4x2x1 or 1x-1x1x1")
    return MeshConfig(*map(int, given.split("x")))


def load_on_mesh(checkpoint: str, which: Which = "latest") -> Checkpoint:
    """The checkpoint that a path names. With --mesh, the compiler divides what is computed with its parameters.

    Raises:
      ConfigError: the mesh does not make the devices or cannot divide the parameters; or see `load_checkpoint`.
    """
    if (wanted := mesh()) is None:
        return load_checkpoint(checkpoint, which)

    def place_on(config: ExperimentConfig, mesh: MeshConfig = wanted) -> Placement:
        return place_params(dataclasses.replace(config, mesh=mesh))

    return load_checkpoint(checkpoint, which, place_on)


def _claim(*names: str) -> None:
    """absl's --help lists what the program's own module defines or claims."""
    for name in names:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def experiment_from_flags() -> ExperimentConfig:
    """The experiment that --gin_file and --gin_param describe."""
    return load_experiment(flags.FLAGS.gin_file, flags.FLAGS.gin_param)


def data_config(config: ExperimentConfig, data_dir: str | None) -> DataConfig:
    """The run's data, looked for in `data_dir` where that is given."""
    return config.data if data_dir is None else dataclasses.replace(config.data, data_dir=data_dir)


def run_folder(checkpoint: str) -> AnyPath:
    """The folder of the run that a checkpoint belongs to, given the run, its checkpoints, or a single one."""
    path = location("--checkpoint", checkpoint)
    return next((folder for folder in (path, *path.parents[:2]) if (folder / "checkpoints").is_dir()), path)


def write(output: str | AnyPath, text: str) -> None:
    """Writes a result, into a folder that is made if it is missing, and says where. Of several processes one does."""
    if not is_first():
        return
    if not isinstance(output, BucketPath):
        output = Path(output)
        output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"written to {output}")


def is_first() -> bool:
    """Whether this is the process that prints and writes for all."""
    several = "distributed" in flags.FLAGS and flags.FLAGS.distributed is not None
    return not several or distributed.is_first()  # which asks for the devices


def warn(text: str) -> None:
    """Says something on stderr, once for all processes."""
    if is_first():
        print(text, file=sys.stderr)


def run_on_mesh(main: Callable[[list[str]], Any]) -> None:
    """`run(main)` of a program with the flags of `define_mesh_flags`, on every process that --distributed tells of.

    The first one prints and writes. Where one is lost the others end with `distributed.EXIT_LOST`, within a minute.
    """

    def together(argv: list[str]) -> Any:
        if flags.FLAGS.distributed is None:
            return main(argv)
        distributed.initialize(flags.FLAGS.distributed)
        alone = contextlib.nullcontext() if distributed.is_first() else contextlib.redirect_stdout(io.StringIO())
        try:
            with alone:
                return main(argv)
        except Exception as error:
            if distributed.is_loss(error):
                distributed.end_lost(error)
            if isinstance(error, ConfigError):
                print(f"error: {shorten(f'{distributed.this_process()}{error}')}", file=sys.stderr)
            else:
                traceback.print_exc()
            distributed.leave(1)  # Python's own way out would wait for the others

    run(together)


def run(main: Callable[[list[str]], Any]) -> None:
    """`experiments.program.run(main)`, after the imports of --import. Compiled programs are kept."""

    def importing(argv: list[str]) -> Any:
        shared.keep_compiled_programs()
        for name in flags.FLAGS["import"].value or () if "import" in flags.FLAGS else ():
            import_mixers(name)
        return main(argv)

    shared.run(importing)
