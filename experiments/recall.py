r"""Trains models on generated recall tasks, and measures which of them solve them.

    aamoe recall --task=copy --seeds=0,1,2 --output=experiments/results/recall
    aamoe recall --task=mqar --stack=dense --stack=default \
        --gin_param='DataConfig.seq_len = 1024' --gin_param='chunk_size = 32' --output=experiments/results/recall_1024

Every stack trains on the same rows, once per seed, until it answers 99 % of a fixed set of other rows, or its steps are
used up. Then it is measured on 16 batches of more rows. Router recall: of the answers that lie outside the window, how
many are in a chunk that the token was given, in the layer where that is most. Nothing is downloaded.

A finished run is kept in WORK_DIR as one JSON file: after an interruption the same command does what is left. Writes
OUTPUT.json, OUTPUT.md and OUTPUT.png.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from jaxtyping import Array, Bool, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, ScalarFormatter

from aamoe_jax.analysis.inspection import read
from aamoe_jax.analysis.pictures import BLUE, VERMILION, picture
from aamoe_jax.config import ConfigError, ExperimentConfig, ModelConfig, to_dict
from aamoe_jax.data import ensure_prepared
from aamoe_jax.markdown import table
from aamoe_jax.mixers.statistics import summarize
from aamoe_jax.training.optimizer import build_optimizer
from aamoe_jax.training.state import abstract_state, initial_state, place
from aamoe_jax.training.step import make_train_step
from experiments.binding import load_experiment
from experiments.matching import active_flops, parameters
from experiments.program import command_line, publish, start
from experiments.runs import Result, comparison, keep, seeds_of, with_training
from experiments.studies import LEARNED, ONE_TOKEN, STANDARD
from experiments.tasks import TASKS, VOCAB_SIZE, Examples, Task, examples, generator

FLAGS = flags.FLAGS
SOLVED = 0.99
"""Accuracy at which a run ends."""
FINAL_BATCHES = 16
EVALUATION_SEED = 2**31
"""Of the rows that are only measured."""


class Stack(NamedTuple):
    """What is compared, and how it is drawn."""

    title: str
    colour: str
    bindings: tuple[str, ...] = ()


STACKS = {
    "dense": Stack("attention, feed-forward", "#333333", (f"ModelConfig.pattern = ({STANDARD!r},)",)),
    "hybrid": Stack("hybrid, half standard", "#CC79A7", (f"ModelConfig.pattern = ('even({STANDARD}, aamoe)',)",)),
    "context": Stack(
        "routed context alone",
        "#009E73",
        ("ModelConfig.pattern = ('aamoe+feed_forward',)", "AAMoEConfig.num_experts = 0"),
    ),
    "literal": Stack(
        "AA-MoE, literal",
        "#E69F00",
        (
            *LEARNED,
            "AAMoEConfig.local = 'none'",
            "BudgetConfig.normalizer = 'row'",
            "ModelConfig.norm = 'layer'",
            "ModelConfig.qk_norm = 'none'",
        ),
    ),
    "learned": Stack("AA-MoE, learned router", VERMILION, LEARNED),
    "default": Stack("AA-MoE", BLUE),
}
ABLATIONS = {
    "one_pooled_key": Stack("one pooled key", "#56B4E9", ("AAMoEConfig.pooled_keys = 1",)),
    "no_convolution": Stack("queries and keys of one token", "#F0E442", ONE_TOKEN),
    "key_convolution": Stack("convolution on keys alone", "#E7298A", ("AAMoEConfig.query_convolution = False",)),
    "no_bias": Stack("no bias", "#999999", ("AAMoEConfig.bias = 'none'",)),
    "uniform": Stack("uniform budgets", "#8DA0CB", ("BudgetConfig.importance = 'uniform'",)),
    "all_pooled_keys": Stack("as many pooled keys as keys", "#4B0082", ("AAMoEConfig.pooled_keys = %chunk_size",)),
    "shares": Stack("half of each budget for experts", "#8B4513", ("BudgetConfig.expert_share = 0.5",)),
    "unbounded": Stack("unbounded budgets", "#A6761D", ("BudgetConfig.importance = 'learned'",)),
}
"""AA-MoE with one decision changed."""
ALL_STACKS = STACKS | ABLATIONS


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_multi_enum("task", None, list(TASKS), "What is to be solved. Repeat it.", required=True)
    flags.DEFINE_multi_enum(
        "stack", list(STACKS), list(ALL_STACKS), "What is compared, or AA-MoE with one decision changed. Repeat it."
    )
    flags.DEFINE_multi_string("gin_file", ["recall.gin"], "Path of a gin file, or the name of a shipped config.")
    flags.DEFINE_multi_string("gin_param", [], "One binding for every stack. Repeat it.")
    flags.DEFINE_integer("steps", None, "Most steps of every run; those of the config if not given.", lower_bound=1)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "One run per seed and stack. A seed fixes parameters and rows.")
    flags.DEFINE_string("work_dir", "runs/recall", "Where finished runs are kept.")
    flags.DEFINE_string("output", None, "Path of the report without its suffix.", required=True)


# Running.


def run(config: ExperimentConfig, task: Task) -> Result:
    """Trains one stack on a task until it is solved, and measures it.

    Raises:
      ConfigError: the vocabulary is too small for the tasks, or rows are too short.
    """
    model, training, length = config.model, config.training, config.data.seq_len
    if model.vocab_size < VOCAB_SIZE:
        raise ConfigError(f"ModelConfig.vocab_size = {model.vocab_size}: these tasks need at least {VOCAB_SIZE}")
    placement = place(config)
    optimizer = build_optimizer(config.optimizer, training.steps)
    graphdef, _ = abstract_state(model, optimizer, placement)
    state = initial_state(model, optimizer, training.seed, placement)
    step_function = make_train_step(config, graphdef, optimizer, np.ones(model.vocab_size, np.int32), placement)
    step = jax.jit(step_function, donate_argnums=0)
    measure = functools.partial(Measure, functools.partial(_answers, model), model.aamoe.chunk_size)
    learn, held_out = (generator(task, config.data, split) for split in ("train", "validation"))
    random = np.random.default_rng(training.seed)
    rows = functools.partial(examples, rows=training.batch_size, length=length)
    fixed = [rows(held_out, np.random.default_rng([EVALUATION_SEED, i])) for i in range(training.eval_batches)]
    curve, solved, start = [], None, time.monotonic()
    for number in range(1, training.steps + 1):
        state, metrics = step(state, placement.put(rows(learn, random).batch()))
        if number % training.eval_every == 0 or number == training.steps:
            found = measure().over(state.params, fixed)
            curve.append({"step": number, "loss": float(metrics["nll"] / metrics["count"]), **found.summary()})
            if found.accuracy >= SOLVED:
                solved = number
                break
    seconds = time.monotonic() - start
    random = np.random.default_rng([EVALUATION_SEED, training.eval_batches])
    final = measure().over(state.params, [rows(held_out, random) for _ in range(FINAL_BATCHES)])
    return {
        "task": task,
        "seed": training.seed,
        "steps": number,
        "solved": solved,
        "seconds": seconds,
        **final.summary(),
        "by_distance": final.by_distance(length),
        "curve": curve,
        "parameters": parameters(config),
        "flops_per_token": active_flops(config, length),
        "config": to_dict(config),
        "versions": {"jax": jax.__version__},
        "device": jax.devices()[0].device_kind,
    }


def _answers(model: ModelConfig, params: Any, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Any]]:
    logits, figures = read(model, params, batch, "resources")
    return logits.argmax(-1), figures


class Measure:
    """How many targets a model answers, and whether the layers were given what holds the answer."""

    def __init__(self, read: Callable, chunk_size: int):
        self._read, self._m = read, chunk_size
        self._distance: list[np.ndarray] = []
        self._right: list[np.ndarray] = []
        self._given: list[np.ndarray] = []
        self._sums: list[dict[str, np.ndarray]] = []

    def over(self, params: Any, batches: Sequence[Examples]) -> Measure:
        """The same, having looked at these batches."""
        params = jax.device_get(params)  # off the mesh, which is of one device
        for batch in batches:
            answer, figures = jax.device_get(self._read(params, batch.batch()))
            scored = batch.scored
            self._distance.append(distances(batch)[scored])
            self._right.append((answer == batch.targets)[scored])
            if "resource" in figures:
                layers = zip(figures["resource"], figures["spent"], strict=True)
                self._given.append(np.stack([given_answer(*layer, batch, self._m)[scored] for layer in layers]))
                self._sums.append({name: value for name, value in figures.items() if name not in PER_TOKEN})
        return self

    @property
    def accuracy(self) -> float:
        return float(np.concatenate(self._right).mean())

    def recall(self) -> float | None:
        """Router recall, of the layer with most; None where no AA-MoE layer is, or no answer beyond the window."""
        if not self._given:
            return None
        far = np.concatenate(self._distance) >= self._m
        given = np.concatenate(self._given, axis=1)[:, far]
        return float(given.mean(1).max()) if given.shape[1] else None

    def summary(self) -> Result:
        """Accuracy, router recall, and the shares of pairs and attention on routed context, per layer."""
        if not self._sums:
            return {"accuracy": self.accuracy}
        figures = summarize({name: np.sum([sums[name] for sums in self._sums], axis=0) for name in self._sums[0]})
        shares = {name: figures[name] for name in ("pairs_context", "mass_context", "spent")}
        return {"accuracy": self.accuracy, "router_recall": self.recall(), **shares}

    def by_distance(self, length: int) -> list[Result]:
        """Accuracy by the distance to the answer, in octaves."""
        distance, right = np.concatenate(self._distance), np.concatenate(self._right)
        edges = 2 ** np.arange(int(np.ceil(np.log2(length))) + 1)
        bins = [(int(a), int(b), (distance >= a) & (distance < b)) for a, b in itertools.pairwise(edges)]
        return [
            {"from": a, "to": b, "targets": int(at.sum()), "accuracy": float(right[at].mean())}
            for a, b, at in bins
            if at.any()
        ]


PER_TOKEN = ("resource", "mass", "probability", "spent", "budget")


def answers(batch: Examples) -> Iterator[tuple[int, int, Int[np.ndarray, "n"]]]:
    """(row, token, places) of every scored target: the earlier tokens, and its own, that hold its answer."""
    for row, token in zip(*np.nonzero(batch.scored), strict=True):
        yield row, token, np.flatnonzero(batch.label[row, : token + 1] == batch.wanted[row, token])


def distances(batch: Examples) -> Int[np.ndarray, "b L"]:
    """How many tokens back the nearest token stands that holds the answer of the target; 0 for the token itself."""
    result = np.zeros_like(batch.label)
    for row, token, places in answers(batch):
        result[row, token] = token - places[-1]
    return result


def given_answer(
    resource: Int[np.ndarray, "b L K"], count: Int[np.ndarray, "b L"], batch: Examples, m: int
) -> Bool[np.ndarray, "b L"]:
    """Whether a token was given a chunk that holds the answer of its target, as a routed resource or as its own."""
    result = np.zeros(count.shape, bool)
    for row, token, places in answers(batch):
        result[row, token] = np.isin(resource[row, token, : count[row, token]], places // m).any()
    return result


def results_of(
    experiments: Mapping[str, ExperimentConfig], tasks: Sequence[Task], seeds: Sequence[int], work_dir: Path
) -> list[Result]:
    """One result for every task, seed and stack: read, where an earlier call has left it.

    Raises:
      ConfigError: what lies in `work_dir` is of another experiment.
    """
    results = []
    for task, seed, (name, config) in itertools.product(tasks, seeds, experiments.items()):
        config = with_training(config, seed=seed)
        path = work_dir / f"{task}-{config.data.seq_len}-{name}-{seed}.json"
        if not path.exists():
            print(f"== {task}, {config.data.seq_len} tokens, {name}, seed {seed}", flush=True)
            result = keep({"stack": name, **run(config, task)}, path)
            end = f"solved at {result['solved']}" if result["solved"] else f"not solved by {result['steps']}"
            print(f"   {result['accuracy']:.1%}, {end}, {result['seconds']:.0f} s", flush=True)
        results.append(json.loads(path.read_text()))
        if results[-1]["config"] != json.loads(json.dumps(to_dict(config))):
            raise ConfigError(f"{path} is of another experiment: take another --work_dir, or the old values")
    return results


# Reporting.


def report(results: Sequence[Result], command: str) -> str:
    """The results as Markdown: one table per task, a line per stack."""
    first = results[0]
    training, data = first["config"]["training"], first["config"]["data"]
    parts = [
        "# Recall: does a stack read the context it needs?",
        f"    {command}",
        f"At most {training['steps']} steps of {training['batch_size']} x {data['seq_len']} tokens; a run ends at "
        f"{SOLVED:.0%}. Means over seeds; steps until solved, seed by seed. Router recall: answers beyond the window "
        "whose chunk the token was given. It and the shares of pairs and attention on routed context are each those of "
        f"the layer where they are largest. JAX {first['versions']['jax']}, {first['device']}.",
    ]
    heads = ["stack", "parameters", "FLOPs a token", "accuracy", "worst seed", "solved at", "router recall"]
    heads += ["pairs on context", "attention on context"]
    for task, of_task in _groups(results, "task").items():
        rows = []
        for name, runs in _groups(of_task, "stack").items():
            accuracy = [one["accuracy"] for one in runs]
            rows.append(
                [
                    ALL_STACKS[name].title,
                    f"{runs[0]['parameters']:,}",
                    f"{runs[0]['flops_per_token']:,.0f}",
                    f"{statistics.mean(accuracy):.1%}",
                    f"{min(accuracy):.1%}",
                    ", ".join(str(one["solved"] or "no") for one in runs),
                    *(_mean_share(runs, key) for key in ("router_recall", "pairs_context", "mass_context")),
                ]
            )
        parts += [f"## {task}", table(heads, rows)]
    return "\n\n".join(parts) + "\n"


def _groups(results: Sequence[Result], key: str) -> dict[str, list[Result]]:
    """The results by what they have under `key`, in the order in which they come."""
    names = dict.fromkeys(result[key] for result in results)
    return {name: [result for result in results if result[key] == name] for name in names}


def _mean_share(runs: Sequence[Result], key: str) -> str:
    """The mean over seeds, of the layer with most; a dash where there is none."""
    values = [one[key] for one in runs if one.get(key) is not None]
    if not values:
        return "-"
    return f"{statistics.mean(max(value) if isinstance(value, list) else value for value in values):.1%}"


def draw(results: Sequence[Result], path: str | Path) -> Figure:
    """Accuracy over the steps, and by the distance to the answer: a row of panels for every task."""
    tasks = _groups(results, "task")
    with picture(path, 9.0, 2.9 * len(tasks)) as figure:
        for (left, right), (task, found) in zip(
            figure.subplots(len(tasks), 2, squeeze=False), tasks.items(), strict=True
        ):
            _draw_task(left, right, task, found)
        figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _draw_task(left: Axes, right: Axes, task: str, results: Sequence[Result]) -> None:
    for result in results:
        stack, curve, bins = ALL_STACKS[result["stack"]], result["curve"], result["by_distance"]
        label = None if stack.title in left.get_legend_handles_labels()[1] else stack.title
        steps, accuracy = ([point[key] for point in curve] for key in ("step", "accuracy"))
        left.plot(steps, accuracy, color=stack.colour, lw=1.3, label=label)
        middle = [(one["from"] * one["to"]) ** 0.5 for one in bins]
        right.plot(middle, [one["accuracy"] for one in bins], "o-", color=stack.colour, lw=1.0, markersize=3)
    length = results[0]["config"]["data"]["seq_len"]
    left.set(title=f"{task}, {length} tokens: accuracy while training", xlabel="step", ylim=(-0.02, 1.02))
    right.set(title="at the end, by the distance to the answer", xlabel="tokens back", ylim=(-0.02, 1.02))
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(ScalarFormatter())
    for axes in (left, right):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


@comparison
def main() -> None:
    """Makes the comparison that the flags describe."""
    seeds = seeds_of(FLAGS.seeds)
    params = {name: [*FLAGS.gin_param, *ALL_STACKS[name].bindings] for name in FLAGS.stack}
    experiments = {
        name: with_training(load_experiment(FLAGS.gin_file, given), steps=FLAGS.steps) for name, given in params.items()
    }
    tasks = list(dict.fromkeys(FLAGS.task))
    if "needle" in tasks:
        ensure_prepared(next(iter(experiments.values())).data)
    results = results_of(experiments, tasks, seeds, Path(FLAGS.work_dir))
    command = command_line("experiments.recall")
    record = {"command": command, "results": results}
    publish(record, report(results, command), f"{FLAGS.output}.json", indent=None)
    draw(results, f"{FLAGS.output}.png")


if __name__ == "__main__":
    start(define_flags, main)
