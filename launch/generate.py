"""Continues prompts with a trained model, under causal budgets.

    aamoe generate --checkpoint=runs/quickstart --prompt='def main('

One prompt is streamed as it is written. Several (--prompt repeated) are decoded together, and printed one after the
other, each under a line that counts them.
"""

from __future__ import annotations

import codecs
import itertools
import os
import sys
from pathlib import Path

from absl import flags

from aamoe_jax.config import ConfigError
from aamoe_jax.evaluation.perplexity import require_budget_scale
from aamoe_jax.generation.generate import DEFAULT_SAMPLING, stream_text
from aamoe_jax.generation.sampling import Sampling
from launch import program

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this program."""
    program.define_import_flag()
    program.define_mesh_flags()
    flags.DEFINE_string("checkpoint", None, "Run folder, or one checkpoint in it.", required=True)
    flags.DEFINE_enum("which", "latest", ["latest", "best"], "Of a run: the newest, or that of the best validation.")
    flags.DEFINE_multi_string("prompt", [], "Text to continue. Repeat it to continue several together.")
    flags.DEFINE_multi_string("prompt_file", [], "File whose bytes are to be continued; - reads standard input.")
    flags.DEFINE_integer("tokens", 200, "Most tokens to add to each.", lower_bound=1, upper_bound=2**20)
    flags.DEFINE_integer(
        "cache",
        None,
        "Length of the cache in tokens, prompt included; as many as needed if not given.",
        lower_bound=1,
        upper_bound=2**20,
    )
    flags.DEFINE_float("temperature", DEFAULT_SAMPLING.temperature, "0: always the most probable token.")
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
    flags.DEFINE_float("budget_scale", 1.0, "Multiplies the budget of every token.")


def read_prompts() -> list[bytes]:
    """The prompts of --prompt and --prompt_file, as bytes: they need not be UTF-8."""
    prompts = [os.fsencode(prompt) for prompt in FLAGS.prompt]
    for name in FLAGS.prompt_file:
        if name == "-" and FLAGS.distributed:
            raise ConfigError("--prompt_file=-: several processes have no common input; give a file that all can read")
        if name != "-" and not Path(name).is_file():
            raise ConfigError(f"--prompt_file={name}: there is no such file")
        prompts.append(sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes())
    if not prompts:
        raise ConfigError("--prompt: give a text to continue, such as --prompt='def '")
    given = [f"--prompt={prompt!r}" for prompt in FLAGS.prompt]
    given += [f"--prompt_file={name}" for name in FLAGS.prompt_file]
    for name, prompt in zip(given, prompts, strict=True):
        if not prompt:
            raise ConfigError(f"{name}: it is empty; give at least one byte to continue")
    return prompts


def main(argv: list[str]) -> None:
    program.refuse_arguments(argv)
    require_budget_scale(FLAGS.budget_scale)
    sampling = Sampling(FLAGS.temperature, FLAGS.top_k, FLAGS.top_p)
    prompts = read_prompts()
    pieces = stream_text(
        program.load_on_mesh(FLAGS.checkpoint, FLAGS.which),
        prompts,
        new_tokens=FLAGS.tokens,
        sampling=sampling,
        seed=FLAGS.seed,
        stop=[os.fsencode(text) for text in FLAGS.stop],
        budget=None if FLAGS.budget == "causal" else FLAGS.budget,
        budget_scale=FLAGS.budget_scale,
        cache_length=FLAGS.cache,
    )
    if len(prompts) == 1:
        # As it is generated, in whole characters; the prompt with the first token, so that an error leaves no output.
        first = next(pieces)[0]
        new = itertools.chain([prompts[0] + first], (piece for (piece,) in pieces))
        for text in codecs.iterdecode(new, "utf-8", "replace"):
            print(text, end="", flush=True)
        print()
    else:
        texts = [b"".join(text).decode("utf-8", "replace") for text in zip(prompts, *pieces, strict=True)]
        for number, text in enumerate(texts, 1):
            print(f"--- {number} of {len(texts)}\n{text}")


if __name__ == "__main__":
    define_flags()
    program.run_on_mesh(main)
