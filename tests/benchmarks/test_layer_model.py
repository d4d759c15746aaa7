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


def compiled_of(chips=tuple(TPUS), lengths=tuple(LENGTHS)) -> dict:
    parts = {"aamoe": {"products": 200.0, "tables": 90.0, "router": 30.0, "budget": 5.0, "copies": 7.0}}
    parts["dense"] = {"products": 300.0, "projections": 50.0}
    rows = [
        {"chip": chip, "length": length, "layer": layer, "parts": parts[layer]}
        for chip in chips
        for length in lengths
        for layer in parts
    ]
    return {"command": "python -m benchmarks.compiled_layer", "rows": rows}


def test_both_passes_of_a_tile_make_one_figure_and_one_pass_none():
    rows = [*schedule_of()["rows"], entry("v5e", "resident", "forward", 3.0, tile=256)]
    assert layer_model.attention(rows, "v5e", "resident") == [Attention(512, 20.0)]
    assert layer_model.attention(rows, "v5e", "gathered") == []


def test_the_parts_of_a_layer_and_its_kernels_add_up():
    (row,) = layer_model.model(schedule_of(["v5e"]), compiled_of(["v5e"], [4096]))
    routed = layer_model.routed("v5e", 4096, [Attention(512, 20.0)])
    assert row["aamoe"] == {
        "products": 200.0, "tables": 90.0, "choice": 35.0, "window": 0.0, "rest": 7.0, "attention": routed,
    }  # fmt: skip
    dense = 300.0 + 50.0 + 1.35 * 12.0 * 4096 / 128 / 2
    assert row["speed_up"] == pytest.approx(dense / (332.0 + routed))


def test_rows_up_to_a_window_are_bound_by_issue_and_tiles_filled_as_their_size_allows():
    # 8 pairs of 8192 tokens over 64 experts and 64 chunks: 512 rows each.
    assert layer_model.fill(128, 8 * 8192, 128) == layer_model.FILL
    assert layer_model.fill(512, 8 * 8192, 128) == pytest.approx(512 / (512 + 256))
    around = layer_model.movement(TPUS["v5e"], 1024 * 40)  # what no kernel hides
    for length in (2048, 8192):
        found = layer_model.routed("v5e", length, [Attention(128, 20.0)])
        assert found == pytest.approx(8 * 1.35 * 20.0 / 0.8 + around)


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
    rows = layer_model.model(schedule_of(), compiled_of())
    assert [(row["chip"], row["length"]) for row in rows] == [(chip, length) for chip in TPUS for length in LENGTHS]
    for chip in TPUS:
        mine = [row for row in rows if row["chip"] == chip]
        speed_ups = [row["speed_up"] for row in mine]
        assert speed_ups[-1] > speed_ups[0]
        for name in ("aamoe", "dense"):
            totals = [sum(row[name].values()) for row in mine]
            assert totals == sorted(totals)


def test_what_was_not_compiled_or_tabled_is_left_out_and_the_report_says_that_it_is_a_model():
    schedule, compiled = schedule_of(["v5e"]), compiled_of(["v5e", "v6e"], [2048, 4096])
    compiled["rows"] = [row for row in compiled["rows"] if (row["layer"], row["length"]) != ("dense", 4096)]
    rows = layer_model.model(schedule, compiled)
    assert [(row["chip"], row["length"]) for row in rows] == [("v5e", 2048)]
    commands = {"command": "python -m this", "schedule": schedule["command"], "compiled": compiled["command"]}
    text = layer_model.report(commands | {"rows": rows})
    assert "not measured" in text
    assert text.count("\n| v5e | 2048 |") == 1
    assert text.endswith(
        "```\npython -m this\n```\n\n"
        "From: `python -m benchmarks.tpu_schedule` and `python -m benchmarks.compiled_layer`\n"
    )
