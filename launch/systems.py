"""Lists the mechanisms of the papers with their code, tests and status.

  aamoe systems
  aamoe systems --output=experiments/results/systems.md

Everything but the list of systems is read off the code and tests of this checkout, which name the IDs that they are
about.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from absl import flags

from aamoe_jax.config import ConfigError
from experiments.systems import ROOT, TESTS, family, report, systems
from launch.program import refuse_arguments, run


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("output", None, "Markdown file to write.")


def main(argv: list[str]) -> None:
    refuse_arguments(argv)
    if not (ROOT / TESTS[0]).is_dir():
        raise ConfigError(f"there are no tests beside {ROOT.name}: run this in a checkout of the repository")
    text = f"{report(systems())}\nMixers as one family, y = sum f(x) g(x):\n\n{family()}"
    print(text, end="")
    if flags.FLAGS.output is not None:
        command = shlex.join(["python", "-m", "launch.systems", *sys.argv[1:]])
        Path(flags.FLAGS.output).write_text(f"`{command}`\n\n# Systems\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    define_flags()
    run(main)
