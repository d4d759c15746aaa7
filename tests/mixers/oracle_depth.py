"""Mixture of Depths in NumPy and float64, where the predictor chooses."""

import numpy as np

from aamoe_jax.config import ModelConfig
from aamoe_jax.mixers.depth import MixtureOfDepthsConfig
from tests.mixers.oracle_attention import attend
from tests.mixers.rows import Rows


def mixture_of_depths(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    guess = np.maximum(h @ params["predictor"]["hidden"], 0) @ params["predictor"]["output"]
    return through(params, h, rows, config, let_through(guess > 0, rows, config))


def let_through(wish: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    """Token by token: who wants to, unless the document so far has had its share."""
    chosen = np.zeros_like(wish)
    for row, i in np.ndindex(wish.shape):
        before = sum(chosen[row, j] for j in rows.seen(row, i) if j < i)
        allowed = int(config.of(MixtureOfDepthsConfig).capacity * (rows.positions[row, i] + 1))
        chosen[row, i] = wish[row, i] and rows.segment_ids[row, i] > 0 and before < allowed
    return chosen


def through(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig, chosen: np.ndarray) -> np.ndarray:
    """The chosen tokens of each row by themselves, as if there were no others."""
    output = np.zeros_like(h)
    for row in range(len(h)):
        at = np.flatnonzero(chosen[row] & (rows.segment_ids[row] > 0))
        if not len(at):
            continue
        alone = Rows(rows.segment_ids[row : row + 1, at], rows.positions[row : row + 1, at])
        taken = h[row : row + 1, at]
        feed_forward = params["feed_forward"]
        hidden = np.maximum(taken @ feed_forward["key"]["kernel"], 0) @ feed_forward["value"]["kernel"]
        layer = attend(params["attention"], taken, alone, config) + hidden
        output[row, at] = layer[0] * (taken[0] @ params["router"])[:, None]
    return output


ORACLES = {"mixture_of_depths": mixture_of_depths}
