"""Continues prompts of token ids, and yields every token as it is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.sampling import NO_TOKEN, Sampling
from aamoe_jax.mixers.dynamic import FilteredAttentionConfig

Tokens = Int[np.ndarray, "_"]
Stop = tuple[int, ...]


def stream(
    decoder: Decoder,
    prompts: Sequence[Tokens],
    *,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Sequence[Stop] = (),
    budget_scale: float = 1.0,
) -> Iterator[list[int | None]]:
    """The next token of every row, again and again; None for a row that has ended.

    Args:
      prompts: one per row, of any lengths.
      stop: sequences of tokens that end a row once it has them (they are given out too); what stands in the prompt
        does not count.
      budget_scale: of the AA-MoE layers.

    Raises:
      ConfigError: for prompts that are empty or do not fit, empty stops, and scales out of range; and on the way where
        logits are no numbers, as those of a filtered cache that is full.
    """
    decoder.check_scale(budget_scale)
    lengths = [len(prompt) for prompt in prompts]
    if min(lengths, default=0) == 0:
        raise ConfigError("prompt = '': give at least one token to continue")
    room = decoder.plan.length
    if max(lengths) + new_tokens > room:
        raise ConfigError(f"prompt: {max(lengths)} tokens and {new_tokens} new ones do not fit into a cache for {room}")
    if () in stop:
        raise ConfigError("stop = (): give at least one token that ends a text")

    def steps() -> Iterator[list[int | None]]:
        state = decoder.prefill(prompts, budget_scale=budget_scale)
        rows = len(prompts)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))
        texts: list[list[int]] = [[] for _ in prompts]
        pending: list[jax.Array] = []
        for step in range(new_tokens + 1):
            if step < new_tokens:
                drawn, state = decoder.next(state, keys, sampling, budget_scale=budget_scale)
                pending.append(drawn)
            # The device works on a step while the one before it is read: a stop is seen one step late.
            if step == 0:
                continue
            tokens = np.asarray(pending.pop(0)).tolist()
            alive = [not _ended(text, stop) for text in texts]
            if any(token == NO_TOKEN and live for token, live in zip(tokens, alive, strict=True)):
                raise ConfigError(_no_token(decoder.plan.config, step - 1))
            yield [token if live else None for token, live in zip(tokens, alive, strict=True)]
            for text, token, live in zip(texts, tokens, alive, strict=True):
                text += [token] * live
            if all(_ended(text, stop) for text in texts):
                return

    return steps()


def _ended(text: list[int], stop: Sequence[Stop]) -> bool:
    return any(tuple(text[-len(end) :]) == end for end in stop)


def _no_token(config: ModelConfig, new_tokens: int) -> str:
    if config.layers_of("filtered_attention"):
        field = f"FilteredAttentionConfig.capacity = {config.of(FilteredAttentionConfig).capacity}"
        return f"{field}: a head kept more keys than that, after {new_tokens} new tokens"
    return f"the model's logits are no numbers, after {new_tokens} new tokens"
