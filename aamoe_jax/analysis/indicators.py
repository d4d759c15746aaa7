"""What an attention map looks like, in a few numbers (DEC-17; Xue, Moosavi, Aletras).

Shapes: H heads, L tokens. A map has a row for every token and a column for every token that it weighs; rows add up to 1
over the tokens up to their own, or to less where the rest goes to experts (AA-MoE) or to a memory (All-Attention).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from aamoe_jax.analysis.inspection import read
from aamoe_jax.config import ConfigError, ModelConfig
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.fixed_maps import fixed_streams
from aamoe_jax.model import LanguageModel, Period, betas_of_blocks
from aamoe_jax.sharding import on_host

NEIGHBOURS = 4
"""Local focus is told for so many distances, from 0."""


class Indicators(NamedTuple):
    """Of one map; means are over heads, and over the tokens that have such a weight."""

    context: float
    """Mean of the sum of a row: the share of attention that tokens get."""
    entropy: float
    """Mean of -sum_j A_ij log A_ij, in nats: log i for a token that weighs all i alike. NaN where a weight is negative.
    """
    concentration: float
    """Mean of the Frobenius norm of a head's map."""
    head_diversity: float
    """Mean over the L (L + 1) / 2 causal places of the standard deviation over heads."""
    sink: float
    """Mean weight of the first token."""
    local_focus: tuple[float, ...]
    """Mean weight of the token N places before, for N = 0, 1, 2, 3 (as far as the row has them)."""


def indicators(attention: Float[np.ndarray, "H L L"]) -> Indicators:
    """The indicators of a causal attention map."""
    attention, length = attention.astype(np.float64), attention.shape[-1]
    with np.errstate(invalid="ignore"):
        information = attention * np.log(np.where(attention == 0, 1, attention))
    return Indicators(
        context=float(attention.sum(-1).mean()),
        entropy=float(-information.sum(-1).mean()),
        concentration=float(np.sqrt((attention**2).sum((-2, -1))).mean()),
        head_diversity=float(np.tril(attention.std(0)).sum() * 2 / (length * (1 + length))),
        sink=float(attention[:, :, 0].mean()),
        local_focus=tuple(
            float(np.diagonal(attention, -distance, 1, 2).mean()) for distance in range(min(NEIGHBOURS, length))
        ),
    )


class MappedLayer(NamedTuple):
    """The map of one mixer of a stack on one passage."""

    layer: int
    """Counted from 0."""
    mixer: str
    attention: Float[np.ndarray, "H L L"]


def attention_maps(config: ModelConfig, params: dict[str, Any], tokens: Int[np.ndarray, "L"]) -> list[MappedLayer]:
    """The attention maps of all mixers of the stack that have one, on a passage, under causal budgets.

    Raises:
      ConfigError: there is none, or the passage has no token.
    """
    blocks = mapped_blocks(config)
    if not blocks:
        raise ConfigError(f"ModelConfig.pattern = {config.pattern!r}: no mixer of it has an attention map")
    if not len(tokens):
        raise ConfigError("the passage is empty: there is nothing to attend to")
    maps = on_host(read(config, params, {"tokens": tokens[None]}, "maps")[1]["attention_map"]).astype(np.float32)
    return [MappedLayer(*block, attention[0]) for block, attention in zip(blocks, maps, strict=True)]


def mapped_blocks(config: ModelConfig) -> list[tuple[int, str]]:
    """The layers, counted from 0, and mixers whose statistics hold an attention map, in the order of the stack."""

    def statistics() -> tuple[dict[str, Any], ...]:
        length = config.aamoe.chunk_size  # AA-MoE layers take whole chunks
        embed = LanguageModel(config, rngs=nnx.Rngs(0)).embed
        fixed = fixed_streams(config, embed, length)
        x = jnp.zeros((1, length, config.d_model), config.dtype)
        rows = Context.of_rows(config, 1, length)
        context = Context(rows.segment_ids, rows.positions, causal_budget(config), 0.0, "maps", embedded=x, fixed=fixed)
        return Period(config, rngs=nnx.Rngs(0))(x, context, betas_of_blocks(config)[0])[2]

    reported = jax.eval_shape(statistics)
    having = [block for block, found in zip(config.mixers, reported, strict=True) if "attention_map" in found]
    return [(period * len(config.pattern) + at, name) for period in range(config.periods) for at, name in having]


def table(found: list[MappedLayer]) -> str:
    """The indicators of every layer as text."""
    head = f"{'layer':>5}  {'mixer':<18}  {'context':>7}  {'entropy':>8}  {'conc':>7}  {'headdiv':>8}  {'sink':>6}"
    lines = [head + "".join(f"  {f'locfoc{n}':>7}" for n in range(NEIGHBOURS))]
    for layer, mixer, attention in found:
        figures = indicators(attention)
        start = (
            f"{layer:>5}  {mixer:<18}  {figures.context:>7.3f}  {figures.entropy:>8.3f}  {figures.concentration:>7.3f}"
        )
        focus = "".join(f"  {value:>7.4f}" for value in figures.local_focus)
        lines.append(f"{start}  {figures.head_diversity:>8.5f}  {figures.sink:>6.4f}{focus}")
    return "\n".join(lines)
