"""How many resources each token may spend (section 2.2; AA-11; decisions 01, 11, 16, 21-23).

The real-valued budget of a token is its share of B = beta * L, where L are the tokens of its document: documents that
are packed into one row spend what they would spend alone. The number of resources that it gets is the floor; the real
value goes into the affordability of eq 11 and carries the gradient.

Shapes: b rows, L tokens per row, d width. Everything here is float32 (decision 38).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from aamoe_jax.config import AAMoEConfig
from aamoe_jax.mixers.base import BudgetMode, Context

PREDICTOR_WIDTH = 64
"""Hidden units of the causal predictor that is trained beside `row` budgets."""
CAPPED = ("prefix", "predictor")
"""Budgets whose running spend is bounded online (decision 23)."""
UNBOUNDED = 2**29
"""More than any budget; the sum of two is an integer of 32 bits."""


class Budget(NamedTuple):
    """What every token may spend."""

    real: Float[Array, "b L"]
    """B b_i, which carries the gradient."""
    wanted: Int[Array, "b L"]
    """Its floor."""
    granted: Int[Array, "b L"]
    """B_i: the floor, less what is of no use to the token, and what the cap takes."""


def budget_of_rows(signal: Float[Array, "b n"], limit: Int[Array, "b n"], slack: int, context: Context) -> Budget:
    """B b_i and B_i (AA-11). They are a matter of whole documents: one number of every token is gathered.

    Args:
      signal: importance w_B . h; of `predictor` modes the real budgets that are predicted.
      limit: the most that is of use to a token.
    """
    mode, beta, segment_ids = context.budget, context.beta, context.segment_ids
    signal, limit = (context.move(x, "here", "rows") for x in (signal, limit))
    if mode == "prefix":
        budget = prefix_budgets(signal, segment_ids, beta)
    elif mode == "row":
        budget = row_budgets(signal, segment_ids, beta)
    else:
        budget = jnp.where(segment_ids > 0, signal, 0.0)
    wanted = floor_row_budgets(budget, segment_ids) if mode == "row" else floor_causal_budgets(budget)
    granted = jnp.where(segment_ids > 0, jnp.minimum(wanted, limit), 0)
    if mode in CAPPED:
        granted = cap_spending(granted, segment_ids, beta, slack)
    return Budget(*(context.move(x, "rows", "here") for x in (budget, wanted, granted)))


def next_budget(
    signal: Float[Array, "b 1"],
    limit: Int[Array, "b 1"],
    slack: int,
    context: Context,
    log_mean: Float[Array, "b 2"],
    spent: Int[Array, "b"],
) -> tuple[Budget, Float[Array, "b 2"]]:
    """`budget_of_rows` of one more token in every row, from the running mean (see `next_prefix_budget`) and what was
    spent before it; and the mean after it."""
    beta, positions = context.beta, context.positions
    if context.budget == "prefix":
        budget, log_mean = next_prefix_budget(signal, log_mean, positions, beta)
    else:
        budget = signal
    wanted = floor_causal_budgets(budget)
    granted = jnp.minimum(wanted, limit)
    if context.budget in CAPPED:
        # Where the budget scale was lowered, more may have been spent than is allowed by now.
        granted = jnp.clip(total_allowance(positions + 1, beta, slack) - spent[:, None], 0, granted)
    return Budget(budget, wanted, granted), log_mean


def most_pairs(mode: BudgetMode, rows: int, length: int, slots: int, beta: float, config: AAMoEConfig) -> int:
    """Static bound on the pairs of rows (decision 26): sum_i B_i <= B, plus the slack of causal budgets for every
    document of a row. There are at most as many as chunks, for documents start where chunks do (decision 30).

    Args:
      beta: the largest that it may become.
    """
    if mode == "predictor_uncapped":
        return rows * length * slots
    slack = 0 if mode == "row" else config.budget.slack * max(length // config.chunk_size, 1)
    return rows * min(math.floor(beta * length + 0.5) + slack, length * slots)


def over_documents(
    merge: Callable[[tuple[Array, ...], tuple[Array, ...]], tuple[Array, ...]],
    terms: tuple[Shaped[Array, "b L *rest"], ...],
    segment_ids: Int[Array, "b L"],
    *,
    reverse: bool = False,
) -> tuple[Shaped[Array, "b L *rest"], ...]:
    """The running `merge` of the terms of a document, up to every token; in reverse from its end down to the token.

    Args:
      merge: associative; what comes first in the direction of the scan is its first argument.
    """

    def restart(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
        (left_start, *so_far), (start, *own) = left, right
        merged = merge(tuple(so_far), tuple(own))
        of = [start.reshape(start.shape + (1,) * (x.ndim - start.ndim)) for x in own]
        return left_start | start, *(jnp.where(*choice) for choice in zip(of, own, merged, strict=True))

    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    start = jnp.pad(changes, ((0, 0), (0, 1) if reverse else (1, 0)), constant_values=True)
    return jax.lax.associative_scan(restart, (start, *terms), axis=1, reverse=reverse)[1:]


def of_whole_documents(running: Shaped[Array, "b L"], segment_ids: Int[Array, "b L"]) -> Shaped[Array, "b L"]:
    """What has been reached at the last token of a document, at each of its tokens."""
    return over_documents(lambda last, _: last, (running,), segment_ids, reverse=True)[0]


def index_in_document(segment_ids: Int[Array, "b L"]) -> Int[Array, "b L"]:
    """Tokens of a document up to every token, itself included."""
    add: Callable[..., Any] = lambda x, y: (x[0] + y[0],)  # noqa: E731
    return over_documents(add, (jnp.ones_like(segment_ids),), segment_ids)[0]


def bounded(importance: Float[Array, "*tokens"]) -> Float[Array, "*tokens"]:
    """Importance within +-log 2, so that no budget is more than 4 times the mean, or less than a quarter of it.

    A token learns from what it was given alone. One that was given nothing useful learns to ask for less, and then for
    certain finds nothing: without bounds, budgets run together into the few tokens that are well served already.
    """
    return math.log(2) * jnp.tanh(importance / math.log(2))


IMPORTANCE: Mapping[str, Callable[[Float[Array, "*tokens"]], Float[Array, "*tokens"]]] = {
    "learned": lambda importance: importance,
    "bounded": bounded,
    "uniform": jnp.zeros_like,
}
"""What w_B . h becomes (`BudgetConfig.importance`)."""


def row_budgets(
    importance: Float[Array, "b L"], segment_ids: Int[Array, "b L"], beta: Float[Array, ""] | float
) -> Float[Array, "b L"]:
    """The paper's budgets, beta * L * softmax(importance) over all L tokens of the document: they see the future
    (AA-28). Padding gets 0."""
    (top,) = over_documents(lambda x, y: (jnp.maximum(x[0], y[0]),), (importance,), segment_ids)
    weight = jnp.exp(importance - jax.lax.stop_gradient(of_whole_documents(top, segment_ids)))
    (total,) = over_documents(lambda x, y: (x[0] + y[0],), (weight,), segment_ids)
    length = of_whole_documents(index_in_document(segment_ids), segment_ids)
    return jnp.where(segment_ids > 0, beta * length * (weight / of_whole_documents(total, segment_ids)), 0.0)


def prefix_budgets(
    importance: Float[Array, "b L"], segment_ids: Int[Array, "b L"], beta: Float[Array, ""] | float
) -> Float[Array, "b L"]:
    """Causal budgets, beta * exp(s_i) / mean_{j <= i} exp(s_j), the mean running over the token's document so far."""
    (log_sum,) = over_documents(lambda x, y: (jnp.logaddexp(x[0], y[0]),), (importance,), segment_ids)
    budget = beta * jnp.exp(importance - log_sum + jnp.log(index_in_document(segment_ids).astype(jnp.float32)))
    return jnp.where(segment_ids > 0, budget, 0.0)


