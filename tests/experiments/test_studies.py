"""Studies: variants that load, runs that are shared, claims that are judged (DEC-16, DEC-20, PM-15)."""

import dataclasses
import json

import numpy as np
import pytest

from aamoe_jax.config import ConfigError, to_dict
from aamoe_jax.data import load_tokenizer
from experiments import runs as experiment_runs
from experiments import studies
from experiments.matching import active_flops, parameters
from experiments.runs import by_document, positive_numbers
from experiments.studies import STUDIES, Claim, Study, Variant
from tests.experiments.test_local_context import tiny_experiment


@pytest.mark.parametrize("name", STUDIES)
def test_every_variant_is_an_experiment_and_every_claim_is_of_variants(name):
    study = STUDIES[name]
    found = studies.configs(study, ["quickstart.gin"], [], 7)
    assert set(found) == set(study.variants)
    assert {config.training.steps for config in found.values()} == {7}
    assert {claim.less for claim in study.claims} | {claim.more for claim in study.claims} <= set(study.variants)
    for variant in study.variants.values():
        if variant.trained_as is not None:
            assert variant.bindings == study.variants[variant.trained_as].bindings
    sizes = [parameters(config) for name, config in found.items() if study.variants[name].matched]
    assert max(sizes) <= 1.02 * min(sizes), "each within 1 % of the first"


def test_stacks_of_equal_flops():
    """Their widths are multiples of the number of heads, and of two of them."""
    main = STUDIES["main"]
    found = studies.configs(main, ["quickstart.gin"], [], 7, "flops")
    wanted = active_flops(found["AA-MoE"], 512)
    for name, config in found.items():
        assert active_flops(config, 512) == pytest.approx(wanted, rel=0.05), name
    assert parameters(found["transformer"]) < 0.5 * parameters(found["AA-MoE"])


def test_learning_rates_are_numbers():
    assert positive_numbers("learning_rates", ["1e-3", "0.01"]) == [1e-3, 1e-2]
    for values in (["fast"], ["0"], ["-1"], ["nan"], ["inf"]):
        with pytest.raises(ConfigError, match=f"--learning_rates={values[0]}: "):
            positive_numbers("learning_rates", values)


def test_a_part_of_a_study_keeps_the_claims_that_it_can_judge():
    study = studies.part_of(STUDIES["budgets"], ["uniform", "learned"])
    assert list(study.variants) == ["learned", "uniform"]
    assert [(claim.less, claim.more) for claim in study.claims] == [("learned", "uniform")]
    assert studies.part_of(STUDIES["budgets"], []) == STUDIES["budgets"]
    with pytest.raises(ConfigError, match=r"--variant=unifrom: this study has 'learned', 'uniform'"):
        studies.part_of(STUDIES["budgets"], ["unifrom"])


def test_dec_20_hybrids_keep_no_quarter_and_half_of_the_layers():
    found = studies.configs(STUDIES["hybrids"], ["quickstart.gin"], [], None)
    assert [len(config.model.layers_of("attention")) for config in found.values()] == [0, 1, 2, 4]


def test_aa_33_the_baselines_stand_beside_three_budgets():
    found = studies.configs(STUDIES["compute"], ["quickstart.gin"], [], None).values()
    assert len({config.model.aamoe.budget.beta for config in found}) == 3
    mixers = {name for config in found for _, name in config.model.mixers}
    assert mixers >= {"aamoe", "parallel", "all_attention", "attention", "moe", "switch", "mixture_of_depths"}


def result(bits: float, logit: float = 0.0, seed: int = 0, documents: tuple = ((1.0, 1),)) -> dict:
    about = {"tokens": 1000, "statistics": {"logit_absmax": [0.0, logit]}}
    versions = {"jax": "0"}
    return {
        "seed": seed,
        "steps": 3,
        "bits_per_byte": bits,
        "tokens_per_second": 10.0,
        "evaluation": about,
        "documents": documents,
        "budgets": None,
        "corpus_digest": "0" * 20,
        "versions": versions,
        "device": "cpu",
    }


class TestIntervals:
    def test_every_document_has_its_nats_and_bytes(self):
        tokens = np.array([[5, 6, 1, 7], [8, 9, 1, 0]])  # two documents, the second over both rows
        targets = np.array([[6, 1, 7, 8], [9, 1, 0, 0]])
        counts = np.array([[1, 1, 0, 1], [1, 1, 0, 0]])
        nll = np.arange(1.0, 9.0).reshape(2, 4) * counts
        batch = {"tokens": tokens, "targets": targets, "loss_mask": counts}
        assert by_document(nll, [batch], load_tokenizer("bytes")) == [(3.0, 1), (15.0, 2)]


