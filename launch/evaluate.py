"""Evaluates a checkpoint on held-out text, under causal budgets.

    python -m launch.evaluate --checkpoint=runs/quickstart

The config comes out of the checkpoint. Prints a table and writes evaluation-SPLIT-BUDGET-STEP.json into the run folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from absl import flags

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.data import dataset_metadata, documents_of, evaluation_batches, load_tokenizer
from aamoe_jax.evaluation import baselines
from aamoe_jax.evaluation.perplexity import Evaluation, causal_budget, evaluate, flip_rate, leakage_gap
from aamoe_jax.model import structure
from aamoe_jax.training.checkpoints import Checkpoint, load_checkpoint
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_enum("which", "latest", ["latest", "best"], "Of a run: the newest, or that of the best validation.")
    flags.DEFINE_list("datasets", [], "Datasets to evaluate on; the mixture of the run if not given.")
    flags.DEFINE_enum("split", "test", ["validation", "test"], "Held-out split.")
    flags.DEFINE_enum(
        "budget",
        "causal",
        ["causal", "row"],
        "`causal`: prefix budgets, or the predictor under the cap where the model trained on row budgets. `row`: the "
        "training budgets of the paper, which see the future: no honest perplexity, shown beside the causal one.",
    )
    flags.DEFINE_integer("batch_size", 8, "Rows per forward pass.", lower_bound=1)
    flags.DEFINE_string("data_dir", None, "Where prepared datasets lie; the run's folder if not given.")
    flags.DEFINE_string("output", None, "JSON file to write; inside the run folder if not given.")


def evaluate_dataset(checkpoint: Checkpoint, data: DataConfig, name: str) -> dict[str, Any]:
    """The record of one dataset under causal budgets; row budgets beside them when asked for by name.

    What row budgets gain by seeing the future is always told of a model that was trained on them.
    """
    model = checkpoint.config.model
    batches = evaluation_batches(data, name, split=FLAGS.split, batch_size=FLAGS.batch_size)
    byte_lengths = load_tokenizer(data.tokenizer).byte_lengths

    def under(budget: str) -> Evaluation:
        return evaluate(structure(model), checkpoint.params, model, batches, byte_lengths, budget=budget)

    has_budgets = "aamoe" in model.pattern
    if FLAGS.budget == "row" and not has_budgets:
        raise ConfigError("--budget=row: this model has no AA-MoE layer, so it has no budgets")
    causal = under(causal_budget(model))
    record = {"dataset": name, "split": FLAGS.split, "causal": causal.to_dict()}
    if not has_budgets:
        record["causal"]["budget"] = None
    record["corpus_digest"] = dataset_metadata(data, name)["corpus_digest"]
    trained_on_row = has_budgets and model.aamoe.budget.normalizer == "row"
    if trained_on_row or FLAGS.budget == "row":
        row = under("row")
        record["leakage_gap"] = leakage_gap(causal, row)
        if trained_on_row:
            record["flip_rate"] = flip_rate(row)
        if FLAGS.budget == "row":
            record["row"] = row.to_dict()
    heldout = b"".join(documents_of(data, name, FLAGS.split))
    train = b"".join(documents_of(data, name, "train"))
    record["baselines"] = {
        "unigram": baselines.unigram_bits_per_byte(train, heldout),
        "xz": baselines.xz_bits_per_byte(heldout),
    }
    return record


def table(records: list[dict[str, Any]]) -> str:
    """The records as a text table."""
    lines = [f"{'dataset':<14}{'budgets':<22}{'bits/byte':>10}{'nats/token':>12}{'perplexity':>12}{'MFLOP/token':>13}"]
    for record in records:
        causal = record["causal"]
        lines.append(_row(record["dataset"], f"{causal['budget']} (causal)" if causal["budget"] else "-", causal))
        if "row" in record:
            lines.append(_row("", "row (sees the future)", record["row"]))
        if "leakage_gap" in record:
            flips = f", flip rate {record['flip_rate']:.3f}" if "flip_rate" in record else ""
            lines.append(f"{'':<14}leakage gap of row budgets {record['leakage_gap']:+.4f} bits/byte{flips}")
        lines += [f"{'':<14}{name:<22}{bits:>10.3f}" for name, bits in record["baselines"].items()]
    return "\n".join(lines)


def _row(name: str, budget: str, figures: dict[str, Any]) -> str:
    numbers = f"{figures['bits_per_byte']:>10.3f}{figures['nats_per_token']:>12.3f}{figures['perplexity']:>12.2f}"
    return f"{name:<14}{budget:<22}{numbers}{figures['flops_per_token'] / 1e6:>13.2f}"


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    checkpoint = load_checkpoint(FLAGS.checkpoint, which=FLAGS.which)
    data = program.data_config(checkpoint.config, FLAGS.data_dir)
    names = FLAGS.datasets or [name for name, _ in data.mixture]
    records = [evaluate_dataset(checkpoint, data, name) for name in names]
    print(f"checkpoint of step {checkpoint.step}, {FLAGS.split} split")
    print(table(records))
    # Everything that tells one evaluation of a run from another is in the name.
    name = "-".join(["evaluation", FLAGS.split, FLAGS.budget, f"step{checkpoint.step}", *FLAGS.datasets]) + ".json"
    output = Path(FLAGS.output) if FLAGS.output else program.run_folder(FLAGS.checkpoint) / name
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(
        json.dumps({"checkpoint": FLAGS.checkpoint, "step": checkpoint.step, "results": records}, indent=1) + "\n"
    )
    print(f"written to {output}")


if __name__ == "__main__":
    define_flags()
    program.run(main)
