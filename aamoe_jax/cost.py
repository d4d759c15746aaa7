"""What whole models cost, added up from their mixers' `costs` and from what their statistics counted.

A multiply-add is two FLOPs. Counted: all projections, router scores, budgets, and the (token, resource) pairs that were
given, not those that the budget allowed (decision 35). A pair counts all m keys of its resource, a token of dense
attention (L + 1) / 2 keys, whatever documents hide. Norms, softmaxes and rotary embeddings are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Mixer, Statistics
from aamoe_jax.mixers.costs import Number, Setting
from aamoe_jax.registry import MIXERS


def forward_flops(config: ModelConfig, rows: int, length: int, statistics: Statistics) -> float:
    """Model FLOPs of one forward pass over rows x length tokens, readout included.

    Args:
      statistics: what `LanguageModel` returned for them: pairs that were given, experts that computed, tokens that went
        through. Without them no pairs are counted, and of the others what is meant.
    """
    at, mixers = Setting(config, rows, length), list(_mixers(config))
    per_token = sum(mixer.costs(at).model_flops for mixer in mixers) * config.periods
    flops = at.tokens * (per_token + 2 * config.d_model * config.vocab_size)
    for extra in dict.fromkeys(mixer.extra_flops for mixer in mixers):
        flops += extra(at, [mixer for mixer in mixers if mixer.extra_flops == extra], statistics)
    return flops


def training_flops(config: ModelConfig, rows: int, length: int, statistics: Statistics) -> float:
    """FLOPs of one step: the backward pass costs twice the forward. What `remat` computes again is not counted."""
    return 3 * forward_flops(config, rows, length, statistics)


def decode_bytes(config: ModelConfig, context: int) -> Number:
    """Bytes that one more token of one row must read at a context of that many tokens: parameters (float32) and caches.
    The pairs of AA-MoE layers come on top (`aamoe.costs.bytes_per_pair`).

    Raises:
      NotImplementedError: a mixer of the stack does not say what it reads.
    """
    at = Setting(config, 1, context)
    readout = 4 * config.d_model * (config.vocab_size + 1)
    return sum(mixer.decode_bytes(at) for mixer in _mixers(config)) * config.periods + readout


def parameter_count(params: object) -> int:
    """Scalars in a tree of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _mixers(config: ModelConfig) -> Iterator[type[Mixer]]:
    """Of one period."""
    return (MIXERS[name].cls for _, name in config.mixers)
