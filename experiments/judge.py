"""Whether one stack has fewer bits per byte than another: how much fewer, how certain, and what follows.

The interval is of what is random: which documents are held out, and which seed a run had. Both stacks of a comparison
have the same seeds and documents, so that differences are taken run by run and document by document before anything is
drawn (a paired bootstrap of two levels).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

Verdict = Literal["holds", "does not hold", "no difference", "open"]

RESAMPLES = 10_000
FEWEST_SEEDS = 3
"""With fewer, nothing is decided: two runs say little of a third."""
MARGIN = 0.005
"""Bits per byte. A difference that is certainly smaller is none."""


class Difference(NamedTuple):
    """How much more one stack has than another, and the 95 % of it that the bootstrap found in the middle."""

    mean: float
    low: float
    high: float
    of_seeds: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"

    def verdict(self, margin: float) -> Verdict:
        """What follows for the claim that it is positive.

        Args:
          margin: differences up to here are none.
        """
        if len(self.of_seeds) < FEWEST_SEEDS:
            return "open"
        if -margin < self.low and self.high < margin:
            return "no difference"
        if self.low > 0:
            return "holds"
        return "does not hold" if self.high < 0 else "open"


def difference(
    less: Float[np.ndarray, "seeds documents"],
    more: Float[np.ndarray, "seeds documents"],
    size: Float[np.ndarray, "documents"],
) -> Difference:
    """How much more `more` has, a unit of size: the sum over documents over their size, mean over seeds.

    Args:
      less, more: totals of every run and document, in the same order.
      size: of the documents, in bytes.
    """
    excess = more - less
    seeds, documents = excess.shape
    random = np.random.default_rng(0)
    drawn = _drawn(random, seeds) / seeds, _drawn(random, documents)
    means = np.einsum("rs,sd,rd->r", drawn[0], excess, drawn[1], optimize=True) / (drawn[1] @ size)
    low, high = np.percentile(means, (2.5, 97.5))
    of_seeds = excess.sum(1) / size.sum()
    return Difference(float(of_seeds.mean()), float(low), float(high), tuple(of_seeds.tolist()))


def _drawn(random: np.random.Generator, count: int) -> Float[np.ndarray, "resamples n"]:
    """How often each of `count` is drawn, in as many draws with replacement."""
    return random.multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(float)
