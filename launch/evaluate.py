"""Evaluates a checkpoint on held-out text, under causal budgets.

    aamoe evaluate --checkpoint=runs/quickstart
    aamoe evaluate --checkpoint=runs/row --budget=all
    aamoe evaluate --checkpoint=runs/quickstart --sweep=budget
    aamoe evaluate --checkpoint=runs/hybrid --skip_layers=mlp

The config comes out of the checkpoint. Prints a table, and writes evaluation-SPLIT-BUDGET-STEP.json into the run
folder; of a sweep also a picture. Beside every figure stands what a probe of causality saw on the first batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from aamoe_jax.analysis import sweep_pictures
from aamoe_jax.bucket import AnyPath
from aamoe_jax.config import ConfigError, DataConfig, ExperimentConfig, MeshConfig, ModelConfig, to_dict
from aamoe_jax.data import dataset_metadata, documents_of, load_tokenizer
from aamoe_jax.evaluation import baselines, report
from aamoe_jax.evaluation.evaluate import evaluate
from aamoe_jax.evaluation.perplexity import (
    budget_modes,
    causal_budget,
    flip_rate,
    leakage_gap,
    predictor_figures,
    require_budget_scale,
)
from aamoe_jax.evaluation.sweeps import BUDGET_SCALES, LENGTH_FACTORS, budget_sweep, held_out, length_sweep
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import Skipped, structure
from aamoe_jax.training.checkpoints import Checkpoint, library_versions, load_checkpoint
from aamoe_jax.training.state import Placement, place
from launch import program

FLAGS = flags.FLAGS
Record = dict[str, Any]


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_enum("which", "latest", ["latest", "best"], "Of a run: the newest, or that of the best validation.")
    flags.DEFINE_list("datasets", [], "Datasets to evaluate on; the mixture of the run if not given.")
    flags.DEFINE_enum("split", "test", ["validation", "test"], "Held-out split.")
    flags.DEFINE_enum(
        "budget",
        "causal",
        ["causal", "row", "prefix", "predictor", "predictor_uncapped", "all"],
        "`causal`: prefix budgets, or the predictor under the cap where the model trained on row budgets. `row`: the "
        "training budgets of the paper, which see the future: no honest perplexity, shown beside the causal one. "
        "`prefix`, `predictor`, `predictor_uncapped`: by name. `all`: side by side, as many as the model has.",
    )
    flags.DEFINE_float("budget_scale", 1.0, "Multiplies the budget of every token.")
    flags.DEFINE_enum(
        "sweep",
        "none",
        ["none", "budget", "length"],
        "`budget`: at several budget scales. `length`: in rows of other lengths, with the budget per token or per row "
        "fixed.",
    )
    flags.DEFINE_list(
        "sweep_points",
        [],
        f"Of a budget sweep the budget scales, {','.join(map(str, BUDGET_SCALES))} if not given; of a length "
        f"sweep multiples of the training length, {','.join(map(str, LENGTH_FACTORS))} if not given.",
    )
    flags.DEFINE_list(
        "skip_layers",
        [],
        "Leaves these out of the stack: layers by their number, counted from 0, and mixers by name, such as 1,mlp. "
        "They are computed all the same, and what they would add is multiplied by 0.",
    )
    flags.DEFINE_integer(
        "max_batches", None, "Only the text of the first so many batches: a quick look.", lower_bound=1
    )
    flags.DEFINE_integer("batch_size", 8, "Rows per forward pass.", lower_bound=1)
    program.define_mesh_flags()
    flags.DEFINE_string("data_dir", None, "Where prepared datasets lie; the run's folder if not given.")
    flags.DEFINE_string("output", None, "JSON file to write; inside the run folder if not given.")


# What is asked.


def asked_budgets(model: ModelConfig) -> tuple[BudgetMode, ...]:
    """The budgets to show; row budgets never stand alone."""
    offered = budget_modes(model)
    if not offered:
        for flag in ("budget", "budget_scale"):
            if FLAGS[flag].present and FLAGS[flag].value != FLAGS[flag].default:
                raise ConfigError(f"--{flag}={FLAGS[flag].value}: this model has no AA-MoE layer, so it has no budgets")
        return (causal_budget(model),)
    if FLAGS.budget == "all":
        return offered
    if FLAGS.budget in ("causal", "row"):
        return (causal_budget(model),) if FLAGS.budget == "causal" else (causal_budget(model), "row")
    if FLAGS.budget not in offered:
        raise ConfigError(
            f"--budget={FLAGS.budget}: this model was trained on prefix budgets and has no budget predictor"
        )
    return (FLAGS.budget,)


def swept_budget(model: ModelConfig) -> BudgetMode:
    """The one kind of budget that is swept."""
    if FLAGS.budget == "all":
        raise ConfigError(f"--budget=all: --sweep={FLAGS.sweep} takes one kind of budget")
    if FLAGS.budget_scale != 1:
        raise ConfigError(f"--budget_scale={FLAGS.budget_scale}: --sweep={FLAGS.sweep} sets the budget scale itself")
    if FLAGS.sweep == "budget" and not budget_modes(model):
        raise ConfigError("--sweep=budget: this model has no AA-MoE layer, so it has no budgets")
    return asked_budgets(model)[-1]


def skipped_layers(model: ModelConfig) -> frozenset[Skipped]:
    """What --skip_layers names."""
    mixers = dict.fromkeys(name for _, name in model.mixers)
    found = {int(name) if name.isdecimal() else name for name in FLAGS.skip_layers}
    for name in found:
        if name not in mixers and name not in range(model.num_layers):
            known = f"layers 0 to {model.num_layers - 1}, and the mixers {', '.join(mixers)}"
            raise ConfigError(f"--skip_layers={','.join(FLAGS.skip_layers)}: there is no {name!r}; there are {known}")
    return frozenset(found)


def sweep_points() -> tuple[float, ...]:
    """The numbers of --sweep_points."""
    if not FLAGS.sweep_points:
        return BUDGET_SCALES if FLAGS.sweep == "budget" else LENGTH_FACTORS
    try:
        return tuple(sorted({require_budget_scale(float(point)) for point in FLAGS.sweep_points}))
    except ValueError as error:
        wanted = "must be positive numbers, such as 0.5,1,2"
        raise ConfigError(f"--sweep_points={','.join(FLAGS.sweep_points)}: {wanted}") from error


def load() -> Checkpoint:
    """The checkpoint, on one device or the mesh. Rows of a sweep have many lengths, which no mesh divides evenly."""
    if FLAGS.sweep != "none" or (mesh := program.mesh()) is None:
        return program.load_on_mesh(FLAGS.checkpoint, FLAGS.which)
    return load_checkpoint(FLAGS.checkpoint, FLAGS.which, functools.partial(placement_on, mesh))


def placement_on(mesh: MeshConfig, config: ExperimentConfig) -> Placement:
    """Of rows of training on a mesh without a bound on pairs: a measurement drops nothing."""
    rows = dataclasses.replace(config.training, batch_size=FLAGS.batch_size, accumulate=1)
    return place(dataclasses.replace(config, mesh=mesh, training=rows))


# What is measured.


def evaluate_dataset(checkpoint: Checkpoint, data: DataConfig, name: str) -> Record:
    """The record of one dataset under the budgets that were asked for.

    What row budgets gain by seeing the future, and how well they are guessed, is always told of a model that was
    trained on them.
    """
    model = checkpoint.config.model
    shown = asked_budgets(model)
    trained_on_row = "predictor" in budget_modes(model)
    mesh = program.mesh()
    placement = placement_on(mesh, checkpoint.config) if mesh else None
    found = {
        budget: evaluate(
            checkpoint,
            name,
            split=FLAGS.split,
            budget=budget,
            budget_scale=FLAGS.budget_scale,
            batch_size=FLAGS.batch_size,
            max_batches=FLAGS.max_batches,
            data_dir=FLAGS.data_dir,
            skipped=skipped_layers(model),
            placement=placement,
        )
        for budget in dict.fromkeys((*shown, "row") if trained_on_row else shown)
    }
    record = _dataset_record(data, name) | {"budgets": {budget: found[budget].to_dict() for budget in shown}}
    if "row" in found:
        for budget in shown:
            record["budgets"][budget]["gap_to_row"] = leakage_gap(found[budget], found["row"])
    if trained_on_row:
        record |= {"flip_rate": flip_rate(found["row"]), "predictor": predictor_figures(found["row"])}
    heldout = b"".join(documents_of(data, name, FLAGS.split))
    train = b"".join(documents_of(data, name, "train"))
    record["baselines"] = {
        "unigram": baselines.unigram_bits_per_byte(train, heldout),
        "xz": baselines.xz_bits_per_byte(heldout),
    }
    return record


def sweep_dataset(checkpoint: Checkpoint, data: DataConfig, name: str) -> Record:
    """The record of one dataset at several budget scales, or in rows of several lengths."""
    model, points = checkpoint.config.model, sweep_points()
    budget, record = swept_budget(model), _dataset_record(data, name)
    start = (structure(model, skipped_layers(model)), checkpoint.params, model)
    byte_lengths = load_tokenizer(data.tokenizer).byte_lengths
    swept: Sequence[Any]

    def rows(length: float) -> Any:
        options = {"batch_size": FLAGS.batch_size, "max_batches": FLAGS.max_batches}
        return held_out(data, name, FLAGS.split, length=length, **options)

    if FLAGS.sweep == "budget":
        swept = budget_sweep(*start, rows(data.seq_len), byte_lengths, budget=budget, scales=points)
    else:
        swept = length_sweep(*start, rows, byte_lengths, budget=budget, trained_length=data.seq_len, factors=points)
    return record | {"points": [point.to_dict() for point in swept]}


def _dataset_record(data: DataConfig, name: str) -> Record:
    return {"dataset": name, "split": FLAGS.split, "corpus_digest": dataset_metadata(data, name)["corpus_digest"]}


# What is told.


def tables(results: list[Record]) -> str:
    """All results as text."""
    if FLAGS.sweep == "none":
        predictors = [
            f"{result['dataset']}: {report.predictor_table(result['predictor'], result['flip_rate'])}"
            for result in results
            if "predictor" in result
        ]
        return "\n\n".join([report.budgets_table(results), *predictors])
    table = report.budget_sweep_table if FLAGS.sweep == "budget" else report.length_sweep_table
    budgets = next(measured(results[0]))["budget"]
    parts = [f"{result['dataset']}, {report.budget_label(budgets)}\n{table(result['points'])}" for result in results]
    return "\n\n".join([*parts, report.FUTURE_LEAK])


def measured(result: Record) -> Iterator[Record]:
    """Every evaluation inside the result of a dataset."""
    yield from result.get("budgets", {}).values()
    for point in result.get("points", []):
        yield from point["fixed"].values() if "fixed" in point else [point]


def output_path(step: int) -> AnyPath:
    """Everything that tells one evaluation of a run from another is in the name."""
    if FLAGS.output:
        return Path(FLAGS.output)
    kind = "evaluation" if FLAGS.sweep == "none" else f"{FLAGS.sweep}_sweep"
    parts = [kind, FLAGS.split, FLAGS.budget]
    parts += [f"scale{FLAGS.budget_scale:g}"] if FLAGS.budget_scale != 1 else []
    parts += [f"at{'_'.join(FLAGS.sweep_points)}"] if FLAGS.sweep_points else []
    parts += [f"without_{'_'.join(FLAGS.skip_layers)}"] if FLAGS.skip_layers else []
    parts += [f"first{FLAGS.max_batches}"] if FLAGS.max_batches else []
    return program.run_folder(FLAGS.checkpoint) / ("-".join([*parts, f"step{step}", *FLAGS.datasets]) + ".json")


def write(record: Record, output: AnyPath) -> None:
    """The JSON, and one picture per dataset of a sweep."""
    program.write(output, report.as_json(record))
    if FLAGS.sweep == "none" or not program.is_first():
        return
    draw = sweep_pictures.budget_sweep if FLAGS.sweep == "budget" else sweep_pictures.length_sweep
    for result in record["results"]:
        name = output.stem if len(record["results"]) == 1 else f"{output.stem}-{result['dataset'].replace(':', '_')}"
        picture = output.with_name(f"{name}.png")
        draw(result["points"], picture)
        print(f"picture {picture}")


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    require_budget_scale(FLAGS.budget_scale)
    if FLAGS.sweep_points and FLAGS.sweep == "none":
        given = ",".join(FLAGS.sweep_points)
        raise ConfigError(f"--sweep_points={given}: give --sweep=budget or --sweep=length with it")
    checkpoint = load()
    model, data = checkpoint.config.model, program.data_config(checkpoint.config, FLAGS.data_dir)
    measure = evaluate_dataset if FLAGS.sweep == "none" else sweep_dataset
    results = [measure(checkpoint, data, name) for name in FLAGS.datasets or [name for name, _ in data.mixture]]
    part = f", the first {FLAGS.max_batches} batches alone: a part" if FLAGS.max_batches else ""
    scaled = f", every budget times {report.fraction(FLAGS.budget_scale)}" if FLAGS.budget_scale != 1 else ""
    skipped = f", without {', '.join(FLAGS.skip_layers)}" if FLAGS.skip_layers else ""
    print(f"checkpoint of step {checkpoint.step}, {FLAGS.split} split{part}{scaled}{skipped}")
    print(tables(results))
    exact = model.dtype == "float32" and jax.default_backend() == "cpu"
    warnings = report.causality_warnings((item for result in results for item in measured(result)), exact=exact)
    for warning in warnings:
        program.warn(warning)
    record = {
        "command": program.command_line("launch.evaluate"),
        "checkpoint": FLAGS.checkpoint,
        "step": checkpoint.step,
        "max_batches": FLAGS.max_batches,
        "skip_layers": FLAGS.skip_layers,
        "device": jax.devices()[0].device_kind,
        "versions": library_versions(),
        "warnings": warnings,
        "config": to_dict(checkpoint.config),
        "results": results,
    }
    write(record, output_path(checkpoint.step))


if __name__ == "__main__":
    define_flags()
    program.run_on_mesh(main)
