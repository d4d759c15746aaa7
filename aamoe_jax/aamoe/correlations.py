"""Do tokens that are hard to predict get large budgets (AA-25)?

Pearson correlations of B_i, the resources of a token, with three signals, over all tokens that predict one of their
document and are predicted by one: `loss`, -log p of the next token; `surprisal`, -log p of the token itself, given
those before it; and `entropy` of the distribution of the next token. They are made of sums, which add up over batches
and devices.

Shapes: n AA-MoE layers, b rows, t tokens of them here, V words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.mixers.base import Statistics
from aamoe_jax.shards import TOKENS, WHOLE, Shards

SIGNALS = ("loss", "surprisal", "entropy")


def beside_loss(
    statistics: Statistics, logits: Float[Array, "b t V"], batch: Mapping[str, Int[Array, "b L"]], shards: Shards
) -> Statistics:
    """Statistics of a forward pass with the detail `tokens`, with sums (`moments`) in place of what they have per
    token."""
    result = {name: value for name, value in statistics.items() if name not in ("spent", "budget")}
    if "spent" in statistics:
        result["budget_moments"] = moments(statistics["spent"], *signals(logits, batch, shards))
    return result


def signals(
    logits: Float[Array, "b t V"], batch: Mapping[str, Int[Array, "b L"]], shards: Shards = WHOLE
) -> tuple[Float[Array, "3 b t"], Bool[Array, "b t"]]:
    """The three signals of every token, less log V: so sums of their squares keep what differs while a model predicts
    all words alike. And which tokens have all of them."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    targets, counts = (shards.part(batch[name], TOKENS) for name in ("targets", "loss_mask"))
    loss = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    # Of the token before: one number of every token travels. A document's first token is predicted by none.
    rows = shards.gather(jnp.stack([loss, counts.astype(jnp.float32)], axis=2), TOKENS)
    surprisal, predicted = jnp.moveaxis(shards.part(jnp.pad(rows, ((0, 0), (1, 0), (0, 0)))[:, :-1], TOKENS), -1, 0)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return jnp.stack([loss, surprisal, entropy]) - math.log(logits.shape[-1]), (counts > 0) & (predicted > 0)


def moments(
    spent: Int[Array, "n b t"], signal: Float[Array, "3 b t"], counts: Bool[Array, "b t"]
) -> Float[Array, "n 3 6"]:
    """Sums of 1, B, x, B^2, x^2 and B x over the tokens that count, for every layer and signal x."""
    b, x = spent.astype(jnp.float32)[:, None], signal[None]
    one = jnp.ones_like(b * x)
    terms = jnp.stack([one, b * one, x * one, b**2 * one, x**2 * one, b * x], axis=-1)
    return jax.lax.stop_gradient(jnp.where(counts[..., None], terms, 0).sum((2, 3)))


def correlations(sums: Float[np.ndarray, "n 3 6"]) -> dict[str, list[float | None]]:
    """Pearson's correlation of the budgets of every layer with every signal; None where either does not vary."""
    count, b, x, b_b, x_x, b_x = np.moveaxis(np.asarray(sums, np.float64), -1, 0)
    variances = count * b_b - b**2, count * x_x - x**2
    # Sums of float32: what is left of less than this share of them is rounding.
    varies = (variances[0] > 1e-6 * b**2) & (variances[1] > 1e-6 * x**2)
    scale = np.sqrt(np.where(varies, variances[0] * variances[1], 1))
    found = np.where(varies, (count * b_x - b * x) / scale, np.nan)
    return {name: [None if np.isnan(r) else float(r) for r in row] for name, row in zip(SIGNALS, found.T, strict=True)}


def budget_figures(sums: Float[np.ndarray, "n 3 6"]) -> dict[str, list[float | None]]:
    """`correlations` by the names that they have among the figures of layers."""
    return {f"budget_{name}": values for name, values in correlations(sums).items()}
