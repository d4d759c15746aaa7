"""What a mixer is given, and what it returns.

A mixer is a module with `__call__(h, context) -> (output, statistics)`: h [b, L, d] is the normed input of the block,
output [b, L, d] is added to the residual stream, statistics is a flat dict of arrays (empty for dense mixers).

Over a mesh h is the part of the rows and tokens that `shards.py` says, parameters are divided as their `axes` say, and
output and statistics are of the same tokens; `context.shards` moves what a mixer needs of others.

It decodes through a cache of its own making, a pytree of arrays:
* `empty_cache(rows, length)`: an empty cache for `length` tokens in every row;
* `fill(h, context, cache)`: the cache after a prompt h [b, L, d] that starts the rows, padded at its end (or `prefill`,
  which also returns the output);
* `decode(h, context, cache) -> (output, cache)`: one more token h [b, 1, d] per row, at `context.positions`; its output
  is what `__call__` would give it in a row of all tokens so far.
A mixer that defines none of the three decodes by computing whole rows again.

`check_mixer` (aamoe_jax/check.py) holds a mixer to all of this.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import RotaryTable, rotary_table
from aamoe_jax.mixers.costs import Costs, Loop, Number, Setting
from aamoe_jax.mixers.weighted_sum import WeightedSum
from aamoe_jax.registry import MIXERS
from aamoe_jax.shards import RESOURCE, TENSOR, TOKENS, WHOLE, Shards

BudgetMode = Literal["row", "prefix", "predictor", "predictor_uncapped"]
Detail = Literal["sums", "tokens", "resources", "maps"]
Layout = Literal["here", "attending", "rows"]
Statistics = dict[str, Any]
"""Arrays: sums over tokens on the device, NumPy's once they are on the host."""
Cache = Any
"""A pytree of arrays that a mixer makes and reads."""


DIVIDED: dict[Layout, tuple[str, ...]] = {"here": TOKENS, "attending": RESOURCE, "rows": ()}
"""The axes of a mesh over which the tokens of a row are divided: a device has some of them ("here"), attends for some
more with a part of the heads ("attending"), and can look at whole rows. Without a mesh all three are the same."""


class RotaryTables(NamedTuple):
    """The rotary angles that layers need: computed once, for they are the same in every layer."""

    heads: RotaryTable
    """Of all tokens of the rows, for heads."""
    attending: RotaryTable
    """Of the tokens that attend together, for heads."""
    tokens: RotaryTable
    """Of the tokens here, for the router's vectors."""
    ends: RotaryTable
    """Of the last token of every chunk of the rows, for the router's vectors."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The batch around the activations, the same for every layer but for `beta`."""

    segment_ids: Int[Array, "b L"]
    """Documents of whole rows, counted from 1; 0 is padding. Tokens see their own document alone."""
    positions: Int[Array, "b L"]
    """Position of a token in its document, for whole rows."""
    budget: BudgetMode
    """Which budgets AA-MoE layers use: the row's, the prefix's, or the predictor's, under the cap or without it."""
    beta: Float[Array, ""] | float
    """Mean number of resources per token in this layer; at most the largest of the config, which bounds the work."""
    detail: Detail = "sums"
    """`tokens` adds per-token arrays to the statistics, `resources` also what every token was given, `maps` what every
    token weighs every other by."""
    with_mass: Bool[Array, ""] | bool = True
    """Whether statistics hold how attention is divided, which costs something; else they hold 0. A traced value chooses
    while the program runs."""
    scale: Float[Array, ""] | float = 1.0
    """The budget scale, which multiplies beta (AA-35). It may change without a new compilation."""
    max_scale: float = 1.0
    """The largest `scale` that the static bounds on work cover; a larger one is cut to it."""
    shards: Shards = WHOLE
    """Which part of the rows h is."""
    rotary_tables: RotaryTables | None = None
    """Where they were computed once for all layers: see `rotary`."""
    embedded: Float[Array, "b s d"] | None = None
    """The embeddings of the tokens that attend together, where a mixer of the stack reads them (DEC-08)."""
    fixed: Any = None
    """The `mixers.fixed_maps.FixedStreams` at this depth, where a mixer of the stack reads one."""

    @classmethod
    def of_rows(cls, config: ModelConfig, rows: int, length: int) -> Context:
        """Every row one document, budgets as configured (those of the first layer, where layers differ)."""
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        return cls(jnp.ones((rows, length), jnp.int32), positions, config.aamoe.budget.normalizer, config.betas[0])

    def rotary(self, config: ModelConfig) -> RotaryTables:
        """The angles of rotary embeddings at every position."""
        if self.rotary_tables is not None:
            return self.rotary_tables
        ends = self.positions[:, config.aamoe.chunk_size - 1 :: config.aamoe.chunk_size]
        heads = rotary_table(self.positions, config.head_dim, config.rope_base)
        return RotaryTables(
            heads,
            RotaryTable(*(self.shards.part(x, RESOURCE) for x in heads)),
            rotary_table(self.shards.part(self.positions, TOKENS), config.d_model, config.rope_base),
            rotary_table(ends, config.d_model, config.rope_base),
        )

    @property
    def real(self) -> Bool[Array, "b n"]:
        """Tokens here that are not padding."""
        return self.shards.part(self.segment_ids, TOKENS) > 0

    @property
    def attending_from(self) -> Int[Array, ""] | int:
        """Where in their rows the tokens that attend together begin."""
        return self.shards.start(self.segment_ids.shape[1], RESOURCE)

    def move(self, x: Array, source: Layout, target: Layout) -> Array:
        """What is known of the tokens of one layout, for those of another: [b, n, ...] here, [b, s, ...] that attend
        together, [b, L, ...] of whole rows."""
        before, after = DIVIDED[source], DIVIDED[target]
        if len(after) < len(before):
            return self.shards.gather(x, tuple(axis for axis in before if axis not in after))
        return self.shards.part(x, tuple(axis for axis in after if axis not in before))

    def sum_over_heads(self, x: Array) -> Array:
        """[b, s, ...] of some of the heads -> [b, n, ...], the sum over all of them."""
        return self.shards.scatter_sum(x, TENSOR)


