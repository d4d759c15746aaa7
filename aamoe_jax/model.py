"""The language model (AA-31): embed -> blocks -> norm -> logits. A stack is a repeated pattern of mixers.

Shapes: b rows, L tokens per row, d width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ModelConfig
from aamoe_jax.layers import Norm
from aamoe_jax.mixers.base import BudgetMode, Cache, Context, Detail, Statistics
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.fixed_maps import fixed_streams
from aamoe_jax.registry import MIXERS
from aamoe_jax.shards import TENSOR, TOKENS, WHOLE, Shards
from pallas_kernels import chips
from pallas_kernels.residuals import RESIDUALS
from pallas_kernels.tpu import row_major
from pallas_kernels.varying import varying

Skipped = int | str
"""A layer, counted from 0, or a mixer wherever it stands."""

UNROLLED = 8
"""The most periods that are unrolled on a CPU: compiling takes longer with each."""
LARGE_BATCH = 1024
"""The fewest tokens of a batch for which they are."""
_POLICIES = jax.checkpoint_policies
REMAT_POLICIES = {
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(RESIDUALS)
    ),
    "attention": _POLICIES.save_only_these_names(RESIDUALS),
    "full": _POLICIES.nothing_saveable,
}


class Block(nnx.Module):
    """x + mixer(norm(x)), the residual block of every mixer (decision 19)."""

    def __init__(self, name: str, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = Norm(config.d_model, config.norm, config.norm_eps)
        self.mixer = build_mixer(name, config, rngs=rngs)

    def __call__(self, x: Float[Array, "b L d"], context: Context) -> tuple[Float[Array, "b L d"], Statistics]:
        x = row_major(x)
        output, statistics = self.mixer(row_major(self.norm(x)), context)
        return row_major(x + output), statistics

    def prefill(self, x: Float[Array, "b L d"], context: Context, cache: Cache) -> tuple[Float[Array, "b L d"], Cache]:
        """The block over a prompt, and the cache after it."""
        output, cache = self.mixer.prefill(self.norm(x), context, cache)
        return x + output, cache

    def decode(self, x: Float[Array, "b 1 d"], context: Context, cache: Cache) -> tuple[Float[Array, "b 1 d"], Cache]:
        """The block over one more token in every row."""
        output, cache = self.mixer.decode(self.norm(x), context, cache)
        return x + output, cache


class Period(nnx.Module):
    """One pass through the pattern of mixers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.blocks = nnx.Dict(
            {f"{index}_{name}": Block(name, config, rngs=rngs) for index, (_, name) in enumerate(config.mixers)}
        )

    def __call__(
        self, x: Float[Array, "b L d"], context: Context, betas: Float[Array, "p"], kept: Bool[Array, "p"] | None = None
    ) -> tuple[Float[Array, "b L d"], Any, tuple[Statistics, ...]]:
        """All blocks in order: what leaves the last, `Context.fixed` behind it, and the statistics of each.

        Args:
          betas: the budget of every block.
          kept: whether it is there; None: all are.
        """
        collected, fixed = [], context.fixed
        for index, block in enumerate(self.blocks.values()):
            at, before = dataclasses.replace(context, beta=betas[index], fixed=fixed), (x, fixed)
            if fixed is not None:
                at, fixed = fixed.through(block, at)
            x, statistics = block(x, at)
            if kept is not None:
                x, fixed = jax.tree.map(functools.partial(jnp.where, kept[index]), (x, fixed), before)
            collected.append(statistics)
        return x, fixed, tuple(collected)

    def empty_caches(self, rows: int, length: int) -> list[Cache]:
        """One cache per block."""
        return [block.mixer.empty_cache(rows, length) for block in self.blocks.values()]

    def prefill(
        self, x: Float[Array, "b L d"], context: Context, betas: Float[Array, "p"], caches: list[Cache]
    ) -> tuple[Float[Array, "b L d"], Any, list[Cache]]:
        """All blocks over a prompt, and the caches after it."""
        filled, fixed = [], context.fixed
        for beta, block, cache in zip(betas, self.blocks.values(), caches, strict=True):
            at = dataclasses.replace(context, beta=beta)
            if fixed is not None:
                at, fixed = fixed.through(block, at)
            x, cache = block.prefill(x, at, cache)
            filled.append(cache)
        return x, fixed, filled

    def decode(
        self, x: Float[Array, "b 1 d"], context: Context, betas: Float[Array, "p"], caches: list[Cache]
    ) -> tuple[Float[Array, "b 1 d"], list[Cache]]:
        """All blocks over one more token in every row."""
        longer = []
        for beta, block, cache in zip(betas, self.blocks.values(), caches, strict=True):
            x, cache = block.decode(x, dataclasses.replace(context, beta=beta), cache)
            longer.append(cache)
        return x, longer


