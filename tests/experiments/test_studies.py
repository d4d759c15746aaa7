"""Studies: variants that load, runs that are shared, claims that are judged (DEC-16, DEC-20, PM-15)."""

import dataclasses
import json

import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.data import load_tokenizer
from experiments import studies
from experiments.matching import parameters
from experiments.runs import by_document
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

    def test_the_interval_is_of_the_difference_and_of_documents(self):
        """Against the normal approximation, for many documents of unequal size."""
        random = np.random.default_rng(0)
        size = random.integers(50, 150, 400)
        base, gain = random.normal(2.0, 1.0, 400), random.normal(0.1, 0.05, 400)  # bits per byte
        less, more = (
            [result(0.0, documents=tuple(zip(bits * size * np.log(2), size, strict=True)))]
            for bits in (base, base + gain)
        )
        low, high = studies.over_documents(less, more)
        middle = (gain * size).sum() / size.sum()
        error = np.sqrt((size**2 * (gain - middle) ** 2).sum()) / size.sum()
        assert (low, high) == pytest.approx((middle - 1.96 * error, middle + 1.96 * error), abs=error / 5)

    def test_one_document_has_no_interval(self):
        assert studies.over_documents([result(1.0)], [result(2.0)]) is None


class TestDEC16:
    def test_claims_are_judged_by_means_over_seeds(self, tmp_path):
        claims = [Claim("one", "a", "b"), Claim("two", "b", "a"), Claim("three", "b", "a", "logit_absmax")]
        study = Study("Title", {"a": Variant(), "b": Variant()}, claims)
        results = {"a": [result(1.0, 9.0), result(3.0, 9.0, 1)], "b": [result(2.5, 1.0), result(2.1, 3.0, 1)]}
        text = studies.report(study, dict.fromkeys("ab", tiny_experiment(tmp_path)), results, "the command")
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
        assert rows[-3:] == [
            ["one", "a", "b", "bits_per_byte", "+0.3000", "+1.5000 -0.9000", "-", "holds"],
            ["two", "b", "a", "bits_per_byte", "-0.3000", "-1.5000 +0.9000", "-", "does not hold"],
            ["three", "b", "a", "logit_absmax", "+7.0000", "+8.0000 +6.0000", "-", "holds"],
        ]

    def test_a_difference_within_the_interval_decides_nothing(self):
        def runs(*bits: float) -> list:
            return [result(sum(bits) / 3, documents=tuple((np.log(2) * one, 1.0) for one in bits))]

        found = [
            studies._judged(Claim("", "a", "b"), runs(1.0, 1.0, 1.0), runs(*more))[-1]
            for more in ((1.1, 1.2, 1.3), (0.7, 0.8, 0.9), (0.9, 1.0, 1.2))
        ]
        assert found == ["holds", "does not hold", "undecided"]

    def test_a_stack_without_layers_is_the_same_run(self, tmp_path):
        config = tiny_experiment(tmp_path / "data")
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, pattern=("attention+mlp",)))
        variants = {"whole": Variant(), "without mlp": Variant((), "whole", frozenset({"mlp"}))}
        study = Study("Title", variants, [Claim("layers work together", "whole", "without mlp")])
        experiments = dict.fromkeys(variants, config)
        results = studies.conduct(study, experiments, [0], tmp_path / "runs", 0)
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["whole-0"]
        whole, without = (results[name][0] for name in variants)
        assert whole["bits_per_byte"] != without["bits_per_byte"]
        assert whole["config"] == without["config"]
        other = dataclasses.replace(config, model=dataclasses.replace(config.model, pattern=("mlp",)))
        with pytest.raises(ConfigError, match=r"ModelConfig\.pattern"):
            studies.conduct(study, dict.fromkeys(variants, other), [0], tmp_path / "runs", 0)
        path = tmp_path / "runs/whole-0/result.json"
        old = {name: value for name, value in json.loads(path.read_text()).items() if name != "documents"}
        path.write_text(json.dumps(old))
        with pytest.raises(ConfigError, match=r"whole-0/result\.json was measured by an older version: delete"):
            studies.conduct(study, experiments, [0], tmp_path / "runs", 0)
