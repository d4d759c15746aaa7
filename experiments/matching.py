"""Makes two experiments of similar size: equal active FLOPs per token, or equal parameters (AA-32, decision 36).

One field of the second experiment is changed until it is within 1 % of the first, or it is said why that cannot be.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from flax import nnx

from aamoe_jax.config import ConfigError, ExperimentConfig
from aamoe_jax.cost import forward_flops, parameter_count
from aamoe_jax.model import LanguageModel
from aamoe_jax.preflight.closed_form import pairs_per_token
from aamoe_jax.preflight.report import table
from experiments.binding import bindable_fields, rebound

Equal = Literal["flops", "parameters"]
Ratio = Callable[[int | float], float]
"""How many times as big as the reference the other experiment is at a value of the field."""

TOLERANCE = 0.01
LARGEST = 2**24
SMALLEST = 2.0**-16
"""No field is tried beyond these."""


class Match(NamedTuple):
    """An experiment that was made to match."""

    config: ExperimentConfig
    field: str
    value: int | float


def active_flops(config: ExperimentConfig, length: int) -> float:
    """Per token of a forward pass over rows of that many tokens, readout included; all budgets are spent."""
    pairs = {"pairs_expert": jnp.asarray(length * pairs_per_token(config.model))}
    return forward_flops(config.model, 1, length, pairs) / length


def parameters(config: ExperimentConfig) -> int:
    """Scalars that are trained. None is made."""
    return parameter_count(nnx.state(nnx.eval_shape(lambda: LanguageModel(config.model, rngs=nnx.Rngs(0)))))


def match(reference: ExperimentConfig, other: ExperimentConfig, field: str, equal: Equal) -> Match:
    """`other` with the value of `field` that makes it as big as the reference, within TOLERANCE.

    Args:
      field: full name of a number with which `other` grows, such as `ModelConfig.d_ff`.

    Raises:
      ConfigError: there is no such value.
    """
    length = reference.data.seq_len
    measure = parameters if equal == "parameters" else functools.partial(active_flops, length=length)
    wanted = measure(reference)

    @functools.cache
    def ratio(value: int | float) -> float:
        return measure(rebound(other, {field: value})) / wanted

    value = _whole(ratio, other, field) if _kind(field) is int else _real(ratio, field)
    if abs(ratio(value) - 1) > TOLERANCE:
        raise _refusal(field, f"the closest is {value}, with {ratio(value):.3f} times the {equal} of the reference")
    return Match(rebound(other, {field: value}), field, value)


def _kind(field: str) -> type[int] | type[float]:
    """Of the numbers that the field takes."""
    fields = bindable_fields()
    if field not in fields:
        raise ConfigError(f"no field is called {field!r}; `python -m launch.config show` lists all")
    hints = {fields[field].hint, *get_args(fields[field].hint)}
    if not hints & {int, float}:
        raise ConfigError(f"{field} is no number: nothing can be found along it")
    return int if int in hints else float


def _whole(ratio: Ratio, other: ExperimentConfig, field: str) -> int:
    """The best of the multiples of the smallest value that is valid: what restricts a field is what it must divide."""
    step = next((value for value in range(1, 4097) if _is_valid(other, field, value)), None)
    if step is None:
        raise _refusal(field, "no value up to 4096 is valid")
    low, high = _bracket(ratio, step, field)
    for turn in itertools.count():
        if high - low <= step:
            break
        # Where the size is linear in the field, as it mostly is, the line through both ends meets the reference.
        share = 0.5 if turn % 2 else (1 - ratio(low)) / (ratio(high) - ratio(low))
        steps = min(max(math.floor(share * (high - low) / step), 1), (high - low) // step - 1)
        middle = low + steps * step
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    return min((low, high), key=lambda value: abs(ratio(value) - 1))


def _is_valid(other: ExperimentConfig, field: str, value: int) -> bool:
    try:
        rebound(other, {field: value})
    except ConfigError:
        return False
    return True


def _real(ratio: Ratio, field: str) -> float:
    """A number with as few digits as do."""
    low, high = _bracket(ratio, SMALLEST, field)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    rounded = (float(f"{high:.{digits}g}") for digits in range(1, 9))
    return next((value for value in rounded if abs(ratio(value) - 1) <= TOLERANCE / 10), high)


def _bracket(ratio: Ratio, step: int | float, field: str) -> tuple[int | float, int | float]:
    """Multiples of the step of which one is too little, the other enough; the step twice where it is enough itself."""
    if ratio(step) >= 1:
        return step, step
    low, high = step, 2 * step
    while ratio(high) < 1:
        if high > LARGEST:
            raise _refusal(field, f"at {high:g} it is {ratio(high):.3f} times the reference, and more adds nothing")
        growth = ratio(high) - ratio(low)
        further = (1 - ratio(high)) / growth * (high - low) if growth > 0 else high
        low, high = high, min(high + max(math.ceil(further / step), 1) * step, 2 * LARGEST)
    return low, high


def _refusal(field: str, why: str) -> ConfigError:
    return ConfigError(f"{field}: cannot be matched: {why}")


def comparison(names: Sequence[str], reference: ExperimentConfig, other: ExperimentConfig, found: Match) -> str:
    """The sizes of the reference and of the other, as it was and as it is, as a Markdown table."""
    length = reference.data.seq_len
    entries = [(names[0], reference), (names[1], other), (f"{names[1]}, {found.field} = {found.value}", found.config)]
    sizes = [(parameters(config), active_flops(config, length)) for _, config in entries]
    rows = [
        [name, f"{count:,}", f"{count / sizes[0][0]:.3f}", f"{flops:,.0f}", f"{flops / sizes[0][1]:.3f}"]
        for (name, _), (count, flops) in zip(entries, sizes, strict=True)
    ]
    return table(["experiment", "parameters", "of reference", "active FLOPs/token", "of reference"], rows)
