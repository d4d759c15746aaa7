"""Time per generated token at growing contexts: AA-MoE against a dense transformer with a key/value cache.

    python -m benchmarks.decode --output=experiments/results/decode_cpu.json

Both models have the same width and depth, decode one row, and hold a full cache of random keys and values: nothing is
prefilled, and what a token costs does not depend on what the numbers are, but for the budgets, which a random w_B makes
as uneven as they are in use. At every context the models take turns, a few tokens each: long enough that a model finds
its parameters where it left them, as it does when it decodes alone, and the other has not just swept them out.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from aamoe_jax import cost
from aamoe_jax.aamoe.cache import Cache
from aamoe_jax.aamoe.costs import bytes_per_pair
from aamoe_jax.config import AAMoEConfig, BudgetConfig, ModelConfig
from aamoe_jax.generation.decoder import Decoder, State
from aamoe_jax.model import LanguageModel, split
from benchmarks import measure

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
    flags.DEFINE_integer("width", 256, "d.", lower_bound=1)
    flags.DEFINE_integer("heads", 4, "H.", lower_bound=1)
    flags.DEFINE_integer("chunk_size", 64, "m.", lower_bound=1)
    flags.DEFINE_integer("experts", 64, "E.", lower_bound=0)
    flags.DEFINE_float("beta", 4.0, "Mean number of resources per token.")
    flags.DEFINE_integer("max_resources", None, "K_max; 4 * beta if not given.", lower_bound=1)
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.")


def model_config(pattern: tuple[str, ...]) -> ModelConfig:
    """The models as the flags describe them."""
    layer = AAMoEConfig(
        chunk_size=FLAGS.chunk_size,
        num_experts=FLAGS.experts,
        max_resources=FLAGS.max_resources or round(4 * FLAGS.beta),
        budget=BudgetConfig(beta=FLAGS.beta),
    )
    return ModelConfig(
        d_model=FLAGS.width, num_heads=FLAGS.heads, num_layers=FLAGS.layers, pattern=pattern, aamoe=layer
    )


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
        config = model_config(pattern)
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
    total = jax.jit(jnp.sum)
    call: Callable[[], Any] = lambda: total(x)  # noqa: E731
    call()
    return x.nbytes / min(measure.seconds(call) for _ in range(10)) / 1e9


def report(record: dict[str, Any]) -> str:
    """The record as markdown."""
    lines = [
        "# Time per generated token",
        "",
        f"{record['setting']}, on {record['machine']['cores']} cores of {record['machine']['device']}. "
        f"Reading memory: at most {record['read_gigabytes_per_second']:.0f} GB/s. Medians over {record['tokens']} "
        "tokens, the quartiles in brackets; bytes are what a token must touch, in closed form.",
        "",
        "| context | AA-MoE, ms | over the first row | MB touched | GB/s | dense, ms | MB touched | GB/s | speed-up |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    first = record["rows"][0]["aamoe"]["milliseconds"]
    for row in record["rows"]:
        aamoe, dense = row["aamoe"], row["dense"]
        lines.append(
            f"| {row['context']} | {_time(aamoe)} | {aamoe['milliseconds'] / first:.2f} | {_traffic(aamoe)} "
            f"| {_time(dense)} | {_traffic(dense)} | {row['speed_up']:.1f} |"
        )
    versions = ", ".join(f"{name} {version}" for name, version in record["machine"]["versions"].items())
    return "\n".join([*lines, "", "```", record["command"], "```", "", versions, ""])


def _time(figures: dict[str, Any]) -> str:
    low, high = figures["quartiles"]
    return f"{figures['milliseconds']:.2f} ({low:.2f} to {high:.2f})"


def _traffic(figures: dict[str, Any]) -> str:
    return f"{figures['bytes'] / 1e6:.1f} | {figures['gigabytes_per_second']:.1f}"


def setting() -> str:
    """The case in words."""
    layer = model_config(MODELS["aamoe"]).aamoe
    return (
        f"{FLAGS.layers} layers, d = {FLAGS.width}, H = {FLAGS.heads}, m = {FLAGS.chunk_size}, E = {FLAGS.experts}, "
        f"beta = {FLAGS.beta:g}, K_max = {layer.max_resources}, one row, float32"
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; inputs are given as --flag=value")
    rows = []
    for context in map(int, FLAGS.contexts):
        rows.append(measure_context(context, turns=FLAGS.turns))
        print(f"context {context}: speed-up {rows[-1]['speed_up']:.1f}", file=sys.stderr, flush=True)
    record = {
        "command": shlex.join(["python", "-m", "benchmarks.decode", *sys.argv[1:]]),
        "machine": measure.machine(),
        "setting": setting(),
        "tokens": FLAGS.turns * TURN,
        "read_gigabytes_per_second": read_bandwidth(),
        "rows": rows,
    }
    measure.publish(record, report(record), FLAGS.output)


if __name__ == "__main__":
    define_flags()
    app.run(main)
