"""Mixers by name: what a stack's pattern may contain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from flax import nnx

from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.config import MixerName, ModelConfig
from aamoe_jax.mixers.all_attention import AllAttention
from aamoe_jax.mixers.attention import CausalAttention
from aamoe_jax.mixers.base import Mixer
from aamoe_jax.mixers.clustered import ClusteredAttention
from aamoe_jax.mixers.costs import Costs, Setting, mixer_input
from aamoe_jax.mixers.deconstructed import TokenMLP
from aamoe_jax.mixers.depth import MixtureOfDepths
from aamoe_jax.mixers.dynamic import FilteredAttention, GatedAttention, SquareRootAttention
from aamoe_jax.mixers.experts import ReLUExperts, SwitchExperts, TopKExperts
from aamoe_jax.mixers.family import Form
from aamoe_jax.mixers.feed_forward import FeedForward, SwiGLU
from aamoe_jax.mixers.fixed_maps import FixedMapAttention, StaticAttention
from aamoe_jax.mixers.parts import Part, SideBySide
from aamoe_jax.mixers.recurrent import ApproximateAttention, NonApproximateAttention

PARTS: Mapping[MixerName, Mapping[str, Callable[..., Part]]] = {
    # The parallel transformer layer (eq 1, AA-05).
    "parallel": {"attention": CausalAttention, "feed_forward": FeedForward},
    "all_attention": {"attention": AllAttention},
    "attention": {"attention": CausalAttention},
    "local_attention": {"attention": functools.partial(CausalAttention, selector="window")},
    "strided_attention": {"attention": functools.partial(CausalAttention, selector="strided")},
    "sink_attention": {"attention": functools.partial(CausalAttention, selector="sinks")},
    "sqrt_attention": {"attention": SquareRootAttention},
    "gated_attention": {"attention": GatedAttention},
    "filtered_attention": {"attention": FilteredAttention},
    "clustered_attention": {"attention": ClusteredAttention},
    # One principle of attention after the other relaxed (Xue, Moosavi, Aletras).
    "mlp": {"mlp": TokenMLP},
    "approximate": {"attention": ApproximateAttention},
    "non_approximate": {"attention": NonApproximateAttention},
    "random_qk": {"attention": functools.partial(FixedMapAttention, stream="random_qk")},
    "fixed_qk": {"attention": functools.partial(FixedMapAttention, stream="fixed_qk")},
    "static_qk": {"attention": StaticAttention},
    "feed_forward": {"feed_forward": FeedForward},
    "swiglu": {"feed_forward": SwiGLU},
    "moe": {"experts": TopKExperts},
    "switch": {"experts": SwitchExperts},
    "relu_moe": {"experts": ReLUExperts},
}
"""The parts that stand side by side in each mixer."""

WHOLE: Mapping[MixerName, Callable[..., nnx.Module]] = {"aamoe": AAMoELayer, "mixture_of_depths": MixtureOfDepths}
"""Mixers of their own making: they choose among tokens before anything is computed of them."""

MIXERS: tuple[MixerName, ...] = (*WHOLE, *PARTS)


def forms(name: MixerName) -> list[Form]:
    """What a mixer is as an instance of the family, part by part."""
    makers = [WHOLE[name]] if name in WHOLE else PARTS[name].values()
    return [make.func.form(**make.keywords) if isinstance(make, functools.partial) else make.form() for make in makers]


def makers(name: str) -> list[type[Mixer]]:
    """The classes of a mixer: those of its parts, or its own."""
    made = [WHOLE[name]] if name in WHOLE else PARTS[name].values()
    return [make.func if isinstance(make, functools.partial) else make for make in made]


def costs(name: str, at: Setting) -> Costs:
    """What one layer of the mixer costs."""
    return sum((maker.costs(at) for maker in makers(name)), mixer_input(at))


def build_mixer(name: MixerName, config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """The mixer called `name`."""
    return WHOLE[name](config, rngs=rngs) if name in WHOLE else SideBySide(PARTS[name], config, rngs=rngs)
