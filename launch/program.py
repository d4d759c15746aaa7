"""What every program shares: the two flags that choose an experiment, and errors that are one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from aamoe_jax.config import ConfigError, ExperimentConfig
from experiments.binding import load_experiment

GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "Path of a gin file, or the name of a shipped config such as aamoe.gin. Repeat it: later files win."
)
GIN_PARAM = flags.DEFINE_multi_string(
    "gin_param",
    [],
    "One binding, such as 'ModelConfig.d_model = 128'. Repeat it: params win over files, later ones too.",
)


def experiment_from_flags() -> ExperimentConfig:
    """The experiment that --gin_file and --gin_param describe."""
    return load_experiment(GIN_FILE.value, GIN_PARAM.value)


def run(main: Callable[[Sequence[str]], Any]) -> None:
    """Parses flags, runs `main(arguments)` without the program's name, and exits: 1 and one line for a ConfigError."""
    for flag in (GIN_FILE, GIN_PARAM):
        # So that --help of the program lists the flags of this module too.
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[flag.name])

    def guarded(argv: Sequence[str]) -> Any:
        try:
            return main(argv[1:])
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    app.run(guarded)
