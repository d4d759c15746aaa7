r"""Trains variants of a model alike, and tests what the papers claim about them.

    aamoe studies --study=hybrids --gin_file=quickstart.gin --steps=600 --seeds=0,1 \
        --output=experiments/results/hybrids

Every variant of a study trains for the same steps on the same data, once per seed, and is evaluated on the test split
under causal budgets. All have as many parameters as the first, or (`--equal=flops`) as many active FLOPs a token. With
`--learning_rates` every variant has the rate with which its first seed does best on the validation split.

A claim holds where the 95 % interval over seeds and documents says so, of three seeds or more. Where all of it is
within the margin there is no difference; where neither is so, the claim is open (experiments/judge.py).

A run lies in WORK_DIR/STUDY/VARIANT-SEED: after an interruption the same command does what is left. Writes OUTPUT.json
and OUTPUT.md.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
from absl import flags

from aamoe_jax.config import ConfigError, ExperimentConfig, from_dict
from aamoe_jax.data import ensure_prepared
from aamoe_jax.evaluation.budget_use import UNEVEN
from aamoe_jax.markdown import table
from aamoe_jax.model import Skipped
from experiments.binding import load_experiment
from experiments.judge import FEWEST_SEEDS, MARGIN, Difference, difference
from experiments.matching import TOLERANCE, Equal, active_flops, match, parameters
from experiments.program import command_line, publish, start
from experiments.runs import (
    More,
    Result,
    comparison,
    positive_numbers,
    require_one_dataset,
    run,
    seeds_of,
    validate,
    with_training,
)

FLAGS = flags.FLAGS


class Variant(NamedTuple):
    """One stack of a study."""

    bindings: tuple[str, ...] = ()
    """What it changes in the config of the study."""
    trained_as: str | None = None
    """The variant whose runs it evaluates; None: its own."""
    without: frozenset[Skipped] = frozenset()
    """What is left out in the evaluation."""
    matched: bool = True
    """Whether it must be as big as the first."""


class Claim(NamedTuple):
    """Of two variants the first has less bits per byte, or less of another figure."""

    finding: str
    less: str
    more: str
    figure: str = "bits_per_byte"
    mixer: str | None = None
    """Whose layers' figure it is; None: of all layers."""


class Study(NamedTuple):
    """Variants by name, and what is claimed of them."""

    title: str
    variants: Mapping[str, Variant]
    claims: Sequence[Claim]


def stack(pattern: str, *bindings: str) -> Variant:
    """A stack of this pattern of one entry."""
    return Variant((f"ModelConfig.pattern = ('{pattern}',)", *bindings))


STANDARD = "attention+feed_forward"
WIDTH_TOLERANCE = 0.05
"""A width is a multiple of the number of heads, and not all stacks have feed-forwards to close the gap."""
SIGNALS = ("loss", "surprisal", "entropy")
"""What the size of budgets is correlated with."""
ONE_TOKEN = "AAMoEConfig.key_convolution = False", "AAMoEConfig.query_convolution = False"
"""Queries and keys of one token."""
LEARNED = (
    "AAMoEConfig.router = 'learned'",
    *ONE_TOKEN,
    "BudgetConfig.importance = 'learned'",
)
"""The router of the paper, which has queries and keys of its own."""
SEPARATE = stack("aamoe", "BudgetConfig.importance = 'uniform'", "BudgetConfig.expert_share = 0.5")
BASELINES = {
    "separate budgets": SEPARATE,
    "context alone": stack("aamoe+feed_forward", "AAMoEConfig.num_experts = 0"),
    "dense, parallel": stack("parallel"),
    "All-Attention": stack("all_attention"),
    "mixture of experts": stack("attention+moe"),
    "Switch": stack("attention+switch"),
    "Mixture of Depths": stack("even(parallel, mixture_of_depths)", "BudgetConfig.normalizer = 'row'"),
}
HYBRIDS = {
    "a quarter standard": stack(f"quarter({STANDARD}, aamoe)"),
    "half standard": stack(f"even({STANDARD}, aamoe)"),
}
DECONSTRUCTED = ("mlp", "approximate", "non_approximate", "random_qk", "fixed_qk", "static_qk")


