"""Shows what the tokens of a text spend their budgets on, as an HTML page.

    aamoe inspect --checkpoint=runs/quickstart --text=FILE       # one HTML page; FILE may be - for stdin
    aamoe inspect --checkpoint=runs/dense --text=FILE --maps     # indicators of attention maps
    aamoe inspect --checkpoint=runs/quickstart --copies          # repeated against new text, held-out split

The page is one file that loads nothing: every token of the passage with its resources, layer by layer. `--copies`
prints a table and writes copying.json. Both go into the run folder unless --output says otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from jaxtyping import Int

from aamoe_jax.analysis import copying, indicators
from aamoe_jax.analysis.inspection import Inspection, aamoe_layers, inspect_passage
from aamoe_jax.analysis.inspection_page import page_data, render
from aamoe_jax.config import ConfigError, ExperimentConfig
from aamoe_jax.data import evaluation_batches, load_tokenizer
from aamoe_jax.evaluation.perplexity import causal_budget, require_budget_scale
from aamoe_jax.training.checkpoints import Checkpoint
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    program.define_mesh_flags()
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_string("text", None, "File that holds the passage; - reads standard input.")
    flags.DEFINE_bool("copies", False, "Measure repeated against new tokens of a held-out split instead.")
    flags.DEFINE_bool(
        "maps",
        False,
        "With --text, for stacks whose layers compute full attention maps: their indicators, and no page.",
    )
    flags.DEFINE_integer("tokens", None, "Most tokens shown; a row of training if not given.", lower_bound=1)
    flags.DEFINE_float("budget_scale", 1.0, "Multiplies the budget of every token.")
    flags.DEFINE_string("output", None, "File to write; inside the run folder if not given.")
    flags.DEFINE_list("datasets", [], "--copies: datasets to measure on; the mixture of the run if not given.")
    flags.DEFINE_enum("split", "test", ["validation", "test"], "--copies: held-out split.")
    flags.DEFINE_integer("batch_size", 8, "--copies: rows per forward pass.", lower_bound=1)
    flags.DEFINE_integer("max_batches", 0, "--copies: that many, evenly spread; 0: all.", lower_bound=0)
    flags.DEFINE_string("data_dir", None, "--copies: where prepared datasets lie; the run's folder if not given.")


# The page.


def facts(checkpoint: Checkpoint, inspection: Inspection, text_bytes: int, scale: float) -> list[tuple[str, str]]:
    """What stands at the head of the page, given the bytes of text that the model predicted."""
    model = checkpoint.config.model
    budget = causal_budget(model) + (f" × {scale:g}" if scale != 1 else "")
    resources = f"{inspection.num_chunks} chunks of {inspection.chunk_size}, {inspection.num_experts} experts"
    # A passage of one token predicts nothing.
    loss = [("loss", f"{np.nansum(inspection.bits) / text_bytes:.3f} bits per byte")] if text_bytes else []
    return [
        ("model", f"{program.run_folder(FLAGS.checkpoint).resolve().name}, step {checkpoint.step}"),
        ("budgets", budget),
        ("resources", resources),
        ("passage", f"{len(inspection.tokens)} tokens"),
        *loss,
    ]


def read_passage(config: ExperimentConfig) -> tuple[Int[np.ndarray, "L"], list[str]]:
    """The tokens of --text that are shown, and what is to be said of them, which is told on stderr too."""
    if FLAGS.text == "-" and FLAGS.distributed:
        raise ConfigError("--text=-: several processes have no common input; give a file that all can read")
    tokens = load_tokenizer(config.data.tokenizer).encode(program.read_text(FLAGS.text)).astype(np.int32)
    limit, notes = FLAGS.tokens or config.data.seq_len, []
    if len(tokens) > limit:
        notes.append(f"Cut: the first {limit} of {len(tokens)} tokens are shown (--tokens sets how many).")
        tokens = tokens[:limit]
    if len(tokens) > config.data.seq_len:
        notes.append(f"Longer than the rows of training, which had {config.data.seq_len} tokens.")
    for note in notes:
        program.warn(f"note: {note}")
    return tokens, notes


def write_page(checkpoint: Checkpoint) -> None:
    """Writes the page of --text."""
    config = checkpoint.config
    tokenizer = load_tokenizer(config.data.tokenizer)
    tokens, notes = read_passage(config)
    inspection = inspect_passage(config.model, checkpoint.params, tokens, budget_scale=FLAGS.budget_scale)
    predicted = int(tokenizer.byte_lengths[tokens[1:]].sum())
    source = "standard input" if FLAGS.text == "-" else Path(FLAGS.text).name
    data = page_data(
        inspection,
        config.model.aamoe,
        tokenizer,
        source=source,
        facts=facts(checkpoint, inspection, predicted, FLAGS.budget_scale),
        notes=notes,
    )
    stem = "stdin" if FLAGS.text == "-" else Path(FLAGS.text).stem
    write(f"inspect-{stem}.html", render(data))


# Copies.


def measure_copies(checkpoint: Checkpoint) -> dict[str, Any]:
    """The record of --copies: one result per dataset and n."""
    data = program.data_config(checkpoint.config, FLAGS.data_dir)
    results = []
    for name in FLAGS.datasets or [name for name, _ in data.mixture]:
        ledger = copying.observe(
            checkpoint.config.model,
            checkpoint.params,
            evaluation_batches(data, name, split=FLAGS.split, batch_size=FLAGS.batch_size),
            eos_id=load_tokenizer(data.tokenizer).eos_id,
            max_batches=FLAGS.max_batches,
            budget_scale=FLAGS.budget_scale,
        )
        documents = len(np.unique(ledger.cluster))
        comparisons = [copying.compare(ledger, n) for n in copying.NGRAMS]
        results.append({"dataset": name, "tokens": len(ledger.token), "documents": documents, "n": comparisons})
    return {
        "checkpoint": FLAGS.checkpoint,
        "step": checkpoint.step,
        "split": FLAGS.split,
        "budget": causal_budget(checkpoint.config.model),
        "budget_scale": FLAGS.budget_scale,
        "layers": list(aamoe_layers(checkpoint.config.model)),
        "results": results,
    }


def table(result: dict[str, Any], layers: list[int]) -> str:
    """One dataset's comparisons as a text table."""
    lines = [
        f"{result['dataset']}: {result['tokens']} tokens of {result['documents']} documents; ± one standard error",
        f"{'':<26}{'resources per token':^21}{'copied - novel':>18}{'same token, place':>19}{'context share':>17}",
        f"{'n':>3} {'copied':>9}  {'layer':<10}{'copied':>10}{'novel':>9}{'':>39}{'copied':>9}{'novel':>8}",
    ]
    for entry in result["n"]:
        lines += _rows(entry, layers)
    return "\n".join(lines)


