"""Draws a run: the loss, shares of context and experts, and a map of budgets.

aamoe draw --run_dir=runs/quickstart
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Int

from aamoe_jax.analysis import pictures
from aamoe_jax.bucket import AnyPath, location
from aamoe_jax.config import ConfigError, ExperimentConfig
from aamoe_jax.data import evaluation_batches, load_tokenizer
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.model import merge, structure
from aamoe_jax.training.checkpoints import load_checkpoint
from aamoe_jax.training.metrics import FILE, read_metrics
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    flags.DEFINE_string("run_dir", None, "Run folder, as given to launch.train.", required=True)
    flags.DEFINE_integer("window", 0, "Which window of the held-out split the budget map shows.", lower_bound=0)
    flags.DEFINE_integer("tokens", 440, "How many tokens of it.", lower_bound=1)
    flags.DEFINE_string("data_dir", None, "Where prepared datasets lie; the run's folder if not given.")


def read_records(run_dir: AnyPath) -> list[dict[str, Any]]:
    """The metrics of a run, under the names that the pictures know: figures per layer at the top, validation apart."""
    metrics = read_metrics(run_dir)
    if not metrics and not (run_dir / FILE).exists():
        raise ConfigError(f"--run_dir={run_dir}: there is no {FILE}; train first, with aamoe train")
    records = [
        {"step": record["step"], "validation_bits_per_byte": record.get("bits_per_byte")}
        if record["kind"] == "validation"
        else record | record.get("layers", {})
        for record in metrics
    ]
    if not any("bits_per_byte" in record for record in records):
        raise ConfigError(f"--run_dir={run_dir}: {FILE} has no step of training yet; go on with aamoe train")
    return records


def spent_on_passage(
    config: ExperimentConfig, params: dict[str, Any], passage: dict[str, Int[np.ndarray, "1 L"]]
) -> Int[np.ndarray, "layers L"]:
    """Resources that every layer gave to every token, under causal budgets."""

    @jax.jit
    def spent(params: dict[str, Any]) -> Any:
        model = merge(structure(config.model), params)
        inputs = (jnp.asarray(passage[key]) for key in ("tokens", "segment_ids", "positions"))
        return model(*inputs, budget=causal_budget(config.model), detail="tokens")[1]["spent"]

    return np.asarray(spent(params))[:, 0]


def main(argv: list[str]) -> None:
    """Draws what the model's stack has, and prints the paths."""
    program.refuse_arguments(argv)
    run_dir = location("--run_dir", FLAGS.run_dir)
    records = read_records(run_dir)
    drawn = [run_dir / "loss.png"]
    pictures.loss_curve(records, drawn[0])
    checkpoint = load_checkpoint(run_dir)
    if checkpoint.config.model.layers_of("aamoe"):
        drawn += [run_dir / "shares.png", run_dir / "budget_map.png"]
        pictures.context_expert_share(records, drawn[1])
        data = program.data_config(checkpoint.config, FLAGS.data_dir)
        windows = evaluation_batches(data, data.mixture[0][0], split="validation", batch_size=1)
        if FLAGS.window >= len(windows):
            raise ConfigError(f"--window={FLAGS.window}: the split has {len(windows)} windows, counted from 0")
        passage = windows[FLAGS.window]
        spent = spent_on_passage(checkpoint.config, checkpoint.params, passage)
        tokenizer = load_tokenizer(data.tokenizer)
        shown = passage["tokens"][0, : FLAGS.tokens]
        text = [tokenizer.decode(shown[i : i + 1]).decode("utf-8", "replace") for i in range(len(shown))]
        pictures.budget_map(text, spent[:, : len(shown)], drawn[2], layers=range(len(spent)))
    for path in drawn:
        print(f"picture {path}")


if __name__ == "__main__":
    define_flags()
    program.run(main)
