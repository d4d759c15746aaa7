"""Time per generated token at growing contexts: AA-MoE against a dense transformer with a key/value cache.

    python -m benchmarks.decode --output=experiments/results/decode_cpu.json

Both models have the same width and depth, decode one row, and hold a full cache of random keys and values: nothing is
prefilled, and what a token costs does not depend on what the numbers are, but for the budgets, which a random w_B makes
as uneven as they are in use. At every context the models take turns, a few tokens each: long enough that a model finds
its parameters where it left them, as it does when it decodes alone, and the other has not just swept them out.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from aamoe_jax import cost
from aamoe_jax.aamoe.cache import Cache
from aamoe_jax.aamoe.costs import bytes_per_pair
from aamoe_jax.config import ModelConfig
from aamoe_jax.generation.decoder import Decoder, State
from aamoe_jax.model import LanguageModel, split
from benchmarks import measure
from experiments.program import command_line, plain_table, publish, start

FLAGS = flags.FLAGS
TURN = 20
"""Timed tokens of one model before it is the other's turn."""
WARM_UP = 3
"""Tokens before the clock counts: at every turn, to find the caches warm; the very first compiles."""
MODELS = {"aamoe": ("aamoe",), "dense": ("parallel",)}


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_list("contexts", ["1024", "4096", "16384", "65536"], "Tokens in the cache, ascending.")
    flags.DEFINE_integer("turns", 10, f"Turns of each model at each context, of {TURN} timed tokens.", lower_bound=1)
    flags.DEFINE_integer("layers", 4, "Depth.", lower_bound=1)
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")
    measure.define_model_flags()
    flags.adopt_module_key_flags(measure)


def random_params(config: ModelConfig) -> dict[str, Any]:
    """Initial parameters, with a w_B that makes budgets uneven."""
    _, params = split(LanguageModel(config, rngs=nnx.Rngs(0)))

    def stir(path: tuple, leaf: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(1), leaf.shape) if path[-1].key == "importance" else leaf

    return jax.tree_util.tree_map_with_path(stir, params)


def full_state(decoder: Decoder, tokens: int, beta: float) -> State:
    """A state with `tokens` random tokens in the caches, as if they had spent what they may."""
    start = decoder.prefill([np.zeros(1, np.int32)])
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(start.caches))))
    caches = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype) if x.ndim > 1 else x, start.caches)

    def spend(cache: Any) -> Any:
        if not isinstance(cache, Cache):
            return cache
        # exp(s) of a normal importance has mean exp(1/2).
        log_mean = jnp.zeros_like(cache.log_mean).at[:, 0].set(0.5)
        return cache._replace(log_mean=log_mean, spent=jnp.full_like(cache.spent, int(beta * tokens)))

    caches = [[spend(cache) for cache in period] for period in caches]
    return State(caches, jnp.full_like(start.lengths, tokens), start.logits)


@dataclasses.dataclass
class Run:
    """One model at one context, token by token."""

    decoder: Decoder
    state: State
    tokens: Iterator[np.ndarray]
    """What is appended: random, since one and the same token would freeze the budgets."""

    def step(self) -> float:
        """Seconds of one more token."""
        start = time.perf_counter()
        self.state = self.decoder.append(self.state, next(self.tokens))
        jax.block_until_ready(self.state.logits)
        return time.perf_counter() - start

    def spent(self) -> int:
        """Resources given so far, over all layers."""
        caches = [cache for period in self.state.caches for cache in period]
        return sum(int(cache.spent[0]) for cache in caches if isinstance(cache, Cache))