def _deconstructed() -> Study:
    """Uniform stacks, and hybrids of every other layer (DEC-16; the findings of Xue, Moosavi and Aletras)."""
    uniform = {name: stack(f"{name}+feed_forward") for name in DECONSTRUCTED}
    hybrid = {f"hybrid {name}": stack(f"even({STANDARD}, {name}+feed_forward)") for name in DECONSTRUCTED}
    few = {"quarter non_approximate": stack(f"quarter({STANDARD}, non_approximate+feed_forward)")}
    # Normed queries and keys bound the scores, whatever the other layers do.
    unbound = {
        f"{name}, no QK norm": Variant((*(uniform | hybrid)[name].bindings, "ModelConfig.qk_norm = 'none'"))
        for name in ("non_approximate", "hybrid non_approximate")
    }
    skip = {"hybrid mlp without mlp": Variant(hybrid["hybrid mlp"].bindings, "hybrid mlp", frozenset({"mlp"}))}
    claims = [
        Claim("tokens have to mix, in a uniform stack", "attention", "mlp"),
        Claim("the mathematical form matters, in a uniform stack", "attention", "non_approximate"),
        *(Claim(f"half the layers standard make up for {name}", f"hybrid {name}", name) for name in DECONSTRUCTED),
        Claim("weights that follow the input help", "static_qk", "random_qk"),
        Claim("queries and keys may be of embeddings: better than no mixing", "hybrid static_qk", "hybrid mlp"),
        Claim("layers work together: the simple ones cannot be taken out", "hybrid mlp", "hybrid mlp without mlp"),
        Claim(
            "standard layers keep the scores of others small",
            "hybrid non_approximate, no QK norm",
            "non_approximate, no QK norm",
            "logit_absmax",
            "non_approximate",
        ),
        Claim("a few standard layers are enough", "quarter non_approximate", "non_approximate"),
    ]
    variants = {"attention": stack(STANDARD), **uniform, **hybrid, **few, **unbound, **skip}
    return Study("Attention deconstructed", variants, claims)