def next_prefix_budget(
    importance: Float[Array, "b 1"],
    log_mean: Float[Array, "b 2"],
    positions: Int[Array, "b 1"],
    beta: Float[Array, ""] | float,
) -> tuple[Float[Array, "b 1"], Float[Array, "b 2"]]:
    """`prefix_budgets` of one more token, and the new log of the running mean of exp(importance).

    Rounding must not add up over a long text, until floors differ from those of the whole row. So it is the mean that
    is carried on, whose corrections shrink, and beside it what the last addition cut off (Kahan's sum).
    """
    new, first = importance[:, 0], positions[:, 0] == 0
    # Of the first token the mean is its own; there is none before it.
    mean, lost = jnp.where(first, new, log_mean[:, 0]), jnp.where(first, 0.0, log_mean[:, 1])
    count = positions[:, 0].astype(jnp.float32) + 1.0
    above = new - mean
    # log((count - 1 + exp(above)) / count), without a large exponential.
    small = jnp.log1p(jnp.expm1(jnp.minimum(above, 20.0)) / count)
    large = above - jnp.log(count) + jnp.log1p((count - 1.0) * jnp.exp(-jnp.maximum(above, 20.0)))
    change = jnp.where(above < 20.0, small, large) - lost
    total = mean + change
    return beta * jnp.exp(importance - total[:, None]), jnp.stack([total, (total - mean) - change], axis=1)


