"""What fewer bfloat16 passes in the router's products change: choices, bits per byte.

    aamoe router_precision --gin_file=quickstart.gin --seeds=0,1 --output=experiments/results/router_precision.json

Every `AAMoEConfig.router_precision` trains the same model, once per seed, and is evaluated on the test split under
causal budgets. A CPU would multiply in float32 whatever the precision: here it multiplies as a TPU does, forward and
backward (`tpu_passes`). Choices are those of the trained model of `highest`, on the same text, with each precision in
turn: from the second layer on, a token's own vector has changed too. A run lies in
WORK_DIR/PRECISION-SEED; after an interruption the same command does what is left. Writes OUTPUT and a .md beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax._src.lax.lax import _dot_general_lower  # the rule has no public name
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import mlir
from jax.lax import Precision
from jaxtyping import Array, Bool, Float

from aamoe_jax.analysis.inspection import has_local_rank, read
from aamoe_jax.config import ConfigError, ExperimentConfig, ModelConfig, RouterPrecision
from aamoe_jax.data import ensure_prepared, evaluation_batches
from aamoe_jax.data.batches import Batch
from aamoe_jax.training.checkpoints import load_checkpoint
from experiments.program import command_line, plain_table, publish, start
from experiments.runs import Result, comparison, run, seeds_of, with_training
from experiments.studies import Study, Variant, configs

FLAGS = flags.FLAGS
PRECISIONS: tuple[RouterPrecision, ...] = get_args(RouterPrecision)
PASSES = {Precision.HIGH: 3, Precision.DEFAULT: 1}
"""Products of bfloat16 that a TPU takes for one of float32; `highest` takes six: as good as float32."""
BINDINGS = {name: f"AAMoEConfig.router_precision = {name!r}" for name in PRECISIONS}
STUDY = Study("", {name: Variant((binding,), matched=False) for name, binding in BINDINGS.items()}, ())


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_multi_string("gin_file", [], "Path of a gin file, or the name of a shipped config. Repeat it.")
    flags.DEFINE_multi_string("gin_param", [], "One binding, such as 'ModelConfig.d_model = 128'. Repeat it.")
    flags.DEFINE_integer("steps", None, "Steps of every run; those of the config if not given.", lower_bound=1)
    flags.DEFINE_multi_enum("precision", list(PRECISIONS), PRECISIONS, "Precisions to train with. Repeat it.")
    flags.DEFINE_list("seeds", ["0", "1"], "One run per seed and precision. A seed fixes parameters and order of data.")
    flags.DEFINE_integer("eval_batches", 0, "Batches of the test split to evaluate on; 0: all.", lower_bound=0)
    flags.DEFINE_integer("choice_batches", 8, "Batches of the test split to compare choices on.", lower_bound=1)
    flags.DEFINE_string("work_dir", "runs/router_precision", "Where the runs lie.")
    flags.DEFINE_string("output", None, "JSON file to write, and a .md beside it.", required=True)


@contextlib.contextmanager
def tpu_passes() -> Iterator[None]:
    """Within, a CPU makes a product of float32 arrays that asks for `high` or `default` from parts in bfloat16, as a
    TPU does."""

    def rule(ctx: Any, *operands: Any, precision: Any, **how: Any) -> Any:
        passes = PASSES.get(precision[0] if isinstance(precision, tuple) else precision)
        if passes is None or any(aval.dtype != jnp.float32 for aval in ctx.avals_in):
            return _dot_general_lower(ctx, *operands, precision=precision, platform="cpu", **how)
        return mlir.lower_fun(functools.partial(in_passes, passes=passes, **how), False)(ctx, *operands)

    mlir.register_lowering(dot_general_p, rule, platform="cpu")
    jax.clear_caches()
    try:
        yield
    finally:
        mlir.register_lowering(dot_general_p, functools.partial(_dot_general_lower, platform="cpu"), platform="cpu")
        jax.clear_caches()


def in_passes(x: Float[Array, "..."], y: Float[Array, "..."], *, passes: int, **how: Any) -> Float[Array, "..."]:
    """x y in one or three products of bfloat16, summed in float32."""
    multiply: Callable[..., Any] = functools.partial(jax.lax.dot_general, precision=Precision.HIGHEST, **how)
    (x_high, x_low), (y_high, y_low) = parts(x), parts(y)
    found = multiply(x_high, y_high)
    return found if passes == 1 else found + (multiply(x_high, y_low) + multiply(x_low, y_high))


def parts(x: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """x as a number of bfloat16, and what is left, as another."""
    # A conversion and back might be optimised away.
    rounded = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    high = rounded(x)
    return high, rounded(x - high)


def with_precision(model: ModelConfig, precision: RouterPrecision) -> ModelConfig:
    """The model with another precision of its router."""
    return dataclasses.replace(model, aamoe=dataclasses.replace(model.aamoe, router_precision=precision))


def chosen(model: ModelConfig, params: dict[str, Any], batch: Batch) -> Bool[np.ndarray, "layers b L R"]:
    """Which resources every token was given, beside its own neighbourhood."""
    found = read(model, params, batch, "resources")[1]
    resource, spent = np.asarray(found["resource"]), np.asarray(found["spent"])
    slot = np.arange(resource.shape[-1])
    used = (slot < spent[..., None]) & (slot >= int(has_local_rank(model.aamoe)))
    chunks = -(-resource.shape[2] // model.aamoe.chunk_size)
    given = np.zeros((*resource.shape[:-1], chunks + model.aamoe.num_experts + 1), bool)  # the last: unused slots
    np.put_along_axis(given, np.where(used, resource, given.shape[-1] - 1), True, axis=-1)
    return given[..., :-1]


def changed_choices(model: ModelConfig, params: dict[str, Any], batches: Sequence[Batch]) -> dict[str, list[float]]:
    """By precision, of every layer: the share of the first precision's choices that are others."""
    first, *_ = PRECISIONS
    changed: dict[str, Any] = dict.fromkeys(PRECISIONS, 0)
    total: Any = 0
    for batch in batches:
        found = {name: chosen(with_precision(model, name), params, batch) for name in PRECISIONS}
        total += found[first].sum((1, 2, 3))
        for name in PRECISIONS:
            changed[name] += (found[first] & ~found[name]).sum((1, 2, 3))
    return {name: (changed[name] / total).tolist() for name in PRECISIONS}


