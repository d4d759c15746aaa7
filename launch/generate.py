"""Continues a prompt with a trained model, under causal budgets.

python -m launch.generate --checkpoint=runs/quickstart --prompt='def main('
"""

from __future__ import annotations

from absl import flags

from aamoe_jax.data import load_tokenizer
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.generation.sample import sample
from aamoe_jax.model import structure
from aamoe_jax.training.checkpoints import load_checkpoint
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_string("prompt", "def ", "Text to continue.")
    flags.DEFINE_integer("tokens", 200, "Tokens to add.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.7, "0: always the most probable token.", lower_bound=0.0)
    flags.DEFINE_integer("seed", 0, "Seed of the draws.")


def main(argv: list[str]) -> None:
    """Prints the prompt and what follows it."""
    program.refuse_arguments(argv)
    checkpoint = load_checkpoint(FLAGS.checkpoint)
    tokenizer = load_tokenizer(checkpoint.config.data.tokenizer)
    tokens = sample(
        structure(checkpoint.config.model),
        checkpoint.params,
        tokenizer.encode(FLAGS.prompt.encode()),
        new_tokens=FLAGS.tokens,
        temperature=FLAGS.temperature,
        seed=FLAGS.seed,
        budget=causal_budget(checkpoint.config.model),
        stop_id=tokenizer.eos_id,
    )
    print(FLAGS.prompt + tokenizer.decode(tokens).decode("utf-8", "replace"))


if __name__ == "__main__":
    define_flags()
    program.run(main)
