"""A model as StableHLO programs that need JAX and no code of this package: the forward pass, and decoding.

Shapes: b rows (any number), L tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import export
from jaxtyping import Array, Float, Int

from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.generation.decoder import Parameters, Plan, State, fill, grow
from aamoe_jax.model import merge, structure

MANIFEST = "functions.json"
PLATFORMS = ("cpu", "tpu")
"""What the programs are lowered for: JAX's own operations, no kernel of this package."""

Flat = dict[str, Array]
"""Arrays by their names, joined by dots."""


def export_functions(config: ModelConfig, params: dict[str, Any], folder: Path, *, length: int) -> None:
    """Writes `forward`, `prefill` and `decode` as NAME.stablehlo into a folder, and functions.json, which says what
    each takes and gives.

    Every function takes the parameters first, a dict by the names of model.safetensors. Rows are computed apart, so
    that there may be any number of them.

      forward(params, tokens [b, L]) -> logits [b, L, V]
      prefill(params, tokens [b, L], lengths [b]) -> state, a dict; state["logits"] are those of the next token, [b, V]
      decode(params, state, tokens [b]) -> state

    Args:
      params: nested, as in a checkpoint.
      length: L, the tokens of a row. Budgets are causal: what pads a shorter one changes nothing before it.

    Raises:
      ConfigError: `length` is not positive, or JAX runs on an accelerator, for which other programs would be made.
    """
    if length < 1:
        raise ConfigError(f"length = {length}: must be at least 1")
    if (platform := jax.default_backend()) != "cpu":
        raise ConfigError(f"JAX runs on a {platform}: export with JAX_PLATFORMS=cpu, for CPUs and TPUs")
    functions = _functions(dataclasses.replace(config, kernel=None), length)
    (rows,) = export.symbolic_shape("b")
    flat = traverse_util.flatten_dict(params, sep=".")
    weights = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in flat.items()}
    row, number = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, length), (rows,)))
    state = jax.eval_shape(functions["prefill"], weights, row, number)
    arguments = {"forward": {"tokens": row}, "prefill": {"tokens": row, "lengths": number}}
    arguments["decode"] = {"state": state, "tokens": number}
    told: dict[str, Any] = {
        "length": length,
        "vocab_size": config.vocab_size,
        "budget": causal_budget(config) if config.layers_of("aamoe") else None,
        "platforms": PLATFORMS,
        "jax": jax.__version__,
        "params": _described(weights),
        "functions": {},
    }
    for name, function in functions.items():
        made = export.export(jax.jit(function), platforms=PLATFORMS)(weights, *arguments[name].values())
        (folder / f"{name}.stablehlo").write_bytes(made.serialize())
        result = jax.tree.unflatten(made.out_tree, made.out_avals)
        told["functions"][name] = {
            "file": f"{name}.stablehlo",
            "takes": {argument: _described(held) for argument, held in arguments[name].items()},
            "gives": _described(result),
        }
    (folder / MANIFEST).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _functions(config: ModelConfig, length: int) -> dict[str, Callable[..., Any]]:
    """The functions, whose states are dicts by name."""
    plan = Plan(config, causal_budget(config), 1.0, length)

    def forward(weights: Flat, tokens: Int[Array, "b L"]) -> Float[Array, "b L V"]:
        model = merge(structure(config), _nested(weights))

        def of_row(tokens: Int[Array, "L"]) -> Float[Array, "L V"]:
            return model(tokens[None], budget=plan.budget)[0][0]

        return jax.vmap(of_row)(tokens)

    def first(weights: Flat, tokens: Int[Array, "L"], count: Int[Array, ""]) -> State:
        whole = jnp.pad(tokens, (0, plan.capacity - length))
        return fill(plan, _apart(config, weights), whole[None], count[None], 1.0)

    def prefill(weights: Flat, tokens: Int[Array, "b L"], lengths: Int[Array, "b"]) -> Flat:
        state = jax.vmap(first, (None, 0, 0))(weights, tokens, lengths)
        return _named(state._replace(lengths=state.lengths[:, 0], logits=state.logits[:, 0]))

    def decode(weights: Flat, named: Flat, tokens: Int[Array, "b"]) -> Flat:
        kinds = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((length,), ())]
        like = jax.eval_shape(first, weights, *kinds)
        state: State = jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in _named(like)])
        state = state._replace(lengths=state.lengths[:, None], logits=state.logits[:, None])

        def of_row(state: State, token: Int[Array, ""]) -> State:
            return grow(plan, _apart(config, weights), state, token[None], 1.0)

        state = jax.vmap(of_row)(state, tokens)
        return _named(state._replace(lengths=state.lengths[:, 0], logits=state.logits[:, 0]))

    return {"forward": forward, "prefill": prefill, "decode": decode}


def _nested(weights: Flat) -> dict[str, Any]:
    return traverse_util.unflatten_dict(weights, sep=".")


def _apart(config: ModelConfig, weights: Flat) -> Parameters:
    """As the decoder holds them."""
    params = _nested(weights)
    stacked = params.pop("periods")
    return Parameters(params, [jax.tree.map(lambda x, p=p: x[p], stacked) for p in range(config.periods)])


def _named(state: State) -> dict[str, Any]:
    """The arrays of a state by name, in the order of its leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _described(tree: Any) -> Any:
    """Arrays as their shapes and types; a number of rows is the letter b."""
    if isinstance(tree, dict):
        return {name: _described(held) for name, held in tree.items()}
    return {"shape": [size if isinstance(size, int) else str(size) for size in tree.shape], "dtype": tree.dtype.name}
