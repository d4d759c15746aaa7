"""Decoding against the causal forward pass of whole rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.stream import stream
from tests.test_model import run, tokens_of


def teacher_forced(config, params, tokens, **options) -> np.ndarray:
    """Logits [b, L, V] of the causal forward pass over whole rows."""
    return np.asarray(run(config, params, jnp.asarray(tokens), **options)[0])


def generate(decoder: Decoder, prompts: Sequence[np.ndarray], **options) -> list[np.ndarray]:
    """What `stream` yields, row by row."""
    steps = zip(*stream(decoder, prompts, **options), strict=True)
    return [np.asarray([token for token in row if token is not None], np.int32) for row in steps]


def stepped(decoder: Decoder, tokens: np.ndarray, starts: list[int], **options) -> list[np.ndarray]:
    """Logits of each row from its prompt's last token on, the rest of the row being appended token by token.

    Rows have prompts of the lengths `starts`; a row that ends before the others is fed its last token again.
    """
    length = tokens.shape[1]
    state = decoder.prefill([row[:start] for row, start in zip(tokens, starts, strict=True)], **options)
    found = [[logits] for logits in np.asarray(state.logits)]
    for step in range(length - min(starts)):
        at = [min(start + step, length - 1) for start in starts]
        state = decoder.append(state, tokens[np.arange(len(starts)), at], **options)
        for row, logits in enumerate(np.asarray(state.logits)):
            if starts[row] + step < length:
                found[row].append(logits)
    return [np.stack(row) for row in found]


def assert_parity(config, params, *, length: int, starts: list[int], atol: float = 1e-5, **options):
    """Decoding equals the forward pass at every token of every row, whatever part of it the prompt was."""
    tokens = np.asarray(tokens_of(len(starts), length))
    budget = options.pop("budget", None) or ("predictor" if config.aamoe.budget.normalizer == "row" else "prefix")
    scale = options.pop("budget_scale", 1.0)
    wanted = teacher_forced(config, params, tokens, budget=budget, budget_scale=scale, max_budget_scale=max(1.0, scale))
    # A row that ends early still takes steps: one place more than tokens.
    places = length + max(starts) - min(starts) + 1
    decoder = Decoder(config, params, length=places, budget=budget, max_budget_scale=max(1.0, scale))
    for row, (found, start) in enumerate(
        zip(stepped(decoder, tokens, starts, budget_scale=scale), starts, strict=True)
    ):
        np.testing.assert_allclose(found, wanted[row, start - 1 :], atol=atol, err_msg=f"row {row}")


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """What is compiled inside a with block: one entry each."""
    seen: list[str] = []

    def listen(event: str, duration: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
