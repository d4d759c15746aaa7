"""The layer-level model: what grows with length, what binds, by hand where it can be."""

from __future__ import annotations

import pytest

from benchmarks import layer_model
from benchmarks.layer_model import Attention
from pallas_kernels.chips import TPUS

LENGTHS = [2**k for k in range(11, 18)]


def entry(chip: str, kernel: str, direction: str, nanoseconds: float, tile: int = 512) -> dict:
    shape = {"m": 128, "d": 128, "heads": 8, "tile": tile}
    return {"chip": chip, "kernel": kernel, "direction": direction, "issue_nanoseconds": nanoseconds} | shape


def schedule_of(chips=tuple(TPUS)) -> dict:
    rows = [
        entry(chip, kernel, direction, nanoseconds)
        for chip in chips
        for kernel, times in (("resident", (8.0, 12.0)), ("splash", (4.0, 8.0)))
        for direction, nanoseconds in zip(("forward", "backward"), times, strict=True)
    ]
    return {"command": "python -m benchmarks.tpu_schedule", "rows": rows}


def test_both_passes_of_a_tile_make_one_figure_and_one_pass_none():
    rows = [*schedule_of()["rows"], entry("v5e", "resident", "forward", 3.0, tile=256)]
    assert layer_model.attention(rows, "v5e", "resident") == [Attention(512, 20.0)]
    assert layer_model.attention(rows, "v5e", "gathered") == []


def test_dense_attention_by_hand():
    found = layer_model.dense("v5e", 4096, [Attention(512, 12.0)])
    assert found["attention"] == pytest.approx(1.35 * 12.0 * 4096 / 128 / 2)
    assert found["feed-forward"] == pytest.approx(1e9 * 3 * 4 * 1024 * 4096 / (0.575 * 197e12))


def test_rows_up_to_a_window_are_bound_by_issue_and_tiles_filled_as_their_size_allows():
    # 8 pairs of 8192 tokens over 64 experts and 64 chunks: 512 rows each.
    assert layer_model.fill(128, 8 * 8192, 128) == layer_model.FILL
    assert layer_model.fill(512, 8 * 8192, 128) == pytest.approx(512 / (512 + 256))
    for length in (2048, 8192):
        assert layer_model.routed("v5e", length, [Attention(128, 20.0)]) == pytest.approx(8 * 1.35 * 20.0 / 0.8)


def test_kernels_that_issue_nothing_still_move_their_tables():
    assert layer_model.routed("v5e", 2**17, [Attention(128, 0.0)]) > layer_model.routed(
        "v5e", 2**13, [Attention(128, 0.0)]
    )
    assert layer_model.routed("v5e", 2**13, [Attention(128, 0.0)]) > 0


def test_the_best_tile_is_taken_at_every_length():
    both = [Attention(128, 26.0), Attention(512, 20.0)]
    for length in LENGTHS:
        assert layer_model.routed("v5e", length, both) == min(layer_model.routed("v5e", length, [one]) for one in both)


def test_longer_rows_pay_more_and_the_dense_layer_most():
    rows = layer_model.model(schedule_of(), LENGTHS)
    assert [(row["chip"], row["length"]) for row in rows] == [(chip, length) for chip in TPUS for length in LENGTHS]
    for chip in TPUS:
        mine = [row for row in rows if row["chip"] == chip]
        speed_ups = [row["speed_up"] for row in mine]
        assert speed_ups[-1] > speed_ups[0]
        for name in ("aamoe", "dense"):
            totals = [sum(row[name].values()) for row in mine]
            assert totals == sorted(totals)
            assert {row[name]["projections"] for row in mine} == {mine[0]["aamoe"]["projections"]}


def test_chips_without_a_schedule_are_left_out_and_the_report_says_that_it_is_a_model():
    schedule = schedule_of(["v5e"])
    rows = layer_model.model(schedule, [2048])
    assert [row["chip"] for row in rows] == ["v5e"]
    text = layer_model.report({"command": "python -m this", "schedule": schedule["command"], "rows": rows})
    assert "not measured" in text
    assert text.count("\n| v5e | 2048 |") == 1
    assert text.endswith("```\npython -m this\n```\n\nFrom: `python -m benchmarks.tpu_schedule`\n")
