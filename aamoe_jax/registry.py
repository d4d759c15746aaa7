"""The registry of mixers: the names that `ModelConfig.pattern` may contain.

A mixer registers itself in the file that defines it, with everything that others need to know of it:

    @register("running_mean", "the mean of the values of all earlier tokens")
    class RunningMean(Mixer): ...

    register("local_attention", "attention to the last `window` tokens", selector="window")(CausalAttention)

Nothing of the library is imported here, so that configs can look names up.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

Activation = Literal["softmax", "relu", "swiglu", "root", "gated_root"]
"""Of the products of input and keys: over all of them (`softmax`), each for itself (`relu`), times that of a gate
(`swiglu`), as they are over the root of their number (`root`), or both of the latter (`gated_root`)."""

Class = TypeVar("Class", bound=type)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A mixer in the registry."""

    name: str
    cls: Any
    """A subclass of `mixers.base.Mixer`: how it computes, decodes, and what it costs."""
    summary: str
    """One line for the table of mixers."""
    options: Mapping[str, Any]
    """Keyword arguments of the class, where one class serves several mixers."""
    heads: Activation | None
    """The activation of its heads, if they are networks whose neurons are the tokens of its input (`analysis.neurons`).
    """
    neurons: bool
    """Whether it has learned key/value pairs that are networks of neurons."""
    embeddings: bool
    """Whether it reads the token embeddings (`Context.embedded`)."""
    config: type | None
    """A frozen dataclass whose fields can be set in gin, and which `ModelConfig.of` returns; None: it has none."""
    own_weighted_sums: tuple[Any, ...] | None
    """Where one class serves several mixers: in place of `Mixer.weighted_sums`."""
    fixed_stream: Callable[..., Any] | None
    """What enters the first block of the fixed sequence that it reads (`Context.fixed`): a function of (embed, config,
    positions [1, n], shards), which returns [1, n, d]."""

    @property
    def weighted_sums(self) -> tuple[Any, ...]:
        """What each of its parts sums over (`mixers.weighted_sum.WeightedSum`)."""
        return self.cls.weighted_sums if self.own_weighted_sums is None else self.own_weighted_sums

    @property
    def readable(self) -> bool:
        """Whether it can be read as networks of neurons."""
        return self.heads is not None or self.neurons


MIXERS: dict[str, Entry] = {}
"""All mixers that have been imported, by name."""


def register(
    name: str,
    summary: str,
    *,
    heads: Activation | None = None,
    neurons: bool = False,
    embeddings: bool = False,
    config: type | None = None,
    weighted_sums: tuple[Any, ...] | None = None,
    fixed_stream: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[[Class], Class]:
    """A decorator that makes a class a mixer of this name; see `Entry` for the arguments.

    Args:
      options: keyword arguments with which the class is called, beside (config, *, rngs).

    Raises:
      ValueError: the name is no word of letters, digits and underscores, or is taken; the config is no frozen
        dataclass with a default for every field.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"mixer name {name!r}: must be letters, digits and underscores, such as 'running_mean'")

    if config is not None and not _is_config(config):
        raise ValueError(
            f"mixer {name!r}: config = {config!r} must be a frozen dataclass with a default for every field"
        )

    def enter(cls: Class) -> Class:
        taken = MIXERS.get(name)
        if taken is not None and _place(taken.cls) != _place(cls):
            raise ValueError(f"mixer name {name!r} is that of {_place(taken.cls)}: take another for {_place(cls)}")
        MIXERS[name] = Entry(
            name, cls, summary, options, heads, neurons, embeddings, config, weighted_sums, fixed_stream
        )
        return cls

    return enter


def own_configs() -> dict[str, type]:
    """The configs that mixers have registered, by the name of the class."""
    return {entry.config.__name__: entry.config for entry in MIXERS.values() if entry.config is not None}


def _is_config(cls: type) -> bool:
    # Of how a dataclass was made, typeshed knows nothing.
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return False
    missing = dataclasses.MISSING
    return all(
        field.default is not missing or field.default_factory is not missing for field in dataclasses.fields(cls)
    )


def unknown_mixer(name: str) -> str:
    """Why `name` is refused, with the closest name or all of them."""
    close = difflib.get_close_matches(name, MIXERS, n=1, cutoff=0.6)
    known = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(MIXERS))}"
    return f"{name!r} is no mixer; {known}"


def _place(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
