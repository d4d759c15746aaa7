"""What a person sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import tqdm

from aamoe_jax.training import distributed
from aamoe_jax.training.metrics import Record

STILL_SECONDS = 10.0
"""A compilation that takes longer says so, again after so long each time."""
CACHE_HIT = "/jax/compilation_cache/cache_hits"
"""JAX's event."""


def say(line: str) -> None:
    """A line for people, above the bar where there is one; from process 0 alone."""
    if distributed.is_first():
        tqdm.tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


@contextlib.contextmanager
def compiling(what: str, *, even_if_quick: bool = False) -> Iterator[None]:
    """Says now and then that `what` is being compiled; and at the end how long it took, and if it came from the cache.

    Args:
      even_if_quick: says the end of a compilation that took no longer than STILL_SECONDS too.
    """
    start, done, hits = time.perf_counter(), threading.Event(), list[str]()

    def seconds() -> float:
        return time.perf_counter() - start

    def tell() -> None:
        while not done.wait(STILL_SECONDS):
            say(f"compiling {what}: {seconds():.0f} s so far")

    def note(event: str, **_: Any) -> None:
        hits.extend([event] * (event == CACHE_HIT))

    thread = threading.Thread(target=tell, name="compiling", daemon=True)
    jax.monitoring.register_event_listener(note)
    thread.start()
    try:
        yield
    finally:
        jax.monitoring.unregister_event_listener(note)
        done.set()
        thread.join()
    if even_if_quick or seconds() > STILL_SECONDS:
        say(f"compiled {what} in {seconds():.1f} s{', from the cache' if hits else ''}")


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Shows training records as they come, if this is process 0."""

    def __init__(self, start: int, steps: int):
        self._steps = steps
        disable = None if distributed.is_first() else True  # None: where there is no terminal
        self._bar = tqdm.tqdm(initial=start, total=steps, unit="step", dynamic_ncols=True, disable=disable)

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def restart_clock(self) -> None:
        """Leaves the time until now out of the rate."""
        self._bar.unpause()

    def advance(self) -> None:
        """One step more."""
        self._bar.update()

    def train(self, record: Record) -> None:
        """The figures of a logged step."""
        if not self._bar.disable:
            self._bar.set_postfix_str(_figures(record))
            return
        remaining = (self._steps - record["step"]) / record["steps_per_second"]
        self.say(
            f"step {record['step']}/{self._steps}  {_figures(record)}  {record['steps_per_second']:.3g} steps/s  "
            f"waiting for data {record['data_wait']:.0%}  ETA {tqdm.tqdm.format_interval(remaining)}"
        )

    def validation(self, records: list[Record]) -> None:
        """The figures of an evaluation."""
        for record in records:
            causal = f", with the row's own budgets {record['loss_row']:.4f}" if "loss_row" in record else ""
            self.say(f"step {record['step']}  validation on {record['dataset']}: {_loss(record)}{causal}")

    def say(self, line: str) -> None:
        """`say`."""
        say(line)


def _figures(record: Record) -> str:
    parts = [_loss(record), f"{record['tokens_per_second']:,.0f} tokens/s"]
    layers = record.get("layers", {})
    if "spent" in layers:
        parts.append(f"{np.mean(layers['spent']):.2f} resources/token")
        if dropped := max(layers["overflow"]):
            parts.append(f"{dropped:.2%} of a layer's pairs dropped at MeshConfig.pair_bound")
    if "moe_active" in layers:
        parts.append(f"{np.mean(layers['moe_active']):.2f} experts/token")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    return "  ".join(parts)


def _loss(record: Record) -> str:
    bits = f" ({record['bits_per_byte']:.3f} bits/byte)" if "bits_per_byte" in record else ""
    return f"loss {record['loss']:.4f}{bits}"
