"""Continues prompts of token ids, and yields every token as it is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Int

from aamoe_jax.config import ConfigError
from aamoe_jax.generation.decoder import Decoder, State
from aamoe_jax.generation.sampling import NO_TOKEN, Sampling
from aamoe_jax.mixers.filtered import FilteredAttentionConfig, FilteredCache
from aamoe_jax.sharding import on_host

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

    At the end a warning says how many neurons filtered caches had no room for, if there were any.

    Args:
      prompts: one per row, of any lengths.
      stop: sequences of tokens that end a row once it has them (they are given out too); what stands in the prompt
        does not count.
      budget_scale: of the AA-MoE layers.

    Raises:
      ConfigError: for prompts that are empty or do not fit, empty stops, and scales out of range; and on the way where
        logits are no numbers.
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
            tokens = on_host(pending.pop(0)).tolist()
            alive = [not _ended(text, stop) for text in texts]
            if any(token == NO_TOKEN and live for token, live in zip(tokens, alive, strict=True)):
                raise ConfigError(f"the model's logits are no numbers, after {step - 1} new tokens")
            yield [token if live else None for token, live in zip(tokens, alive, strict=True)]
            for text, token, live in zip(texts, tokens, alive, strict=True):
                text += [token] * live
            if all(_ended(text, stop) for text in texts):
                break
        _report(decoder, state)

    return steps()


def evictions(state: State) -> tuple[int, int]:
    """(evicted, kept): neurons that the caches of filtered layers had no room for, and all that filters let through."""
    caches = jax.tree.leaves(state.caches, is_leaf=lambda x: isinstance(x, FilteredCache))
    filtered = [cache for cache in caches if isinstance(cache, FilteredCache)]
    evicted = sum(int(on_host(cache.evicted.sum())) for cache in filtered)
    return evicted, evicted + sum(int(on_host(jnp.isfinite(cache.log_gate).sum())) for cache in filtered)


def _report(decoder: Decoder, state: State) -> None:
    evicted, kept = evictions(state)
    if evicted:
        filtering = decoder.plan.config.of(FilteredAttentionConfig)
        places, length = filtering.places(decoder.plan.capacity), decoder.plan.capacity
        logging.warning(
            "filtered_attention evicted %d of the %d keys that it kept: its caches have %d places for %d tokens; "
            "FilteredAttentionConfig.capacity = %s, a larger one keeps more",
            *(evicted, kept, places, length, filtering.capacity),
        )


def _ended(text: list[int], stop: Sequence[Stop]) -> bool:
    return any(tuple(text[-len(end) :]) == end for end in stop)
