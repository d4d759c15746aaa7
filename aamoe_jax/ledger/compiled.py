"""What the compiler says of one mixer: the other side of the ledger.

`cost_analysis` counts elementwise operations too, and the body of a loop once, however often it runs. What the forward
pass holds for the backward pass is the output of a compiled forward pass that returns the arrays of its `jax.vjp`
closure: all that a backward pass elsewhere would need, less the parameters among them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.aamoe.budget import most_pairs
from aamoe_jax.aamoe.costs import AAMoECosts, attended
from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.base import Context, Statistics
from aamoe_jax.mixers.build import build_mixer
from aamoe_jax.mixers.costs import Costs, Setting
from aamoe_jax.mixers.experts import Experts, expert_width
from aamoe_jax.mixers.fixed_maps import FixedStreams
from aamoe_jax.mixers.grouped import blocks_of
from aamoe_jax.registry import MIXERS
from pallas_kernels.block_sparse_attention import window, xla
from pallas_kernels.block_sparse_attention.operation import Problem

Row = tuple[Int[Array, "b L"], Int[Array, "b L"]]
"""Segment ids and positions."""


class Inputs(NamedTuple):
    """What a mixer looks at."""

    h: Float[Array, "b n d"]
    embedded: Float[Array, "b n d"] | None
    """The embeddings, where it looks at these."""
    stream: Float[Array, "1 n d"] | None
    """The fixed sequence, where it looks at one."""


class Trial:
    """One mixer as functions of arrays: row by row a document, budgets as configured."""

    def __init__(self, name: str, config: ModelConfig):
        self.name, self.config = name, config
        self._build = lambda: build_mixer(name, config, rngs=nnx.Rngs(0))
        self._graphdef = nnx.graphdef(nnx.eval_shape(self._build))

    def params(self) -> Any:
        """Parameters in the types in which they are multiplied: casting them is none of the mixer's activations."""

        def as_used(_: Any, param: nnx.Param) -> Any:
            return param.replace(param[...].astype(self.config.dtype)) if "storage" in param.axes else param

        return nnx.map_state(as_used, nnx.state(self._build()))

    def forward(self, params: Any, inputs: Inputs, row: Row) -> tuple[Array, list[Array]]:
        """The output, and what is kept for the backward pass beside parameters."""
        output, pull_back = self.vjp(params, inputs, row)
        given = {id(leaf) for leaf in jax.tree.leaves(params)}
        return output, [leaf for leaf in jax.tree.leaves(pull_back) if id(leaf) not in given]

    def vjp(self, params: Any, inputs: Inputs, row: Row) -> tuple[Array, Callable[[Array], tuple[Any, Inputs]]]:
        """The output, and what makes gradients of parameters and inputs from its cotangent."""
        return self.vjp_and_statistics(params, inputs, row)[:2]

    def vjp_and_statistics(
        self, params: Any, inputs: Inputs, row: Row
    ) -> tuple[Array, Callable[[Array], tuple[Any, Inputs]], Statistics]:
        """The same, and what the mixer says of itself in a step of training that is not logged."""
        apply = lambda params, inputs: self._mixer(params)(inputs.h, self._context(inputs, row))  # noqa: E731
        return jax.vjp(apply, params, inputs, has_aux=True)

    def decode(self, params: Any, inputs: Inputs, row: Row, cache: Any) -> tuple[Array, Any]:
        """One more token in every row."""
        return self._mixer(params).decode(inputs.h, self._context(inputs, row), cache)

    def cache_shapes(self, rows: int, length: int) -> Any:
        """An empty cache for `length` tokens in every row, as shapes."""
        return jax.eval_shape(lambda: self._mixer(self.params()).empty_cache(rows, length))

    def arguments(self, rows: int, length: int) -> tuple[Any, Inputs, Row]:
        """Random parameters and inputs: the arguments of `forward`, and the first of `decode`."""

        def normal(seed: int, rows: int) -> Array:
            return jax.random.normal(jax.random.key(seed), (rows, length, self.config.d_model), self.config.dtype)

        embedded = normal(2, rows) if MIXERS[self.name].embeddings else None
        stream = normal(3, 1) if MIXERS[self.name].fixed_stream is not None else None
        # Arguments, not constants: the compiler would compute masks beforehand.
        row = jnp.ones((rows, length), jnp.int32), jnp.broadcast_to(jnp.arange(length), (rows, length))
        return self.params(), Inputs(normal(1, rows), embedded, stream), row

    def shapes(self, rows: int, length: int) -> Any:
        """The arguments as shapes, which take no memory."""
        return jax.eval_shape(lambda: self.arguments(rows, length))

    def _mixer(self, params: Any) -> Any:
        return nnx.merge(self._graphdef, params)

    def _context(self, inputs: Inputs, row: Row) -> Context:
        streams = {} if inputs.stream is None else {self.name: inputs.stream}
        budget, beta = self.config.aamoe.budget.normalizer, self.config.betas[0]
        embedded, fixed = inputs.embedded, FixedStreams(streams, streams)
        return Context(*row, budget, beta, with_mass=False, embedded=embedded, fixed=fixed)


