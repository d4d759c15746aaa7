"""Holds a mixer to what stacks need of it: causality, decoding, gradients and meshes."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from aamoe_jax.config import (
    ConfigError,
    DataConfig,
    ExperimentConfig,
    MeshConfig,
    ModelConfig,
    TrainingConfig,
    from_dict,
    to_dict,
)
from aamoe_jax.evaluation.causality import default_cuts, probe
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.extensions import import_again, imported
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import LanguageModel, merge, split, structure
from aamoe_jax.registry import MIXERS, unknown_mixer
from aamoe_jax.shards import AXES
from aamoe_jax.training.auxiliary import first_sparsity_weights, loss_weights
from aamoe_jax.training.state import place
from aamoe_jax.training.step import gradients_and_metrics, over_mesh

Params = dict[str, Any]
Logits = Callable[..., Float[Array, "b L V"]]

ROWS = 2
TOLERANCE = 1e-4
"""The largest difference that rounding in float32 is taken to make, relative to the largest value."""
LEAK = 1e-5
"""The largest change of a logit by what its token must not see: most mixers make none at all."""
GATHER = (
    "along resource and tensor h holds the tokens of this device alone: gather those of the whole rows with "
    "context.move(h, 'here', 'rows'), and return context.move(output, 'rows', 'here')"
)


class MixerError(AssertionError):
    """A mixer does not do what stacks need of it. The message says what, by how much, and what to look for."""


def check_mixer(
    name: str, config: ModelConfig | None = None, *, length: int = 32, untrained: Sequence[str] = ()
) -> None:
    """Checks a mixer in a model, in float32, with random parameters and on random tokens:

    * Causality: logits do not change when later tokens do, nor when documents before their own do.
    * Decoding: logits of tokens that come one by one, through the caches, are those of the whole row.
    * Gradients: finite, and of every parameter.
    * Meshes: on two devices, loss, statistics and gradients are those of one, along every axis of the mesh. Where there
      is one device, this runs in another process with two CPU devices: the mixer must then have a file of its own,
      which that process can import.

    Args:
      name: of a registered mixer.
      config: the model, whose `pattern` becomes this mixer alone; None: a small one of two layers.
      length: tokens of a row: a multiple of 2 devices x 2 documents x `AAMoEConfig.chunk_size`.
      untrained: names of parameters that the loss is not meant to reach.

    Raises:
      ConfigError: no mixer is called so.
      MixerError: one of the checks fails.
    """
    if name not in MIXERS:
        raise ConfigError(unknown_mixer(name))
    config = dataclasses.replace(_small() if config is None else config, pattern=(name,), dtype="float32")
    params = _random_params(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (ROWS, length), dtype=np.int32)
    model = functools.partial(_logits, structure(config), params, causal_budget(config))
    _check_causality(model, tokens, config)
    _check_decoding(model, params, tokens, config)
    _check_gradients(params, tokens, config, untrained)
    if len(jax.devices()) > 1:
        _check_meshes(params, tokens, config)
    else:
        _check_meshes_apart(length, config)


def _small() -> ModelConfig:
    config = ModelConfig(vocab_size=64, d_model=32, num_heads=4, num_layers=2)
    return dataclasses.replace(config, aamoe=dataclasses.replace(config.aamoe, chunk_size=8, num_experts=4))


def _random_params(config: ModelConfig) -> Params:
    """Parameters that are nowhere where they start: what starts at zero may keep others from being reached."""
    _, params = split(LanguageModel(config, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.1 * random.normal(size=x.shape).astype(np.float32), params)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _logits(
    graphdef: nnx.GraphDef, params: Params, budget: BudgetMode, tokens: Int[Array, "b L"], segment_ids: Any = None
) -> Float[Array, "b L V"]:
    positions = None if segment_ids is None else _positions(segment_ids)
    return merge(graphdef, params)(tokens, segment_ids, positions, budget=budget)[0]


def _positions(segment_ids: Int[Array, "b L"]) -> Int[Array, "b L"]:
    """Of tokens in their documents."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)


def _check_causality(model: Logits, tokens: Int[np.ndarray, "b L"], config: ModelConfig) -> None:
    length, name = tokens.shape[1], config.pattern[0]
    found = probe(model, tokens, default_cuts(length, config.aamoe.chunk_size), vocab_size=config.vocab_size)
    if not found.largest <= LEAK:
        cut = found.cuts[int(np.argmax(np.nan_to_num(found.before, nan=np.inf)))]
        raise MixerError(
            f"{name} is not causal: other tokens from position {cut} on change logits before it by up to "
            f"{found.largest:.1e}; let token i read tokens j <= i alone"
        )
    half, documents = length // 2, 1 + (np.arange(length) >= length // 2) * np.ones((ROWS, 1), np.int32)
    other = np.where(documents == 1, (tokens + 1) % config.vocab_size, tokens).astype(np.int32)
    mine, others = (model(x, jnp.asarray(documents, jnp.int32))[:, half:] for x in (tokens, other))
    if not (change := _difference(mine, others)) <= LEAK:
        raise MixerError(
            f"{name} reads other documents: other tokens of the document before change logits by up to {change:.1e}; "
            "let tokens read those of equal context.segment_ids alone"
        )