def runs(bits: np.ndarray, size: np.ndarray) -> list[dict]:
    """Results with these bits per byte in every seed and document."""
    totals = bits * size * np.log(2)
    means = totals.sum(1) / size.sum() / np.log(2)
    return [
        result(mean, seed=seed, documents=tuple(zip(row, size, strict=True)))
        for seed, (mean, row) in enumerate(zip(means, totals, strict=True))
    ]


class TestTheJudge:
    """With what was put in: a difference, none, one that seeds or documents do not agree on."""

    random = np.random.default_rng(0)
    size = random.integers(50, 150, 400)
    hardness = random.normal(2.0, 1.0, 400)
    """Of documents, in bits per byte: far larger than any difference."""

    def found(self, *of_seeds: float, spread: float = 0.05, documents: int = 400) -> list[str]:
        base = self.hardness + self.random.normal(0, 0.02, (len(of_seeds), 1)) + np.zeros((len(of_seeds), 400))
        gain = np.array(of_seeds)[:, None] + self.random.normal(0, spread, 400)
        gain -= (gain * self.size).sum(1, keepdims=True) / self.size.sum() - np.array(of_seeds)[:, None]
        of = [runs(x[:, :documents], self.size[:documents]) for x in (base, base + gain)]
        return studies._judged(Claim("", "a", "b"), *of)

    def test_a_planted_difference_is_found(self):
        assert self.found(0.02, 0.025, 0.03)[-1] == "holds"
        assert self.found(-0.02, -0.025, -0.03)[-1] == "does not hold"

    def test_a_planted_zero_is_no_difference(self):
        assert self.found(0.0, 0.0005, -0.0005, spread=0.01)[-1] == "no difference"
        assert self.found(0.001, 0.0015, 0.002, spread=0.01)[-1] == "no difference", "smaller than the margin"

    def test_seeds_of_opposite_sign_leave_it_open(self):
        assert self.found(1.5, -0.9)[-1] == "open"
        assert self.found(1.5, -0.9, 1.5)[-1] == "open"

    def test_two_seeds_decide_nothing(self):
        assert self.found(0.02, 0.025)[-1] == "open"

    def test_few_documents_that_differ_leave_it_open(self):
        base = np.full((3, 4), 2.0)
        other = base + np.array([0.3, -0.2, 0.1, -0.1])
        assert studies._judged(Claim("", "a", "b"), runs(base, np.ones(4)), runs(other, np.ones(4)))[-1] == "open"

    def test_the_interval_is_of_documents_and_of_seeds(self):
        """Against the normal approximation: of many documents of unequal size, and of many seeds."""
        base = self.hardness[None] + np.zeros((40, 1))
        gain = self.random.normal(0.1, 0.05, 400) + self.random.normal(0, 0.02, (40, 1))
        found = studies.differ("bits_per_byte", runs(base, self.size), runs(base + gain, self.size))
        share, seeds = self.size / self.size.sum(), (gain * self.size).sum(1) / self.size.sum()
        variance = (share**2 * (gain.mean(0) - found.mean) ** 2).sum() + seeds.var() / 40
        assert found.mean == pytest.approx(seeds.mean())
        assert found.low == pytest.approx(found.mean - 1.96 * variance**0.5, abs=0.1 * variance**0.5)
        assert found.high == pytest.approx(found.mean + 1.96 * variance**0.5, abs=0.1 * variance**0.5)

    def test_other_figures_are_judged_run_by_run(self):
        less, more = [result(0.0, 9.0, n) for n in range(3)], [result(0.0, logit, 0) for logit in (9.5, 10.0, 11.0)]
        found = studies.differ("logit_absmax", less, more)
        assert (found.low, found.high) == (0.5, 2.0)
        assert found.verdict(0.0) == "holds"


