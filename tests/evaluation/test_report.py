"""Tables and JSON of evaluations."""

from __future__ import annotations

import json

import pytest

from aamoe_jax.evaluation import report


def record(budget: str | None = "prefix", bits: float = 2.5, moved: float = 0.0, **more) -> dict:
    """What `Evaluation.to_dict` gives, as far as tables read it."""
    figures = {
        "budget": budget,
        "budget_scale": 1.0,
        "bits_per_byte": bits,
        "nats_per_token": 1.7,
        "perplexity": 5.5,
        "flops_per_token": 2.5e6,
        "spent": None if budget is None else 3.5,
        "clip_rate": None if budget is None else 0.25,
        "causality": {"largest": moved},
    }
    return figures | more


def cells(table: str, start: str) -> list[str]:
    """The words of the one line that starts so."""
    (line,) = (line for line in table.splitlines() if line.strip().startswith(start))
    return line.split()


def test_json_keeps_its_values_and_has_lists_of_numbers_on_one_line():
    value = {"a": [1, -2.5e-07, None], "b": [[0.5], [float("inf")]], "c": {"d": ["x", "[ 1,  2 ]"]}, "e": []}
    text = report.as_json(value)
    assert json.loads(text) == value
    assert '"a": [1, -2.5e-07, null],' in text
    assert text.endswith("}\n")


@pytest.mark.parametrize(("value", "text"), [(0.25, "1/4"), (0.5, "1/2"), (1.0, "1"), (0.3, "0.3"), (1.5, "1.5")])
def test_scales_read_as_people_write_them(value, text):
    assert report.fraction(value) == text


class TestBudgets:
    def test_one_line_per_budget_and_baseline(self):
        budgets = {
            "row": record("row", 2.4, moved=1.25, gap_to_row=0.0),
            "predictor": record("predictor", 2.5, gap_to_row=0.1),
        }
        result = {"dataset": "code", "budgets": budgets, "baselines": {"xz": 1.5}}
        table = report.budgets_table([result, result | {"dataset": "a_long_name_of_a_dataset"}])
        lines = [line for line in table.splitlines() if line.startswith("code")]
        assert lines[0].split()[:5] == ["code", "row", "(sees", "the", "future)"]
        assert len({len(line) for line in table.splitlines() if "(causal)" in line or "future)" in line}) == 1
        assert "+0.1000" in table
        assert "25.0%" in table
        assert "to row: the leakage gap" in table

    def test_a_model_without_budgets_has_dashes(self):
        table = report.budgets_table([{"dataset": "code", "budgets": {"x": record(None)}, "baselines": {}}])
        assert cells(table, "code") == ["code", "-", "2.500", "-", "1.700", "5.50", "2.50", "-", "-", "0"]
        assert "leakage" not in table

    def test_the_predictor_has_a_line_per_layer_and_at_most_eight_ranks(self):
        figures = {
            "exact": [0.75],
            "within_one": [1.0],
            "error": [0.25],
            "total": [0.9],
            "affords": [[1.0] * 8 + [0.5]],
        }
        table = report.predictor_table(figures, 0.25)
        assert cells(table, "0") == ["0", "0.750", "1.000", "0.250", "0.900"] + ["1.000"] * 8
        assert "k=8" in table
        assert "k=9" not in table


class TestWarnings:
    def test_a_causal_budget_that_leaks_is_a_warning_where_arithmetic_is_exact(self):
        records = [record("row", moved=1.0), record("prefix"), record("predictor", moved=0.25)]
        (warning,) = report.causality_warnings(records, exact=True)
        assert warning.startswith("warning: under predictor budgets earlier logits changed by 0.25: the future leaks")
        (note,) = report.causality_warnings(records, exact=False)
        assert note.startswith("note: under predictor budgets earlier logits changed by 0.25; in this arithmetic")

    def test_no_number_is_a_warning_and_a_dense_model_is_not_spared(self):
        (warning,) = report.causality_warnings([record(None, moved=float("nan"))], exact=True)
        assert warning.startswith("warning: without budgets earlier logits changed by nan")

    def test_nothing_to_say(self):
        assert report.causality_warnings([record(), record("row", moved=3.0)], exact=True) == []


class TestSweeps:
    def points(self, *bits: float) -> list[dict]:
        return [record(bits=value, budget_scale=scale) for scale, value in zip((0.5, 1.0, 2.0), bits, strict=True)]

    def test_bits_that_fall_all_the_way(self):
        table = report.budget_sweep_table(self.points(3.0, 2.5, 2.5))
        assert cells(table, "1/2")[:2] == ["1/2", "3.0000"]
        assert cells(table, "1 ")[:3] == ["1", "2.5000", "-0.5000"]
        assert table.endswith("bits per byte fall monotonically with the budget")

    def test_bits_that_do_not(self):
        table = report.budget_sweep_table(self.points(3.0, 2.5, 2.75))
        assert table.endswith("do not fall monotonically with the budget: they rise from 1 to 2 by 0.2500")

    def test_lengths_with_what_is_fixed_and_what_was_skipped(self):
        fixed = {"beta": record(), "B": record(bits=3.0, budget_scale=0.5)}
        points = [
            {"factor": 2.0, "length": 1024.0, "skipped": None, "fixed": fixed},
            {"factor": 8.0, "length": 4096.0, "skipped": "too little text", "fixed": {}},
        ]
        table = report.length_sweep_table(points)
        assert cells(table, "1024")[:5] == ["1024", "2", "beta", "1", "2.5000"]
        assert cells(table, "B")[:3] == ["B", "1/2", "3.0000"]
        assert cells(table, "4096") == ["4096", "8", "skipped:", "too", "little", "text"]
