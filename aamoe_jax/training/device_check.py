"""Looks for devices that compute wrongly or slowly, which nothing else would tell of.

A step is a function of its state and batch, so that computing it twice gives the same bits: if not, a device is
damaged, or the program is not deterministic (GPUs need XLA_FLAGS=--xla_gpu_deterministic_ops=true). Steps of several
processes end together, so that the slow process does not show in them: each times the same work of its own.
"""

from __future__ import annotations

import functools
import json
import socket
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from aamoe_jax.training import distributed
from aamoe_jax.training.checkpoints import state_fingerprints
from aamoe_jax.training.state import TrainState
from aamoe_jax.training.step import Batch, Metrics, TrainStep

SLOW = 1.3
"""A process that takes so many times as long as the median of all is named."""
PROBE_SIZE, PROBE_PRODUCTS, PROBE_RUNS = 512, 16, 5


class WrongBitsError(RuntimeError):
    """A step gave different bits when it was computed again."""


class Speed(NamedTuple):
    """How long a process took for the same work."""

    host: str
    seconds: float


def step_twice(train_step: TrainStep, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """`train_step(state, batch)`, computed twice and compared. Needs memory for a second state.

    Raises:
      WrongBitsError: the states afterwards differ.
    """
    first, _ = train_step(jax.tree.map(jnp.copy, state), batch)
    expected = state_fingerprints(first)
    del first
    after, metrics = train_step(state, batch)
    found = state_fingerprints(after)
    differing = [name for name, number in found.items() if expected[name] != number]
    if differing:
        raise WrongBitsError(
            f"the step to {int(jax.device_get(after.step))} gave different bits when it was computed again, in "
            f"{len(differing)} of {len(found)} arrays, such as {differing[0]}: a device is damaged, or the program is "
            "not deterministic (on GPUs: XLA_FLAGS=--xla_gpu_deterministic_ops=true)"
        )
    return after, metrics


def speeds() -> list[Speed]:
    """Of all processes, by index: the slowest of its devices, each in its best run. All must call it."""
    slowest = max(_probe(device) for device in jax.local_devices())
    said = distributed.gather(distributed.unique("speed"), json.dumps([socket.gethostname(), slowest]))
    return [Speed(*json.loads(text)) for text in said]


def stragglers(found: list[Speed]) -> list[str]:
    """What to say of every process that is slow."""
    median = statistics.median(speed.seconds for speed in found)
    return [
        f"process {index} on {speed.host} takes {speed.seconds / median:.1f} times as long as the median of "
        f"{len(found)} processes: {1e3 * speed.seconds:.1f} ms against {1e3 * median:.1f} ms"
        for index, speed in enumerate(found)
        if speed.seconds > SLOW * median
    ]


def _probe(device: jax.Device) -> float:
    x = jax.device_put(jnp.eye(PROBE_SIZE), device)
    _work(x).block_until_ready()
    took = []
    for _ in range(PROBE_RUNS):
        start = time.perf_counter()
        _work(x).block_until_ready()
        took.append(time.perf_counter() - start)
    return min(took)


@jax.jit
def _work(x: Float[Array, "n n"]) -> Float[Array, "n n"]:
    return functools.reduce(lambda total, _: jnp.tanh(total @ x), range(PROBE_PRODUCTS), x)
