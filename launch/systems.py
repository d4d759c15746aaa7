"""Lists the mechanisms of the papers: built, held by a test, reachable and measured.

  aamoe systems
  aamoe systems --output=experiments/results/systems.md

All of it is read off this checkout: code names the mechanisms that it is about, for each there is a deliberate bug that
tests must notice (`python -m tests.deliberate_bugs`), what reaches it is tried, results must exist. The file has the
details of each mechanism too.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from aamoe_jax.config import ConfigError
from experiments import held, systems
from launch.program import command_line, refuse_arguments, run


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("output", None, "Markdown file to write.")


def main(argv: list[str]) -> None:
    refuse_arguments(argv)
    if not (systems.ROOT / held.BUGS).is_file():
        raise ConfigError(f"there are no tests beside {systems.ROOT.name}: run this in a checkout of the repository")
    found = systems.systems()
    counts, sums = systems.counts(found), f"## Mixers as weighted sums, y = sum f(x) g(x)\n\n{systems.weighted_sums()}"
    print(f"{counts}\n\n{systems.tables(found)}\n{sums}", end="")
    if flags.FLAGS.output is not None:
        Path(flags.FLAGS.output).write_text(
            f"`{command_line('launch.systems')}`\n\n# Systems\n\n{EXPLAINED}\n{counts}\n\n"
            f"{systems.tables(found, links=True)}\n{sums}\n## Details\n\n{systems.details(found)}",
            encoding="utf-8",
        )


EXPLAINED = """\
* **built**: code names the mechanism.
* **held**: with a deliberate bug in it, every test that is named for it fails ([bugs](systems_held.md)).
* **reachable**: gin bindings that load, a program that has the flags, or a function that can be imported.
* **measured**: committed results are about it. *In part*: the details say what these leave open. *A definition* is
  decided by its test.
"""


if __name__ == "__main__":
    define_flags()
    run(main)
