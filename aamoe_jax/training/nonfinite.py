"""Steps whose loss or gradient is not finite: kept out of the state, if the run is to go on past them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from aamoe_jax.training.state import TrainState

IN_A_ROW = 10
"""So many steps in a row that are not finite end a run that skips them: what is wrong is not in the batches."""


def keep_finite(finite: Bool[Array, ""], new: TrainState, old: TrainState) -> TrainState:
    """The new state; or the old one with its step counted, so that the next batch follows, if it is not finite.

    The optimizer's own count stays too: its schedules go by updates, not by steps.
    """

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)

    kept = keep(new._replace(step=(), key=()), old._replace(step=(), key=()))
    return kept._replace(step=new.step, key=new.key)


def updates_made(optimizer: optax.OptState) -> Int[Array, ""]:
    """Updates behind an optimizer's state: steps, less those that were skipped."""
    _, count = optax.tree.get_all_with_path(optimizer, "count")[0]
    return count
