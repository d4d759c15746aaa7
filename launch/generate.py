"""Continues prompts with a trained model, under causal budgets.

    python -m launch.generate --checkpoint=runs/quickstart --prompt='def main('

One prompt is streamed as it is written. Several (--prompt repeated) are decoded together, and printed one after the
other, each under a line that counts them.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from aamoe_jax.config import ConfigError
from aamoe_jax.data import load_tokenizer
from aamoe_jax.data.tokenizers import Tokenizer
from aamoe_jax.evaluation.perplexity import require_budget_scale
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.generate import stream
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.training.checkpoints import load_checkpoint
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_enum("which", "latest", ["latest", "best"], "Of a run: the newest, or that of the best validation.")
    flags.DEFINE_multi_string("prompt", [], "Text to continue. Repeat it to continue several together.")
    flags.DEFINE_multi_string("prompt_file", [], "File whose bytes are to be continued; - reads standard input.")
    flags.DEFINE_integer("tokens", 200, "Most tokens to add to each.", lower_bound=1)
    flags.DEFINE_integer("cache", None, "Tokens that a text has room for, prompt included; as many as needed.")
    flags.DEFINE_float("temperature", 0.7, "0: always the most probable token.")
    flags.DEFINE_integer("top_k", None, "Draw from the k most probable tokens alone.")
    flags.DEFINE_float("top_p", 1.0, "Draw from the most probable tokens that together have this probability.")
    flags.DEFINE_multi_string("stop", [], "Text that ends a continuation, beside the end of a document.")
    flags.DEFINE_integer("seed", 0, "Seed of the draws.")
    flags.DEFINE_enum(
        "budget",
        "causal",
        ["causal", "prefix", "predictor"],
        "`causal`: what the model was trained for, prefix budgets or the predictor under the cap.",
    )
    flags.DEFINE_float("budget_scale", 1.0, "The dial: multiplies the budget of every token.")


def read_prompts() -> list[bytes]:
    """The prompts of --prompt and --prompt_file, as bytes: they need not be UTF-8."""
    prompts = [os.fsencode(prompt) for prompt in FLAGS.prompt]
    for name in FLAGS.prompt_file:
        if name != "-" and not Path(name).is_file():
            raise ConfigError(f"--prompt_file={name}: there is no such file")
        prompts.append(sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes())
    if not prompts:
        raise ConfigError("--prompt: give a text to continue, such as --prompt='def '")
    for prompt in prompts:
        if not prompt:
            raise ConfigError("--prompt='': give at least one byte to continue")
    return prompts


class Printer:
    """Writes bytes to the terminal as text, as soon as they are whole characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, text: bytes, *, last: bool = False) -> None:
        """Writes what is complete; bytes that are no UTF-8 come out as replacement characters."""
        sys.stdout.write(self._decoder.decode(text, final=last))
        sys.stdout.flush()


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    require_budget_scale(FLAGS.budget_scale)
    sampling = Sampling(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
    texts = read_prompts()
    checkpoint = load_checkpoint(FLAGS.checkpoint, which=FLAGS.which)
    tokenizer = load_tokenizer(checkpoint.config.data.tokenizer)
    prompts = [tokenizer.encode(text).astype(np.int32) for text in texts]
    decoder = Decoder(
        checkpoint.config.model,
        checkpoint.params,
        length=FLAGS.cache if FLAGS.cache is not None else max(map(len, prompts)) + FLAGS.tokens,
        budget=None if FLAGS.budget == "causal" else FLAGS.budget,
        max_budget_scale=max(1.0, FLAGS.budget_scale),
    )
    steps = stream(
        decoder,
        prompts,
        new_tokens=FLAGS.tokens,
        sampling=sampling,
        seed=FLAGS.seed,
        stop=[(tokenizer.eos_id,), *(tuple(tokenizer.encode(os.fsencode(text)).tolist()) for text in FLAGS.stop)],
        budget_scale=FLAGS.budget_scale,
    )
    if len(texts) == 1:
        print_stream(texts[0], steps, tokenizer)
    else:
        print_all(texts, steps, tokenizer)


def print_stream(prompt: bytes, steps, tokenizer: Tokenizer) -> None:
    """One text, token by token."""
    printer = Printer()
    printer.write(prompt)
    for (token,) in steps:
        printer.write(tokenizer.decode(np.asarray([token])))
    printer.write(b"\n", last=True)


def print_all(prompts: Sequence[bytes], steps, tokenizer: Tokenizer) -> None:
    """Several texts, when all have ended."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in steps:
        for row, token in zip(rows, tokens, strict=True):
            row += [] if token is None else [token]
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True), 1):
        print(f"--- {number} of {len(prompts)}")
        Printer().write(prompt + tokenizer.decode(np.asarray(row, np.int64)) + b"\n", last=True)


if __name__ == "__main__":
    define_flags()
    program.run(main)