STUDIES: Mapping[str, Study] = {
    "deconstructed": _deconstructed(),
    "hybrids": Study(
        "AA-MoE beside standard layers (DEC-20)",
        {
            "all AA-MoE": stack("aamoe"),
            **HYBRIDS,
            "all standard": stack(STANDARD),
        },
        [
            Claim("AA-MoE is better alone than the standard stack", "all AA-MoE", "all standard"),
            Claim("a few standard layers help", "a quarter standard", "all AA-MoE"),
            Claim("half of them help", "half standard", "all AA-MoE"),
        ],
    ),
    "questions": Study(
        "Three questions to attention as a network of tokens (PM-15)",
        {
            "attention": stack(STANDARD),
            "the longer messages": stack(
                "filtered_attention+feed_forward",
                "FilteredAttentionConfig.filter = 'message_norm'",
                "FilteredAttentionConfig.threshold = 1.0",
            ),
            "a quarter of random clusters": stack(
                "clustered_attention+feed_forward",
                "ClusteredAttentionConfig.clusters = 16",
                "ClusteredAttentionConfig.clusters_kept = 4",
                "ClusteredAttentionConfig.learn_centroids = False",
            ),
            "a quarter of learned clusters": stack(
                "clustered_attention+feed_forward",
                "ClusteredAttentionConfig.clusters = 16",
                "ClusteredAttentionConfig.clusters_kept = 4",
            ),
            "gates": stack("gated_attention+feed_forward"),
            "a square root": stack("sqrt_attention+feed_forward"),
        },
        [
            Claim("does every head need a message of every token?", "attention", "the longer messages"),
            Claim("does it have to be compared with each?", "attention", "a quarter of random clusters"),
            Claim("and with each, where clusters are learned?", "attention", "a quarter of learned clusters"),
            Claim("is it worth learning them?", "a quarter of learned clusters", "a quarter of random clusters"),
            Claim("are gates better than normalisation?", "gates", "attention"),
            Claim("is normalisation by a square root enough?", "a square root", "attention"),
        ],
    ),
    "signal": Study(
        "One signal for context and experts, and no gate (AA-23, AA-24)",
        {
            "one signal": stack("aamoe"),
            "none for context": stack("aamoe", "AAMoEConfig.signal = 'context_stopped'"),
            "none for experts": stack("aamoe", "AAMoEConfig.signal = 'experts_stopped'"),
            "one for each": stack("aamoe", "AAMoEConfig.signal = 'separate'"),
            # The gate's parameters, one vector an expert, come on top.
            "a gate of experts": stack("aamoe", "AAMoEConfig.expert_gate = True")._replace(matched=False),
        },
        [
            Claim("the router of context learns from the loss", "one signal", "none for context"),
            Claim("the router of experts learns from the loss", "one signal", "none for experts"),
            Claim("one softmax over both is better than two", "one signal", "one for each"),
            Claim("a gate of experts helps attention to mix them", "a gate of experts", "one signal"),
        ],
    ),
    "prices": Study(
        "Prices of resources (AA-39)",
        {
            "all cost 1": stack("aamoe"),
            "experts cost 2": stack("aamoe", "BudgetConfig.expert_price = 2.0"),
            "far chunks cost more": stack("aamoe", "BudgetConfig.distance_price = 0.5"),
            "wanted experts cost more": stack("aamoe", "BudgetConfig.load_price = 0.5"),
        },
        [
            Claim("experts should cost more than chunks", "experts cost 2", "all cost 1"),
            Claim("far chunks should cost more than near ones", "far chunks cost more", "all cost 1"),
            Claim("experts that are wanted should cost more", "wanted experts cost more", "all cost 1"),
        ],
    ),
    "selection": Study(
        "What resources are ranked by, and what makes budgets differ",
        {
            "AA-MoE": stack("aamoe"),
            "without convolution": stack("aamoe", *ONE_TOKEN),
            "convolution on keys alone": stack("aamoe", "AAMoEConfig.query_convolution = False"),
            # The router's own parameters come on top: it has no feed-forward that could give way.
            "learned router": stack("aamoe", *LEARNED)._replace(matched=False),
            "dense, parallel": stack("parallel"),
            "dense, one after the other": stack(STANDARD),
            # Attention over all earlier tokens, by a layer that can afford every chunk; rows of up to 32 chunks.
            "dense, with convolution": stack(
                "aamoe+feed_forward",
                "AAMoEConfig.num_experts = 0",
                "AAMoEConfig.max_resources = None",
                "AAMoEConfig.bias = 'none'",
                "BudgetConfig.importance = 'uniform'",
                "BudgetConfig.beta = 32.0",
            ),
            "uniform budgets": stack("aamoe", "BudgetConfig.importance = 'uniform'"),
            "unbounded budgets": stack("aamoe", "BudgetConfig.importance = 'learned'"),
        },
        [
            Claim("ranking by pooled keys is better than by a learned router", "without convolution", "learned router"),
            Claim("keys should know the tokens before theirs", "convolution on keys alone", "without convolution"),
            Claim("and queries those before their own", "AA-MoE", "convolution on keys alone"),
            Claim("AA-MoE is better than a parallel stack of its size", "AA-MoE", "dense, parallel"),
            Claim("AA-MoE is better than an ordinary transformer", "AA-MoE", "dense, one after the other"),
            Claim("the convolution helps dense attention too", "dense, with convolution", "dense, one after the other"),
            Claim("AA-MoE is better than that", "AA-MoE", "dense, with convolution"),
            Claim("tokens should not all get the same", "AA-MoE", "uniform budgets"),
            Claim("budgets should be bounded", "AA-MoE", "unbounded budgets"),
        ],
    ),
    "main": Study(
        "AA-MoE and what a user would pick instead",
        {
            "AA-MoE": stack("aamoe"),
            **BASELINES,
            "transformer": stack(STANDARD),
            "transformer, with convolution": stack("convolved_attention+feed_forward"),
            "uniform budgets": stack("aamoe", "BudgetConfig.importance = 'uniform'"),
            "window and experts alone": stack("aamoe", "AAMoEConfig.context = 'none'"),
            **HYBRIDS,
        },
        [
            Claim("AA-MoE is better than a transformer", "AA-MoE", "transformer"),
            Claim("and than one with its convolution", "AA-MoE", "transformer, with convolution"),
            *(Claim(f"and than: {name}", "AA-MoE", name) for name in BASELINES),
            Claim("tokens should not all get the same", "AA-MoE", "uniform budgets"),
            Claim("routed context helps", "AA-MoE", "window and experts alone"),
            Claim("a few standard layers help", "a quarter standard", "AA-MoE"),
            Claim("half of them help", "half standard", "AA-MoE"),
            Claim("a hybrid is better than a transformer", "a quarter standard", "transformer"),
            Claim("half of them is better than a quarter", "half standard", "a quarter standard"),
        ],
    ),
    "compute": Study(
        "Perplexity against compute, at similar size (AA-33)",
        {
            "AA-MoE, beta 4": stack("aamoe"),
            "AA-MoE, beta 2": stack("aamoe", "BudgetConfig.beta = 2.0"),
            "AA-MoE, beta 8": stack("aamoe", "BudgetConfig.beta = 8.0"),
            **BASELINES,
        },
        [
            Claim("more compute, less loss", "AA-MoE, beta 8", "AA-MoE, beta 2"),
            Claim("one budget is better than two", "AA-MoE, beta 4", "separate budgets"),
            Claim("conditional parameters beside conditional context help", "AA-MoE, beta 4", "context alone"),
            Claim("AA-MoE is better than a dense stack of its size", "AA-MoE, beta 4", "dense, parallel"),
            Claim("AA-MoE is better than experts alone", "AA-MoE, beta 4", "mixture of experts"),
        ],
    ),
    "budgets": Study(
        "One learned budget, and what there is instead (AA-32)",
        {
            "learned": stack("aamoe"),
            "uniform": stack("aamoe", "BudgetConfig.importance = 'uniform'"),
            "separate": SEPARATE,
            "context alone": stack("aamoe+feed_forward", "AAMoEConfig.num_experts = 0"),
        },
        [
            Claim("tokens should not all get the same", "learned", "uniform"),
            Claim("chunks and experts should compete", "uniform", "separate"),
        ],
    ),
}


