"""Changes fields of a config until its FLOPs or parameters match another's.

  aamoe match --gin_file=aamoe.gin --gin_file=dense.gin --field=ModelConfig.d_ff --equal=parameters
  aamoe match --gin_file=dense.gin --gin_file=aamoe.gin --field=BudgetConfig.beta --equal=flops
  aamoe match --gin_file=aamoe.gin --gin_file=dense.gin --field=ModelConfig.d_model --field=ModelConfig.d_ff

The first file is the reference, the second is changed; --gin_param applies to both. Several fields grow together, in
the proportions that they have; where that does not come close enough, the last then moves alone. Active FLOPs per token
are those of a forward pass over rows of the reference's length, with every budget spent. Within 1 %, or exit code 1 and
why not.
"""

from __future__ import annotations

from typing import get_args

from absl import app, flags

from experiments.binding import load_experiment
from experiments.matching import Equal, comparison, match
from launch.program import define_experiment_flags, refuse_arguments, run


def define_flags() -> None:
    """The flags of this program."""
    define_experiment_flags()
    flags.DEFINE_multi_string("field", None, "A number to change, such as ModelConfig.d_ff. Repeat it.", required=True)
    flags.DEFINE_enum("equal", "flops", get_args(Equal), "What is to be equal.")


def main(argv: list[str]) -> None:
    refuse_arguments(argv)
    values = flags.FLAGS
    if len(values.gin_file) != 2:
        raise app.UsageError(f"give --gin_file twice, the reference first; there are {len(values.gin_file)}")
    reference, other = (load_experiment([name], values.gin_param) for name in values.gin_file)
    found = match(reference, other, values.field, values.equal)
    print(comparison(values.gin_file, reference, other, found))
    print("\n" + " ".join(f"--gin_param='{field} = {value!r}'" for field, value in found.values.items()))


if __name__ == "__main__":
    define_flags()
    run(main)
