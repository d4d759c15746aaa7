"""Parts: what stands side by side on one normed input, and is summed (eq 1).

A part sees the tokens of its whole `tensor` group, for its own heads or hidden units alone, and returns its share of
the sum. So the maths of a part knows nothing of `tensor`, and all parts of a layer move their tokens once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import rounded
from aamoe_jax.mixers.base import Cache, Context, Mixer, Statistics
from aamoe_jax.shards import TENSOR


class Part(Mixer):
    """A part that looks at every token alone, unless it says otherwise: it has no cache."""

    label: ClassVar[str]
    """Its name among the parameters of a layer."""
    has_map: ClassVar[bool] = False
    """Whether it has weights of every token on every token (DEC-17): see `attention_map`."""

    def attention_map(self, h: Float[Array, "b L d"], context: Context) -> Float[Array, "b H L S"]:
        """The attention weights of every token here, head by head."""
        raise NotImplementedError

    def empty_cache(self, rows: int, length: int) -> Cache:
        """An empty cache for `length` tokens in every row."""
        return ()

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt."""
        return cache

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row."""
        return self(h, context)[0], cache


class SideBySide(Mixer):
    """The mixer that is the sum of its parts."""

    def __init__(self, parts: Mapping[str, Callable[..., Part]], config: ModelConfig, *, rngs: nnx.Rngs):
        self.parts = nnx.Dict({name: make(config, rngs=rngs) for name, make in parts.items()})

    def __call__(self, h: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        h = context.shards.gather(h, TENSOR)
        outputs, statistics = [], dict[str, Any]()
        for part in self.parts.values():
            output, found = part(h, context)
            outputs.append(output)
            statistics |= found
            if part.has_map and context.detail == "maps":
                statistics["attention_map"] = part.attention_map(h, context)
        return _as_input(context.shards.scatter_sum(sum(outputs[1:], outputs[0]), TENSOR), h), statistics

    def empty_cache(self, rows: int, length: int) -> dict[str, Any]:
        """The caches of all parts."""
        return {name: part.empty_cache(rows, length) for name, part in self.parts.items()}

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: dict[str, Any]) -> dict[str, Any]:
        """The caches after a prompt."""
        return {name: part.fill(h, context, cache[name]) for name, part in self.parts.items()}

    def decode(
        self, h: Float[Array, "b 1 d"], context: Context, cache: dict[str, Any]
    ) -> tuple[Float[Array, "b 1 d"], dict[str, Any]]:
        """One more token in every row."""
        outputs, caches = zip(*(part.decode(h, context, cache[name]) for name, part in self.parts.items()), strict=True)
        return _as_input(sum(outputs[1:], outputs[0]), h), dict(zip(self.parts, caches, strict=True))


def _as_input(output: Float[Array, "b n d"], h: Float[Array, "b n d"]) -> Float[Array, "b n d"]:
    """A sum that may be in float32, in the type of the input."""
    return output if output.dtype == h.dtype else rounded(output, h.dtype).astype(h.dtype)