def define_stack_flags() -> None:
    """The flags that say which stacks of which study there are, and how big."""
    flags.DEFINE_enum("study", None, list(STUDIES), "What to compare.", required=True)
    flags.DEFINE_multi_string("variant", [], "A stack of the study, by its name. Repeat it; all if not given.")
    flags.DEFINE_multi_string("gin_file", [], "Path of a gin file, or the name of a shipped config. Repeat it.")
    flags.DEFINE_multi_string("gin_param", [], "One binding, such as 'ModelConfig.d_model = 128'. Repeat it.")
    flags.DEFINE_enum("equal", "parameters", get_args(Equal), "What all variants have as much of as the first.")


def define_run_flags() -> None:
    """The flags that say how often and how long every stack is trained, and where that lies."""
    flags.DEFINE_integer("steps", None, "Steps of every run; those of the config if not given.", lower_bound=1)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "One run per seed and variant. It fixes parameters and order of data.")
    flags.DEFINE_string("work_dir", "runs/studies", "Where the runs lie.")
    flags.DEFINE_string("output", None, "Path of the report without its suffix.", required=True)


def define_flags() -> None:
    """The flags of this program."""
    define_stack_flags()
    define_run_flags()
    flags.DEFINE_list("learning_rates", [], "Every variant at the best of these; that of the config if not given.")
    flags.DEFINE_float("margin", MARGIN, "Differences in bits per byte up to here are none.", lower_bound=0.0)
    flags.DEFINE_integer("eval_batches", 0, "Batches of the test split to evaluate on; 0: all.", lower_bound=0)


