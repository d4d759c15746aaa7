"""What every program shares: the two flags that choose an experiment, and errors that are one line.

if __name__ == "__main__":
    define_experiment_flags()   # in programs that take an experiment
    run(main)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags

from aamoe_jax.config import ConfigError, ExperimentConfig
from experiments.binding import load_experiment


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
    for name in ("gin_file", "gin_param"):
        # absl's --help lists what the program's own module defines or claims.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])


def experiment_from_flags() -> ExperimentConfig:
    """The experiment that --gin_file and --gin_param describe."""
    return load_experiment(flags.FLAGS.gin_file, flags.FLAGS.gin_param)


def run(main: Callable[[list[str]], Any]) -> None:
    """`absl.app.run(main)`, but a ConfigError ends the program with one line on stderr and exit code 1."""

    def guarded(argv: list[str]) -> Any:
        try:
            return main(argv)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    app.run(guarded)