def _check_decoding(model: Logits, params: Params, tokens: Int[np.ndarray, "b L"], config: ModelConfig) -> None:
    """From two prompts of different lengths."""
    wanted, length = np.asarray(model(tokens)), tokens.shape[1]
    starts = np.asarray([3, length // 2])
    decoder = Decoder(config, params, length=length)
    state = decoder.prefill([row[:start] for row, start in zip(tokens, starts, strict=True)])
    for more in range(length - starts.max()):
        at = starts + more
        change = _difference(state.logits, wanted[np.arange(ROWS), at - 1])
        if not change <= TOLERANCE:
            where = "after the prompt, by `fill`" if more == 0 else f"after {more} more tokens, by `decode`"
            raise MixerError(
                f"{config.pattern[0]} decodes something else: {where}, logits differ from those of the whole row by "
                f"{change:.1e}; leave empty_cache, fill and decode out to compare with the default, which recomputes"
            )
        state = decoder.append(state, tokens[np.arange(ROWS), at])


def _check_gradients(
    params: Params, tokens: Int[np.ndarray, "b L"], config: ModelConfig, untrained: Sequence[str]
) -> None:
    gradients, _ = _step(params, tokens, config, MeshConfig())
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        parameter = jax.tree_util.keystr(path, simple=True, separator="/")
        if not np.isfinite(gradient).all():
            raise MixerError(f"{config.pattern[0]}: the gradient of {parameter} is not finite")
        if not gradient.any() and parameter.rsplit("/", 1)[-1] not in untrained:
            raise MixerError(
                f"{config.pattern[0]}: the gradient of {parameter} is 0: the loss does not depend on it; name it in "
                "`untrained` where that is meant"
            )


def _check_meshes(params: Params, tokens: Int[np.ndarray, "b L"], config: ModelConfig) -> None:
    one = _step(params, tokens, config, MeshConfig())
    for axis in AXES:
        sizes = dict.fromkeys(AXES, 1) | {axis: 2}
        try:
            two = _step(params, tokens, config, MeshConfig(**sizes))
        except (TypeError, ValueError) as error:
            raise MixerError(
                f"{config.pattern[0]} cannot be traced on MeshConfig.{axis} = 2: {error}; {GATHER}"
            ) from error
        for what, mine, other in zip(("gradients", "loss and statistics"), two, one, strict=True):
            scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(other) if x.size)
            changes = jax.tree.map(lambda x, y, scale=scale: _difference(x, y, 1e-3 * scale), mine, other)
            path, worst = max(jax.tree_util.tree_leaves_with_path(changes), key=lambda leaf: leaf[1])
            if not worst <= 10 * TOLERANCE:
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise MixerError(
                    f"{config.pattern[0]} computes something else on MeshConfig.{axis} = 2: {what} differ by "
                    f"{worst:.1e} at {where}; {GATHER}"
                )


def _check_meshes_apart(length: int, config: ModelConfig) -> None:
    """The same in another process, which has two CPU devices."""
    module = sys.modules[MIXERS[config.pattern[0]].cls.__module__]
    own = [] if module.__name__.startswith("aamoe_jax.") else [(module.__name__, str(module.__file__))]
    request = {"config": to_dict(config), "length": length, "imports": [*imported(), *own]}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from aamoe_jax.check import main; sys.exit(main())"],
        input=json.dumps(request),
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise MixerError((done.stdout.strip() or done.stderr.strip()).splitlines()[-1])


def _step(
    params: Params, tokens: Int[np.ndarray, "b L"], config: ModelConfig, mesh: MeshConfig
) -> tuple[Params, Params]:
    """Gradients, and loss with statistics, of one training step."""
    rows, length = tokens.shape
    data = DataConfig(seq_len=length, document_align=config.aamoe.chunk_size)
    experiment = ExperimentConfig(config, data, training=TrainingConfig(batch_size=rows), mesh=mesh)
    count = 1 if mesh == MeshConfig() else 2
    placement = place(experiment, jax.devices()[:count])
    weights = loss_weights(config) | {"sparsity_loss": np.ones_like(first_sparsity_weights(config))}
    compute = functools.partial(
        gradients_and_metrics,
        structure(config),
        weights=weights,
        accumulate=1,
        shards=placement.shards,
        byte_lengths=np.ones(config.vocab_size, np.int32),
    )
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=1),
        "segment_ids": np.ones_like(tokens),
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
        "loss_mask": np.ones_like(tokens),
    }
    step = jax.jit(over_mesh(compute, placement, (placement.params, PartitionSpec())))
    gradients, metrics = step(placement.put_params(params), placement.put(batch))
    return jax.device_get((gradients, {"loss": metrics["nll"], "statistics": metrics["statistics"]}))


def _difference(x: Any, y: Any, least: float = 1.0) -> float:
    """The largest, relative to the largest value of y or to `least`; infinite where a value is not finite."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return np.inf
    return float(np.abs(x - y).max() / max(np.abs(y).max(), least)) if x.size else 0.0


def main() -> int:
    """Checks on meshes what another process asks for on standard input."""
    request = json.loads(sys.stdin.read())
    missing = import_again(map(tuple, request["imports"]))
    try:
        config = from_dict(ModelConfig, request["config"])
        tokens = np.random.default_rng(1).integers(0, config.vocab_size, (ROWS, request["length"]), dtype=np.int32)
        _check_meshes(_random_params(config), tokens, config)
    except ConfigError as error:
        also = f"; {', '.join(missing)} is not to be found" if missing else ""
        print(f"meshes could not be checked in another process: {error}{also}")
        return 1
    except MixerError as error:
        print(error)
        return 1
    return 0