def part_of(study: Study, names: Sequence[str]) -> Study:
    """The study of these variants alone, and the claims that are of them; of no names, all of it.

    Raises:
      ConfigError: a name that the study does not have.
    """
    for name in names:
        if name not in study.variants:
            raise ConfigError(f"--variant={name}: this study has {', '.join(map(repr, study.variants))}")
    kept = {name: variant for name, variant in study.variants.items() if not names or name in names}
    return study._replace(variants=kept, claims=[c for c in study.claims if {c.less, c.more} <= set(kept)])


def configs(
    study: Study,
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    steps: int | None,
    equal: Equal = "parameters",
) -> dict[str, ExperimentConfig]:
    """The experiment of every variant, of the size of the first where it must be; seeds are set later.

    Raises:
      ConfigError: a variant that cannot be, or not in this size.
    """
    found: dict[str, ExperimentConfig] = {}
    for name, variant in study.variants.items():
        config = with_training(load_experiment(gin_files, [*gin_params, *variant.bindings]), steps=steps)
        require_one_dataset(config)
        found[name] = _of_size(next(iter(found.values())), config, equal) if found and variant.matched else config
    return found


def _of_size(first: ExperimentConfig, other: ExperimentConfig, equal: Equal) -> ExperimentConfig:
    """The other as big as the first: of parameters by the width of its feed-forwards, within 1 % (decision 36); of
    FLOPs by the width of the model, within 5 %, and with it that of its feed-forwards, which closes the gap."""
    if equal == "flops":
        length = first.data.seq_len
        if abs(active_flops(other, length) / active_flops(first, length) - 1) <= TOLERANCE:
            return other
        return match(first, other, ("ModelConfig.d_model", "ModelConfig.d_ff"), equal, WIDTH_TOLERANCE).config
    if abs(parameters(other) / parameters(first) - 1) <= TOLERANCE:
        return other
    return match(first, other, ("ModelConfig.d_ff",), equal).config


def tuned(
    study: Study, experiments: Mapping[str, ExperimentConfig], rates: Sequence[float], seed: int, work_dir: Path
) -> dict[str, ExperimentConfig]:
    """Every variant with the learning rate of `rates` that is best with this seed, on the validation split.

    Raises:
      ConfigError: a run in `work_dir` is of another experiment.
      StoppedError: a signal stopped a run.
    """
    found = {}
    for name, variant in study.variants.items():
        tried = {}
        for rate in rates:
            config = with_training(with_learning_rate(experiments[name], rate), seed=seed)
            print(f"== {name}, learning rate {rate:g}, seed {seed}", flush=True)
            tried[rate] = validate(config, folder_of(work_dir, name, variant, config))
            print(f"   {tried[rate]:.4f} bits per byte of the validation split", flush=True)
        found[name] = with_learning_rate(experiments[name], min(tried, key=lambda rate: tried[rate]))
    return found


def with_learning_rate(config: ExperimentConfig, rate: float) -> ExperimentConfig:
    """The experiment with another learning rate."""
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=rate))


def folder_of(work_dir: Path, name: str, variant: Variant, config: ExperimentConfig) -> Path:
    """Where a run lies: by its variant, learning rate and seed."""
    run = f"{config.optimizer.learning_rate:g}-{config.training.seed}"
    return work_dir / f"{(variant.trained_as or name).replace(' ', '_')}-{run}"


def conduct(
    study: Study,
    experiments: Mapping[str, ExperimentConfig],
    seeds: Sequence[int],
    work_dir: Path,
    eval_batches: int,
    more: More | None = None,
) -> dict[str, list[Result]]:
    """The results of every variant on the test split, one per seed.

    Raises:
      ConfigError: a run in `work_dir` is of another experiment.
      StoppedError: a signal stopped a run.
    """
    results: dict[str, list[Result]] = {name: [] for name in study.variants}
    for name, config, folder in planned(study, experiments, seeds, work_dir):
        results[name].append(run(config, folder, eval_batches, more=more, skipped=study.variants[name].without))
    return results