class Mixer(nnx.Module):
    """What all mixers have: see the top of this file. Costs are functions of the config alone: no mixer is built."""

    weighted_sums: ClassVar[tuple[WeightedSum, ...]] = (WeightedSum(*["not said"] * len(WeightedSum._fields)),)
    """What each of its parts is as a sum over candidates, for the table of mixers."""
    losses: ClassVar[tuple[str, ...]] = ()
    """Which of `training.auxiliary.LOSSES` its statistics hold, of those that are weighed by their layers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config

    def __call__(self, h: Float[Array, "b n d"], context: Context) -> tuple[Float[Array, "b n d"], Statistics]:
        """What is added to the residual stream of the tokens h, and statistics."""
        raise NotImplementedError

    def empty_cache(self, rows: int, length: int) -> Cache:
        """An empty cache for `length` tokens in every row; by default for their inputs."""
        return jnp.zeros((rows, length, self.config.d_model), self.config.dtype)

    def fill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> Cache:
        """The cache after a prompt."""
        return cache.at[:, : h.shape[1]].set(h)

    def prefill(self, h: Float[Array, "b L d"], context: Context, cache: Cache) -> tuple[Float[Array, "b L d"], Cache]:
        """A prompt, and the cache after it; by default by `__call__` and `fill`."""
        # What both compute alike, the compiler computes once.
        return self(h, context)[0], self.fill(h, context, cache)

    def decode(self, h: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """One more token in every row; by default by computing the whole row again.

        The default serves mixers that read their input alone: no embeddings, and no fixed sequence.
        """
        cache = cache.at[jnp.arange(len(h)), context.positions[:, 0]].set(h[:, 0], mode="drop")
        index = jnp.broadcast_to(jnp.arange(cache.shape[1]), cache.shape[:2])
        so_far = (index <= context.positions).astype(jnp.int32)
        row = dataclasses.replace(context, segment_ids=so_far, positions=index, rotary_tables=None, embedded=None)
        return jnp.take_along_axis(self(cache, row)[0], context.positions[..., None], axis=1), cache

    @classmethod
    def costs(cls, at: Setting) -> Costs:
        """Of one layer of this mixer, in closed form.

        Where a mixer does not say, FLOPs are those of multiplying every token by every parameter once (in decoding, all
        tokens of a row where the cache is the default one), and activation bytes are unknown: NaN.
        """
        parameters, cached = _sizes(cls, at)
        computed = at.length if cls.decode is Mixer.decode else 1
        flops = 2 * parameters
        return Costs(at.tokens * flops, at.rows * computed * flops, math.nan, cached, flops)

    @staticmethod
    def loops(at: Setting) -> tuple[Loop, ...]:
        """The loops over blocks of scores in its forward pass: a compiler's count has one turn of each."""
        return ()

    @staticmethod
    def summarize(statistics: Statistics) -> dict[str, Any]:
        """Figures per layer, made on the host of what `__call__` returned, summed over a batch.

        Args:
          statistics: those of a whole stack, in float64, each with a leading axis over the layers that have it; those
            of this mixer are missing where no layer is one.
        """
        return {}

    @staticmethod
    def extra_flops(at: Setting, members: Sequence[Any], statistics: Statistics) -> float:
        """FLOPs of a forward pass beyond the model FLOPs in `costs`, for mixers whose work depends on the text.

        Args:
          members: the classes of the mixers of one period that share this method.
          statistics: of all layers of the stack; a figure may be missing, and then changes nothing.
        """
        return 0.0

    @classmethod
    def decode_bytes(cls, at: Setting) -> Number:
        """Bytes that one more token of one row reads: parameters (float32), and what it reads of a full cache.

        Raises:
          NotImplementedError: the mixer does not say.
        """
        raise NotImplementedError(f"{cls.__name__} does not say what it reads for one more token")


@functools.lru_cache
def _sizes(cls: type[Mixer], at: Setting) -> tuple[int, int]:
    """Parameters of a mixer, and bytes of its cache. None is made."""
    options = next(entry.options for entry in MIXERS.values() if entry.cls is cls)

    def build() -> tuple[Any, Cache]:
        mixer = cls(at.config, rngs=nnx.Rngs(0), **options)
        return nnx.state(mixer), mixer.empty_cache(at.rows, at.length)

    parameters, cache = nnx.eval_shape(build)
    cached = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    return sum(leaf.size for leaf in jax.tree.leaves(parameters)), cached


def causal_mask(segment_ids: Int[Array, "b L"]) -> Bool[Array, "b L L"]:
    """mask[b, i, j]: token i may see token j, which is not later and of the same document."""
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    return causal & (segment_ids[:, :, None] == segment_ids[:, None, :])


def document_starts(segment_ids: Int[Array, "b L"]) -> Int[Array, "b L"]:
    """Where in the row the document of every token begins."""
    index = jnp.arange(segment_ids.shape[1])
    begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    return jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
