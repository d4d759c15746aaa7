"""Sweeps: the same text at several budget scales and in rows of other lengths (AA-34, AA-35; DEC-18)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.evaluation import perplexity
from aamoe_jax.evaluation.perplexity import Evaluator
from aamoe_jax.evaluation.sweeps import UnfitLengthError, budget_sweep, held_out, length_sweep, rises
from aamoe_jax.model import structure
from tests.aamoe.helpers import M, model_config
from tests.data.helpers import ALIGN, prepared, random_documents
from tests.evaluation.helpers import random_params

BYTES = np.ones(384, np.int32)
LENGTH = 4 * M


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """About 700 tokens held out, in rows of 4 chunks."""
    assert ALIGN == M
    return prepared(tmp_path_factory.mktemp("data"), random_documents(held_out=8), seq_len=LENGTH)


@pytest.fixture(scope="module")
def count_traces():
    """How often a model is traced while a block runs."""
    traces, patch, merge = [], pytest.MonkeyPatch(), perplexity.merge
    patch.setattr(perplexity, "merge", lambda *inputs: traces.append(1) or merge(*inputs))
    yield traces
    patch.undo()


def start_of(config):
    return structure(config), random_params(config), config


def rows_of(data, **options):
    return lambda length: held_out(data, "tiny", "test", length=length, batch_size=4, **options)


class TestBudget:
    def test_one_compilation_serves_all_points_and_scale_1_is_the_plain_evaluation(self, data, count_traces):
        config = model_config(beta=2.0)
        batches = rows_of(data, max_batches=3)(LENGTH)
        count_traces.clear()
        swept = budget_sweep(*start_of(config), batches, BYTES, budget="prefix", scales=(4.0, 1.0, 0.25, 0.5, 2.0))
        assert len(count_traces) == 2  # the losses, and the logits of the probe
        assert [point.budget_scale for point in swept] == [0.25, 0.5, 1.0, 2.0, 4.0]
        assert [point.tokens for point in swept] == [swept[0].tokens] * 5
        assert [point.causality.largest for point in swept] == [0.0] * 5
        assert np.all(np.diff([point.spent for point in swept]) > 0)
        assert all(point.spent <= 2.0 * point.budget_scale + 8 / LENGTH for point in swept)
        graphdef, params, _ = start_of(config)
        plain = Evaluator(graphdef, config, budget="prefix")(params, batches, BYTES)
        assert swept[2].bits_per_byte == pytest.approx(plain.bits_per_byte, rel=1e-5)
        assert swept[2].spent == plain.spent

    def test_a_point_that_is_no_positive_number_is_refused(self, data):
        with pytest.raises(ConfigError, match=r"budget_scale = -1.0: must be a positive number"):
            budget_sweep(*start_of(model_config()), rows_of(data)(LENGTH), BYTES, budget="prefix", scales=(-1.0, 1.0))

    def test_rises_are_the_places_where_it_does_not_fall(self):
        assert rises([3.0, 2.0, 2.0, 1.0]) == []
        assert rises([3.0, 2.0, 2.5, 1.0, 1.1]) == [2, 4]
        assert rises([3.0]) == []


class TestLength:
    def test_beta_fixed_and_b_fixed(self, data):
        config = model_config(beta=2.0, num_layers=1)
        factors = (2.0, 1.0, 1000.0)
        points = length_sweep(
            *start_of(config), rows_of(data), BYTES, budget="prefix", trained_length=LENGTH, factors=factors
        )
        by_factor = {point.factor: point for point in points}
        assert list(by_factor) == [1.0, 2.0, 1000.0]
        assert by_factor[1000.0].skipped.startswith("the test split of 'tiny' has")
        assert by_factor[1000.0].to_dict()["fixed"] == {}
        for factor in (1.0, 2.0):
            found = by_factor[factor].evaluations
            assert list(found) == ["beta", "B"]
            assert found["beta"].budget_scale == 1.0
            assert found["B"].budget_scale == pytest.approx(1 / factor)
            assert len(found["beta"].nll_by_position) == factor * LENGTH
            assert max(evaluation.causality.largest for evaluation in found.values()) == 0.0
        trained = by_factor[1.0].evaluations
        assert trained["B"] is trained["beta"]
        longer = by_factor[2.0].evaluations
        assert longer["B"].spent < longer["beta"].spent

    def test_a_model_without_budgets_has_one_curve(self, data):
        config = model_config(pattern=("parallel",), num_layers=1)
        points = length_sweep(
            *start_of(config), rows_of(data), BYTES, budget="prefix", trained_length=LENGTH, factors=(2.0,)
        )
        assert [list(point.evaluations) for point in points] == [["none"]]
        assert points[0].evaluations["none"].budget is None

    def test_no_fit_length_at_all_is_an_error_that_says_why(self, data):
        with pytest.raises(ConfigError, match="no length can be evaluated; the last one: the test split"):
            length_sweep(
                *start_of(model_config()),
                rows_of(data),
                BYTES,
                budget="prefix",
                trained_length=LENGTH,
                factors=(1 / 3, 900.0),
            )


class TestHeldOut:
    @pytest.mark.parametrize(("length", "rows"), [(LENGTH // 2, 8), (LENGTH, 4), (2 * LENGTH, 2), (8 * LENGTH, 1)])
    def test_a_forward_pass_holds_as_many_tokens_at_every_length(self, data, length, rows):
        batches = rows_of(data)(float(length))
        assert batches[0]["tokens"].shape == (rows, length)

    def test_every_length_has_the_same_text(self, data):
        """Every target counts once; only where documents are cut into rows is one more token first in its row."""
        whole = self.targets(rows_of(data)(LENGTH))
        for length in (LENGTH // 2, 2 * LENGTH, 8 * LENGTH):
            np.testing.assert_array_equal(self.targets(rows_of(data)(length)), whole)

    def test_a_part_is_the_text_of_the_first_batches(self, data):
        whole, part = rows_of(data)(LENGTH), rows_of(data, max_batches=2)
        wanted = self.targets([whole[0], whole[1]])
        for length in (LENGTH // 2, LENGTH, 2 * LENGTH, 4 * LENGTH):
            np.testing.assert_array_equal(self.targets(part(length)), wanted)
        assert len(rows_of(data, max_batches=999)(LENGTH)) == len(whole)

    @pytest.mark.parametrize("length", [ALIGN + 1, ALIGN / 2, 10.5])
    def test_rows_that_would_cut_chunks_are_unfit(self, data, length):
        with pytest.raises(UnfitLengthError, match=f"not a multiple of document_align = {ALIGN}"):
            rows_of(data)(length)

    def test_a_split_smaller_than_a_row_is_unfit(self, data):
        with pytest.raises(UnfitLengthError, match="less than one row of 8000"):
            rows_of(data)(8000)
        assert dataclasses.is_dataclass(data)  # and the config is as it was
        assert data.seq_len == LENGTH

    @staticmethod
    def targets(batches) -> np.ndarray:
        """All targets that count, in the order of the text."""
        found = [batches[i]["targets"][batches[i]["loss_mask"] > 0] for i in range(len(batches))]
        return np.concatenate(found)
