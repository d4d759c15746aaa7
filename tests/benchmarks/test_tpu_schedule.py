"""The schedule benchmark without a compiler: figures from a schedule, the table, the targets, the golden file."""

from __future__ import annotations

import json

import pytest

from benchmarks import schedule_report, tpu_schedule
from benchmarks.tpu_schedule import HEADLINE, KERNELS, Measured, Shape
from pallas_kernels import aot, schedule
from pallas_kernels.block_sparse_attention.tpu import dispatch
from pallas_kernels.chips import TPUS

MIB = 2**20
SLOTS = dict.fromkeys(schedule_report.SLOTS, 0.25)


def scheduled(cycles: int, **slots: float) -> schedule.Schedule:
    return schedule.Schedule(2 * cycles, (), cycles, SLOTS | slots, spills=7)


def program(moved: int) -> aot.Compiled:
    return aot.Compiled(1.0, moved // 2, moved - moved // 2, 0, 0, 0)


def named(name: str, direction: str) -> tpu_schedule.Kernel:
    (kernel,) = (kernel for kernel in KERNELS if (kernel.name, kernel.direction) == (name, direction))
    return kernel


def row(chip: str = "v5e", direction: str = "forward", cycles: int = 5120, shape: Shape = HEADLINE, moved: int = MIB):
    kernel = named("resident", direction)
    (part,) = kernel.parts(shape)
    found = Measured(program(moved), scheduled(cycles, VSTORE=0.5), part.pairs_a_step)
    return tpu_schedule.row(chip, kernel, shape, [found])


class TestRow:
    def test_bundles_and_time_by_hand(self):
        found = row(cycles=5120, moved=64 * 512 * 1000)
        assert found["bundles_a_pair"] == 10.0
        assert found["bytes_a_pair"] == 1000.0
        assert found["nanoseconds"] == found["issue_nanoseconds"] == pytest.approx(10 / 1.5)
        assert found["hbm_nanoseconds"] == pytest.approx(1000 / 820)
        assert found["teraflops"] == pytest.approx(4 * 128 * 1024 / (10 / 1.5) / 1e3)
        assert found["share_of_peak"] == pytest.approx(found["mxu_nanoseconds"] / found["nanoseconds"])
        assert (found["busiest"], found["busiest_bundles"]) == ("VSTORE", 5.0)

    def test_what_moves_more_than_it_issues_takes_as_long_as_its_bytes(self):
        found = row(moved=64 * 512 * 100_000)
        assert found["nanoseconds"] == found["hbm_nanoseconds"] > found["issue_nanoseconds"]
        assert schedule_report.binding(found) == "forward: HBM, 100000 bytes a pair"

    def test_a_backward_pass_is_five_products_and_a_second_group_of_heads_a_second_step(self):
        forward, backward = row(), row(direction="backward")
        assert backward["mxu_nanoseconds"] == 2.5 * forward["mxu_nanoseconds"]
        wide = row(shape=HEADLINE._replace(heads=16))
        assert wide["bundles_a_pair"] == 2 * forward["bundles_a_pair"]

    def test_splash_is_counted_in_pairs_of_the_same_flops(self):
        forward = named("splash", "forward")
        # 512 queries x 512 keys x 1 head are as many products as 256 tokens x 128 keys x 8 heads.
        for shape in (HEADLINE, Shape(256, 256, 4, 512)):
            (part,) = forward.parts(shape)
            assert part.pairs_a_step == 256
        assert forward.bytes_a_pair(HEADLINE, []) == 2 * 512 * 128 * 2 / 256

    def test_parts_of_a_pass_add_up_and_their_slots_weigh_by_their_bundles(self):
        kernel, shape = named("gathered", "forward"), HEADLINE
        parts = [
            Measured(program(MIB), scheduled(4096, VSTORE=0.5), 512),
            Measured(program(MIB), scheduled(512, VSTORE=0.9), 256),
        ]
        found = tpu_schedule.row("v5e", kernel, shape, parts)
        assert found["bundles_a_pair"] == 8 + 2
        assert found["slots"]["VSTORE"] == pytest.approx((8 * 0.5 + 2 * 0.9) / 10)
        assert found["spills"] == 14
        assert found["bytes_a_pair"] == MIB / (64 * 512) + MIB / (128 * 512) + 12 * 1024

    def test_dense_attention_reads_a_block_a_step(self):
        # 512 keys and values, or queries and gradients, for 512 tokens of 4 resources; 8 bytes of bias and visibility.
        for direction in ("forward", "backward"):
            assert named("dense", direction).bytes_a_pair(HEADLINE, []) == 2 * 2 * 512 * 1024 / (512 * 4) + 8


class TestCompiler:
    def test_a_kernel_without_tiles_is_compiled_once(self):
        kernel = named("paged", "forward")
        assert [len(kernel.parts(HEADLINE._replace(tile=tile))) for tile in (512, 256)] == [1, 0]

    def test_one_compilation_serves_all_kernels_of_a_case_and_a_refusal_is_told(self, monkeypatch, capsys):
        compilations = []

        def compile_apart(chip, case, options, dump_to):
            compilations.append(case)
            if "gathered" in case:
                raise aot.CompileError(f"{case} for {chip}: out of memory\nand more")
            return program(MIB)

        monkeypatch.setattr(aot, "compile_apart", compile_apart)
        monkeypatch.setattr(schedule, "read", lambda folder, call: scheduled(512))
        rows, refused = tpu_schedule.measured("v5e", KERNELS, HEADLINE)
        assert [row["kernel"] for row in rows] == ["resident"] * 2 + ["dense"] * 2 + [
            "resident_running", "paged", *["splash"] * 2
        ]  # fmt: skip
        assert [name.rpartition(".")[2] for name in compilations] == [
            "chip_cases:kernel", "chip_cases:kernel", "gathered_cases:kernel", "gathered_cases:kernel",
            "dense_cases:kernels", "chip_cases:kernel", "decode_cases:decode", "tpu_cases:splash",
        ]  # fmt: skip
        shape = "m 128, d 128, heads 8, tile 512"
        assert refused == [
            {"what": f"v5e gathered {direction}: {shape}", "why": "out of memory"}
            for direction in ("forward", "backward")
        ]
        assert "v5e gathered forward: m 128, d 128, heads 8, tile 512: out of memory" in capsys.readouterr().err

    @pytest.mark.parametrize(("chip", "cores"), [("v5e", 1), ("v5p", 2)])
    def test_what_surrounds_the_kernels_is_counted_for_one_core(self, chip, cores, monkeypatch):
        monkeypatch.setattr(aot, "compile_apart", lambda *arguments, dump_to: dump_to.mkdir())
        monkeypatch.setattr(tpu_schedule, "bundles_around_kernels", lambda folder: 8 * 8192 * folder.is_dir())
        assert tpu_schedule.around(chip) == {"chip": chip, "bundles_a_pair": cores}


class TestReport:
    def rows(self, cycles: int) -> list[dict]:
        wide = Shape(256, 256, 4, 512)
        return [
            row(chip, direction, cycles, shape)
            for chip in TPUS
            for shape in (HEADLINE, wide)
            for direction in ("forward", "backward")
        ]

    def test_every_row_is_a_line_of_the_table(self):
        lines = schedule_report.table(self.rows(5120)).splitlines()
        assert len(lines) == 2 + 16
        assert len({line.count("|") for line in lines}) == 1
        assert lines[2].startswith("| v5e | resident | forward | 128 | 128 | 8 | 512 | 10.00 | 25% |")

    def test_targets_that_are_met_and_missed(self):
        fast, slow = (schedule_report.targets(self.rows(cycles)) for cycles in (512, 10240))
        assert len(fast) == len(slow) == 4 + 4 + 4 + 2
        assert all(line[-2] == "met" for line in fast)
        assert all(line[-2] == "missed" for line in slow)
        rest = "full in 10.0 of 20.0 bundles; 10.0 wait for results or for other slots; 7 spills"
        assert slow[0][-1] == f"forward: VSTORE, {rest}"

    def test_targets_are_of_the_resident_kernels(self):
        rows = [row(cycles=5120), *(row(cycles=512) | {"kernel": name} for name in ("splash", "gathered"))]
        assert schedule_report.chosen(rows, "v5e", m=128, d=128, tile=512)["forward"] is rows[0]
        assert schedule_report.chosen(rows, "v5p", m=128, d=128, tile=512) == {}

    def test_what_surrounds_the_kernels_stands_beside_them(self):
        around = [{"chip": chip, "bundles_a_pair": 5.0} for chip in ("v5e", "v5p")]
        rows = [row(cycles=5120), row(direction="backward", cycles=2560), row("v5p")]
        assert schedule_report.operation({"rows": rows, "operation": around}) == [
            ["v5e", "15.00", "5.00", "20.00", "25%"]  # of a v5p one pass is missing
        ]
        record = {"command": "this", "versions": {}, "rows": rows, "operation": around, "refused": []}
        assert "| v5e | 15.00 | 5.00 | 20.00 | 25% |" in schedule_report.report(record)

    def test_the_report_ends_with_its_command(self):
        record = {"command": "python -m this", "versions": {"libtpu": "1"}, "rows": self.rows(5120), "refused": []}
        assert "```\npython -m this\n```\n\nlibtpu 1\n" in schedule_report.report(record)


class TestGolden:
    def test_five_per_cent_more_is_a_regression(self):
        golden = {tpu_schedule.key(row()): 10.0}
        assert tpu_schedule.regressions([row(cycles=5120), row(cycles=5370)], golden) == []
        (complaint,) = tpu_schedule.regressions([row(cycles=5380)], golden)
        assert complaint.startswith("v5e resident forward: m 128, d 128, heads 8, tile 512: 10.51 bundles a pair, were")
        assert complaint.endswith(tpu_schedule.GOLDEN_COMMAND)

    def test_a_kernel_that_is_not_in_the_file_is_said(self):
        (complaint,) = tpu_schedule.regressions([row("v6e")], {})
        assert "not in the golden file" in complaint

    def test_the_committed_file_has_the_headline_of_every_chip(self):
        golden = json.loads(tpu_schedule.GOLDEN.read_text())
        assert golden["command"] == tpu_schedule.GOLDEN_COMMAND
        for chip in TPUS:
            for direction in ("forward", "backward"):
                assert tpu_schedule.key(row(chip, direction)) in golden["bundles_a_pair"]


class TestCosts:
    def rows(self) -> list[dict]:
        found = [row(chip, direction) for chip in TPUS for direction in ("forward", "backward")]
        return [each | {"kernel": path} for each in found for path in tpu_schedule.PATHS]

    def test_both_passes_of_a_tile_are_added(self):
        short = row(shape=HEADLINE._replace(tile=256))  # its backward pass is missing
        found = tpu_schedule.costs([*self.rows(), short, row() | {"kernel": "splash"}, row() | {"m": 64}])
        for kind, name in (("issue", "issue_nanoseconds"), ("time", "nanoseconds")):
            both = row()[name] + row(direction="backward")[name]
            costs = {path: tiles["512"][kind] for path, tiles in found["v5e"].items()}
            assert costs == dict.fromkeys(tpu_schedule.PATHS, pytest.approx(both, abs=1e-3))
        assert {tuple(tiles) for tiles in found["v5e"].values()} == {("512",)}

    def test_half_a_path_is_refused(self):
        with pytest.raises(ValueError, match="gathered for v6e has not both passes"):
            tpu_schedule.costs(
                [
                    each
                    for each in self.rows()
                    if (each["chip"], each["kernel"], each["direction"]) != ("v6e", "gathered", "backward")
                ]
            )

    def test_dispatch_goes_by_the_committed_schedules(self):
        assert tpu_schedule.costs(tpu_schedule.committed_rows()) == dispatch.COSTS
        assert all(set(paths["resident"]) == {"128", "256", "512"} for paths in dispatch.COSTS.values())
        assert set(dispatch.COSTS) == set(TPUS)
        assert all(set(paths) == {"resident", "gathered", "dense"} for paths in dispatch.COSTS.values())
