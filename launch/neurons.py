"""Analyzes layers as networks of neurons, and measures the loss with fewer of them.

    aamoe neurons --checkpoint=runs/dense                            # networks, ranks, longest messages
    aamoe neurons --checkpoint=runs/dense --thresholds=0,0.5,1       # heads without short messages
    aamoe neurons --checkpoint=runs/dense --clusters=16 --clusters_kept=1,4,16   # heads routed to clusters

Prints tables, and writes neurons.json into the run folder unless --output says otherwise.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from aamoe_jax.analysis import neurons, thinning
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.data import evaluation_batches, load_tokenizer
from aamoe_jax.registry import MIXERS
from aamoe_jax.training.checkpoints import Checkpoint, load_checkpoint
from aamoe_jax.training.metrics import read_metrics
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_integer("messages", 3, "Longest learned messages shown of every layer.", lower_bound=0)
    flags.DEFINE_list("thresholds", [], "Filters heads by the norm of messages, at each of these thresholds.")
    flags.DEFINE_integer("clusters", 16, "Clusters of keys in every head.", lower_bound=1)
    flags.DEFINE_list("clusters_kept", [], "Routes queries to so many clusters, one number after the other.")
    flags.DEFINE_string("dataset", None, "Dataset to measure on; the first of the run if not given.")
    flags.DEFINE_enum("split", "validation", ["validation", "test"], "Held-out split to measure on.")
    flags.DEFINE_integer("batch_size", 8, "Rows per forward pass.", lower_bound=1)
    flags.DEFINE_integer("max_batches", 4, "Batches of the split.", lower_bound=1)
    flags.DEFINE_string("data_dir", None, "Where prepared datasets lie; the run's folder if not given.")
    flags.DEFINE_string("output", None, "JSON file to write; inside the run folder if not given.")


def numbers(name: str, kind: type) -> list[Any]:
    """The numbers of a list flag."""
    given: list[str] = FLAGS[name].value or []
    try:
        found = [kind(text) for text in given]
    except ValueError:
        found = [math.nan]
    if not all(number >= (kind is int) and math.isfinite(number) for number in found):
        example = "1,4,16" if kind is int else "0,0.5,1"
        raise ConfigError(f"--{name}={','.join(given)}: must be numbers such as {example}")
    return found


# What is read.


def networks(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """One record per network of a layer: how many side by side, neurons, ranks, and its longest messages in tokens.

    Of a mixer that cannot be read there is one without all that: its network is None.
    """
    model, tokenizer = checkpoint.config.model, load_tokenizer(checkpoint.config.data.tokenizer)
    records = []
    for layer, name, mixer in neurons.mixers_of(checkpoint.params, model):
        if not MIXERS[name].readable:
            records.append({"layer": layer, "mixer": name, "network": None})
            continue
        ranks = neurons.ranks(name, mixer, model)
        for label, network in neurons.as_neurons(name, mixer, model).items():
            messages = network.M.reshape(-1, model.d_model)
            longest = messages[np.argsort(-np.linalg.norm(messages, axis=1))[: FLAGS.messages]]
            likely = neurons.likely_tokens(longest, checkpoint.params, model, 4)
            found = {"layer": layer, "mixer": name, "network": label}
            found |= {"side_by_side": len(network.M), "neurons": network.M.shape[1]}
            found |= {field: [getattr(rank, field) for rank in ranks[label]] for field in neurons.Rank._fields}
            text = [
                [tokenizer.decode(np.array([token])).decode("utf-8", "backslashreplace") for token in row]
                for row in likely
            ]
            records.append(found | {"likely": text})
    return records


def active(model: ModelConfig) -> dict[str, list[float]]:
    """Neurons of a head that every AA-MoE layer evaluated for a token, when the run last told; {} if it never did."""
    folder = program.run_folder(FLAGS.checkpoint)
    told = [record["layers"] for record in read_metrics(folder) if "spent" in record.get("layers", {})]
    return neurons.active_neurons(told[-1], model) if told else {}


def sizes(model: ModelConfig) -> dict[str, Any]:
    """Neurons of the stack, and parameters of its mixers."""
    found = {
        "learned": neurons.static_neurons(model),
        "per_token": neurons.neurons_per_token(model),
        "per_token_distinct": neurons.neurons_per_token(model, "distinct"),
        "parameters": {name: neurons.parameters(name, model) for _, name in model.mixers},
    }
    return found | ({"crossover": neurons.crossover(model)} if found["per_token"] else {})


def sweep(checkpoint: Checkpoint) -> list[dict[str, float]]:
    """What --thresholds or --clusters_kept ask for."""
    data = program.data_config(checkpoint.config, FLAGS.data_dir)
    name = FLAGS.dataset or data.mixture[0][0]
    split = evaluation_batches(data, name, split=FLAGS.split, batch_size=FLAGS.batch_size)
    batches = list(itertools.islice(split, FLAGS.max_batches))
    what = checkpoint.params, checkpoint.config.model, batches, load_tokenizer(data.tokenizer).byte_lengths
    if FLAGS.thresholds:
        return thinning.filter_sweep(*what, numbers("thresholds", float))
    return thinning.cluster_sweep(*what, FLAGS.clusters, numbers("clusters_kept", int))


# What is shown.


def table_of_networks(records: Sequence[dict[str, Any]]) -> str:
    """As text, one network a line."""
    lines = [
        f"{'layer':>5}  {'mixer':<20}{'network':<14}{'neurons':>14}{'rank':>12}{'stable rank':>13}  longest messages"
    ]
    for record in records:
        if record["network"] is None:
            lines.append(f"{record['layer']:>5}  {record['mixer']:<20}cannot be read as neurons")
            continue
        counted = f"{record['side_by_side']} x {record['neurons'] or 'tokens'}"
        rank = f"{min(record['numerical'])} of {max(record['largest'])}"
        shown = "  ".join("".join(map(repr, tokens)) for tokens in record["likely"])
        name = f"{record['layer']:>5}  {record['mixer']:<20}{record['network']:<14}"
        lines.append(f"{name}{counted:>14}{rank:>12}{np.mean(record['stable']):>13.2f}  {shown}")
    return "\n".join(lines)


def table_of_sweep(records: Sequence[dict[str, float]]) -> str:
    """As text, one setting a line; figures by name."""
    lines = ["".join(f"{name:>12}" for name in records[0])]
    return "\n".join(lines + ["".join(f"{value:>12.4f}" for value in record.values()) for record in records])


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    if FLAGS.thresholds and FLAGS.clusters_kept:
        raise ConfigError("give --thresholds or --clusters_kept, one at a time")
    checkpoint = load_checkpoint(FLAGS.checkpoint)
    if FLAGS.thresholds or FLAGS.clusters_kept:
        record: dict[str, Any] = {"step": checkpoint.step, "sweep": sweep(checkpoint)}
        print(table_of_sweep(record["sweep"]))
    else:
        counts = sizes(checkpoint.config.model)
        record = {"step": checkpoint.step, "sizes": counts, "networks": networks(checkpoint)}
        record["active"] = active(checkpoint.config.model)
        print(table_of_networks(record["networks"]))
        print(f"{counts['learned']} learned neurons; every token adds {counts['per_token']} to the heads")
        if "crossover" in counts:
            print(f"heads have more neurons than were learned after {counts['crossover']} tokens")
        for kind, counts in record["active"].items():
            print(f"neurons of a head that a token met, {kind}: " + ", ".join(f"{count:.1f}" for count in counts))
    output = FLAGS.output or program.run_folder(FLAGS.checkpoint) / "neurons.json"
    program.write(output, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    define_flags()
    program.run(main)
