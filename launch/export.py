"""Writes a checkpoint as safetensors with a model card, or its functions too.

    aamoe export --checkpoint=runs/quickstart --output=quickstart-1M
    aamoe export --checkpoint=runs/quickstart --output=quickstart-1M --format=stablehlo --length=512
    aamoe export --checkpoint=path/to/llama --gin_file=upcycled.gin --output=upcycled

The folder is in the layout of Hugging Face: model.safetensors, config.json, README.md. Every program that takes a
checkpoint takes it, and so does TrainingConfig.init_from; both take folders of Llama models too, as a stack of
attention+swiglu. Parameters keep their names and bits.

With an experiment, it is the experiment's model: its parameters are the checkpoint's wherever both have the same, an
AA-MoE layer taking those of the attention in its place, and random elsewhere.

With --format=stablehlo the folder also has forward.stablehlo, prefill.stablehlo and decode.stablehlo: functions that
`jax.export` loads without this package. functions.json says what they take and give.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
from absl import flags

import aamoe_jax
from aamoe_jax.config import ConfigError, to_dict
from aamoe_jax.generation.stablehlo import export_functions
from aamoe_jax.training.checkpoints import Checkpoint, load_checkpoint
from aamoe_jax.training.exchange import carried_over, export
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    program.define_experiment_flags()
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_enum("which", "latest", ["latest", "best"], "Of a run: the newest, or that of the best validation.")
    flags.DEFINE_enum("format", "safetensors", ["safetensors", "stablehlo"], "stablehlo: functions for jax.export too.")
    flags.DEFINE_integer(
        "length", None, "With --format=stablehlo: tokens of a row; DataConfig.seq_len if not given.", lower_bound=1
    )
    flags.DEFINE_string("output", None, "Folder that is written; it must not be there.", required=True)


def parameters(checkpoint: Checkpoint) -> int:
    """How many there are."""
    return sum(leaf.size for leaf in jax.tree.leaves(checkpoint.params))


def model_card(checkpoint: Checkpoint, name: str) -> str:
    """What a reader of the folder needs to know, as Markdown."""
    config, loss = checkpoint.config, checkpoint.metadata.get("validation_loss")
    tokens = checkpoint.step * config.training.batch_size * config.data.seq_len
    corpora = ", ".join(corpus for corpus, _ in config.data.mixture)
    facts = {
        "layers": f"{config.model.num_layers} of {' '.join(config.model.pattern)}, width {config.model.d_model}",
        "parameters": f"{parameters(checkpoint):,}",
        "trained on": f"{corpora}: {checkpoint.step:,} steps, {tokens:,} tokens",
        "tokenizer": config.data.tokenizer,
        "validation loss": "not measured" if loss is None else f"{loss:.4f} nats per token",
        "written by": f"aamoe_jax {aamoe_jax.__version__}",
    }
    rows = "\n".join(f"| {fact} | {value} |" for fact, value in facts.items())
    return f"""---
library_name: aamoe_jax
---
# {name}

| | |
|---|---|
{rows}

```python
from aamoe_jax import generate, load_checkpoint

print(generate(load_checkpoint("{name}"), "Once", new_tokens=50))
```

`config.json` has the whole experiment. Parameters are those of `aamoe_jax.LanguageModel`, their names joined by dots;
what begins with `periods.` has a leading axis over the repetitions of the pattern.
"""


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    if FLAGS.length is not None and FLAGS.format != "stablehlo":
        raise ConfigError(f"--length={FLAGS.length}: only the functions of --format=stablehlo have a length")
    checkpoint, output = load_checkpoint(FLAGS.checkpoint, FLAGS.which), Path(FLAGS.output)
    if FLAGS.gin_file or FLAGS.gin_param:
        config = program.experiment_from_flags()
        seed = config.training.seed
        params, new = carried_over(checkpoint.params, checkpoint.config.model, config.model, seed=seed)
        meta = checkpoint.metadata | {"config": to_dict(config), "step": 0, "validation_loss": None}
        checkpoint = Checkpoint(config, params, 0, meta)
        print(f"new parameters, drawn with seed {seed}: {', '.join(new) or 'none'}")
    functions = None
    if FLAGS.format == "stablehlo":
        length = FLAGS.length or checkpoint.config.data.seq_len
        functions = functools.partial(export_functions, checkpoint.config.model, checkpoint.params, length=length)
    export(checkpoint.params, checkpoint.metadata, model_card(checkpoint, output.name), output, functions)
    print(f"{output}: {parameters(checkpoint):,} parameters of step {checkpoint.step}")


if __name__ == "__main__":
    define_flags()
    program.run(main)
