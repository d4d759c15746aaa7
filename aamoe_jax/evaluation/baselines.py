"""What any model must beat: bits per byte of a text under its byte frequencies, and under xz."""

from __future__ import annotations

import lzma

import numpy as np
from jaxtyping import Float, Int


def byte_counts(text: bytes) -> Int[np.ndarray, "256"]:
    """How often every byte occurs."""
    return np.bincount(np.frombuffer(text, np.uint8), minlength=256)


def unigram_bits_per_byte(train: bytes, heldout: bytes) -> float:
    """Cross-entropy of `heldout` under the byte frequencies of `train`.

    Every byte counts once more than it was seen, so that a byte which is new in `heldout` has a finite price.
    """
    counts = byte_counts(train) + 1
    return _mean_bits(heldout, np.log2(counts / counts.sum()))


def unigram_entropy(heldout: bytes) -> float:
    """Entropy of the text's own byte frequencies: no model that ignores the context goes below it."""
    counts = byte_counts(heldout)
    seen = counts > 0
    return _mean_bits(heldout, np.log2(counts / max(1, counts.sum()), where=seen, out=np.zeros(256)))


def xz_bits_per_byte(heldout: bytes) -> float:
    """The size of all bytes as one xz stream of preset 9, container included, in bits per byte of text."""
    _require_text(heldout)
    return 8 * len(lzma.compress(heldout, preset=9)) / len(heldout)


def _mean_bits(text: bytes, log_probability: Float[np.ndarray, "256"]) -> float:
    """Mean price of a byte of `text`, in bits."""
    _require_text(text)
    return float(-(byte_counts(text) * log_probability).sum() / len(text))


def _require_text(text: bytes) -> None:
    if not text:
        raise ValueError("bits per byte of an empty text are undefined")
