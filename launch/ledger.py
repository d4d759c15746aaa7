"""Lists the costs of every mixer: FLOPs, activation bytes and cache bytes.

  aamoe ledger --gin_file=aamoe.gin
  aamoe ledger --rows=4 --length=2048 --against=compiler --output=experiments/results/ledger.md

One mixer in one layer, for a prompt and for one more token: what this code does in closed form, and the formulas that
were published, slips named. --against=compiler also sets the closed form beside what the compiler says.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from aamoe_jax.ledger.report import report
from launch.program import command_line, define_experiment_flags, experiment_from_flags, refuse_arguments, run


def define_flags() -> None:
    """The flags of this program."""
    define_experiment_flags()
    flags.DEFINE_integer("rows", 1, "B.", lower_bound=1)
    flags.DEFINE_integer("length", None, "L; DataConfig.seq_len if not given.", lower_bound=1)
    flags.DEFINE_enum("against", "paper", ["paper", "compiler"], "What the closed form is set beside.")
    flags.DEFINE_string("output", None, "Markdown file to write.")


def main(argv: list[str]) -> None:
    refuse_arguments(argv)
    values, experiment = flags.FLAGS, experiment_from_flags()
    text = report(experiment.model, values.rows, values.length or experiment.data.seq_len, values.against)
    print(text, end="")
    if values.output is not None:
        Path(values.output).write_text(f"`{command_line('launch.ledger')}`\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    define_flags()
    run(main)
