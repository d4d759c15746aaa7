"""What is measured: forward and backward pass of one layer on one random row.

Shapes: L tokens, d width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.aamoe.costs import flops_per_pair
from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Context, RotaryTables, Statistics
from aamoe_jax.mixers.build import build_mixer, costs
from aamoe_jax.mixers.costs import Setting
from benchmarks.dense import CANDIDATES, parallel_layer

AAMOE = "aamoe"
Row = tuple[Int[Array, "1 L"], Int[Array, "1 L"], RotaryTables]
"""Segment ids, positions and rotations, all of which a stack computes once for all of its layers."""
Arguments = tuple[Any, Float[Array, "1 L d"], Float[Array, "1 L d"], Row]
"""Parameters, the normed input of the layer, the cotangent of its output, and the row."""
PAIR_KINDS = ("pairs_local", "pairs_context", "pairs_expert")


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer at one length."""

    layer: str
    """`aamoe`, or the name of one of the dense CANDIDATES."""
    config: ModelConfig
    length: int
    importance: float
    """Standard deviation of w_B . h / sqrt(d) over tokens: 0 is initialisation, where all budgets are equal."""

    @property
    def mixer(self) -> str:
        return "aamoe" if self.layer == AAMOE else "parallel"

    def step(self) -> Callable[..., tuple[Array, tuple[Any, Array], Statistics]]:
        """`Arguments` -> output, gradients of parameters and h, statistics."""
        graphdef = nnx.graphdef(nnx.eval_shape(self.build))

        # The row is an argument as it is in training: as a constant, masks would be folded at compile time, which takes
        # minutes and is no measure of anything.
        def step(params: Any, h: Array, cotangent: Array, row: Row) -> tuple[Array, tuple[Any, Array], Statistics]:
            segment_ids, positions, rotary_tables = row
            budget, beta = self.config.aamoe.budget.normalizer, self.config.betas[0]
            context = Context(segment_ids, positions, budget, beta, rotary_tables=rotary_tables)

            def forward(params: Any, h: Array) -> tuple[Array, Statistics]:
                layer = nnx.merge(graphdef, params)
                if self.layer == AAMOE:
                    return layer(h, context)
                return parallel_layer(layer, CANDIDATES[self.layer], h, context), {}

            # The output is returned, so that no part of the forward pass is dead code.
            output, pull_back, statistics = jax.vjp(forward, params, h, has_aux=True)
            return output, pull_back(cotangent), statistics

        return step

    def arguments(self) -> Arguments:
        """Random, and the same for every layer of one config and length."""
        shape = (1, self.length, self.config.d_model)
        h, cotangent = (jax.random.normal(key, shape, self.config.dtype) for key in jax.random.split(jax.random.key(1)))
        context = Context.of_rows(self.config, 1, self.length)
        row = context.segment_ids, context.positions, context.rotary(self.config)
        return nnx.state(self.build()), h, cotangent, row

    def shapes(self) -> Arguments:
        """The arguments as shapes, which take no memory."""
        return jax.eval_shape(self.arguments)

    def training_flops(self, statistics: Statistics) -> float:
        """Of one step in closed form: projections, scores and the pairs really spent; backward is twice forward."""
        per_token = costs(self.mixer, Setting(self.config, 1, self.length)).model_flops
        pairs = sum(float(statistics[kind]) for kind in PAIR_KINDS if kind in statistics)
        return 3.0 * (self.length * per_token + pairs * flops_per_pair(self.config))

    def build(self) -> nnx.Module:
        """The layer with its parameters."""
        layer = build_mixer(self.mixer, self.config, rngs=nnx.Rngs(0))
        if self.layer == AAMOE:
            # A trained w_B: budgets vary, so that tiles of pairs are as ragged as they are in use.
            noise = jax.random.normal(jax.random.key(2), (self.config.d_model,))
            layer.importance = nnx.Param(self.importance * noise)
        return layer