def floor_row_budgets(budget: Float[Array, "b L"], segment_ids: Int[Array, "b L"]) -> Int[Array, "b L"]:
    """B_i = floor(B b_i), forgiving float32 rounding (decision 16).

    Without epsilon, uniform budgets lose a unit per token at some lengths; bounded by 1 / 2L it cannot push sum_i B_i
    past B.
    """
    length = of_whole_documents(index_in_document(segment_ids), segment_ids)
    return jnp.floor(budget + jnp.minimum(1e-4, 0.5 / length)).astype(jnp.int32)


def floor_causal_budgets(budget: Float[Array, "b L"]) -> Int[Array, "b L"]:
    """The floor of budgets that the cap bounds: epsilon follows float32 rounding, and never the length of the row."""
    return jnp.floor(budget + 1e-4 * jnp.maximum(1.0, 0.1 * budget)).astype(jnp.int32)


def total_allowance(tokens: Int[Array, "..."], beta: Float[Array, ""] | float, slack: int) -> Int[Array, "..."]:
    """What the first `tokens` tokens of a document may spend together: floor(beta * i) + slack (decision 23)."""
    # A budget scale may ask for more than an integer holds.
    allowance = jnp.floor(jnp.minimum(beta * tokens + 1e-4, float(UNBOUNDED))).astype(jnp.int32)
    return jnp.minimum(allowance + slack, UNBOUNDED)


def cap_spending(
    wanted: Int[Array, "b L"], segment_ids: Int[Array, "b L"], beta: Float[Array, ""] | float, slack: int
) -> Int[Array, "b L"]:
    """The largest spends n_i <= wanted_i whose running sum stays within beta * i + slack at every token of a document
    (decision 23).

    A token takes the running spend x to min(x + wanted_i, allowance_i). Two such maps, one after the other, are again
    one: min(x + wanted_1 + wanted_2, min(allowance_1 + wanted_2, allowance_2)). So this is a scan, exact in integers.
    """

    def after(first: tuple[Array, ...], second: tuple[Array, ...]) -> tuple[Array, Array]:
        (wanted_1, allowance_1), (wanted_2, allowance_2) = first, second
        wanted = jnp.minimum(wanted_1 + wanted_2, UNBOUNDED)
        return wanted, jnp.minimum(allowance_1 + wanted_2, allowance_2)

    index = index_in_document(segment_ids)
    wanted = jnp.where(segment_ids > 0, jnp.minimum(wanted, UNBOUNDED), 0)
    running = jnp.minimum(*over_documents(after, (wanted, total_allowance(index, beta, slack)), segment_ids))
    before = jnp.pad(running[:, :-1], ((0, 0), (1, 0)))
    return running - jnp.where(index == 1, 0, before)


class BudgetPredictor(nnx.Module):
    """A causal guess of row budgets from the token alone (AA-29, decision 22): beta * softplus(MLP(h)) / log 2,
    which starts at beta."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        hidden = PREDICTOR_WIDTH
        self.hidden_kernel = nnx.Param(
            width**-0.5 * jax.random.normal(rngs.params(), (width, hidden)), axes=("storage_float32", None)
        )
        self.hidden_bias = nnx.Param(jnp.zeros(hidden), axes=(None,))
        self.output_kernel = nnx.Param(jnp.zeros(hidden), axes=(None,))
        self.output_bias = nnx.Param(jnp.zeros(()), axes=())

    def __call__(self, h: Float[Array, "b L d"], beta: Float[Array, ""] | float) -> Float[Array, "b L"]:
        """Predicted real budgets. Gradients stop at h: predicting never changes what is predicted."""
        h = jax.lax.stop_gradient(h).astype(jnp.float32)
        hidden = jax.nn.relu(h @ self.hidden_kernel[...] + self.hidden_bias[...])
        logit = hidden @ self.output_kernel[...] + self.output_bias[...]
        return beta * jax.nn.softplus(logit) / jnp.log(2.0)


def predictor_loss(
    predicted: Float[Array, "b L"], budget: Int[Array, "b L"], real: Bool[Array, "b L"], max_budget: int
) -> Float[Array, ""]:
    """Sum over tokens and k of the cross-entropy between sigma(predicted - k), eq 11, and [B_i >= k] (decision 22).

    A token that knows its B_i best predicts a value within (B_i, B_i + 1), where the row's own real budget lies: the
    floor is right, with room on both sides.
    """
    k = jnp.arange(1, max_budget + 1)
    logit = predicted[..., None] - k
    affords = jax.lax.stop_gradient(budget)[..., None] >= k
    loss = -jnp.where(affords, jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit)).sum(-1)
    return jnp.sum(jnp.where(real, loss, 0.0))
