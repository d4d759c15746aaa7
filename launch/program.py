"""What the programs here share beside experiments/program.py: the flags that choose an experiment, and imports.

if __name__ == "__main__":
    define_experiment_flags()   # in programs that take an experiment
    run(main)
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from aamoe_jax.config import DataConfig, ExperimentConfig
from aamoe_jax.extensions import import_mixers
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


def define_import_flag() -> None:
    """Defines --import, which `run` obeys before the program begins: for programs that build models."""
    flags.DEFINE_multi_string(
        "import", [], "A module, or the path of a .py file, that registers mixers of your own. Repeat it for several."
    )
    _claim("import")


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


def run_folder(checkpoint: str) -> Path:
    """The folder of the run that a checkpoint belongs to, given the run, its checkpoints, or a single one."""
    path = Path(checkpoint)
    return next((folder for folder in (path, *path.parents) if (folder / "checkpoints").is_dir()), path)


def write(output: str | Path, text: str) -> None:
    """Writes a result, into a folder that is made if it is missing, and says where."""
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    Path(output).write_text(text, encoding="utf-8")
    print(f"written to {output}")


def run(main: Callable[[list[str]], Any]) -> None:
    """`experiments.program.run(main)`, after the imports of --import. Compiled programs are kept."""
    shared.keep_compiled_programs()

    def importing(argv: list[str]) -> Any:
        for name in flags.FLAGS["import"].value or () if "import" in flags.FLAGS else ():
            import_mixers(name)
        return main(argv)

    shared.run(importing)
