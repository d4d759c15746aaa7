"""Shows, resolves and compares configs.

  aamoe config show                            every field: type, default, meaning
  aamoe config show BudgetConfig d_model       the fields of one config, or those of a name
  aamoe config resolve --gin_file=aamoe.gin --gin_param='BudgetConfig.beta = 8.0'
                                                          the complete config, as gin text that loads again
  aamoe config diff dense.gin aamoe.gin        the fields in which two configs differ
  aamoe config diff aamoe.gin                  ... and in which one differs from the defaults

--gin_param of diff applies to both sides. Bare names such as aamoe.gin are those of experiments/configs.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import signal
import textwrap
from collections.abc import Sequence

from absl import app, flags

from aamoe_jax.config import ConfigError
from aamoe_jax.registry import MIXERS
from experiments.binding import (
    bindable_fields,
    config_classes,
    describe,
    did_you_mean,
    differences,
    load_experiment,
    operative_gin,
)
from launch.program import define_experiment_flags, experiment_from_flags, run


def field_docs(cls: type) -> dict[str, str]:
    """The string literals under the fields of a dataclass, by field."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, below in itertools.pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


def show(names: Sequence[str]) -> str:
    """Every field with type, default and meaning, and every mixer; of the configs, fields or mixers called `names`, if
    there are any."""
    sections = []
    for cls in config_classes():
        docs, lines = field_docs(cls), [f"{cls.__name__}: {inspect.getdoc(cls)}"]
        for field in bindable_fields().values():
            if field.owner is cls and (not names or {cls.__name__, field.name, field.full_name} & set(names)):
                lines.append(f"  {field.name}: {describe(field.hint)} = {field.default!r}")
                indent = " " * 6
                lines += textwrap.wrap(docs.get(field.name, ""), 116, initial_indent=indent, subsequent_indent=indent)
        if len(lines) > 1:
            sections.append("\n".join(lines))
    mixers = [entry for name, entry in sorted(MIXERS.items()) if not names or name in names]
    if mixers:
        lines = [f"  {entry.name}: {entry.summary}" for entry in mixers]
        sections.append("\n".join(["Mixers, the names that ModelConfig.pattern may contain:", *lines]))
    if not sections:
        known = [name for field in bindable_fields().values() for name in (field.owner.__name__, field.name)]
        close = did_you_mean(names[0], [*known, *MIXERS]) or "; `show` alone lists all"
        raise ConfigError(f"no config, no field and no mixer is called {' or '.join(names)}{close}")
    return "\n\n".join(sections)


def diff(files: Sequence[str], params: Sequence[str] = ()) -> str:
    """One line per field in which two gin files differ, or one file and the defaults; `params` apply to both."""
    *left, right = files
    found = differences(load_experiment(left, params), load_experiment([right], params))
    return "\n".join(
        [f"# {''.join(left) or 'defaults'} -> {right}: {len(found)} of {len(bindable_fields())} fields differ"]
        + [f"{name}: {one!r} -> {other!r}" for name, (one, other) in found.items()]
    )


def main(argv: list[str]) -> None:
    """Runs the command that the arguments name."""
    match argv[1:]:
        case ["show", *names]:
            print(show(names))
        case ["resolve"]:
            print(operative_gin(experiment_from_flags()), end="")
        case ["diff", *files] if len(files) in (1, 2):
            print(diff(files, flags.FLAGS.gin_param))
        case _:
            raise app.UsageError("the commands are: show [NAME...], resolve, diff A.gin [B.gin]")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `show | head` ends in silence
    define_experiment_flags()
    run(main)
