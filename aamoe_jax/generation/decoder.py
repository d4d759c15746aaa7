"""A model laid out for decoding: a prompt fills the caches, every further token is one compiled step (AA-40).

Shapes: b rows, L tokens of the padded prompts, d width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.evaluation.perplexity import causal_budget, require_budget_scale
from aamoe_jax.generation.sampling import Sampling, draw
from aamoe_jax.mixers.base import BudgetMode, Cache, Context
from aamoe_jax.mixers.fixed_maps import FixedStreams, fixed_streams
from aamoe_jax.model import LanguageModel, betas_of_blocks, merge, structure

SMALLEST_BUCKET = 16

Scale = Float[Array, ""] | float


class Parameters(NamedTuple):
    """Every period apart: a step reads parameters where they lie, without cutting them out of a stack first."""

    ends: dict[str, Any]
    """Embedding, last norm, readout."""
    periods: list[dict[str, Any]]


class State(NamedTuple):
    """What the tokens so far have left behind. Whoever takes it overwrites it: use each state once."""

    caches: list[list[Cache]]
    """One per block of every period."""
    lengths: Int[Array, "b"]
    """Tokens in each row so far, which is the position of the next one."""
    logits: Float[Array, "b V"]
    """Of the next token."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the compiled functions depend on, beside shapes."""

    config: ModelConfig
    budget: BudgetMode
    max_budget_scale: float
    length: int
    """Most tokens of a row."""

    def __post_init__(self) -> None:
        if self.budget == "row":
            raise ConfigError("budget = 'row': row budgets see the future; sampling needs 'prefix' or 'predictor'")
        trained = self.config.aamoe.budget.normalizer
        if self.budget.startswith("predictor") and self.config.layers_of("aamoe") and trained != "row":
            raise ConfigError(
                f"budget = {self.budget!r}: this model has no budget predictor; it has its own causal budgets, 'prefix'"
            )

    @property
    def capacity(self) -> int:
        """Tokens that caches can hold: whole chunks, where there are AA-MoE layers."""
        return self.whole(self.length)

    def whole(self, length: int) -> int:
        """The length of rows that are padded to whole chunks."""
        m = self.config.aamoe.chunk_size if self.config.layers_of("aamoe") else 1
        return -(-length // m) * m

    def model(self, ends: dict[str, Any], period: dict[str, Any]) -> LanguageModel:
        """The model, of one period."""
        return merge(structure(self.config), ends | {"periods": period})

    def betas(self, index: Int[Array, ""] | int, scale: Scale) -> Float[Array, "p"]:
        """Of every block of a period."""
        return betas_of_blocks(self.config, scale, self.max_budget_scale)[index]

    def context(self, segment_ids: Int[Array, "b L"], positions: Int[Array, "b L"], scale: Scale) -> Context:
        """What every mixer is told."""
        context = Context(segment_ids, positions, self.budget, 0.0, scale=scale, max_scale=self.max_budget_scale)
        return dataclasses.replace(context, rotary_tables=context.rotary(self.config))


class Decoder:
    """Rows that grow at their ends, to at most `length` tokens each, prompt included.

    A step is compiled once per number of rows (and `Sampling`), a prompt once per power of two of its length. Steps do
    not check their arguments: a budget scale above `max_budget_scale` is cut to it, and a full row has logits of NaN.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict[str, Any],
        *,
        length: int,
        budget: BudgetMode | None = None,
        max_budget_scale: float = 1.0,
    ):
        """Lays the parameters out.

        Args:
          budget: causal budgets of the AA-MoE layers; None: `causal_budget(config)`.
          max_budget_scale: the largest budget scale that static shapes allow for.

        Raises:
          ConfigError: for budgets that this model, or any sampling model, cannot have.
        """
        self.plan = Plan(config, causal_budget(config) if budget is None else budget, max_budget_scale, length)
        ends = {name: part for name, part in params.items() if name != "periods"}
        count = config.periods
        periods = [jax.tree.map(lambda x, p=p: x[p], params["periods"]) for p in range(count)]
        self.params = jax.tree.map(jnp.asarray, Parameters(ends, periods))

    def prefill(self, prompts: Sequence[Int[np.ndarray, "_"]], *, budget_scale: float = 1.0) -> State:
        """The state after prompts, one per row, of any lengths.

        Raises:
          ConfigError: for an empty prompt, one that fills the cache, or a budget scale out of range.
        """
        self.check_scale(budget_scale)
        lengths = [len(prompt) for prompt in prompts]
        if not lengths or min(lengths) == 0:
            raise ConfigError("prompt = '': give at least one token to continue")
        room = self.plan.length
        if max(lengths) >= room:
            raise ConfigError(f"prompt: {max(lengths)} tokens do not fit into a cache for {room} with one more")
        bucket = self.plan.whole(min(room, max(SMALLEST_BUCKET, 1 << (max(lengths) - 1).bit_length())))
        tokens = np.zeros((len(prompts), bucket), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        return fill(self.plan, self.params, tokens, np.asarray(lengths, np.int32), budget_scale)

    def check_scale(self, budget_scale: float) -> None:
        """Refuses a budget scale that is not a positive number, or larger than static shapes allow for."""
        if require_budget_scale(budget_scale) > self.plan.max_budget_scale:
            most = self.plan.max_budget_scale
            raise ConfigError(f"budget_scale = {budget_scale}: must be at most max_budget_scale = {most}")

    def append(self, state: State, tokens: Int[np.ndarray, "b"], *, budget_scale: float = 1.0) -> State:
        """The state after one more token in every row, given from outside."""
        tokens = np.asarray(tokens, np.int32)
        return _append(self.plan, self.params, state, tokens, np.float32(budget_scale))

    def next(
        self, state: State, keys: Key[Array, "b"], sampling: Sampling, *, budget_scale: float = 1.0
    ) -> tuple[Int[Array, "b"], State]:
        """Draws one more token in every row, and the state after it. `keys` are the rows' own, the same at every
        step."""
        return _next(self.plan, self.params, state, keys, sampling, np.float32(budget_scale))


def fill(
    plan: Plan,
    params: Parameters,
    tokens: Int[Array | np.ndarray, "b L"],
    lengths: Int[Array | np.ndarray, "b"],
    budget_scale: float,
) -> State:
    """The state after prompts that are padded to whole chunks."""
    (ends, periods), scale = params, np.float32(budget_scale)
    embedded, fixed = _enter(plan, params, tokens)
    x, caches = embedded, []
    for index, period in enumerate(periods):
        empty = _empty_caches(plan, ends, period, len(tokens))
        x, fixed, filled = _prefill_period(plan, ends, period, index, x, embedded, fixed, lengths, empty, scale)
        caches.append(filled)
    return State(caches, jnp.asarray(lengths), _last_logits(plan, params, x, lengths))


_jit = functools.partial(jax.jit, static_argnums=0)


@_jit
def _enter(
    plan: Plan, params: Parameters, tokens: Int[Array, "b L"]
) -> tuple[Float[Array, "b L d"], FixedStreams | None]:
    """The embedded prompts, and fixed streams for all positions of the cache: maps are made once."""
    model = plan.model(params.ends, params.periods[0])
    return model.embed(tokens), fixed_streams(plan.config, model.embed, plan.capacity)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _empty_caches(plan: Plan, ends: dict[str, Any], period: dict[str, Any], rows: int) -> list[Cache]:
    return plan.model(ends, period).periods.empty_caches(rows, plan.capacity)


@functools.partial(_jit, donate_argnames="caches")
def _prefill_period(
    plan: Plan,
    ends: dict[str, Any],
    period: dict[str, Any],
    index: Int[Array, ""] | int,
    x: Float[Array, "b L d"],
    embedded: Float[Array, "b L d"],
    fixed: FixedStreams | None,
    lengths: Int[Array, "b"],
    caches: list[Cache],
    scale: Scale,
) -> tuple[Float[Array, "b L d"], FixedStreams | None, list[Cache]]:
    """One period of blocks over the prompts; the same executable serves them all."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    context = plan.context((positions < lengths[:, None]).astype(jnp.int32), positions, scale)
    context = dataclasses.replace(context, embedded=embedded, fixed=fixed)
    return plan.model(ends, period).periods.prefill(x, context, plan.betas(index, scale), caches)


@_jit
def _last_logits(
    plan: Plan, params: Parameters, x: Float[Array, "b L d"], lengths: Int[Array, "b"]
) -> Float[Array, "b V"]:
    last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]
    return plan.model(params.ends, params.periods[0]).logits(last)


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnames="state")
def _next(
    plan: Plan, params: Parameters, state: State, keys: Key[Array, "b"], sampling: Sampling, scale: Scale
) -> tuple[Int[Array, "b"], State]:
    # A draw depends on its row's key and length alone: not on the other rows, nor on how many steps there were.
    drawn = draw(state.logits, jax.vmap(jax.random.fold_in)(keys, state.lengths), sampling)
    return drawn, grow(plan, params, state, drawn, scale)


def grow(plan: Plan, params: Parameters, state: State, tokens: Int[Array, "b"], scale: Scale) -> State:
    """All blocks over one more token in every row."""
    positions = state.lengths[:, None]
    context = plan.context(jnp.ones_like(positions), positions, scale)
    x = plan.model(params.ends, params.periods[0]).embed(tokens[:, None])
    context = dataclasses.replace(context, embedded=x)
    longer = []
    for index, (period, caches) in enumerate(zip(params.periods, state.caches, strict=True)):
        x, caches = plan.model(params.ends, period).periods.decode(x, context, plan.betas(index, scale), caches)
        longer.append(caches)
    logits = plan.model(params.ends, params.periods[0]).logits(x[:, 0])
    logits = jnp.where(positions < plan.length, logits, jnp.nan)
    return State(longer, state.lengths + 1, logits)


_append = _jit(grow, donate_argnames="state")
