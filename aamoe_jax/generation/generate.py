"""Continues text with the model of a checkpoint: prompts are encoded, and new tokens decoded, by its tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from aamoe_jax.data import load_tokenizer
from aamoe_jax.data.tokenizers import Tokenizer
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.generation.stream import stream
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.training.checkpoints import Checkpoint

DEFAULT_SAMPLING = Sampling(temperature=0.7)


def generate(
    checkpoint: Checkpoint,
    prompt: str,
    *,
    new_tokens: int = 200,
    sampling: Sampling = DEFAULT_SAMPLING,
    seed: int = 0,
    stop: Sequence[str] = (),
    budget: BudgetMode | None = None,
    budget_scale: float = 1.0,
    cache_length: int | None = None,
) -> str:
    """The text that follows a prompt, without the prompt.

    Args:
      checkpoint: from `load_checkpoint`.
      new_tokens: most tokens to add. The text ends earlier after an end of document or a stop.
      sampling: temperature, top-k and top-p; `Sampling(temperature=0.0)` takes the most probable token.
      seed: of the draws; the same seed gives the same text.
      stop: texts that end the continuation, which includes the one that ended it.
      budget: `prefix` or `predictor`; None: `causal_budget` of the model.
      budget_scale: multiplies the budget of every token in the AA-MoE layers.
      cache_length: tokens that the caches hold, prompt included; None: as many as needed. Calls with the same length
        share compiled code.

    Returns:
      The new text; bytes that are not UTF-8 are replaced by U+FFFD.

    Raises:
      ConfigError: the prompt is empty or does not fit into `cache_length`, or the model cannot have such a budget.
    """
    pieces = stream_text(
        checkpoint,
        [prompt.encode()],
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop=[text.encode() for text in stop],
        budget=budget,
        budget_scale=budget_scale,
        cache_length=cache_length,
    )
    return b"".join(piece for (piece,) in pieces).decode(errors="replace")


def stream_text(
    checkpoint: Checkpoint,
    prompts: Sequence[bytes],
    *,
    new_tokens: int,
    sampling: Sampling = DEFAULT_SAMPLING,
    seed: int = 0,
    stop: Sequence[bytes] = (),
    budget: BudgetMode | None = None,
    budget_scale: float = 1.0,
    cache_length: int | None = None,
) -> Iterator[list[bytes]]:
    """Continues several prompts together; yields the new bytes of every prompt after each step.

    The arguments are those of `generate`, with text as bytes: neither a prompt nor a piece of text need be UTF-8. The
    piece of a prompt whose text has ended is empty. Arguments are checked before the first step is asked for.
    """
    tokenizer = load_tokenizer(checkpoint.config.data.tokenizer)
    return stream_tokens(
        checkpoint,
        tokenizer,
        [tokenizer.encode(prompt).astype(np.int32) for prompt in prompts],
        new_tokens=new_tokens,
        sampling=sampling,
        seed=seed,
        stop=stop,
        budget=budget,
        budget_scale=budget_scale,
        cache_length=cache_length,
    )


def stream_tokens(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    encoded: Sequence[Int[np.ndarray, "_"]],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Sequence[bytes] = (),
    budget: BudgetMode | None = None,
    budget_scale: float = 1.0,
    cache_length: int | None = None,
) -> Iterator[list[bytes]]:
    """`stream_text` of prompts that are encoded by the tokenizer of the checkpoint already."""
    needed = max(map(len, encoded), default=0) + new_tokens
    decoder = Decoder(
        checkpoint.config.model,
        checkpoint.params,
        length=needed if cache_length is None else cache_length,
        budget=budget,
        max_budget_scale=max(1.0, budget_scale),
    )
    steps = stream(
        decoder,
        encoded,
        new_tokens=new_tokens,
        sampling=dataclasses.replace(sampling, vocab_size=tokenizer.vocab_size),
        seed=seed,
        stop=[(tokenizer.eos_id,)],
        budget_scale=budget_scale,
    )
    # Stops are text, not tokens: one text can be spelled in many sequences of tokens.
    return _pieces(steps, [Continuation(stop) for _ in encoded], tokenizer)


def _pieces(
    steps: Iterator[list[int | None]], continuations: Sequence[Continuation], tokenizer: Tokenizer
) -> Iterator[list[bytes]]:
    for tokens in steps:
        pieces = []
        for continuation, token in zip(continuations, tokens, strict=True):
            continuation.ended |= token is None
            pieces.append(b"" if continuation.ended else continuation.add(tokenizer.decode(np.asarray([token]))))
        yield pieces
        if all(continuation.ended for continuation in continuations):
            return


class Continuation:
    """The bytes that follow one prompt, up to and including the first stop."""

    def __init__(self, stops: Sequence[bytes]):
        self._stops = [stop for stop in stops if stop]
        self.text = b""
        self.ended = False

    def add(self, new: bytes) -> bytes:
        """Appends new bytes; returns those that belong to the text: all, or those up to the end of a stop."""
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