def stacked_periods(config: ModelConfig, *, rngs: nnx.Rngs) -> Period:
    """All periods of the stack in one module: every parameter has a leading axis over them."""
    keys = jax.random.split(rngs.params(), config.periods)
    params = jax.vmap(lambda key: nnx.state(Period(config, rngs=nnx.Rngs(key))))(keys)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Period(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, params)


def betas_of_blocks(
    config: ModelConfig, scale: Float[Array, ""] | float = 1.0, max_scale: float = 1.0
) -> Float[Array, "periods p"]:
    """The budget of every block of every period, that of its layer.

    Args:
      scale: multiplies every budget (AA-35), as far as `max_scale` times the largest, which bounds the work.
    """
    betas = jnp.minimum(jnp.asarray(config.betas, jnp.float32) * scale, max(config.betas) * max_scale)
    return betas.reshape(config.periods, -1)[:, np.array([layer for layer, _ in config.mixers])]


def kept_blocks(config: ModelConfig, skipped: frozenset[Skipped]) -> Bool[Array, "periods p"]:
    """Which blocks of every period are not skipped (DEC-11)."""
    layers = np.arange(config.num_layers).reshape(config.periods, -1)
    return jnp.array([[skipped.isdisjoint({row[at], name}) for at, name in config.mixers] for row in layers])


