"""Makes two experiments of similar size: equal active FLOPs per token, or equal parameters (AA-32, decision 36).

Fields of the second experiment are changed until it is within 1 % of the first, or it is said why that cannot be.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from flax import nnx

from aamoe_jax.config import ConfigError, ExperimentConfig, ModelConfig, shown
from aamoe_jax.cost import parameter_count
from aamoe_jax.markdown import table
from aamoe_jax.model import LanguageModel
from aamoe_jax.preflight.closed_form import spent_flops
from experiments.binding import bindable_fields, did_you_mean, rebound, value_of

Equal = Literal["flops", "parameters"]
Number = Any
"""A value of the field: all are int, or all are float."""
Ratio = Callable[[Number], float]
"""How many times as big as the reference the other experiment is at a value of the field."""
Valid = Callable[[Number], bool]
"""Whether the other experiment can have that value."""

TOLERANCE = 0.01
LARGEST = 2**24
SMALLEST = 2.0**-16
"""No field is tried beyond these."""
FURTHEST = 4096
"""Steps from one valid value in which the next is looked for."""


class Match(NamedTuple):
    """An experiment that was made to match."""

    config: ExperimentConfig
    values: dict[str, Number]
    """Of the fields that were changed."""
    ratio: float
    """Its size, over the reference's."""


def active_flops(config: ExperimentConfig, length: int) -> float:
    """Per token of a forward pass over rows of that many tokens, readout included; all budgets are spent."""
    return spent_flops(config.model, 1, length) / length


def parameters(config: ExperimentConfig) -> int:
    """Scalars that are trained. None is made."""
    return _parameters_of_model(config.model)


@functools.lru_cache(maxsize=1024)  # to trace a model takes most of the time of a search
def _parameters_of_model(model: ModelConfig) -> int:
    return parameter_count(nnx.state(nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0)))))


def match(
    reference: ExperimentConfig,
    other: ExperimentConfig,
    fields: Sequence[str],
    equal: Equal,
    tolerance: float = TOLERANCE,
) -> Match:
    """`other` with values of `fields` that make it as big as the reference, within the tolerance.

    Args:
      fields: full names of numbers with which `other` grows, such as `ModelConfig.d_ff`. Several of them grow together,
        in the proportions that they have; where that does not come close enough, the last then moves alone.

    Raises:
      ConfigError: there are no such values.
    """
    found = Match(other, {}, math.inf)
    for field in fields:
        _kind(field)
    if len(fields) > 1:
        own = {field: value_of(other, field) for field in fields}
        first, *rest = (field for field in fields if own[field] is not None)  # None: it follows from another field

        def together(value: Number) -> dict[str, Number]:
            return {first: value} | {field: _kind(field)(value / own[first] * own[field]) for field in rest}

        found = _closest(reference, other, first, together, equal)
    if abs(found.ratio - 1) > min(tolerance, TOLERANCE):
        try:
            alone = _closest(reference, found.config, fields[-1], lambda value: {fields[-1]: value}, equal)
            found = min(found, alone._replace(values=found.values | alone.values), key=lambda one: abs(one.ratio - 1))
        except ConfigError:
            if abs(found.ratio - 1) > tolerance:
                raise
    if abs(found.ratio - 1) > tolerance:
        values = ", ".join(map(str, found.values.values()))
        raise _refusal(
            " and ".join(fields), f"the closest is {values}, with {found.ratio:.3f} times the {equal} of the reference"
        )
    return found


def _closest(
    reference: ExperimentConfig,
    other: ExperimentConfig,
    field: str,
    values: Callable[[Number], dict[str, Number]],
    equal: Equal,
) -> Match:
    """The best that can be found along `field`, on which the values of all that changes depend."""
    measure = parameters if equal == "parameters" else functools.partial(active_flops, length=reference.data.seq_len)
    wanted = measure(reference)

    @functools.cache
    def ratio(value: Number) -> float:
        return measure(rebound(other, values(value))) / wanted

    @functools.cache
    def valid(value: Number) -> bool:
        try:
            rebound(other, values(value))
        except ConfigError:
            return False
        return True

    value = _whole(ratio, valid, field) if _kind(field) is int else _real(ratio, valid, field)
    return Match(rebound(other, values(value)), values(value), ratio(value))