@pytest.mark.slow
class TestDEC16:
    def test_scores_are_those_of_the_simple_layers_alone(self):
        """What standard layers do to the scores of others; their own may be as large as they like."""
        study = STUDIES["deconstructed"]
        (claim,) = [claim for claim in study.claims if claim.figure == "logit_absmax"]
        found = studies.configs(study, ["quickstart.gin"], [], None)
        hybrid, uniform = (
            [result(0.0) | {"config": to_dict(found[name]), "evaluation": {"statistics": {"logit_absmax": scores}}}]
            for name, scores in ((claim.less, [3.0, 9.0, 2.0, 8.0]), (claim.more, [4.0, 1.0, 5.0, 1.0]))
        )
        assert studies.differ(claim.figure, hybrid, uniform, claim.mixer).mean == pytest.approx(2.0)
        assert studies._judged(claim, hybrid, uniform)[3] == "logit_absmax of non_approximate"

    def test_scores_are_compared_without_a_norm_that_bounds_them(self):
        study = STUDIES["deconstructed"]
        found = studies.configs(study, ["quickstart.gin"], [], None)
        unbound = {
            name for claim in study.claims if claim.figure == "logit_absmax" for name in (claim.less, claim.more)
        }
        assert len(unbound) == 2
        assert {name for name, config in found.items() if config.model.qk_norm == "none"} == unbound

    def test_the_report_has_a_line_for_every_claim(self, tmp_path):
        claims = [Claim("one", "a", "b"), Claim("two", "b", "a"), Claim("three", "b", "a", "logit_absmax")]
        study = Study("Title", {"a": Variant(), "b": Variant()}, claims)
        size, hard = np.array([10.0, 30.0]), np.array([1.0, 2.0])
        less, more = (runs(hard + x * np.ones((3, 2)), size) for x in (0.0, 0.5))
        for results, logit in ((less, 9.0), (more, 1.0)):
            for one in results:
                one["evaluation"] = one["evaluation"] | {"statistics": {"logit_absmax": [0.0, logit]}}
        experiments = dict.fromkeys("ab", tiny_experiment(tmp_path))
        text = studies.report(study, experiments, {"a": less, "b": more}, "the command", (1e-3, 3e-3))
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
        judged = [
            ["one", "a", "b", "bits_per_byte", "+0.5000", "holds"],
            ["two", "b", "a", "bits_per_byte", "-0.5000", "does not hold"],
            ["three", "b", "a", "logit_absmax", "+8.0000", "holds"],
        ]
        assert [[*row[:5], row[-1]] for row in rows[-3:]] == judged
        assert [row[5:7] for row in rows[-3:]] == [[" ".join([x] * 3), f"{x} to {x}"] for *_, x, _ in judged]
        assert "best learning rate of 0.001, 0.003 by the validation split" in text

    def test_learning_rates_are_chosen_on_validation_text_and_claims_judged_on_test_text(self, tmp_path, monkeypatch):
        """Every seed is a run of its own, and the rate is that which is best without the test split."""
        splits = []
        read = experiment_runs.evaluation_batches

        def spy(config, dataset, *, split, batch_size):
            splits.append(split)
            return read(config, dataset, split=split, batch_size=batch_size)

        monkeypatch.setattr(experiment_runs, "evaluation_batches", spy)
        study = Study("Title", {"a": Variant()}, [])
        experiments, folder = {"a": tiny_experiment(tmp_path / "data")}, tmp_path / "runs"
        rates = [1e-6, 1e-2]
        tuned = studies.tuned(study, experiments, rates, 0, folder)
        assert splits == ["validation"] * 2
        assert tuned["a"].optimizer.learning_rate == 1e-2, "hardly anything is learned with the other"
        found = {rate: json.loads((folder / f"a-{rate:g}-0/validation.json").read_text()) for rate in rates}
        assert found[1e-2]["bits_per_byte"] < found[1e-6]["bits_per_byte"]
        results = studies.conduct(study, tuned, [0, 1], folder, 0)["a"]
        assert splits[2:] == ["test"] * 2
        assert [one["config"]["training"]["seed"] for one in results] == [0, 1]
        assert results[0]["bits_per_byte"] != results[1]["bits_per_byte"]
        assert {path.name for path in folder.iterdir()} == {"a-1e-06-0", "a-0.01-0", "a-0.01-1"}
        studies.tuned(study, experiments, rates, 0, folder)
        assert len(splits) == 4, "what was measured is not measured again"

    def test_a_stack_without_layers_is_the_same_run(self, tmp_path):
        config = tiny_experiment(tmp_path / "data")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, pattern=("attention+mlp",)))
        variants = {"whole": Variant(), "without mlp": Variant((), "whole", frozenset({"mlp"}))}
        study = Study("Title", variants, [Claim("layers work together", "whole", "without mlp")])
        experiments = dict.fromkeys(variants, config)
        results = studies.conduct(study, experiments, [0], tmp_path / "runs", 0)
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["whole-0.003-0"]
        whole, without = (results[name][0] for name in variants)
        assert whole["bits_per_byte"] != without["bits_per_byte"]
        assert whole["config"] == without["config"]
        other = dataclasses.replace(config, model=dataclasses.replace(config.model, pattern=("mlp",)))
        with pytest.raises(ConfigError, match=r"ModelConfig\.pattern"):
            studies.conduct(study, dict.fromkeys(variants, other), [0], tmp_path / "runs", 0)
        path = tmp_path / "runs/whole-0.003-0/result.json"
        old = {name: value for name, value in json.loads(path.read_text()).items() if name != "documents"}
        path.write_text(json.dumps(old))
        with pytest.raises(ConfigError, match=r"whole-0.003-0/result\.json was measured by an older version: delete"):
            studies.conduct(study, experiments, [0], tmp_path / "runs", 0)
