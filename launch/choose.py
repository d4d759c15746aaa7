"""Evaluates a checkpoint on multiple-choice questions.

    aamoe choose --checkpoint=runs/quickstart --items=questions.jsonl

Every line of the file is {"context": "...", "choices": [" one", " other"], "answer": 0}; the sets by which attention is
judged (ARC, BoolQ, COPA, HellaSwag, PIQA, RTE, SciQ) are easily brought into that form. Budgets are causal.
"""

from __future__ import annotations

import json

from absl import flags

from aamoe_jax.data import load_tokenizer
from aamoe_jax.evaluation.choices import accuracies, log_probabilities, read_items
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.model import structure
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    program.define_mesh_flags()
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_enum("which", "latest", ["latest", "best"], "Of a run: the newest, or that of the best validation.")
    flags.DEFINE_string("items", None, "File with one question per line, as JSON.", required=True)
    flags.DEFINE_integer("batch_size", 8, "Rows per forward pass; every choice is one.", lower_bound=1)
    flags.DEFINE_string("output", None, "JSON with the log probability of every choice; none if not given.")


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    items = read_items(FLAGS.items)
    checkpoint = program.load_on_mesh(FLAGS.checkpoint, FLAGS.which)
    config = checkpoint.config
    budget = causal_budget(config.model)
    log_p = log_probabilities(
        structure(config.model),
        checkpoint.params,
        items,
        load_tokenizer(config.data.tokenizer),
        budget=budget,
        length=config.data.seq_len,
        batch_size=FLAGS.batch_size,
    )
    found = accuracies(items, log_p)
    print(
        f"step {checkpoint.step}, {found['items']} items: {found['accuracy']:.1%} right, "
        f"{found['accuracy_per_byte']:.1%} by probability per byte; guessing gets {found['chance']:.1%}"
    )
    if FLAGS.output:
        record = {
            "command": program.command_line("launch.choose"),
            "step": checkpoint.step,
            "budget": budget,
            **found,
            "log_probabilities": [one.tolist() for one in log_p],
        }
        program.write(FLAGS.output, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    define_flags()
    program.run_on_mesh(main)
