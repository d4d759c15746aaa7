"""Runs tasks of EleutherAI's lm-evaluation-harness on a checkpoint.

    aamoe harness --checkpoint=runs/quickstart --tasks=tasks/mine.yaml
    aamoe harness --checkpoint=runs/quickstart --tasks=runs/ruler --output=runs/quickstart/ruler.json

A task is a yaml file as lm-eval defines them, a folder of such files, or the name of one that lm-eval brings along,
whose data it downloads. Files need no network. Needs the extra `harness`: `pip install -c constraints.txt -e
'.[harness]'`. Budgets are causal.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from absl import flags

from aamoe_jax.config import ConfigError
from launch import program

FLAGS = flags.FLAGS
RESAMPLES = 1000
"""Of the standard errors that are bootstrapped."""


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    program.define_mesh_flags()
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_enum("which", "latest", ["latest", "best"], "Of a run: the newest, or that of the best validation.")
    flags.DEFINE_list("tasks", None, "Yaml files, folders of them, or names of lm-eval's tasks.", required=True)
    flags.DEFINE_integer("fewshot", None, "Solved examples before each; as the task says if not given.", lower_bound=0)
    flags.DEFINE_integer("limit", None, "Only the first so many of every task.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 8, "Rows per forward pass or decoding step.", lower_bound=1)
    flags.DEFINE_integer(
        "max_length", None, "Tokens of a row, its generated text included; as in training if not given.", lower_bound=2
    )
    flags.DEFINE_string("output", None, "JSON with the results and every sample; none if not given.")


def load_tasks(given: list[str]) -> tuple[Any, list[str]]:
    """lm-eval's index of tasks, and what it is to run: names, and paths of yaml files.

    Raises:
      ConfigError: a path or name of no task.
    """
    from lm_eval.tasks import TaskManager

    folders = [name for name in given if Path(name).is_dir()]
    files = [name for name in given if Path(name).is_file()]
    names = [name for name in given if name not in (*folders, *files)]
    if missing := [name for name in names if "/" in name or name.endswith((".yaml", ".yml"))]:
        raise ConfigError(f"--tasks={missing[0]}: there is no such file or folder")
    if wrong := [name for name in files if Path(name).suffix not in (".yaml", ".yml")]:
        raise ConfigError(f"--tasks={wrong[0]}: is no task; a yaml file names the jsonl file of its rows")
    for folder in folders:
        inside = TaskManager(include_path=folder, include_defaults=False).all_subtasks
        if not inside:
            raise ConfigError(f"--tasks={folder}: holds no yaml file of a task")
        names += inside
    # lm-eval's own are thousands of files: they are read where one of them is asked for.
    manager = TaskManager(include_path=folders, include_defaults=any(name in given for name in names))
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(f"--tasks={unknown[0]}: lm-eval has no task of that name, and there is no such path")
    return manager, names + files


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed: pip install -c constraints.txt -e '.[harness]'")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # lm-eval would fork a process that has threads
    from datasets.exceptions import DatasetsError
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import make_table

    from aamoe_jax.harness import HarnessModel

    manager, tasks = load_tasks(FLAGS.tasks)
    checkpoint = program.load_on_mesh(FLAGS.checkpoint, FLAGS.which)
    model = HarnessModel(checkpoint, batch_size=FLAGS.batch_size, max_length=FLAGS.max_length)
    try:
        results = simple_evaluate(
            model,
            tasks=tasks,
            num_fewshot=FLAGS.fewshot,
            limit=FLAGS.limit,
            bootstrap_iters=RESAMPLES,
            task_manager=manager,
            log_samples=FLAGS.output is not None,
        )
    except (ConnectionError, FileNotFoundError, DatasetsError) as error:  # it reads the rows of all tasks first
        raise ConfigError(
            f"--tasks={','.join(FLAGS.tasks)}: the rows of a task cannot be read: {error}; tasks of lm-eval's own are "
            "downloaded, those of a yaml file and a jsonl file beside it need no network"
        ) from error
    print(f"checkpoint of step {checkpoint.step}")
    print(make_table(results))
    if FLAGS.output:
        record = {"command": program.command_line("launch.harness"), "step": checkpoint.step} | results
        program.write(FLAGS.output, json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    define_flags()
    program.run_on_mesh(main)