def choices_of(config: ExperimentConfig, run_dir: Path) -> dict[str, list[float]]:
    """`changed_choices` of a finished run."""
    ((dataset, _),) = config.data.mixture
    source = evaluation_batches(config.data, dataset, split="test", batch_size=config.training.batch_size)
    batches = [source[index] for index in range(min(FLAGS.choice_batches, len(source)))]
    return changed_choices(config.model, load_checkpoint(run_dir).params, batches)


def report(results: Mapping[str, Sequence[Result]], choices: Sequence[Mapping[str, list[float]]], command: str) -> str:
    """The comparison as Markdown."""
    first = results[PRECISIONS[0]]
    config, seeds = first[0]["config"], [run["seed"] for run in first]
    layers = len(choices[0][PRECISIONS[0]])
    heads = ["router_precision", *(f"bits/byte, seed {seed}" for seed in seeds), "mean", f"to {PRECISIONS[0]}"]
    heads += [f"changed, layer {layer + 1}" for layer in range(layers)]
    rows = []
    for name in PRECISIONS:
        bits = [run["bits_per_byte"] for run in results.get(name, ())]
        cells = ["not trained"] * (len(seeds) + 2)
        if bits:
            mean = statistics.mean(bits)
            more = mean - statistics.mean(run["bits_per_byte"] for run in first)
            cells = [*(f"{x:.4f}" for x in (*bits, mean)), f"{more:+.4f}"]
        changed = (statistics.mean(found[name][layer] for found in choices) for layer in range(layers))
        rows.append([name, *cells, *(f"{share:.3%}" for share in changed)])
    parts = [
        "# The router's products in fewer passes",
        f"{first[0]['steps']} steps of {config['training']['batch_size']} x {config['data']['seq_len']} tokens, "
        f"router `{config['model']['aamoe']['router']}`; the same data in the same order for every precision. "
        f"{first[0]['evaluation']['tokens']:,} tokens of held-out text. A CPU multiplied as a TPU does. Changed: of "
        f"the resources that the trained model with `{PRECISIONS[0]}` chooses, those that it does not choose with this "
        "precision, mean over seeds; from the second layer on a token's vector has changed too. "
        f"Corpus {first[0]['corpus_digest'][:16]}, JAX {first[0]['versions']['jax']}.",
        plain_table(heads, "l" + "r" * (len(heads) - 1), rows),
        f"```\n{command}\n```",
    ]
    return "\n\n".join(parts) + "\n"


@comparison
def main() -> None:
    if jax.default_backend() != "cpu":
        raise ConfigError("this program imitates a TPU on a CPU: set JAX_PLATFORMS=cpu")
    experiments = configs(STUDY, FLAGS.gin_file, FLAGS.gin_param, FLAGS.steps)
    seeds, work_dir = seeds_of(FLAGS.seeds), Path(FLAGS.work_dir)
    if PRECISIONS[0] not in FLAGS.precision:
        raise ConfigError(f"--precision={','.join(FLAGS.precision)}: the others are compared with {PRECISIONS[0]}")
    ensure_prepared(experiments[PRECISIONS[0]].data)
    results: dict[str, list[Result]] = {name: [] for name in PRECISIONS if name in FLAGS.precision}
    choices = []
    with tpu_passes():
        for seed in seeds:
            for name in results:
                print(f"== {name}, seed {seed}", flush=True)
                config, folder = with_training(experiments[name], seed=seed), work_dir / f"{name}-{seed}"
                results[name].append(run(config, folder, FLAGS.eval_batches))
            choices.append(choices_of(experiments[PRECISIONS[0]], work_dir / f"{PRECISIONS[0]}-{seed}"))
    command = command_line("experiments.router_precision")
    record = {"command": command, "results": [one for runs in results.values() for one in runs], "changed": choices}
    publish(record, report(results, choices, command), FLAGS.output)


if __name__ == "__main__":
    start(define_flags, main)
