"""Continues prompts with a trained model, under causal budgets.

    python -m launch.generate --checkpoint=runs/quickstart --prompt='def main('

One prompt is streamed as it is written. Several (--prompt repeated) are decoded together, and printed one after the
other, each under a line that counts them.
"""

from __future__ import annotations

import codecs
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
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
Step = list[int | None]
"""The next token of every text; None for one that has ended."""


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
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
    flags.DEFINE_integer("seed", 0, "Seed of the draws.", lower_bound=0, upper_bound=2**32 - 1)
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
    given = [f"--prompt={prompt!r}" for prompt in FLAGS.prompt] + [
        f"--prompt_file={name}" for name in FLAGS.prompt_file
    ]
    for name, prompt in zip(given, prompts, strict=True):
        if not prompt:
            raise ConfigError(f"{name}: it is empty; give at least one byte to continue")
    return prompts


class Continuation:
    """The bytes that follow one prompt, up to the first stop that they come to."""

    def __init__(self, stops: Sequence[bytes]):
        self._stops = [stop for stop in stops if stop]
        self.text = b""
        self.ended = False

    def add(self, new: bytes) -> bytes:
        """What of the new bytes belongs to the text: all of them, or those up to the end of a stop."""
        if self.ended:
            return b""
        # A stop that was not complete before ends within the new bytes.
        start = len(self.text)
        self.text += new
        ends = [self.text.find(stop, max(0, start - len(stop) + 1)) + len(stop) for stop in self._stops]
        ends = [end for stop, end in zip(self._stops, ends, strict=True) if end >= len(stop)]
        if ends:
            self.ended = True
            self.text = self.text[: min(ends)]
        return self.text[start:]


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
    sampling = dataclasses.replace(sampling, vocab_size=tokenizer.vocab_size)
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
        stop=[(tokenizer.eos_id,)],
        budget_scale=FLAGS.budget_scale,
    )
    # Stops are text and not tokens: one text has many spellings in tokens.
    stops = [os.fsencode(text) for text in FLAGS.stop]
    if len(texts) == 1:
        print_stream(texts[0], stops, steps, tokenizer)
    else:
        print_all(texts, stops, steps, tokenizer)


def print_stream(prompt: bytes, stops: Sequence[bytes], steps: Iterator[Step], tokenizer: Tokenizer) -> None:
    """One text, token by token; the prompt once there is something to follow it."""
    printer, continuation = Printer(), Continuation(stops)
    for number, (token,) in enumerate(steps):
        new = continuation.add(tokenizer.decode(np.asarray([token])))
        printer.write(new if number else prompt + new)
        if continuation.ended:
            break
    printer.write(b"\n", last=True)


def print_all(prompts: Sequence[bytes], stops: Sequence[bytes], steps: Iterator[Step], tokenizer: Tokenizer) -> None:
    """Several texts, when all have ended."""
    continuations = [Continuation(stops) for _ in prompts]
    for tokens in steps:
        for continuation, token in zip(continuations, tokens, strict=True):
            if token is None:
                continuation.ended = True
            else:
                continuation.add(tokenizer.decode(np.asarray([token])))
        if all(continuation.ended for continuation in continuations):
            break
    for number, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True), 1):
        print(f"--- {number} of {len(prompts)}")
        Printer().write(prompt + continuation.text + b"\n", last=True)


if __name__ == "__main__":
    define_flags()
    program.run(main)