class LanguageModel(nnx.Module):
    """Tokens in, logits and statistics out."""

    def __init__(self, config: ModelConfig, skipped: frozenset[Skipped] = frozenset(), *, rngs: nnx.Rngs):
        self.config = config
        self.skipped = skipped
        self.row_multiple = config.aamoe.chunk_size if config.layers_of("aamoe") else 1
        mixers = [MIXERS[name] for _, name in config.mixers]
        self.reads_embeddings = any(mixer.embeddings for mixer in mixers)
        self.reads_fixed_streams = any(mixer.fixed_stream is not None for mixer in mixers)
        shape = (config.vocab_size, config.d_model)
        # Scaled up by sqrt(d) on the way in, so that one table serves both ends: unit activations, unit logits.
        table = config.d_model**-0.5 * jax.random.normal(rngs.params(), shape)
        self.embedding = nnx.Param(table, axes=(None, "storage_float32"))
        self.periods = stacked_periods(config, rngs=rngs)
        self.norm = Norm(config.d_model, config.norm, config.norm_eps)
        if config.embedding == "untied":
            table = config.d_model**-0.5 * jax.random.normal(rngs.params(), shape)
            self.readout = nnx.Param(table, axes=(None, "storage"))

    def __call__(
        self,
        tokens: Int[Array, "b L"],
        segment_ids: Int[Array, "b L"] | None = None,
        positions: Int[Array, "b L"] | None = None,
        *,
        budget: BudgetMode | None = None,
        detail: Detail = "sums",
        with_mass: Bool[Array, ""] | bool = True,
        budget_scale: Float[Array, ""] | float = 1.0,
        max_budget_scale: float = 1.0,
        shards: Shards = WHOLE,
    ) -> tuple[Float[Array, "b n V"], Statistics]:
        """Next-token logits (float32) and the statistics of the AA-MoE layers, each with a leading axis over them.

        Args:
          tokens, segment_ids, positions: of whole rows; logits and statistics are those of the tokens here.
          segment_ids: documents of each row, counted from 1, 0 for padding. None: each row is one document.
          positions: position of every token in its document. None: 0, 1, 2, ...
          budget: `row`, `prefix`, `predictor` or `predictor_uncapped`; None: as the model was configured to train.
          detail: `tokens` adds `spent` and `budget` [layers, b, L] to the statistics; `resources` adds to these
            `resource`, `probability` and `mass` [layers, b, L, K], what every token got (ranks past `spent` mean
            nothing); `maps` adds `attention_map` [layers that have one, b, H, L, L].
          with_mass: whether the statistics hold how attention is divided: see `Context`.
          budget_scale: multiplies every beta, and above 1 K_max too; cut at `max_budget_scale`.
          max_budget_scale: what the static bounds on work are laid out for.
          shards: inside `jax.shard_map`, the mesh around this call.
        """
        length = tokens.shape[1]
        segment_ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape) if positions is None else positions
        if extra := -length % self.row_multiple:
            # Padding has segment 0: no budget, and no chunk that ends in it can be chosen.
            rows = (tokens, segment_ids, positions)
            tokens, segment_ids, positions = (jnp.pad(x, ((0, 0), (0, extra))) for x in rows)
        x = self.embed(shards.part(tokens, TOKENS), shards)
        context = Context(
            segment_ids=segment_ids,
            positions=positions,
            budget=self.config.aamoe.budget.normalizer if budget is None else budget,
            beta=0.0,  # every layer puts in its own
            detail=detail,
            with_mass=with_mass,
            scale=budget_scale,
            max_scale=max_budget_scale,
            shards=shards,
            embedded=shards.gather(x, TENSOR) if self.reads_embeddings else None,
            fixed=fixed_streams(self.config, self.embed, tokens.shape[1], shards) if self.reads_fixed_streams else None,
        )
        context = dataclasses.replace(context, rotary_tables=context.rotary(self.config))
        graphdef, params = nnx.split(self.periods)

        def body(carry: tuple[Array, Any], inputs: tuple[Any, Array, Any]) -> tuple[Any, tuple[Statistics, ...]]:
            (x, fixed), (params, betas, kept) = carry, inputs
            # Gathered inside the body: one period at a time, and once more in the backward pass under `remat`.
            params = nnx.map_state(lambda _, param: param.replace(shards.for_use(param, self.config.dtype)), params)
            at = dataclasses.replace(context, fixed=fixed)
            x, fixed, statistics = nnx.merge(graphdef, params)(x, at, betas, kept)
            return (x, fixed), statistics

        if self.config.remat != "none":
            body = jax.checkpoint(body, policy=REMAT_POLICIES[self.config.remat])
        carry, _ = varying(((x, context.fixed), params))  # what goes around a loop keeps its type
        betas = betas_of_blocks(self.config, context.scale, context.max_scale)
        kept = kept_blocks(self.config, self.skipped) if self.skipped else None
        # One period per step of a scan: compiled once, whatever the depth.
        (x, _), collected = jax.lax.scan(body, carry, (params, betas, kept), unroll=self.unrolled(tokens.size))
        statistics: Statistics = {}  # of the mixers of a period, [periods, ...], as [layers that have it, ...]
        for name in dict.fromkeys(name for found in collected for name in found):
            stack = jnp.stack([found[name] for found in collected if name in found], axis=1)
            statistics[name] = jax.lax.collapse(stack, 0, 2)
        if extra:
            x, statistics = x[:, :length], {name: _first(name, x, length) for name, x in statistics.items()}
        return self.logits(x, shards), statistics

    def unrolled(self, tokens: int) -> bool:
        """Whether the loop over periods is unrolled for a batch of so many tokens. A scan stacks what its steps keep
        for the backward pass, which costs a CPU more than it saves where periods are few and batches large."""
        few = self.config.periods <= UNROLLED and tokens >= LARGE_BATCH
        return few and self.config.remat == "none" and chips.is_cpu()

    def embed(self, tokens: Int[Array, "*batch"], shards: Shards = WHOLE) -> Float[Array, "*batch d"]:
        """What enters the first block."""
        table = shards.for_use(self.embedding, "float32")
        return (table[tokens] * self.config.d_model**0.5).astype(self.config.dtype)

    def logits(self, x: Float[Array, "*batch d"], shards: Shards = WHOLE) -> Float[Array, "*batch V"]:
        """Next-token logits (float32) of what leaves the last block."""
        readout = shards.for_use(self.embedding if self.config.embedding == "tied" else self.readout, self.config.dtype)
        x = self.norm(x)
        return jnp.einsum("...d,vd->...v", x, readout.astype(x.dtype), preferred_element_type=jnp.float32)


def _first(name: str, x: Array, length: int) -> Array:
    """A statistic without the padding of its rows."""
    if name in ("spent", "budget", "resource", "mass", "probability"):
        return x[:, :, :length]
    return x[:, :, :, :length, :length] if name == "attention_map" else x


def structure(config: ModelConfig, skipped: frozenset[Skipped] = frozenset()) -> nnx.GraphDef:
    """What `split` would give as the model's structure; no parameter is made.

    Args:
      skipped: layers, counted from 0, and names of mixers: what is left out of the stack (DEC-11).
    """
    return nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(config, skipped, rngs=nnx.Rngs(0))))


def split(model: LanguageModel) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The model's structure, and its parameters as a nested dict of arrays under this project's own path names."""
    graphdef, params = nnx.split(model)
    return graphdef, nnx.to_pure_dict(params)


def merge(graphdef: nnx.GraphDef, params: dict[str, Any]) -> LanguageModel:
    """The model again, from what `split` gave."""
    return nnx.merge(graphdef, nnx.State(params))
