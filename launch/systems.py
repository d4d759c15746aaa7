"""Lists the mechanisms of the papers with their code, tests and status.

  aamoe systems
  aamoe systems --output=experiments/results/systems.md

Everything but the list of systems is read off the code and tests of this checkout, which name the IDs that they are
about.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from aamoe_jax.config import ConfigError
from experiments import systems
from launch.program import command_line, refuse_arguments, run


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("output", None, "Markdown file to write.")


def main(argv: list[str]) -> None:
    refuse_arguments(argv)
    if not (systems.ROOT / systems.TESTS[0]).is_dir():
        raise ConfigError(f"there are no tests beside {systems.ROOT.name}: run this in a checkout of the repository")
    text = (
        f"{systems.report(systems.systems())}\nMixers as weighted sums, y = sum f(x) g(x):\n\n{systems.weighted_sums()}"
    )
    print(text, end="")
    if flags.FLAGS.output is not None:
        report = f"`{command_line('launch.systems')}`\n\n# Systems\n\n{text}"
        Path(flags.FLAGS.output).write_text(report, encoding="utf-8")


if __name__ == "__main__":
    define_flags()
    run(main)
