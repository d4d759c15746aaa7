"""Rows for the model: windows of a token stream, and what a row says about its documents."""

import numpy as np
from jaxtyping import Int32, Integer, UInt

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.data.stream import Stream


class WindowSource:
    """Random access to windows of seq_len + 1 tokens, seq_len apart: every token is a target in exactly one window.

    The last window is padded. Windows start at multiples of `document_align`, where a document starts or goes on, so
    none begins with padding.
    """

    def __init__(self, config: DataConfig, name: str, split: str):
        if config.seq_len % config.document_align:
            raise ConfigError(
                f"DataConfig.seq_len = {config.seq_len}: must be a multiple of document_align = "
                f"{config.document_align}, or documents would not start at chunk boundaries of a row"
            )
        self.stream = Stream(config, name, split)
        self._seq_len = config.seq_len

    def __len__(self) -> int:
        # The first token of the stream is nobody's target.
        return -(-(len(self.stream) - 1) // self._seq_len)

    def __getitem__(self, index: int) -> UInt[np.ndarray, "window"]:
        start = int(index) * self._seq_len
        return self.stream.read(start, start + self._seq_len + 1)

    def __repr__(self) -> str:
        return f"WindowSource({self.stream!r}, seq_len={self._seq_len})"


def to_example(window: Integer[np.ndarray, "window"], *, eos_id: int, pad_id: int) -> dict[str, Int32[np.ndarray, "L"]]:
    """tokens, targets and, per token: segment_ids, positions, loss_mask.

    segment_ids: 1, 2, ... for the documents of the row, 0 for padding. positions: from 0 in every document (in a row
    that opens inside a document, from the row's start). loss_mask: 1 where the target is a token of the same document;
    its eos counts, its first token has nothing to be predicted from.
    """
    window = window.astype(np.int32)
    tokens, targets = window[:-1], window[1:]
    real = tokens != pad_id
    starts = real.copy()
    starts[1:] &= (tokens[:-1] == eos_id) | ~real[:-1]
    index = np.arange(len(tokens), dtype=np.int32)
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": np.cumsum(starts, dtype=np.int32) * real,
        "positions": (index - np.maximum.accumulate(np.where(starts, index, 0))) * real,
        "loss_mask": (real & (tokens != eos_id) & (targets != pad_id)).astype(np.int32),
    }
