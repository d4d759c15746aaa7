"""What a trained stack loses when its heads are made to do with fewer neurons, without training again.

Two of the essay's closing questions (PM-15): does every token need to be added to every head (PM-10), and to be
compared to every other (PM-11)? Standard attention has all parameters that filtering by the norm of messages takes;
clusters are found among its keys.

Shapes: n tokens, G heads of keys, k their width, C clusters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from aamoe_jax.analysis import clusters
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.evaluation.perplexity import Evaluation, Evaluator, causal_budget
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.clustered import ClusteredAttentionConfig
from aamoe_jax.mixers.filtered import FilteredAttentionConfig
from aamoe_jax.mixers.fixed_maps import fixed_streams
from aamoe_jax.model import betas_of_blocks, merge, structure
from aamoe_jax.patterns import mixers_of

Batches = Sequence[dict[str, Int[np.ndarray, "b L"]]]
ByteLengths = Int[np.ndarray, "V"]
Params = dict[str, Any]
STANDARD: str = "attention"


def thinned(config: ModelConfig, name: str, own: Any) -> ModelConfig:
    """The same stack with another mixer, which has a config of its own, in place of standard attention.

    Raises:
      ConfigError: there is no standard attention.
    """
    if not config.layers_of(STANDARD):
        raise ConfigError(
            f"ModelConfig.pattern = {config.pattern!r}: no layer has 'attention', which is what is thinned"
        )
    layers = ["+".join(name if mixer == STANDARD else mixer for mixer in mixers_of(layer)) for layer in config.pattern]
    return dataclasses.replace(config, own=(*config.own, own), pattern=tuple(layers))


def renamed(params: Params, config: ModelConfig, name: str) -> Params:
    """Parameters of standard attention as those of another mixer that has the same."""
    new, blocks = _names_with(name, config), params["periods"]["blocks"]
    return params | {"periods": {"blocks": {new.get(old, old): block for old, block in blocks.items()}}}


def with_centroids(params: Params, config: ModelConfig, tokens: Int[Array, "b L"], count: int) -> Params:
    """Parameters of standard attention as those of clustered attention: k-means over what every head's keys are on
    these tokens, each row one document."""
    found: dict[str, list[np.ndarray]] = {}
    new = _names_with("clustered_attention", config)
    for name, block, h, _ in inputs_of_blocks(params, config, tokens):
        if name in new:
            keys = block.mixer.parts["attention"].qkv(h)[1]
            flat = np.asarray(keys.reshape(-1, *keys.shape[2:]), np.float32)
            found.setdefault(new[name], []).append(clusters.centroids_of_keys(flat, count))
    params = renamed(params, config, "clustered_attention")
    blocks = dict(params["periods"]["blocks"])
    for name, centroids in found.items():
        part = blocks[name]["mixer"]["parts"]["attention"] | {"centroids": jnp.asarray(np.stack(centroids))}
        blocks[name] = blocks[name] | {"mixer": {"parts": {"attention": part}}}
    return params | {"periods": {"blocks": blocks}}


def inputs_of_blocks(
    params: Params, config: ModelConfig, tokens: Int[Array, "b L"]
) -> Iterator[tuple[str, Any, Float[Array, "b L d"], Context]]:
    """(name, block, normed input, context) of every block in order, each row one document."""
    model = merge(structure(config), params)
    graphdef, stacked = nnx.split(model.periods)
    x, betas = model.embed(tokens), betas_of_blocks(config)
    rows = dataclasses.replace(Context.of_rows(config, *tokens.shape), budget=causal_budget(config))
    context, fixed = dataclasses.replace(rows, embedded=x), fixed_streams(config, model.embed, tokens.shape[1])
    for period in range(config.periods):
        blocks = nnx.merge(graphdef, jax.tree.map(lambda leaf, at=period: leaf[at], stacked)).blocks
        for (name, block), beta in zip(blocks.items(), betas[period], strict=True):
            at = dataclasses.replace(context, beta=beta)
            if fixed is not None:
                at, fixed = fixed.through(block, at)
            yield name, block, block.norm(x), at
            x = block(x, at)[0]


def recall(params: Params, config: ModelConfig, tokens: Int[Array, "b L"]) -> Float[np.ndarray, "layers C"]:
    """`clusters.attention_recall` of every layer with clustered attention."""
    found = [
        clusters.attention_recall(block.mixer.parts["attention"], h, at)
        for name, block, h, at in inputs_of_blocks(params, config, tokens)
        if name.endswith("_clustered_attention")
    ]
    return np.stack([np.asarray(masses) for masses in found])


def filter_sweep(
    params: Params, config: ModelConfig, batches: Batches, byte_lengths: ByteLengths, thresholds: Sequence[float]
) -> list[dict[str, float]]:
    """Share of neurons kept, nats per token, and what these are above the unfiltered model's, by threshold."""
    whole = _evaluated(params, config, batches, byte_lengths)
    as_filtered, settings = renamed(params, config, "filtered_attention"), []
    for threshold in thresholds:
        norms = dataclasses.replace(config.of(FilteredAttentionConfig), filter="message_norm", threshold=threshold)
        filtered = thinned(config, "filtered_attention", norms)
        found = _evaluated(as_filtered, filtered, batches, byte_lengths)
        settings.append({"threshold": threshold} | _record(found, whole, "neurons_kept"))
    return settings


def cluster_sweep(
    params: Params, config: ModelConfig, batches: Batches, byte_lengths: ByteLengths, count: int, kept: Sequence[int]
) -> list[dict[str, float]]:
    """The same for clusters kept, of clusters found on the first batch: share of pairs compared, and recall of exact
    attention."""
    own = [ClusteredAttentionConfig(clusters=count, clusters_kept=clusters_kept) for clusters_kept in kept]
    routed = [thinned(config, "clustered_attention", one) for one in own]  # which refuses first
    whole, sample = _evaluated(params, config, batches, byte_lengths), jnp.asarray(batches[0]["tokens"])
    params = with_centroids(params, config, sample, count)
    masses = recall(params, routed[0], sample).mean(0)
    settings = []
    for clusters_kept, thin in zip(kept, routed, strict=True):
        found = _record(_evaluated(params, thin, batches, byte_lengths), whole, "pairs_kept")
        settings.append({"clusters": clusters_kept, "recall": float(masses[clusters_kept - 1])} | found)
    return settings


def _record(found: Evaluation, whole: Evaluation, share: str) -> dict[str, float]:
    nats = found.nats_per_token
    return {"kept": float(np.mean(found.statistics[share])), "nats": nats, "above": nats - whole.nats_per_token}


def _evaluated(params: Params, config: ModelConfig, batches: Batches, byte_lengths: ByteLengths) -> Evaluation:
    return Evaluator(structure(config), config, budget=causal_budget(config))(params, batches, byte_lengths)


def _names_with(name: str, config: ModelConfig) -> dict[str, str]:
    """What blocks of standard attention are called once it is another mixer, by what they are called now."""
    return {f"{at}_{STANDARD}": f"{at}_{name}" for at, (_, mixer) in enumerate(config.mixers) if mixer == STANDARD}