def measure_context(context: int, *, turns: int) -> dict[str, Any]:
    """The row of one context: the clock runs over its last tokens."""
    tokens = turns * (WARM_UP + TURN)
    if context <= tokens:
        raise app.UsageError(f"--contexts: {context} must be more than the {tokens} tokens that {turns} turns take")
    runs = {}
    for name, pattern in MODELS.items():
        config = measure.model_config(num_layers=FLAGS.layers, pattern=pattern)
        decoder = Decoder(config, random_params(config), length=context)
        drawn = np.random.default_rng(0).integers(0, config.vocab_size, (tokens, 1), np.int32)
        runs[name] = Run(decoder, full_state(decoder, context - tokens, FLAGS.beta), iter(drawn))
    before = runs["aamoe"].spent()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            times[name] += [run.step() for _ in range(WARM_UP + TURN)][WARM_UP:]
    pairs = (runs["aamoe"].spent() - before) / tokens
    row: dict[str, Any] = {"context": context, "pairs_per_token": pairs / FLAGS.layers}
    for name, run in runs.items():
        config = run.decoder.plan.config
        touched = cost.decode_bytes(config, context)
        touched += pairs * bytes_per_pair(config) if name == "aamoe" else 0.0
        median = statistics.median(times[name])
        row[name] = {
            "milliseconds": 1e3 * median,
            "quartiles": [1e3 * float(q) for q in np.quantile(times[name], [0.25, 0.75])],
            "bytes": touched,
            "gigabytes_per_second": touched / median / 1e9,
            "cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.caches)),
        }
    row["speed_up"] = row["dense"]["milliseconds"] / row["aamoe"]["milliseconds"]
    return row


def read_bandwidth() -> float:
    """GB/s of summing 256 MB: what reading memory can do at best here."""
    x = jnp.ones(2**26, jnp.float32)
    call = functools.partial(jax.jit(jnp.sum), x)
    call()
    return x.nbytes / min(measure.seconds(call) for _ in range(10)) / 1e9


def report(record: dict[str, Any]) -> str:
    """The record as markdown."""
    first = record["rows"][0]["aamoe"]["milliseconds"]
    heads = ["context", "AA-MoE, ms", "over the first row", "MB touched", "GB/s", "dense, ms", "MB touched", "GB/s"]
    rows = [
        [
            row["context"],
            _time(row["aamoe"]),
            f"{row['aamoe']['milliseconds'] / first:.2f}",
            *_traffic(row["aamoe"]),
            _time(row["dense"]),
            *_traffic(row["dense"]),
            f"{row['speed_up']:.1f}",
        ]
        for row in record["rows"]
    ]
    parts = [
        "# Time per generated token",
        f"{record['setting']}, on {record['machine']['cores']} cores of {record['machine']['device']}. "
        f"Reading memory: at most {record['read_gigabytes_per_second']:.0f} GB/s. Medians over {record['tokens']} "
        "tokens, the quartiles in brackets; bytes are what a token must touch, in closed form.",
        plain_table([*heads, "speed-up"], "r" * 9, rows),
        measure.closing(record["command"], record["machine"]["versions"]),
    ]
    return "\n\n".join(parts)


def _time(figures: dict[str, Any]) -> str:
    low, high = figures["quartiles"]
    return f"{figures['milliseconds']:.2f} ({low:.2f} to {high:.2f})"


def _traffic(figures: dict[str, Any]) -> list[str]:
    return [f"{figures['bytes'] / 1e6:.1f}", f"{figures['gigabytes_per_second']:.1f}"]


def main() -> None:
    rows = []
    for context in map(int, FLAGS.contexts):
        rows.append(measure_context(context, turns=FLAGS.turns))
        print(f"context {context}: speed-up {rows[-1]['speed_up']:.1f}", file=sys.stderr, flush=True)
    config = measure.model_config()
    record = {
        "command": command_line("benchmarks.decode"),
        "machine": measure.machine(),
        "setting": f"{FLAGS.layers} layers, {measure.sizes(config)}, K_max = {config.aamoe.max_resources}, one row, "
        "float32",
        "tokens": FLAGS.turns * TURN,
        "read_gigabytes_per_second": read_bandwidth(),
        "rows": rows,
    }
    publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
