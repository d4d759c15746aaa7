"""Where the budget of a passage went: what every token was given, which part of the text that is, what came of it.

Shapes: L tokens of the passage, l = ceil(L / m) chunks of m tokens, E experts, K slots per token in rank order, V
vocabulary; `layers` counts the AA-MoE layers of the stack, in order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.aamoe.statistics import summarize
from aamoe_jax.config import AAMoEConfig, ConfigError, ModelConfig
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.mixers.base import Detail
from aamoe_jax.model import merge, structure
from aamoe_jax.sharding import on_host

UNUSED, LOCAL, CONTEXT, EXPERT = -1, 0, 1, 2
"""What a slot holds: nothing, the own neighbourhood, a routed chunk, an expert."""
Slots = Int[np.ndarray, "layers L K"]
LIKELY = 3
"""How many of the most probable next tokens are kept."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """One passage as one document, under causal budgets."""

    tokens: Int[np.ndarray, "L"]
    chunk_size: int
    num_experts: int
    layers: tuple[int, ...]
    """Where in the stack the AA-MoE layers stand, from 0."""
    spent: Int[np.ndarray, "layers L"]
    """Resources given."""
    budget: Float[np.ndarray, "layers L"]
    """Real budgets B_i; what a token is given is at most their floor."""
    resource: Slots
    """Chunks 0..l-1, experts l..l+E-1; a local resource stands as the own chunk."""
    kind: Slots
    """UNUSED, LOCAL, CONTEXT or EXPERT."""
    start: Slots
    """First token that is seen through the slot; 0 for experts."""
    stop: Slots
    """One past the last; 0 for experts."""
    probability: Float[np.ndarray, "layers L K"]
    """P(i, j) of eq 10-14."""
    mass: Float[np.ndarray, "layers L K"]
    """Share of the token's attention, mean over heads."""
    bits: Float[np.ndarray, "L"]
    """-log2 p of the token after those before it; NaN for the first."""
    likely: Int[np.ndarray, "L n"]
    """Most probable next tokens, best first."""
    likely_probability: Float[np.ndarray, "L n"]
    totals: dict[str, Any]
    """`aamoe.statistics.summarize` of the passage: lists with one figure per layer."""

    @property
    def num_chunks(self) -> int:
        """l, an incomplete last one included."""
        return -(-len(self.tokens) // self.chunk_size)

    @property
    def expert(self) -> Slots:
        """Number of the expert in each slot, from 0; -1 where there is none."""
        return np.where(self.kind == EXPERT, self.resource - self.num_chunks, -1)


def inspect_passage(
    config: ModelConfig, params: dict[str, Any], tokens: Int[np.ndarray, "L"], *, budget_scale: float = 1.0
) -> Inspection:
    """Runs the model over a passage and keeps what every layer gave to every token.

    Args:
      params: for `aamoe_jax.model.merge`.
      budget_scale: multiplies every budget; 1 is what the model was trained with.

    Raises:
      ConfigError: the model has no AA-MoE layer, or the passage no token.
    """
    layers = aamoe_layers(config)
    if not len(tokens):
        raise ConfigError("the passage is empty: there is nothing to inspect")
    logits, statistics = read(config, params, {"tokens": tokens[None]}, "resources", budget_scale)
    log_p = jax.nn.log_softmax(logits[0])
    nats = -jnp.take_along_axis(log_p[:-1], tokens[1:, None], axis=-1)[:, 0]
    likely_log_p, likely = jax.lax.top_k(log_p, LIKELY)
    nats, likely_log_p, likely, statistics = on_host((nats, likely_log_p, likely, statistics))
    per_token = {name: statistics.pop(name)[:, 0] for name in ("spent", "budget", "resource", "probability", "mass")}
    kind = slot_kinds(config.aamoe, per_token["spent"], per_token["resource"], len(tokens))
    start, stop = spans(config.aamoe, per_token["resource"], kind)
    return Inspection(
        tokens=tokens,
        chunk_size=config.aamoe.chunk_size,
        num_experts=config.aamoe.num_experts,
        layers=layers,
        kind=kind,
        start=start,
        stop=stop,
        bits=np.concatenate([[np.nan], nats / np.log(2)]),
        likely=likely,
        likely_probability=np.exp(likely_log_p),
        totals=summarize(statistics),
        **per_token,
    )


def aamoe_layers(config: ModelConfig) -> tuple[int, ...]:
    """Where in the stack the AA-MoE layers stand.

    Raises:
      ConfigError: there is none, so that no token has a budget.
    """
    found = config.layers_of("aamoe")
    if not found:
        raise ConfigError(f"ModelConfig.pattern = {config.pattern!r}: no AA-MoE layer, so no budget to inspect")
    return found


def read(
    config: ModelConfig, params: dict[str, Any], batch: Mapping[str, Any], detail: Detail, budget_scale: float = 1.0
) -> tuple[Float[Array, "b L V"], dict[str, Any]]:
    """Logits and statistics of rows under causal budgets; without `segment_ids` and `positions` each is a document."""
    names = ("tokens", "segment_ids", "positions")
    inputs = {name: np.asarray(batch[name], np.int32) for name in names if name in batch}
    return _forward(params, inputs, np.float32(budget_scale), config, detail, max(budget_scale, 1.0))


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _forward(
    params: Any, inputs: dict[str, Array], budget_scale: Array, config: ModelConfig, detail: Detail, most: float
) -> tuple[Array, Any]:
    options: dict[str, Any] = {"budget": causal_budget(config), "detail": detail, "max_budget_scale": most, **inputs}
    return merge(structure(config), params)(budget_scale=budget_scale, **options)


def has_local_rank(config: AAMoEConfig) -> bool:
    """Whether rank 1 is the local resource, bought before any other (decision 03)."""
    return config.local in ("window", "chunk")


def slot_kinds(
    config: AAMoEConfig, spent: Int[np.ndarray, "*batch L"], resource: Int[np.ndarray, "*batch L K"], length: int
) -> Int[np.ndarray, "*batch L K"]:
    """What each slot holds, counted as in `aamoe.statistics`: an own chunk that was routed is context."""
    num_chunks = -(-length // config.chunk_size)
    rank = np.arange(resource.shape[-1])
    kind = np.where(resource < num_chunks, CONTEXT, EXPERT)
    kind = np.where((rank == 0) & has_local_rank(config), LOCAL, kind)
    return np.where(rank < spent[..., None], kind, UNUSED)


def spans(config: AAMoEConfig, resource: Slots, kind: Slots) -> tuple[Slots, Slots]:
    """First token that is seen through each slot and one past the last, in a passage that is one document.

    A window crosses the border of chunks; of the chunk before, a routed slot shows what the window leaves over. Else a
    token sees of its own chunk what is not later than itself. Experts and unused slots show no text: 0, 0.
    """
    token, m = np.arange(resource.shape[1])[None, :, None], config.chunk_size
    start = resource * m
    stop = start + m
    if config.local == "window":
        start = np.where(kind == LOCAL, np.maximum(token - m + 1, 0), start)
        stop = np.where(kind == LOCAL, token + 1, np.minimum(stop, np.maximum(token - m + 1, start)))
    else:
        stop = np.minimum(stop, token + 1)
    shows_text = (kind == LOCAL) | (kind == CONTEXT)
    return np.where(shows_text, start, 0), np.where(shows_text, stop, 0)


@dataclasses.dataclass(frozen=True)
class ExpertUse:
    """One expert in one layer, over the passage."""

    expert: int
    tokens: int
    """How many tokens were given it."""
    mass: float
    """Attention that it got, in tokens: 1.0 is all attention of one token."""
    examples: tuple[int, ...]
    """Tokens that gave it most of their attention, most first."""


def expert_uses(inspection: Inspection, layer: int, *, examples: int = 4) -> list[ExpertUse]:
    """The experts that the passage used in a layer (an index into `inspection.layers`), most used first."""
    expert, mass = inspection.expert[layer], inspection.mass[layer]
    uses = []
    for number in range(inspection.num_experts):
        given: Bool[np.ndarray, "L K"] = expert == number
        tokens = given.any(-1)
        if tokens.any():
            weight = np.where(given, mass, 0.0).sum(-1)
            best = np.argsort(-np.where(tokens, weight, -1.0), kind="stable")[: min(examples, tokens.sum())]
            uses.append(ExpertUse(number, int(tokens.sum()), float(weight.sum()), tuple(best.tolist())))
    return sorted(uses, key=lambda use: (-use.tokens, use.expert))
