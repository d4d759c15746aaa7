"""Small models and inputs that the tests of the layer share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from aamoe_jax.aamoe.layer import AAMoELayer
from aamoe_jax.config import AAMoEConfig, BudgetConfig, ModelConfig
from aamoe_jax.mixers.base import Context

D, HEADS, M, E = 32, 4, 8, 6


def model_config(**changes) -> ModelConfig:
    """A small model; changes go to ModelConfig, AAMoEConfig or BudgetConfig, wherever the field lives."""
    budget, layer = (
        {field.name: changes.pop(field.name) for field in dataclasses.fields(room) if field.name in changes}
        for room in (BudgetConfig, AAMoEConfig)
    )
    budget = BudgetConfig(**{"beta": 3.0, "slack": 8} | budget)
    aamoe = AAMoEConfig(**{"chunk_size": M, "num_experts": E, "budget": budget} | layer)
    return ModelConfig(
        **{"d_model": D, "num_heads": HEADS, "num_layers": 2, "kernel": "reference", "aamoe": aamoe} | changes
    )


def layer_of(config: ModelConfig, *, seed: int = 0, importance: float = 1.0) -> AAMoELayer:
    """A layer whose budgets differ from token to token (w_B starts at 0, which makes them all equal)."""
    layer = AAMoELayer(config, rngs=nnx.Rngs(seed))
    convolutions = [layer.convolution] if config.aamoe.key_convolution else []
    convolutions += [layer.router.convolution] if config.aamoe.router_input == "causal_conv" else []
    for index, convolution in enumerate(convolutions):  # which start at 0
        kernel = convolution.kernel
        kernel[...] = 0.5 * jax.random.normal(jax.random.key(seed + 200 + index), kernel.shape)
    if config.aamoe.expert_gate:  # which starts at 0 too
        gate = layer.expert_gate.kernel
        gate[...] = jax.random.normal(jax.random.key(seed + 300), gate.shape)
    layer.importance[...] = importance * jax.random.normal(jax.random.key(seed + 100), layer.importance.shape)
    return layer


def padded(layer: nnx.Module, h: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """layer(h, context) of rows of any length: an AA-MoE layer gets whole chunks, as in the model."""
    if not isinstance(layer, AAMoELayer):
        return layer(h, context)
    extra = ((0, 0), (0, -h.shape[1] % M))
    rows = {"segment_ids": context.segment_ids, "positions": context.positions}
    context = dataclasses.replace(context, **{name: jnp.pad(x, extra) for name, x in rows.items()})
    output, about = layer(jnp.pad(h, (*extra, (0, 0))), context)
    return output[:, : h.shape[1]], {name: x[:, : h.shape[1]] if jnp.ndim(x) > 1 else x for name, x in about.items()}


def apply(layer: nnx.Module, h: jax.Array, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`padded`, compiled as a whole: much quicker than op by op."""
    graphdef, params = nnx.split(layer)
    return jax.jit(lambda params, h: padded(nnx.merge(graphdef, params), h, context))(params, h)


def gradients(layer: nnx.Module, h: jax.Array, context: Context) -> tuple[jax.Array, tuple]:
    """The sum of squares of the layer's output, and its gradients to parameters and input."""
    graphdef, params = nnx.split(layer)
    loss = lambda params, h: (padded(nnx.merge(graphdef, params), h, context)[0] ** 2).sum()  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, h)


def output_and_gradients(layer: nnx.Module, h: jax.Array, context: Context) -> tuple[jax.Array, tuple]:
    """The layer's output, and the gradients of its sum of squares to parameters and input: compiled once."""
    graphdef, params = nnx.split(layer)

    def loss(params, h):
        output = padded(nnx.merge(graphdef, params), h, context)[0]
        return (output**2).sum(), output

    found, output = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, h)
    return output, found


def inputs(rows: int, length: int, *, seed: int = 0, width: int = D) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, length, width))


def context_of(config: ModelConfig, rows: int, length: int, *, budget: str | None = None, segment_ids=None) -> Context:
    """One document per row unless `segment_ids` says otherwise; positions count within documents."""
    segment_ids = jnp.ones((rows, length), jnp.int32) if segment_ids is None else segment_ids
    index = jnp.arange(length)
    start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    positions = index - jax.lax.cummax(jnp.where(start, index, 0), axis=1)
    budget = config.aamoe.budget.normalizer if budget is None else budget
    return Context(segment_ids, positions, budget, jnp.float32(config.betas[0]))
