"""Draws runs: the loss, shares of context and experts, and a map of budgets.

    aamoe draw --run_dir=runs/quickstart                                # pictures of one run, in its folder
    aamoe draw --run_dir=runs/a --run_dir=runs/b --output=pictures      # the losses of several, in one picture

The budget map shows prose, code and the same code again; --text shows a file, --window a part of the held-out split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from aamoe_jax.analysis import inspection, pictures
from aamoe_jax.bucket import AnyPath, location
from aamoe_jax.config import ConfigError, ExperimentConfig
from aamoe_jax.data import evaluation_batches, load_tokenizer
from aamoe_jax.data.tokenizers import Tokenizer
from aamoe_jax.training.checkpoints import Checkpoint, load_checkpoint, load_config
from aamoe_jax.training.metrics import FILE, read_metrics
from aamoe_jax.training.resume import FREE_FIELDS
from experiments.binding import differences, value_of
from launch import program

FLAGS = flags.FLAGS
MOST_FIELDS = 2
"""Runs that differ in more fields of their configs are called by their folders."""
MOST_TOKENS = 512
"""Longer rows of training are not shown whole unless --tokens asks for it."""
CODE = """\
def mean(values, weights):
    total = 0.0
    for value, weight in zip(values, weights):
        total += weight * value
    return total / sum(weights)
"""
PASSAGE = {
    "prose": "Most of a text follows from the few letters before it. What is new is hard: a name, a number, the "
    "first word of a thought. What was read before should be easy again.\n",
    "code": CODE,
    "same code": CODE,
}
"""What the budget map shows, part by part."""


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    flags.DEFINE_multi_string(
        "run_dir", None, "Run folder, as given to launch.train. Repeat it to compare losses.", required=True
    )
    flags.DEFINE_string("output", None, "Folder for the pictures; that of the run if not given.")
    flags.DEFINE_integer(
        "smooth", 0, "The smoothed loss is a mean over so many steps; 0: a tenth of the longest run.", lower_bound=0
    )
    flags.DEFINE_string("text", None, "The budget map shows this file instead; - reads standard input.")
    flags.DEFINE_integer(
        "window", None, "The budget map shows this window of the held-out split instead.", lower_bound=0
    )
    flags.DEFINE_integer(
        "tokens", None, f"Most tokens of the map; a row of training, up to {MOST_TOKENS}, if not given.", lower_bound=1
    )
    flags.DEFINE_string("data_dir", None, "--window: where prepared datasets lie; the run's folder if not given.")


# Losses.


def read_run(run_dir: AnyPath) -> list[dict[str, Any]]:
    """The metrics of a run that has trained."""
    metrics = read_metrics(run_dir)
    if not metrics and not (run_dir / FILE).exists():
        raise ConfigError(f"--run_dir={run_dir}: there is no {FILE}; train first, with aamoe train")
    if not any(record["kind"] != "validation" and "bits_per_byte" in record for record in metrics):
        raise ConfigError(f"--run_dir={run_dir}: {FILE} has no step of training yet; go on with aamoe train")
    return metrics


def records_of(metrics: Sequence[Mapping[str, Any]], mixture: Mapping[str, float]) -> list[dict[str, Any]]:
    """Metrics under the names that the pictures know: figures per layer at the top; losses in validation apart, as
    means over the datasets by their weights."""
    records: list[dict[str, Any]] = []
    validation: dict[int, dict[str, float]] = {}
    for record in metrics:
        if record["kind"] != "validation":
            records.append(record | record.get("layers", {}))
        elif record.get("bits_per_byte") is not None:
            validation.setdefault(record["step"], {})[record["dataset"]] = record["bits_per_byte"]
    for step, bits in validation.items():
        mean = np.average(list(bits.values()), weights=[mixture[name] for name in bits])
        records.append({"step": step, "validation_bits_per_byte": float(mean)})
    return records


def names_of(runs: Mapping[AnyPath, ExperimentConfig]) -> list[str]:
    """What the legend calls runs: by the fields in which they differ, if these are few and tell them apart; else by
    their folders."""
    first, *others = runs.values()
    fields = sorted({field for other in others for field in differences(first, other)} - FREE_FIELDS)
    names = [
        ", ".join(f"{field.split('.')[1]} = {plain(value_of(run, field))}" for field in fields) for run in runs.values()
    ]
    if 0 < len(fields) <= MOST_FIELDS and len(set(names)) == len(runs):
        return names
    folders = [folder.resolve().name for folder in runs]
    return folders if len(set(folders)) == len(runs) else list(map(str, runs))


def plain(value: Any) -> str:
    """A value of a field as a legend can hold it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# The budget map.