def planned(
    study: Study, experiments: Mapping[str, ExperimentConfig], seeds: Sequence[int], work_dir: Path
) -> Iterator[tuple[str, ExperimentConfig, Path]]:
    """Every run of a study: its variant, experiment and folder. Seed after seed, so that a comparison of all variants
    exists as early as it can."""
    for seed in seeds:
        for name, variant in study.variants.items():
            print(f"== {name}, seed {seed}", flush=True)
            config = with_training(experiments[name], seed=seed)
            yield name, config, folder_of(work_dir, name, variant, config)


def figure(results: Sequence[Result], name: str, layers: Sequence[int] | None = None) -> float:
    """The mean over seeds; of a figure of layers, the largest of these, or of all."""
    if name == "bits_per_byte":
        return statistics.mean(result[name] for result in results)
    of_layers = (result["evaluation"]["statistics"][name] for result in results)
    return statistics.mean(max(x if layers is None else (x[i] for i in layers)) for x in of_layers)


def report(
    study: Study,
    experiments: Mapping[str, ExperimentConfig],
    results: Mapping[str, Sequence[Result]],
    command: str,
    rates: Sequence[float] = (),
    margin: float = MARGIN,
) -> str:
    """The study as Markdown: every variant with its size, then every claim with what was found.

    Args:
      rates: the learning rates that were tried with every variant, if any.
    """
    first_name, first = next(iter(results.items()))
    one, config = first[0], experiments[first_name]
    seeds = [f"seed {run['seed']}" for run in first]
    devices = " and ".join(sorted({run["device"] for runs in results.values() for run in runs}))
    sizes = [_size(experiments[name], runs, figure(first, "bits_per_byte"), rates) for name, runs in results.items()]
    parts = [
        f"# {study.title}",
        f"    {command}",
        f"{one['steps']} steps of {config.training.batch_size} x {config.data.seq_len} tokens, the same in the same "
        f"order for every variant; {one['evaluation']['tokens']:,} tokens of held-out text, causal budgets. FLOPs are "
        f"of a forward pass, in closed form, all budgets spent. Corpus {one['corpus_digest'][:16]}, "
        f"JAX {one['versions']['jax']}, {devices}. {_of_rates(rates)}",
        table(
            ["variant", "parameters", "FLOPs a token", "learning rate", "tokens/s", "bits/byte", *seeds, "to first"],
            [[name, *cells] for name, cells in zip(results, sizes, strict=True)],
        ),
        f"Differences are means over {len(first)} seeds, and their intervals a paired bootstrap over seeds and the "
        f"{len(one['documents'])} held-out documents. Within {margin:g} bits per byte there is no difference; fewer "
        f"than {FEWEST_SEEDS} seeds leave a claim open.",
        table(
            ["claim", "less", "more", "figure", "difference", "of each seed", "95 %", "found"],
            [_judged(claim, results[claim.less], results[claim.more], margin) for claim in study.claims],
        ),
    ]
    if spending := _spending(results):
        parts += [
            f"Where budgets go: shares of pairs and attention on routed context, of tokens whose number of resources "
            f"differs from the mean by more than {UNEVEN:.0%}, and that number's correlation with the loss of the next "
            "token, the surprisal of the token itself and the entropy of the next. Means over seeds, layer by layer.",
            table(["variant", "pairs on context", "attention on context", "uneven", *SIGNALS], spending),
        ]
    return "\n\n".join(parts) + "\n"


def _of_rates(rates: Sequence[float]) -> str:
    tried = ", ".join(f"{rate:g}" for rate in rates)
    return (
        f" Every variant has the best learning rate of {tried} by the validation split, with the first seed."
        if rates
        else ""
    )


