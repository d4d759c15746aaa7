"""Mixers by name: their modules, and their costs."""

from __future__ import annotations

import functools

from flax import nnx

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Mixer
from aamoe_jax.mixers.costs import Costs, Setting, mixer_input
from aamoe_jax.mixers.parts import Part, SideBySide
from aamoe_jax.registry import MIXERS


def build_mixer(name: str, config: ModelConfig, *, rngs: nnx.Rngs) -> Mixer:
    """The mixer called `name`. A single part becomes a mixer of one part."""
    entry = MIXERS[name]
    make = functools.partial(entry.cls, **entry.options)
    return (
        SideBySide({entry.cls.label: make}, config, rngs=rngs)
        if issubclass(entry.cls, Part)
        else make(config, rngs=rngs)
    )


def costs(name: str, at: Setting) -> Costs:
    """What one layer of the mixer costs, its normed input included."""
    return mixer_input(at) + MIXERS[name].cls.costs(at)
