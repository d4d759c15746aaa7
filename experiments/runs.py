"""Runs that comparisons are made of: trained once, evaluated on held-out text under causal budgets, kept.

A run lies in a folder of its own and goes on from its last checkpoint; one that has its result there is not repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from aamoe_jax.config import ConfigError, ExperimentConfig, to_dict
from aamoe_jax.data import dataset_metadata, evaluation_batches, load_tokenizer
from aamoe_jax.data.tokenizers import Tokenizer
from aamoe_jax.evaluation.budget_use import budget_use
from aamoe_jax.evaluation.perplexity import Evaluation, Evaluator, causal_budget
from aamoe_jax.files import write_whole
from aamoe_jax.model import Skipped, structure
from aamoe_jax.training.checkpoints import Checkpoint, load_checkpoint
from aamoe_jax.training.interrupt import StoppedEarly
from aamoe_jax.training.loop import DivergedError, train
from aamoe_jax.training.metrics import read_metrics
from aamoe_jax.training.resume import FREE_FIELDS, changed_fields
from experiments.binding import operative_gin

BUDGET_BATCHES = 64
"""So many batches show which tokens get large budgets."""

Result = dict[str, Any]
Batch = dict[str, Int[np.ndarray, "b L"]]
More = Callable[[ExperimentConfig, Evaluation, Int[np.ndarray, "L"]], Result]
"""(config, evaluation, targets at every position) -> what a comparison asks of a run beside what every one does."""


class StoppedError(RuntimeError):
    """A run was stopped by a signal. Its state is saved."""

    def __init__(self, signal_number: signal.Signals):
        super().__init__(f"stopped by {signal_number.name}, saved; the same command goes on from there")
        self.exit_code = 128 + signal_number


def comparison(compare: Callable[[], None]) -> Callable[[], int]:
    """A program that makes a comparison: what stopped it is said in one line, and is its exit code."""

    @functools.wraps(compare)
    def main() -> int:
        try:
            compare()
        except DivergedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 3
        except StoppedError as error:
            print(error)
            return error.exit_code
        return 0

    return main


def seeds_of(values: Sequence[str]) -> list[int]:
    """The seeds that --seeds lists.

    Raises:
      ConfigError: one is no number that can be a seed.
    """
    for value in values or ("",):
        if not (value.isascii() and value.isdecimal() and int(value[:20]) < 2**31):
            raise ConfigError(f"--seeds: {value!r} is none: give whole numbers from 0 to 2^31 - 1 with commas between")
    return [int(value) for value in values]


def positive_numbers(flag: str, values: Sequence[str]) -> list[float]:
    """The numbers that a flag lists.

    Raises:
      ConfigError: one is no positive number.
    """
    try:
        numbers = [float(value) for value in values]
    except ValueError as error:
        raise ConfigError(f"--{flag}={','.join(values)}: give numbers with commas between") from error
    if not all(0 < number < np.inf for number in numbers):
        raise ConfigError(f"--{flag}={','.join(values)}: must be positive numbers")
    return numbers


def with_training(config: ExperimentConfig, **values: Any) -> ExperimentConfig:
    """The experiment with other fields of its training; None: as it is."""
    given = {name: value for name, value in values.items() if value is not None}
    return dataclasses.replace(config, training=dataclasses.replace(config.training, **given))


def require_one_dataset(config: ExperimentConfig) -> None:
    """Raises a ConfigError unless there is one dataset, the one to evaluate on."""
    if len(config.data.mixture) != 1:
        raise ConfigError(f"DataConfig.mixture = {config.data.mixture!r}: must be one dataset, the one to evaluate on")


def run(
    config: ExperimentConfig,
    run_dir: Path,
    eval_batches: int,
    *,
    more: More | None = None,
    skipped: frozenset[Skipped] = frozenset(),
) -> Result:
    """Trains and evaluates, or reads what an earlier call has left.

    Args:
      eval_batches: of the test split; 0: all.
      skipped: layers or mixers to leave out in the evaluation.

    Raises:
      ConfigError: what lies in `run_dir` is of another experiment.
      StoppedError: a signal stopped the training.
    """

    def on_test(checkpoint: Checkpoint) -> Result:
        return measure(checkpoint, config, run_dir, eval_batches, more, skipped)

    return once(config, run_dir, "result", on_test, eval_batches=eval_batches, skipped=skipped)


def once(
    config: ExperimentConfig,
    run_dir: Path,
    name: str,
    measured: Callable[[Checkpoint], Result],
    *,
    eval_batches: int = 0,
    skipped: frozenset[Skipped] = frozenset(),
) -> Result:
    """What is measured of a run, which is trained if it has not been; or what an earlier call has left in its folder.

    Args:
      name: of the file, to which the layers or mixers that are skipped add theirs.
      eval_batches: that the result is of; 0: all.

    Raises:
      ConfigError: what lies in `run_dir` is of another experiment.
      StoppedError: a signal stopped the training.
    """
    without = "_without_" + "_".join(sorted(map(str, skipped))) if skipped else ""
    path = run_dir / f"{name}{without}.json"
    if path.exists():
        result = json.loads(path.read_text())
        refuse_other_result(result, config, eval_batches, path)
        return result
    train_whole(config, run_dir)
    checkpoint = load_checkpoint(run_dir)
    ((dataset, _),) = config.data.mixture
    about = {
        "seed": config.training.seed,
        "steps": checkpoint.step,
        "eval_batches": eval_batches,
        "corpus_digest": dataset_metadata(config.data, dataset)["corpus_digest"],
        "versions": checkpoint.metadata["versions"],
        "device": jax.devices()[0].device_kind,
        "config": to_dict(config),
    }
    return keep(about | measured(checkpoint), path)


def validate(config: ExperimentConfig, run_dir: Path) -> float:
    """Bits per byte on all of the validation split, by a run that is trained if it has not been: what choices such as a
    learning rate may be made by.

    Raises:
      ConfigError: what lies in `run_dir` is of another experiment.
      StoppedError: a signal stopped the training.
    """

    def on_validation(checkpoint: Checkpoint) -> Result:
        evaluation = _evaluated(checkpoint, config, "validation", 0, frozenset())[0]
        return {"bits_per_byte": evaluation.bits_per_byte, "documents": None}

    return once(config, run_dir, "validation", on_validation)["bits_per_byte"]


def train_whole(config: ExperimentConfig, run_dir: Path) -> None:
    """Trains to the last step, from the last checkpoint in `run_dir` on.

    Raises:
      ConfigError: what lies in `run_dir` is of another experiment.
      StoppedError: a signal stopped the training.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        ended = train(config, run_dir, notes={"config.gin": operative_gin(config)})
    except StoppedEarly as error:
        raise StoppedError(error.signal) from error
    if ended.interrupted is not None:
        raise StoppedError(ended.interrupted)


