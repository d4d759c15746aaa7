"""Says where the wall time of a run went, over all its starts.

aamoe goodput --run_dir=runs/quickstart
"""

from __future__ import annotations

import datetime

from absl import flags

from aamoe_jax.bucket import location
from aamoe_jax.markdown import table
from aamoe_jax.training.goodput import PHASES, goodput, read_attempts
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("run_dir", None, "Run folder, as given to launch.train.", required=True)


def main(argv: list[str]) -> None:
    """Prints a line per start, and their sum."""
    program.refuse_arguments(argv)
    run_dir = location("--run_dir", FLAGS.run_dir)
    total = goodput(run_dir)
    rows = []
    for attempt in read_attempts(run_dir):
        began = datetime.datetime.fromtimestamp(attempt["began"]).strftime("%Y-%m-%d %H:%M:%S")
        steps = f"{attempt['from_step']} to {attempt['to_step']}"
        rows.append(
            [began, steps, attempt["ended"] or "killed", *(f"{attempt['seconds'][phase]:.1f}" for phase in PHASES)]
        )
    print(table(["began", "steps", "ended", *(f"{phase}, s" for phase in PHASES)], rows))
    print(total)


if __name__ == "__main__":
    define_flags()
    program.run(main)
