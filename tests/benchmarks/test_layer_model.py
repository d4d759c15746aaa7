"""The layer-level model: what grows with length, what binds, by hand where it can be."""

from __future__ import annotations

import pytest

from benchmarks import layer_model
from pallas_kernels.chips import TPUS

LENGTHS = [2**k for k in range(11, 18)]


TILES = (128, 256, 512)


def entry(chip: str, kernel: str, direction: str, nanoseconds: float, tile: int = 512) -> dict:
    shape = {"m": 128, "d": 128, "heads": 8, "tile": tile}
    return {"chip": chip, "kernel": kernel, "direction": direction, "issue_nanoseconds": nanoseconds} | shape


def schedule_of(chips=tuple(TPUS)) -> list[dict]:
    return [
        entry(chip, kernel, direction, nanoseconds, tile)
        for chip in chips
        for tile in TILES
        for kernel, times in (("resident", (8.0, 12.0)), ("splash", (4.0, 8.0)))
        for direction, nanoseconds in zip(("forward", "backward"), times, strict=True)
    ]


def compiled_of(chips=tuple(TPUS), lengths=tuple(LENGTHS), rows: int = 1) -> list[dict]:
    parts = {"aamoe": {"products": 200.0, "tables": 90.0, "router": 30.0, "budget": 5.0, "copies": 7.0}}
    parts["dense"] = {"products": 300.0, "projections": 50.0}
    return [
        {"chip": chip, "m": 128, "length": length, "rows": rows, "layer": layer, "parts": parts[layer]}
        for chip in chips
        for length in lengths
        for layer in parts
    ]


def test_both_passes_of_a_tile_make_one_figure_and_one_pass_none():
    rows = [entry("v5e", "resident", direction, 10.0) for direction in ("forward", "backward")]
    rows.append(entry("v5e", "resident", "forward", 3.0, tile=256))
    assert layer_model.attention(rows, "v5e", "resident", 128) == {512: 20.0}
    assert layer_model.attention(rows, "v5e", "gathered", 128) == {}


def test_the_cores_of_a_device_divide_what_has_a_parallel_dimension():
    """A v5p has two: of splash attention they divide the forward pass alone."""
    for kernel, whole, divided in (("resident", 20.0, 10.0), ("splash", 12.0, 10.0)):
        assert layer_model.attention(schedule_of(), "v5e", kernel, 128) == dict.fromkeys(TILES, whole)
        assert layer_model.attention(schedule_of(), "v5p", kernel, 128) == dict.fromkeys(TILES, divided)


def test_the_parts_of_a_layer_and_its_kernels_add_up():
    (row,) = layer_model.model(schedule_of(["v5e"]), compiled_of(["v5e"], [4096]))
    routed = layer_model.routed("v5e", 128, 4096, {256: 20.0})
    assert row["aamoe"] == {
        "products": 200.0, "tables": 90.0, "choice": 35.0, "window": 0.0, "rest": 7.0, "attention": routed,
    }  # fmt: skip
    dense = 300.0 + 50.0 + 1.35 * 12.0 * 4096 / 128 / 2
    assert row["speed_up"] == pytest.approx(dense / (332.0 + routed))


def test_tiles_are_those_of_the_layer_and_as_full_as_its_pairs_make_them():
    """Seven pairs a token beside its window: of 2,048 over 80 resources 179 rows each, of 8,192 over 128 448 rows."""
    around = layer_model.movement(TPUS["v5e"], 1024 * 28) + 1.35 * 12.7 / 1.5  # what no kernel hides
    for length, tile, rows in ((2048, 128, 179.2), (8192, 256, 448)):
        assert layer_model.plan("v5e", 128, length).layout.tile == tile
        found = layer_model.routed("v5e", 128, length, {tile: 20.0})
        assert found == pytest.approx(7 * 1.35 * 20.0 * (rows + tile / 2) / rows + around)
        assert layer_model.routed("v5e", 128, length, {512: 20.0}) is None


def test_larger_resources_are_fewer_and_have_a_kernel_of_their_own():
    """Of 256 keys there are half as many, and a token buys four, its window among them."""
    around = layer_model.movement(TPUS["v5e"], 1024 * 28) + 1.35 * 12.7 / 1.5
    rows = 3 * 8192 / (32 + 32)
    found = layer_model.routed("v5e", 256, 8192, {256: 40.0})
    assert found == pytest.approx(3 * 1.35 * 40.0 * (rows + 128) / rows + around)
    (row,) = layer_model.model(
        [entry("v5e", kernel, direction, 20.0, 256) | {"m": m} for kernel, m in (("resident", 256), ("splash", 128))
         for direction in ("forward", "backward")],
        [row | {"m": 256} for row in compiled_of(["v5e"], [8192])],
    )  # fmt: skip
    assert (row["m"], row["aamoe"]["attention"]) == (256, found)


def test_rows_that_fill_a_device_are_set_against_a_dense_layer_of_as_many_tokens():
    ours, dense = compiled_of(["v5e"], [2048], rows=4)
    dense |= {"length": 8192, "rows": 1}
    (row,) = layer_model.model(schedule_of(["v5e"]), [ours, dense])
    assert (row["length"], row["rows"]) == (2048, 4)
    assert row["dense"]["attention"] == pytest.approx(1.35 * 12.0 * 2048 / 128 / 2)  # of its rows
    assert row["aamoe"]["attention"] == layer_model.routed("v5e", 128, 2048, dict.fromkeys(TILES, 20.0), rows=4)
    assert layer_model.model(schedule_of(["v5e"]), [ours, dense | {"length": 4096}]) == []


def test_kernels_that_issue_nothing_still_move_their_tables():
    nothing = dict.fromkeys(TILES, 0.0)
    short, long = (layer_model.routed("v5e", 128, length, nothing) for length in (2**13, 2**17))
    assert 0 < short < long


def test_longer_rows_pay_more_and_the_dense_layer_most():
    rows = layer_model.model(schedule_of(), compiled_of())
    assert [(row["chip"], row["length"]) for row in rows] == [(chip, length) for chip in TPUS for length in LENGTHS]
    for chip in TPUS:
        mine = [row for row in rows if row["chip"] == chip]
        speed_ups = [row["speed_up"] for row in mine]
        assert speed_ups[-1] > speed_ups[0]
        dense = [sum(row["dense"].values()) for row in mine]
        assert dense == sorted(dense)


def test_what_was_not_compiled_or_tabled_is_left_out_and_the_report_says_that_it_is_a_model():
    schedule, compiled = schedule_of(["v5e"]), compiled_of(["v5e", "v6e"], [2048, 4096])
    compiled = [row for row in compiled if (row["layer"], row["length"]) != ("dense", 4096)]
    rows = layer_model.model(schedule, compiled)
    assert [(row["chip"], row["length"]) for row in rows] == [("v5e", 2048)]
    sources = ["python -m benchmarks.tpu_schedule", "python -m benchmarks.compiled_layer"]
    text = layer_model.report({"command": "python -m this", "from": sources, "rows": rows})
    assert "not measured" in text
    assert text.count("\n| v5e | 128 | 2048 |") == 1
    assert text.endswith(
        "```\npython -m this\n```\n\nFrom: `python -m benchmarks.tpu_schedule`, `python -m benchmarks.compiled_layer`\n"
    )
