"""What any model must beat: bits per byte of a text under its byte frequencies, and under xz."""

from __future__ import annotations

import lzma

import numpy as np
from jaxtyping import Int


def byte_counts(text: bytes) -> Int[np.ndarray, "256"]:
    """How often every byte occurs."""
    return np.bincount(np.frombuffer(text, np.uint8), minlength=256)


def unigram_bits_per_byte(train: bytes, heldout: bytes) -> float:
    """Cross-entropy of `heldout` under the byte frequencies of `train`.

    Every byte counts once more than it was seen, so that a byte which is new in `heldout` has a finite price.
    """
    _require_text(heldout)
    counts = byte_counts(train) + 1
    return float(-(byte_counts(heldout) * np.log2(counts / counts.sum())).sum() / len(heldout))


def xz_bits_per_byte(heldout: bytes) -> float:
    """The size of all bytes as one xz stream of preset 9, container included, in bits per byte of text."""
    _require_text(heldout)
    return 8 * len(lzma.compress(heldout, preset=9)) / len(heldout)


def _require_text(text: bytes) -> None:
    if not text:
        raise ValueError("bits per byte of an empty text are undefined")