def compiled(name: str, config: ModelConfig, rows: int, length: int) -> Costs:
    """The figures of `costs` but model FLOPs, from programs compiled for the device that JAX finds first.

    FLOPs are those of float32: in bfloat16 a CPU converts every operand first, and conversions count. Loops are made up
    for by `beyond_one_turn`.
    """
    cache = Trial(name, config).cache_shapes(rows, length)
    prefill, decode = counted_flops(name, dataclasses.replace(config, dtype="float32"), rows, length)
    more = beyond_one_turn(name, config, rows, length)
    output = rows * length * config.d_model * jnp.dtype(config.dtype).itemsize
    return Costs(
        prefill_flops=prefill + more.prefill_flops,
        decode_flops=decode + more.decode_flops,
        activation_bytes=_forward(name, config, rows, length).memory_analysis().output_size_in_bytes - output,
        cache_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
    )


def counted_flops(name: str, config: ModelConfig, rows: int, length: int) -> tuple[float, float]:
    """The compiler's counts of a forward pass, and of one more token in every row."""
    trial = Trial(name, config)
    inputs = (*trial.shapes(rows, 1), trial.cache_shapes(rows, length))
    step: Any = jax.jit(trial.decode, donate_argnums=3).lower(*inputs).compile()
    return _forward(name, config, rows, length).cost_analysis()["flops"], step.cost_analysis()["flops"]


@functools.lru_cache(maxsize=2)
def _forward(name: str, config: ModelConfig, rows: int, length: int) -> Any:
    trial = Trial(name, config)
    return jax.jit(trial.forward).lower(*trial.shapes(rows, length)).compile()


def beyond_one_turn(name: str, config: ModelConfig, rows: int, length: int) -> Costs:
    """FLOPs that run in loops, less one turn of each: what the compiler does not count."""
    at, cls = Setting(config, rows, length), MIXERS[name].cls
    if issubclass(cls, AAMoECosts):
        return _beyond_one_turn_of_pairs(at)
    if not issubclass(cls, Experts):
        more = sum(loop.scores - loop.turn for loop in cls.loops(at))
        return Costs(prefill_flops=4 * at.width * rows * more)
    # Blocks of tokens of one expert.
    per_token, chosen = 4 * at.width * expert_width(config), cls.experts_per_token(config)
    return Costs(*(per_token * (tokens * chosen - sum(blocks_of(tokens))) for tokens in (at.tokens, rows)))


def _beyond_one_turn_of_pairs(at: Setting) -> Costs:
    """AA-MoE's windows and pairs are loops (`xla`); in decoding slots are."""
    config, layer, given = at.config, at.config.aamoe, attended(at)
    m, heads, chunks = layer.chunk_size, config.num_heads, at.tokens // layer.chunk_size
    most = most_pairs(layer.budget.normalizer, at.rows, at.length, given.slots, max(config.betas), layer)
    sizes = (at.tokens, heads, config.head_dim, chunks + layer.num_experts, m, given.slots)
    path = xla.plan(Problem(*sizes, jnp.dtype(config.dtype), chunks, most, scale=1.0))
    windows = window.chunks_a_step(chunks, heads, m)
    turns = path.group * path.tile * m + (windows * m * 2 * m if given.window_keys else 0)
    keys = given.window_keys + given.pairs * m
    return Costs(
        prefill_flops=4 * config.d_model * (at.tokens * keys - turns),
        decode_flops=4 * config.d_model * at.rows * (keys - m),
    )