def _rows(entry: dict[str, Any], layers: list[int]) -> list[str]:
    copied, novel, plain, matched = (entry[name] for name in ("copied", "novel", "difference", "matched"))
    head = f"{entry['n']:>3} {copied['tokens']:>9}  "
    if plain is None:
        return [f"{head}nothing to compare"]
    lines = []
    for index, layer in enumerate(layers):
        figures = f"{copied['spent'][index]:>10.3f}{novel['spent'][index]:>9.3f}"
        near = _with_error(matched["spent"][index]) if matched else "-"
        shares = f"{copied['pairs_context'][index]:>9.3f}{novel['pairs_context'][index]:>8.3f}"
        lines.append(f"{f'layer {layer}':<10}{figures}{_with_error(plain['spent'][index]):>19}{near:>20}{shares}")
    near = _with_error(matched["nats"]) if matched else "-"
    nats = f"{copied['nats']:>10.3f}{novel['nats']:>9.3f}{_with_error(plain['nats']):>19}{near:>20}"
    lines.append(f"{'nats, next':<10}{nats}")
    return [head + lines[0]] + [" " * len(head) + line for line in lines[1:]]


def _with_error(pair: tuple[float, float]) -> str:
    return f"{pair[0]:+.3f} ± {pair[1]:.3f}"


def write(name: str, text: str) -> None:
    """Writes --output, or `name` in the run folder."""
    program.write(FLAGS.output or program.run_folder(FLAGS.checkpoint) / name, text)


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    require_budget_scale(FLAGS.budget_scale)
    if (FLAGS.text is None) == (not FLAGS.copies):
        raise ConfigError("give either --text=FILE, which writes a page, or --copies, which measures a held-out split")
    if FLAGS.maps and (FLAGS.copies or FLAGS.budget_scale != 1):
        raise ConfigError("--maps: give --text=FILE with it, and neither --copies nor --budget_scale")
    checkpoint = program.load_on_mesh(FLAGS.checkpoint)
    if FLAGS.maps:
        tokens, _ = read_passage(checkpoint.config)
        found = indicators.attention_maps(checkpoint.config.model, checkpoint.params, tokens)
        print(f"checkpoint of step {checkpoint.step}, {len(tokens)} tokens")
        print(indicators.table(found))
        return
    aamoe_layers(checkpoint.config.model)
    if FLAGS.copies:
        record = measure_copies(checkpoint)
        print(f"checkpoint of step {checkpoint.step}, {FLAGS.split} split, {record['budget']} budgets")
        for result in record["results"]:
            print(table(result, record["layers"]))
        write("copying.json", json.dumps(record, indent=1) + "\n")
    else:
        write_page(checkpoint)


if __name__ == "__main__":
    define_flags()
    program.run_on_mesh(main)
