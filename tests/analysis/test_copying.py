"""Copied tokens are those that a comparison of all pairs finds; differences and their errors are the textbook's
(AA-38)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aamoe_jax.analysis import copying
from aamoe_jax.analysis.copying import NGRAMS, Ledger, compare, longest_repeat, repeats, stratified_difference
from aamoe_jax.config import ConfigError
from aamoe_jax.data import ByteTokenizer, evaluation_batches
from tests.aamoe.helpers import model_config
from tests.analysis.helpers import TEXT, inspected, params_of, tokens_of
from tests.data.helpers import prepared


def brute_force(tokens: np.ndarray, n: int) -> list[bool]:
    """Whether the n tokens up to and with i equal the n tokens up to and with some j < i."""
    tokens = tokens.tolist()
    return [
        any(tokens[i - n + 1 : i + 1] == tokens[j - n + 1 : j + 1] for j in range(n - 1, i)) if i >= n else False
        for i in range(len(tokens))
    ]


class TestRepeats:
    @pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
    def test_equal_a_comparison_of_all_pairs(self, n):
        generator = np.random.default_rng(n)
        for tokens in (generator.integers(0, 3, 120), generator.integers(0, 40, 120), tokens_of(TEXT[:300])):
            assert repeats(tokens, n).tolist() == brute_force(tokens, n)

    def test_may_overlap(self):
        assert repeats(np.array([7, 7, 7, 7]), 2).tolist() == [False, False, True, True]

    def test_longer_than_the_text_is_none(self):
        assert not repeats(np.array([1, 2]), 4).any()

    def test_the_longest_is_kept_and_documents_know_nothing_of_each_other(self):
        text = np.arange(40)
        row = np.concatenate([text, text, text, [0]])
        segment = np.repeat([1, 2, 0], [80, 40, 1])
        longest = longest_repeat(row, segment)
        assert not longest[:43].any()  # new, and then fewer than 4 tokens of it again
        assert longest[43:48].tolist() == [4, 4, 4, 4, 8]
        assert longest[71:80].tolist() == [32] * 9
        assert not longest[80:].any()
        for n in NGRAMS:
            np.testing.assert_array_equal(longest[:80] >= n, repeats(row[:80], n))


class TestDifference:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(2, 400))
    member = generator.random(400) < 0.3

    def test_one_stratum_and_single_tokens_are_the_textbook(self):
        found = stratified_difference(self.values, self.member, np.zeros(400, int), np.arange(400))
        first, second = self.values[:, self.member], self.values[:, ~self.member]
        np.testing.assert_allclose(found.value, first.mean(1) - second.mean(1))
        error = np.sqrt(first.var(1) / first.shape[1] + second.var(1) / second.shape[1])
        np.testing.assert_allclose(found.error, error, rtol=2e-3)
        assert found.share == 1.0

    def test_what_the_stratum_explains_is_no_difference(self):
        stratum = np.repeat([0, 1], 200)
        member = np.concatenate([np.arange(200) < 150, np.arange(200) < 20])
        values = np.where(stratum == 0, 5.0, 1.0)[None] + 0.25 * member
        plain = stratified_difference(values, member, np.zeros(400, int), np.arange(400))
        matched = stratified_difference(values, member, stratum, np.arange(400))
        assert plain.value[0] > 2
        assert matched.value[0] == pytest.approx(0.25)

    def test_members_that_nobody_compares_with_are_left_out(self):
        stratum = np.where(np.arange(400) < 100, 0, 1)
        member = self.member | (stratum == 0)
        found = stratified_difference(self.values, member, stratum, np.arange(400))
        rest = stratified_difference(self.values[:, 100:], member[100:], stratum[100:], np.arange(300))
        np.testing.assert_allclose(found.value, rest.value)
        assert found.share == pytest.approx(member[100:].sum() / member.sum())
        assert stratified_difference(self.values, np.ones(400, bool), stratum, stratum) is None

    def test_tokens_of_one_cluster_are_one_observation(self):
        """Every token ten times over: independent they would pretend an error sqrt(10) times smaller."""
        once = stratified_difference(self.values, self.member, np.zeros(400, int), np.arange(400))
        ten = stratified_difference(
            np.repeat(self.values, 10, 1),
            np.repeat(self.member, 10),
            np.zeros(4000, int),
            np.repeat(np.arange(400), 10),
        )
        np.testing.assert_allclose(ten.error, once.error)

    def test_the_error_is_the_spread_over_fresh_samples(self):
        generator, found = np.random.default_rng(1), []
        for _ in range(300):
            cluster = np.repeat(np.arange(30), 10)
            stratum, member = generator.integers(0, 4, 300), generator.random(300) < 0.4
            values = stratum + 0.5 * member + generator.normal(size=30)[cluster] + generator.normal(size=300)
            found.append(stratified_difference(values[None], member, stratum, cluster))
        estimates = np.array([item.value[0] for item in found])
        assert estimates.mean() == pytest.approx(0.5, abs=0.03)
        assert np.mean([item.error[0] for item in found]) == pytest.approx(estimates.std(), rel=0.15)


class TestCompare:
    def test_of_a_passage(self):
        found = inspected()
        ledger = copying.ledger_of(found)
        for n in (4, 16):
            record = compare(ledger, n)
            flags = np.array(brute_force(found.tokens, n))[:-1]
            later = np.arange(len(flags)) >= n
            assert record["copied"]["tokens"] == flags.sum() > 0
            assert record["novel"]["tokens"] == (later & ~flags).sum()
            spent = found.spent[:, :-1]
            np.testing.assert_allclose(record["copied"]["spent"], spent[:, flags].mean(1))
            difference = spent[:, flags].mean(1) - spent[:, later & ~flags].mean(1)
            np.testing.assert_allclose([pair[0] for pair in record["difference"]["spent"]], difference)
            assert record["difference"]["spent_mean"][0] == pytest.approx(difference.mean())
            nats = found.bits[1:] * np.log(2)
            assert record["novel"]["nats"] == pytest.approx(nats[later & ~flags].mean())
        assert json.loads(json.dumps(record)) is not None

    def test_without_a_copy_there_is_no_difference(self):
        length = 20
        zeros = np.zeros((1, length), int)
        ledger = Ledger(np.arange(length), np.arange(length), zeros[0], zeros[0], np.ones(length), zeros, zeros, zeros)
        record = compare(ledger, 4)
        assert record["copied"] == {"tokens": 0}
        assert record["novel"]["tokens"] == length - 4
        assert record["difference"] is record["matched"] is None


class TestObserve:
    def test_every_target_is_counted_once_under_its_document(self, tmp_path):
        documents = {
            split: [(f"{split}/{i}", f"{split}{i} ".encode() + TEXT[: 90 + 10 * i]) for i in range(3)]
            for split in ("train", "validation", "test")
        }
        data = prepared(tmp_path, documents, seq_len=64)
        batches = evaluation_batches(data, "tiny", split="test", batch_size=2)
        config = model_config(num_layers=1)
        eos = ByteTokenizer.eos_id
        ledger = copying.observe(config, params_of(config), batches, eos_id=eos)
        mask = np.concatenate([batches[i]["loss_mask"].reshape(-1) for i in range(len(batches))]) > 0
        assert len(ledger.token) == mask.sum()
        stream = np.concatenate([batches[i]["tokens"].reshape(-1) for i in range(len(batches))])
        np.testing.assert_array_equal(ledger.token, stream[mask])
        # A document's tokens are its bytes; its eos is a target alone.
        assert np.bincount(ledger.cluster).tolist() == [len(text) for _, text in documents["test"]]
        assert (ledger.context + ledger.expert <= ledger.spent).all()
        part = copying.observe(config, params_of(config), batches, eos_id=eos, max_batches=2)
        assert 0 < len(part.token) < len(ledger.token)

    def test_a_dense_model_is_refused(self):
        with pytest.raises(ConfigError, match="no AA-MoE layer"):
            copying.observe(model_config(pattern=("parallel",)), {}, [], eos_id=1)