def keep(result: Result, path: Path) -> Result:
    """Writes a result, whole or not at all, and returns it as a later call will read it: without tuples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return json.loads(path.read_text())


def refuse_other_result(result: Result, config: ExperimentConfig, eval_batches: int, path: Path) -> None:
    """Raises a ConfigError unless the result is of this experiment, and has what reports show."""
    if "documents" not in result:
        raise ConfigError(f"{path} was measured by an older version: delete this file; the training is kept")
    changed = {
        name: values
        for name, values in changed_fields(result["config"], to_dict(config), ExperimentConfig).items()
        if name not in FREE_FIELDS
    }
    if result["eval_batches"] != eval_batches:
        changed["--eval_batches"] = (result["eval_batches"], eval_batches)
    ((dataset, _),) = config.data.mixture
    digest = dataset_metadata(config.data, dataset)["corpus_digest"]
    if result["corpus_digest"] != digest:
        changed[f"corpus_digest of {dataset}"] = (result["corpus_digest"], digest)
    if changed:
        what = ", ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items())
        raise ConfigError(f"{path} is of another experiment ({what}): take another --work_dir, or the old values")


def measure(
    checkpoint: Checkpoint,
    config: ExperimentConfig,
    run_dir: Path,
    eval_batches: int,
    more: More | None,
    skipped: frozenset[Skipped],
) -> Result:
    """A finished run on the test split, under causal budgets."""
    evaluation, batches, tokenizer = _evaluated(checkpoint, config, "test", eval_batches, skipped)
    inputs, budget = (structure(config.model, skipped), checkpoint.params), causal_budget(config.model)
    budgets = budget_use(*inputs, batches[:BUDGET_BATCHES], budget=budget) if "spent" in evaluation.statistics else None
    counts = sum(batch["loss_mask"].sum(0) for batch in batches)
    speeds = [record["tokens_per_second"] for record in read_metrics(run_dir) if record["kind"] == "train"]
    return {
        "bits_per_byte": evaluation.bits_per_byte,
        "nats_per_token": evaluation.nats_per_token,
        "tokens_per_second": statistics.median(speeds),
        "evaluation": evaluation.to_dict(),
        "documents": by_document(np.asarray(evaluation.nll_by_target), batches, tokenizer),
        "budgets": budgets,
        **(more(config, evaluation, counts) if more else {}),
    }


def _evaluated(
    checkpoint: Checkpoint, config: ExperimentConfig, split: str, eval_batches: int, skipped: frozenset[Skipped]
) -> tuple[Evaluation, list[Batch], Tokenizer]:
    """A checkpoint on the first batches of a split (0: on all of it), under causal budgets, and what it was made of."""
    ((dataset, _),) = config.data.mixture
    rows = config.training.batch_size // config.training.accumulate
    source = evaluation_batches(config.data, dataset, split=split, batch_size=rows)
    batches = [source[index] for index in range(min(eval_batches or len(source), len(source)))]
    tokenizer = load_tokenizer(config.data.tokenizer)
    evaluate = Evaluator(structure(config.model, skipped), config.model, budget=causal_budget(config.model))
    return evaluate(checkpoint.params, batches, tokenizer.byte_lengths), batches, tokenizer


def by_document(
    nll: Float[np.ndarray, "rows L"], batches: Sequence[Batch], tokenizer: Tokenizer
) -> list[tuple[float, int]]:
    """Nats and bytes of every document, in the order of the split."""
    tokens, targets, counts = (
        np.concatenate([batch[name] for batch in batches]).reshape(-1) for name in ("tokens", "targets", "loss_mask")
    )
    ends = tokens == tokenizer.eos_id
    document = np.cumsum(ends) - ends  # rows follow one another in the stream
    nats = np.bincount(document, nll.reshape(-1))
    size = np.bincount(document, tokenizer.byte_lengths[targets] * counts)
    return [(float(n), int(s)) for n, s in zip(nats, size, strict=True) if s]