def _size(config: ExperimentConfig, runs: Sequence[Result], reference: float, rates: Sequence[float]) -> list[str]:
    """What a variant is and does, and how far it is from the bits per byte of the first."""
    bits, rate = figure(runs, "bits_per_byte"), config.optimizer.learning_rate
    at_the_end = rates and rate in (min(rates), max(rates))
    return [
        f"{parameters(config):,}",
        f"{active_flops(config, config.data.seq_len):,.0f}",
        f"{rate:g}" + (", at the end" if at_the_end else ""),
        f"{statistics.mean(run['tokens_per_second'] for run in runs):,.0f}",
        f"{bits:.4f}",
        *(f"{run['bits_per_byte']:.4f}" for run in runs),
        f"{bits - reference:+.4f}",
    ]


def _judged(claim: Claim, less: Sequence[Result], more: Sequence[Result], margin: float = MARGIN) -> list[str]:
    """A claim with the differences that were found."""
    found = differ(claim.figure, less, more, claim.mixer)
    seeds = " ".join(f"{one:+.4f}" for one in found.of_seeds)
    # A margin is of bits per byte.
    verdict = found.verdict(margin if claim.figure == "bits_per_byte" else 0.0)
    figure = claim.figure if claim.mixer is None else f"{claim.figure} of {claim.mixer}"
    return [*claim[:3], figure, f"{found.mean:+.4f}", seeds, f"{found.low:+.4f} to {found.high:+.4f}", verdict]


def _layers_of(mixer: str | None, result: Result) -> tuple[int, ...] | None:
    return None if mixer is None else from_dict(ExperimentConfig, result["config"]).model.layers_of(mixer)


def differ(name: str, less: Sequence[Result], more: Sequence[Result], mixer: str | None = None) -> Difference:
    """How much more `more` has of a figure: of bits per byte by documents, of another run by run."""
    if name != "bits_per_byte":
        runs = [
            np.array([[figure([result], name, _layers_of(mixer, result))] for result in results])
            for results in (less, more)
        ]
        return difference(runs[0], runs[1], np.ones(1))
    of_less, of_more = (np.asarray([result["documents"] for result in results]) for results in (less, more))
    return difference(of_less[..., 0] / np.log(2), of_more[..., 0] / np.log(2), of_less[0, :, 1])


def _spending(results: Mapping[str, Sequence[Result]]) -> list[list[str]]:
    """Rows of the table of budgets; none without AA-MoE layers."""
    rows = []
    for name, runs in results.items():
        if runs[0]["budgets"] is not None:
            figures = [run["evaluation"]["statistics"] | run["budgets"] for run in runs]
            forms = dict.fromkeys(("pairs_context", "mass_context", "uneven"), ".1%") | dict.fromkeys(SIGNALS, "+.2f")
            rows.append([name, *(_by_layer([one[key] for one in figures], form) for key, form in forms.items())])
    return rows


def _by_layer(runs: Sequence[Sequence[float | None]], form: str) -> str:
    """The mean over runs of every layer's figure; a dash where a run has none."""
    layers = zip(*runs, strict=True)
    return " ".join("-" if None in layer else format(statistics.mean(layer), form) for layer in layers)


@comparison
def main() -> None:
    """Makes the comparison that the flags describe."""
    seeds, work_dir = seeds_of(FLAGS.seeds), Path(FLAGS.work_dir) / FLAGS.study
    study = part_of(STUDIES[FLAGS.study], FLAGS.variant)
    rates = positive_numbers("learning_rates", FLAGS.learning_rates)
    experiments = configs(study, FLAGS.gin_file, FLAGS.gin_param, FLAGS.steps, FLAGS.equal)
    ensure_prepared(next(iter(experiments.values())).data)
    if rates:
        experiments = tuned(study, experiments, rates, seeds[0], work_dir)
    results = conduct(study, experiments, seeds, work_dir, FLAGS.eval_batches)
    command = command_line("experiments.studies")
    text = report(study, experiments, results, command, rates, FLAGS.margin)
    publish({"command": command, "results": results}, text, f"{FLAGS.output}.json", indent=None)


if __name__ == "__main__":
    start(define_flags, main)