def read_passage(config: ExperimentConfig, tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, int]]:
    """The row that the map shows, for `inspection.read`, and the tokens of its parts by name, if it has any."""
    if FLAGS.window is not None:
        data = program.data_config(config, FLAGS.data_dir)
        windows = evaluation_batches(data, data.mixture[0][0], split="validation", batch_size=1)
        if FLAGS.window >= len(windows):
            raise ConfigError(f"--window={FLAGS.window}: the split has {len(windows)} windows, counted from 0")
        return windows[FLAGS.window], {}
    if FLAGS.text is not None:
        return {"tokens": tokenizer.encode(program.read_text(FLAGS.text))[None]}, {}
    parts = {name: tokenizer.encode(text.encode()) for name, text in PASSAGE.items()}
    return {"tokens": np.concatenate(list(parts.values()))[None]}, {name: len(part) for name, part in parts.items()}


def draw_budget_map(checkpoint: Checkpoint, path: AnyPath) -> None:
    """What every layer spent on every token of the passage, under causal budgets."""
    config = checkpoint.config
    tokenizer = load_tokenizer(config.data.tokenizer)
    row, parts = read_passage(config, tokenizer)
    limit, length = FLAGS.tokens or min(config.data.seq_len, MOST_TOKENS), row["tokens"].shape[1]
    if length > limit:
        program.warn(f"note: the map shows the first {limit} of {length} tokens (--tokens sets how many)")
    row = {name: values[:, :limit] for name, values in row.items()}
    tokens = row["tokens"][0]
    if sum(parts.values()) > len(tokens):
        parts = {}  # cut: the row no longer is what they say
    spent = np.asarray(inspection.read(config.model, checkpoint.params, row, "tokens")[1]["spent"])[:, 0]
    text = [tokenizer.decode(tokens[i : i + 1]).decode("utf-8", "replace") for i in range(len(tokens))]
    layers = inspection.aamoe_layers(config.model)
    pictures.budget_map(text, spent, path, layers=layers, parts=parts)


def refuse_unused(mapped: bool) -> None:
    """Refuses flags of the budget map where there is none."""
    given = {"text": FLAGS.text, "window": FLAGS.window, "tokens": FLAGS.tokens, "data_dir": FLAGS.data_dir}
    unused = [] if mapped else [name for name, value in given.items() if value is not None]
    if unused:
        raise ConfigError(f"--{unused[0]}={given[unused[0]]}: no budget map is drawn of several runs or without AA-MoE")
    if FLAGS.data_dir is not None and FLAGS.window is None:
        raise ConfigError(f"--data_dir={FLAGS.data_dir}: is read with --window alone")


def main(argv: list[str]) -> None:
    """Draws what the model's stack has, and prints the paths."""
    program.refuse_arguments(argv)
    folders = [location("--run_dir", folder) for folder in FLAGS.run_dir]
    if FLAGS.text is not None and FLAGS.window is not None:
        raise ConfigError("give --text or --window, not both: the budget map shows one passage")
    if len(folders) > 1 and FLAGS.output is None:
        raise ConfigError("several --run_dir: give --output=FOLDER for their picture")
    metrics = {folder: read_run(folder) for folder in folders}
    runs = {folder: load_config(folder) for folder in folders}
    mapped = len(runs) == 1 and bool(runs[folders[0]].model.layers_of("aamoe"))
    refuse_unused(mapped)
    records = {folder: records_of(metrics[folder], dict(config.data.mixture)) for folder, config in runs.items()}
    output = Path(FLAGS.output) if FLAGS.output else folders[0]
    output.mkdir(parents=True, exist_ok=True)
    drawn = [output / "loss.png"]
    names = names_of(runs) if len(runs) > 1 else ["training"]
    pictures.loss_curves(dict(zip(names, records.values(), strict=True)), drawn[0], smooth=FLAGS.smooth)
    if mapped:
        drawn += [output / "shares.png", output / "budget_map.png"]
        layers = inspection.aamoe_layers(runs[folders[0]].model)
        pictures.context_expert_share(records[folders[0]], drawn[1], layers=layers)
        draw_budget_map(load_checkpoint(folders[0]), drawn[2])
    for path in drawn:
        print(f"picture {path}")


if __name__ == "__main__":
    define_flags()
    program.run(main)
