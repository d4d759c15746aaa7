"""How many resources each token may spend (section 2.2; AA-11; decisions 01, 11, 16, 21-23).

The real-valued budget of a token is its share of B = beta * L. The number of resources that it gets is the floor; the
real value goes into the affordability of eq 11 and carries the gradient.

Shapes: b rows, L tokens per row, d width. Everything here is float32 (decision 38).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.mixers.base import BudgetMode, Context

PREDICTOR_WIDTH = 64
"""Hidden units of the causal predictor that is trained beside `row` budgets."""
CAPPED = ("prefix", "predictor")
"""Budgets whose running spend is bounded online (decision 23)."""
UNBOUNDED = 2**30
"""More than any budget."""


class Budget(NamedTuple):
    """What every token may spend."""

    real: Float[Array, "b L"]
    """B b_i, which carries the gradient."""
    wanted: Int[Array, "b L"]
    """Its floor."""
    granted: Int[Array, "b L"]
    """B_i: the floor, less what is of no use to the token, and what the cap takes."""


def budget_of_rows(signal: Float[Array, "b n"], limit: Int[Array, "b n"], slack: int, context: Context) -> Budget:
    """B b_i and B_i (AA-11). They are a matter of whole rows: one number of every token is gathered.

    Args:
      signal: importance w_B . h; of `predictor` modes the real budgets that are predicted.
      limit: the most that is of use to a token.
    """
    mode, beta, real = context.budget, context.beta, context.segment_ids > 0
    signal, limit = (context.move(x, "here", "rows") for x in (signal, limit))
    if mode == "prefix":
        budget = prefix_budgets(signal, context.segment_ids, beta)
    elif mode == "row":
        budget = row_budgets(signal, real, beta)
    else:
        budget = jnp.where(real, signal, 0.0)
    wanted = floor_row_budgets(budget) if mode == "row" else floor_causal_budgets(budget)
    granted = jnp.where(real, jnp.minimum(wanted, limit), 0)
    if mode in CAPPED:
        granted = cap_spending(granted, real, beta, slack)
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


def most_pairs(mode: BudgetMode, rows: int, length: int, slots: int, beta: float, slack: int) -> int:
    """Static bound on the pairs of rows: sum_i B_i <= B in a row, plus the slack of causal budgets (decision 26).

    Args:
      beta: the largest that it may become.
    """
    if mode == "predictor_uncapped":
        return rows * length * slots
    per_row = math.floor(beta * length + 0.5) + (0 if mode == "row" else slack)
    return rows * min(per_row, length * slots)


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
    importance: Float[Array, "b L"], real: Bool[Array, "b L"], beta: Float[Array, ""] | float
) -> Float[Array, "b L"]:
    """The paper's budgets, beta * L_real * softmax(importance) over the whole row: they see the future (AA-28).
    Padding gets 0."""
    # A large negative number rather than -inf keeps a row of padding alone free of NaN.
    share = jax.nn.softmax(jnp.where(real, importance, -1e30), axis=-1)
    total = beta * real.sum(axis=-1, keepdims=True)
    return jnp.where(real, total * share, 0.0)


def prefix_budgets(
    importance: Float[Array, "b L"], segment_ids: Int[Array, "b L"], beta: Float[Array, ""] | float
) -> Float[Array, "b L"]:
    """Causal budgets, beta * exp(s_i) / mean_{j <= i} exp(s_j), the mean running over the token's document so far."""

    def merge(left: tuple[Array, Array, Array], right: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """log sum exp and the number of terms, both counted from the last start of a document."""
        left_start, left_sum, left_count = left
        right_start, right_sum, right_count = right
        return (
            left_start | right_start,
            jnp.where(right_start, right_sum, jnp.logaddexp(left_sum, right_sum)),
            jnp.where(right_start, right_count, left_count + right_count),
        )

    start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    terms = (start, importance, jnp.ones_like(importance))
    _, log_sum, count = jax.lax.associative_scan(merge, terms, axis=1)
    budget = beta * jnp.exp(importance - log_sum + jnp.log(count))
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


def floor_row_budgets(budget: Float[Array, "b L"]) -> Int[Array, "b L"]:
    """B_i = floor(B b_i), forgiving float32 rounding (decision 16).

    Without epsilon, uniform budgets lose a unit per token at some lengths; bounded by 1 / 2L it cannot push sum_i B_i
    past B.
    """
    return jnp.floor(budget + min(1e-4, 0.5 / budget.shape[1])).astype(jnp.int32)


def floor_causal_budgets(budget: Float[Array, "b L"]) -> Int[Array, "b L"]:
    """The floor of budgets that the cap bounds: epsilon follows float32 rounding, and never the length of the row."""
    return jnp.floor(budget + 1e-4 * jnp.maximum(1.0, 0.1 * budget)).astype(jnp.int32)


def total_allowance(tokens: Int[Array, "..."], beta: Float[Array, ""] | float, slack: int) -> Int[Array, "..."]:
    """What the first `tokens` tokens of a row may spend together: floor(beta * i) + slack (decision 23)."""
    # A budget scale may ask for more than an integer holds.
    return jnp.floor(jnp.minimum(beta * tokens + 1e-4, 2.0**30)).astype(jnp.int32) + slack


def cap_spending(
    wanted: Int[Array, "b L"], real: Bool[Array, "b L"], beta: Float[Array, ""] | float, slack: int
) -> Int[Array, "b L"]:
    """The largest spends n_i <= wanted_i whose running sum stays within beta * i + slack at every real token
    (decision 23).

    The rule n_i = min(wanted_i, allowance_i - sum_{j<i} n_j) unrolls to running_i = W_i + min(0, min_{j<=i}
    allowance_j - W_j), where W is the running sum of `wanted`: a prefix computation, exact in integers.
    """
    allowance = total_allowance(jnp.cumsum(real, axis=1), beta, slack)
    wanted = jnp.where(real, wanted, 0)
    wanted_sum = jnp.cumsum(wanted, axis=1)
    running = wanted_sum + jnp.minimum(0, jax.lax.cummin(allowance - wanted_sum, axis=1))
    return jnp.diff(running, axis=1, prepend=0)


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
