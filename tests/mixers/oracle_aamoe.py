"""AA-MoE in NumPy and float64: its definition, document by document."""

import numpy as np

from aamoe_jax.aamoe.reference import reference_layer
from aamoe_jax.config import ModelConfig
from tests.mixers.rows import Rows


def aamoe(params: dict, h: np.ndarray, rows: Rows, config: ModelConfig) -> np.ndarray:
    output = np.zeros_like(h)
    for row, segments in enumerate(rows.segment_ids):
        for document in set(segments) - {0}:
            tokens = np.flatnonzero(segments == document)
            output[row, tokens] = reference_layer(params, config, h[row, tokens])
    return output


ORACLES = {"aamoe": aamoe}
