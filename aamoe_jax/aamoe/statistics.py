"""What a layer spent, and on what (AA-25): sums that add up over micro-batches, and the figures made of them.

`max_budget` is the largest value. In a model each has a leading axis over the AA-MoE layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.aamoe.allocation import Allocation, Allocator, Candidates
from aamoe_jax.aamoe.budget import Budget, floor_causal_budgets, predictor_loss
from aamoe_jax.aamoe.correlations import budget_figures
from aamoe_jax.aamoe.parallel import Attended
from aamoe_jax.aamoe.router import Heads
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.statistics import expert_use


class Steps(NamedTuple):
    """What a layer finds on its way to its output."""

    heads: Heads
    candidates: Candidates
    budget: Budget
    allocation: Allocation
    found: Attended


def of_layer(steps: Steps, context: Context, predicted: Float[Array, "b n"] | None, allocator: Allocator) -> Statistics:
    """Sums over what one layer spent, and what `Context.detail` asks for.

    `clipped` is what availability, slots and cap cut off floored budgets (AA-27), and with it what prices above 1 took.

    Args:
      predicted: real budgets that the predictor guesses, where it is trained beside those of the row.
    """
    _, candidates, budget, allocation, found = steps
    real, num_chunks = context.real, candidates.num_chunks
    num_experts = candidates.scores.shape[-1] - num_chunks
    slots = jnp.arange(allocation.resource.shape[-1])
    used = (slots < allocation.count[..., None]) & real[..., None]
    is_local = (slots == 0) & (candidates.local is not None)
    kinds = {
        "local": used & is_local,
        "context": used & ~is_local & (allocation.resource < num_chunks),
        "expert": used & ~is_local & (allocation.resource >= num_chunks),
    }
    expert = jnp.where(kinds["expert"], allocation.resource - num_chunks, num_experts)
    result: Statistics = {
        "tokens": real.sum().astype(jnp.float32),
        "capacity": context.beta * real.sum().astype(jnp.float32),
        "clipped": jnp.where(real, budget.wanted - allocation.count, 0).sum().astype(jnp.float32),
        "zero": (real & (allocation.count == 0)).sum().astype(jnp.float32),
        "one": (real & (allocation.count == 1)).sum().astype(jnp.float32),
        "max_budget": allocation.count.max().astype(jnp.float32),
        "expert_load": tally(expert, num_experts),
    }
    for kind, member in kinds.items():
        result[f"pairs_{kind}"] = member.sum().astype(jnp.float32)
        result[f"mass_{kind}"] = jnp.where(member, found.mass, 0.0).sum()
    result = jax.lax.stop_gradient(result) | {"overflow": found.overflow}
    if predicted is not None:
        result |= prediction(predicted, floor_causal_budgets(predicted), budget.wanted, real, candidates.slots)
        result["predictor_loss"] = predictor_loss(predicted, budget.wanted, real, candidates.slots)
    if context.detail != "sums":
        result |= {"spent": allocation.count, "budget": budget.real}
    if context.detail == "resources":
        # The log probability of unused slots is set to 0, so that theirs reads 1: it means nothing.
        probability = jnp.exp(allocator(candidates.normalized(), budget).log_prob)
        result |= {"resource": allocation.resource, "mass": found.mass, "probability": probability}
    return result


def tally(number: Int[Array, "b L K"], most: int) -> Float[Array, "E"]:
    """How often each of 0..most-1 is there."""

    def scattered(number: Int[Array, "b L K"]) -> Float[Array, "E"]:
        return jnp.zeros(most + 1).at[number.reshape(-1)].add(1.0)[:most]

    def compared(number: Int[Array, "b L K"]) -> Float[Array, "E"]:
        return (number[..., None] == jnp.arange(most)).sum((0, 1, 2), dtype=jnp.float32)

    # A TPU adds scattered numbers one by one: 8 cycles each, and as many for those that count for nothing.
    return jax.lax.platform_dependent(number, tpu=compared, default=scattered)


def prediction(
    predicted: Float[Array, "b L"],
    guess: Int[Array, "b L"],
    budget: Int[Array, "b L"],
    real: Bool[Array, "b L"],
    max_budget: int,
) -> Statistics:
    """How well the predictor's budgets (real and floored) match the row's (decision 22).

    `predictor_affords` [max_budget] counts the tokens on which both agree whether B_i >= k, for every k from 1: what
    Mixture-of-Depths reports of its predictor, for one k.
    """
    error = jnp.abs(guess - budget)
    k = jnp.arange(1, max_budget + 1)
    sums = {
        "predictor_exact": error == 0,
        "predictor_within_one": error <= 1,
        "predictor_error": error,
        "predictor_total": predicted,
    }
    result = {name: jnp.where(real, value, 0).sum().astype(jnp.float32) for name, value in sums.items()}
    agree = ((guess[..., None] >= k) == (budget[..., None] >= k)) & real[..., None]
    result["predictor_affords"] = agree.sum((0, 1)).astype(jnp.float32)
    return jax.lax.stop_gradient(result)


def summarize(statistics: Statistics) -> dict[str, Any]:
    """Figures per layer, on the host: lists with one float per AA-MoE layer.

    Shares are of pairs and of the attention that resources get (a null slot's is left out); `utilisation` is pairs
    over B; `overflow` what was dropped at `MeshConfig.pair_bound`, over all pairs; `expert_entropy` is that of the
    expert load over its maximum log E (1: all experts equally used); `dead_experts` the share of experts that nobody
    chose; `predictor_affords` one list per layer, its k-th figure the accuracy of [B_i >= k]; `budget_loss`,
    `budget_surprisal` and `budget_entropy` the correlations of budgets with these, where a pass measured them.
    """
    s = {name: np.asarray(value, np.float64) for name, value in statistics.items()}
    tokens = np.maximum(s["tokens"], 1)
    pairs = sum(s[f"pairs_{kind}"] for kind in ("local", "context", "expert"))
    mass = sum(s[f"mass_{kind}"] for kind in ("local", "context", "expert"))
    result = {
        "spent": pairs / tokens,
        "utilisation": pairs / np.maximum(s["capacity"], 1),
        "zero_budget": s["zero"] / tokens,
        "one_budget": s["one"] / tokens,
        "max_budget": s["max_budget"],
        "clip_rate": s["clipped"] / np.maximum(pairs + s["clipped"], 1),
        "overflow": s["overflow"] / np.maximum(pairs, 1),
    }
    for kind in ("local", "context", "expert"):
        result[f"pairs_{kind}"] = s[f"pairs_{kind}"] / np.maximum(pairs, 1)
        result[f"mass_{kind}"] = s[f"mass_{kind}"] / np.maximum(mass, 1e-9)
    if s["expert_load"].shape[-1]:
        result["expert_entropy"], result["dead_experts"] = expert_use(s["expert_load"])
    if "predictor_exact" in s:
        result["predictor_exact"] = s["predictor_exact"] / tokens
        result["predictor_within_one"] = s["predictor_within_one"] / tokens
        result["predictor_error"] = s["predictor_error"] / tokens
        result["predictor_total"] = s["predictor_total"] / np.maximum(s["capacity"], 1)
        result["predictor_affords"] = s["predictor_affords"] / tokens[..., None]
    figures = {name: value.tolist() for name, value in result.items()}
    return figures | (budget_figures(s["budget_moments"]) if "budget_moments" in s else {})