def _kind(field: str) -> type[int] | type[float]:
    """Of the numbers that the field takes."""
    fields = bindable_fields()
    if field not in fields:
        close = did_you_mean(field, fields) or "; `aamoe config show` lists all"
        raise ConfigError(f"no field is called {shown(field)}{close}")
    hints = {fields[field].hint, *get_args(fields[field].hint)}
    if not hints & {int, float}:
        raise ConfigError(f"{field} is no number: nothing can be found along it")
    return int if int in hints else float


def _whole(ratio: Ratio, valid: Valid, field: str) -> int:
    """The best of the valid multiples of the smallest: what restricts a field is mostly what it must divide."""
    step = next(filter(valid, range(1, FURTHEST + 1)), None)
    if step is None:
        raise _refusal(field, f"no value up to {FURTHEST} is valid")
    low, high = _bracket(ratio, valid, step, step, field)
    for turn in itertools.count():
        if high - low <= step:
            break
        # Where the size is linear in the field, as it mostly is, the line through both ends meets the reference.
        share = 0.5 if turn % 2 else (1 - ratio(low)) / (ratio(high) - ratio(low))
        steps = min(max(math.floor(share * (high - low) / step), 1), (high - low) // step - 1)
        middle = low + steps * step
        if not valid(middle):
            middle = _nearest(filter(valid, range(low + step, high, step)), middle)
            if middle is None:
                break
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    return min((low, high), key=lambda value: abs(ratio(value) - 1))


def _nearest(values: Iterable[int], wanted: int) -> int | None:
    return min(values, key=lambda value: abs(value - wanted), default=None)


def _real(ratio: Ratio, valid: Valid, field: str) -> float:
    """A number with as few digits as do."""
    start = next(filter(valid, (SMALLEST * 2**power for power in range(40))), None)
    if start is None:
        raise _refusal(field, f"no power of 2 from {SMALLEST:g} on is valid")
    low, high = _bracket(ratio, valid, start, SMALLEST, field)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    rounded = (float(f"{high:.{digits}g}") for digits in range(1, 9))
    return next((value for value in rounded if valid(value) and abs(ratio(value) - 1) <= TOLERANCE / 10), high)


def _bracket(ratio: Ratio, valid: Valid, start: Number, step: Number, field: str) -> tuple[Number, Number]:
    """Values of which one is too little, the other enough; twice the start where it is enough itself, and twice the
    largest that is valid where none is enough."""
    if ratio(start) >= 1:
        return start, start
    low, high = start, _furthest(valid, start, 2 * start, step)
    while low < high and ratio(high) < 1:
        if high > LARGEST:
            raise _refusal(field, f"at {high:g} it is {ratio(high):.3f} times the reference, and more adds nothing")
        growth = ratio(high) - ratio(low)
        further = (1 - ratio(high)) / growth * (high - low) if growth > 0 else high
        wanted = min(high + max(math.ceil(further / step), 1) * step, 2 * LARGEST)
        low, high = high, _furthest(valid, high, wanted, step)
    return low, high


def _furthest(valid: Valid, low: Number, wanted: Number, step: Number) -> Number:
    """A valid value above `low`, `wanted` or as near to it as validity reaches; `low` if there is none."""
    if valid(wanted):
        return wanted
    inside, outside = low, wanted
    while outside - inside > step:
        middle = inside + (outside - inside) // (2 * step) * step
        inside, outside = (middle, outside) if valid(middle) else (inside, middle)
    if inside > low:
        return inside
    # Divisors of a number lie apart.
    scattered = itertools.takewhile(lambda value: value < wanted, (low + at * step for at in range(2, FURTHEST)))
    return next(filter(valid, scattered), low)


def _refusal(field: str, why: str) -> ConfigError:
    return ConfigError(f"{field}: cannot be matched: {why}")


def comparison(names: Sequence[str], reference: ExperimentConfig, other: ExperimentConfig, found: Match) -> str:
    """The sizes of the reference and of the other, as it was and as it is, as a Markdown table."""
    length = reference.data.seq_len
    changed = ", ".join(f"{field} = {value}" for field, value in found.values.items())
    entries = [(names[0], reference), (names[1], other), (f"{names[1]}, {changed}", found.config)]
    sizes = [(parameters(config), active_flops(config, length)) for _, config in entries]
    rows = [
        [name, f"{count:,}", f"{count / sizes[0][0]:.3f}", f"{flops:,.0f}", f"{flops / sizes[0][1]:.3f}"]
        for (name, _), (count, flops) in zip(entries, sizes, strict=True)
    ]
    return table(["experiment", "parameters", "of reference", "active FLOPs/token", "of reference"], rows)
