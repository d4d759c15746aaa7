"""Checkpoints as models of EleutherAI's lm-evaluation-harness (extra `harness`), called `aamoe`.

Importing this module registers the model. Likelihoods come from the forward pass, generated text from the cached
decoder, both under causal budgets. Nothing else of the package needs lm-eval.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from aamoe_jax.config import ConfigError
from aamoe_jax.data import load_tokenizer
from aamoe_jax.evaluation.choices import Row, score_rows
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.generation.generate import stream_tokens
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.model import structure
from aamoe_jax.training.checkpoints import Checkpoint, Which, load_checkpoint

NO_CONTEXT = -1
"""Stands before the first token of a text. The first token of a document is nobody's target in training: it is given
the probability 1 / vocabulary."""
SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
NEW_TOKENS = 256
"""Most tokens of a continuation for which a task names no number, as in lm-eval's own models."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The `generation_kwargs` of a task."""

    until: tuple[str, ...]
    new_tokens: int
    sampling: Sampling

    @classmethod
    def of(cls, given: dict[str, Any]) -> Settings:
        """What lm-eval hands over with a prompt.

        Raises:
          ConfigError: for a setting that has no counterpart here.
        """
        unknown = sorted(given.keys() - SETTINGS)
        if unknown:
            raise ConfigError(f"generation_kwargs.{unknown[0]}: not known; there are {', '.join(sorted(SETTINGS))}")
        until = given.get("until") or ()
        temperature = given.get("temperature", 1.0) if given.get("do_sample", False) else 0.0
        return cls(
            (until,) if isinstance(until, str) else tuple(until),
            int(given.get("max_gen_toks", NEW_TOKENS)),
            Sampling(float(temperature), given.get("top_k"), float(given.get("top_p", 1.0))),
        )


@register_model("aamoe")
class HarnessModel(TemplateLM):
    """A checkpoint as lm-eval asks it."""

    def __init__(
        self,
        checkpoint: str | Checkpoint,
        which: Which = "latest",
        batch_size: int | str | None = None,
        max_length: int | None = None,
        **ignored: Any,
    ):
        """Loads a checkpoint, unless it is one.

        Args:
          checkpoint: a run folder, one checkpoint in it, or what `load_checkpoint` gave.
          batch_size: rows per forward pass and per decoding step; None: 8.
          max_length: tokens of a row, context and continuation together; of a longer context the end is kept. None:
            DataConfig.seq_len.
          ignored: `device` and `max_batch_size`, which lm-eval hands to every model.

        Raises:
          ConfigError: an argument is not known, or see `load_checkpoint`.
        """
        super().__init__()
        if unknown := ignored.keys() - {"device", "max_batch_size"}:
            raise ConfigError(f"model_args {min(unknown)}: not known; there are checkpoint, which, max_length")
        self._checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else load_checkpoint(checkpoint, which)
        config = self._checkpoint.config
        self._tokenizer = load_tokenizer(config.data.tokenizer)
        self._batch_size = 8 if batch_size in (None, "auto") else int(batch_size)
        self._length = config.data.seq_len if max_length is None else int(max_length)

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return NO_CONTEXT

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(string.encode()).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # A first token without context is in the row, but not scored: what it costs is added.
        first = np.array([context == [NO_CONTEXT] and len(chosen) > 0 for _, context, chosen in requests], bool)
        rows = [self._row(*request, unscored) for request, unscored in zip(requests, first.tolist(), strict=True)]
        config = self._checkpoint.config.model
        log_p, greedy = score_rows(
            structure(config),
            self._checkpoint.params,
            rows,
            budget=causal_budget(config),
            length=self._length,
            batch_size=self._batch_size,
        )
        log_p = log_p - first * np.log(self._tokenizer.vocab_size)
        return list(zip(log_p.tolist(), (greedy & ~first).tolist(), strict=True))

    def _row(self, texts: tuple[str, str], context: list[int], chosen: list[int], unscored: bool) -> Row:
        if len(chosen) >= self._length + unscored:
            raise ConfigError(
                f"continuation {texts[1][:60]!r}: {len(chosen)} tokens do not fit into a row of {self._length} with "
                "one before them; give a larger max_length"
            )
        tokens = [token for token in context if token != NO_CONTEXT] + chosen
        return Row(np.array(tokens[-self._length :], np.int32), len(chosen) - unscored)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """log P of whole texts, in nats: every token once, with as much before it as a row holds.

        The first token of a text costs log(vocabulary): `launch.evaluate` leaves it out.
        """
        windows = [
            list(map(make_disjoint_window, get_rolling_token_windows(self.tok_encode(text), NO_CONTEXT, most, 1)))
            for (text,), most in ((request.args, self._length - 1) for request in requests)
        ]
        asked = [(("", ""), *window) for text in windows for window in text]
        found = iter(self._loglikelihood_tokens(asked))
        return [sum((next(found)[0] for _ in text), 0.0) for text in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, without the text that ended them; the most probable token unless a task asks for draws.

        Raises:
          ConfigError: for a setting that is not known, or one that leaves no room for a prompt.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        found = [""] * len(requests)
        for key, group in groups.items():
            settings = Settings.of(json.loads(key))
            prompts = [self.tok_encode(requests[index].args[0]) for index in group]
            for index, text in zip(group, self._continue(prompts, settings), strict=True):
                found[index] = text
        return found

    def _continue(self, prompts: Sequence[list[int]], settings: Settings) -> Iterator[str]:
        room = self._length - settings.new_tokens
        if room < 1:
            raise ConfigError(
                f"generation_kwargs.max_gen_toks = {settings.new_tokens}: a row of {self._length} has no room for a "
                "prompt beside them; lower it, or give a larger max_length"
            )
        rows = min(self._batch_size, len(prompts))
        for start in range(0, len(prompts), rows):
            batch = [np.array(prompt[-room:], np.int32) for prompt in prompts[start : start + rows]]
            steps = stream_tokens(
                self._checkpoint,
                self._tokenizer,
                batch + [batch[-1]] * (rows - len(batch)),  # a step is compiled for so many rows
                new_tokens=settings.new_tokens,
                sampling=settings.sampling,
                stop=[text.encode() for text in settings.until],
                cache_length=self._length,
            )
            for pieces in list(zip(*steps, strict=True))[: len(batch)]:
                yield cut(b"".join(pieces).decode(errors="replace"), settings.until)


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the stops."""
    for stop in filter(None, until):
        text = text.split(stop, 1)[0]
    return text


def share_found(row: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """`process_results` of tasks with several answers: the share of `row["answers"]` that the generated text has."""
    return {"found": sum(answer in results[0] for answer in row["answers"]) / len(row["answers"])}
