"""Summaries: modelled times from the chip's limits, tables, and what to change where a program is too big."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from aamoe_jax.config import (
    AAMoEConfig,
    BudgetConfig,
    ConfigError,
    DataConfig,
    ExperimentConfig,
    ModelConfig,
    TrainingConfig,
)
from aamoe_jax.cost import training_flops
from aamoe_jax.preflight import closed_form, report
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.summary import Summary
from aamoe_jax.preflight.work import Kernel
from aamoe_jax.shards import WHOLE, Shards
from benchmarks.tpu_schedule import RESULTS
from pallas_kernels import chips
from pallas_kernels.block_sparse_attention.tpu import dispatch
from tests.preflight.samples import GIB, REFUSED, SUMMARY


def experiment(**options) -> ExperimentConfig:
    """Options of the layer, or of the model."""
    layer = {"chunk_size": 64, "max_resources": 6, "budget": BudgetConfig(beta=(2.0, 4.0, 8.0, 8.0))}
    layer |= {name: options.pop(name) for name in ("num_experts", "budget") if name in options}
    return ExperimentConfig(
        model=ModelConfig(d_model=1024, num_heads=8, num_layers=4, aamoe=AAMoEConfig(**layer), **options),
        data=DataConfig(seq_len=4096),
        training=TrainingConfig(batch_size=64),
    )


class TestHardware:
    def test_a_slice_is_read_from_its_name(self):
        piece = Slice.parse("v5p:8x8x8")
        assert (piece.chip, piece.chips, piece.devices_per_chip) == ("v5p", 512, 1)
        assert Slice.parse("tpu7x:4x4x4").devices_per_chip == 2
        assert piece.device.flops == 459e12  # a device of v5p is both cores of a chip
        assert (piece.name, piece.count) == ("v5p:8x8x8", 1)
        two = Slice.parse("2xv5p:8x8x8")
        assert (two.name, two.count, two.chips) == ("v5p:8x8x8", 2, 1024)

    @pytest.mark.parametrize("name", ["v9:2x2", "v5p", "v5p:8x", "v5e:0", "0xv5p:8x8x8", "x2v5p:8x8x8"])
    def test_other_names_are_refused(self, name):
        with pytest.raises(ConfigError, match="expected such as v5p:8x8x8"):
            Slice.parse(name)

    @pytest.mark.parametrize(
        ("topology", "places", "links"),
        [
            ("v5p:4x4x4", [(x, 0, 0, 0) for x in range(4)], 2),  # a ring
            ("v5p:4x4x4", [(x, y, 0, 0) for x in range(4) for y in range(4)], 4),  # two rings
            ("v5p:2x2x1", [(0, 0, 0, 0), (1, 0, 0, 0)], 1),  # two neighbours
            ("v5p:8x8x8", [(0, 0, 0, 0), (2, 0, 0, 0), (4, 0, 0, 0), (6, 0, 0, 0)], 1),  # a ring, shared by two groups
            ("v5e:8x16", [(x, 0, 0, 0) for x in range(8)], 1),  # a line: only 16 close to a ring
            ("tpu7x:4x4x4", [(x, 0, 0, core) for x in range(4) for core in (0, 1)], 1),  # a ring, for two cores
            ("tpu7x:4x4x4", [(0, 0, 0, 0), (0, 0, 0, 1)], 6),  # the two halves of a chip
        ],
    )
    def test_groups_have_the_links_between_them(self, topology, places, links):
        piece = Slice.parse(topology)
        assert piece.group_bandwidth(places) == links * piece.kind.link


class TestClosedForm:
    def test_a_token_pays_for_its_budget_up_to_its_slots(self):
        config = experiment().model
        assert closed_form.pairs_per_token(config) == 2 + 4 + 6 + 6
        assert closed_form.pairs_per_token(experiment(pattern=("aamoe", "parallel")).model) == 2 + 6

    def test_the_step_s_flops_are_those_of_cost(self):
        config = experiment()
        given = {"pairs_local": 3, "pairs_context": 10, "pairs_expert": 5}
        spent = {kind: np.asarray(4096 * pairs) for kind, pairs in given.items()}
        assert closed_form.step_flops(config, 4096, "train") == training_flops(config.model, 1, 4096, spent)
        assert closed_form.step_flops(config, 4096, "train") == 3 * closed_form.step_flops(config, 4096, "eval")

    def test_kernels_count_their_pairs_and_what_is_recomputed(self):
        config = experiment()
        pair = 18 * 2 * config.model.aamoe.chunk_size * config.model.d_model  # one product
        forward, backward = (Kernel(f"block_sparse_attention_{part}", 4, 9, 9) for part in ("forward", "backward"))
        again = dataclasses.replace(forward, times=8)
        window = Kernel("local_window_forward", 99, 9, 9)
        for kernels, mode, products in (
            ([forward], "eval", 2),
            ([forward, backward, window], "train", 7),
            ([again, backward, window], "train", 9),
            ([window], "train", 0),
        ):
            assert (
                closed_form.kernel_work(config, Slice.parse("v5p:4x4x4"), WHOLE, 10.0, mode, kernels).flops
                == 10 * pair * products
            )

    @pytest.mark.parametrize(
        ("topology", "path", "tensor", "tabled", "met", "cores"),
        [
            ("v5e:4x4", "resident", 1, 128, 64 + 64, 1),
            ("v5p:4x4x4", "resident", 1, 128, 32 + 64 + 2 * 64, 2),  # each core has half of the tokens
            ("v5p:4x4x4", "gathered", 1, 256, 64 + 64, 2),  # 128 is not tabled
            ("v5p:4x4x4", "gathered", 8, 256, 64 + 64, 1),  # a core has no half of a head
        ],
    )
    def test_kernels_take_what_their_schedules_say(self, topology, path, tensor, tabled, met, cores):
        """A row of 4,096 tokens, 64 chunks, 64 experts; each that a window meets pads half a tile of 128."""
        config, piece = experiment(num_experts=64), Slice.parse(topology)
        name = {"resident": "block_sparse_attention", "gathered": "gathered"}[path]
        kernels = [Kernel(f"{name}_{part}", 4, 9, 9) for part in ("forward", "backward")]
        done = closed_form.kernel_work(config, piece, Shards(tensor=tensor), 4096 / tensor, "train", kernels)
        a_pair = 1e-9 * dispatch.COSTS[piece.chip][path][str(tabled)]["issue"] * 64 / 128 / tensor  # m = 64
        seconds = a_pair * (4096 * (2 + 4 + 6 + 6) + 4 * met * 64) / cores
        assert done.seconds == pytest.approx(1.35 * seconds), "a chip takes longer than its schedule says"

    def test_a_call_has_the_rows_of_one_accumulated_step_and_a_part_of_the_resources(self):
        config = experiment()
        kernels = [Kernel(f"block_sparse_attention_{part}", 4, 9, 9) for part in ("forward", "backward")]

        def seconds(rows: int, shards: Shards = WHOLE, accumulate: int = 1) -> float:
            given = dataclasses.replace(config, training=TrainingConfig(batch_size=64, accumulate=accumulate))
            tokens = 4096 * rows / shards.resource
            return closed_form.kernel_work(given, Slice.parse("v5e:4x4"), shards, tokens, "train", kernels).seconds

        assert seconds(8, accumulate=8) == pytest.approx(8 * seconds(1))
        assert seconds(8) != pytest.approx(8 * seconds(1))  # other windows and tiles
        assert seconds(1) / 4 < seconds(1, Shards(resource=4)) < seconds(1)

    def test_dense_kernels_take_the_same_whatever_is_bought(self):
        kernels = [Kernel(f"dense_attention_{part}", 4, 9, 9) for part in ("forward", "backward")]
        few, many = experiment(), experiment(budget=BudgetConfig(beta=6.0))
        found = [
            closed_form.kernel_work(config, Slice.parse("v6e:4x4"), WHOLE, 4096.0, "train", kernels).seconds
            for config in (few, many)
        ]
        assert found[0] == found[1] > 0

    def test_the_kernels_of_a_pooled_router_are_counted_by_what_is_attached(self):
        config, piece = experiment(), Slice.parse("v5p:4x4x4")
        kernels = [Kernel("choice_forward", 4, 10**12, 9), Kernel("choice_backward", 4, 2 * 10**12, 9)]
        done = closed_form.kernel_work(config, piece, WHOLE, 10.0, "train", kernels)
        assert done.flops == 3 * 10**12
        assert done.seconds == pytest.approx(1.35 * 3e12 / (closed_form.CHOICE_RATE["v5p"] * piece.device.flops))

    def test_dense_attention_is_counted_by_its_schedule(self):
        """Two products in the forward pass, four and three in the two kernels of the backward pass."""
        config, piece = experiment(), Slice.parse("v5p:4x4x4")
        names = "splash_mha_fwd_segmented_residuals", "splash_mha_dkv_no_residuals", "splash_mha_dq_no_residuals"
        kernels = [Kernel(name, times, 0, 9) for name, times in zip(names, (6, 3, 3), strict=True)]
        done = closed_form.kernel_work(config, piece, WHOLE, 4096.0, "train", kernels)
        length = config.data.seq_len
        product = 4096 * 2 * config.model.d_model * (length + min(512, length)) / 2
        forward, backward = closed_form.SPLASH_RATE["v5p"]
        assert done.flops == pytest.approx((6 * 2 + 3 * (4 + 3)) * product)
        at_the_peak = 1.35 * product / piece.device.flops
        assert done.seconds == pytest.approx(at_the_peak * (6 * 2 / forward + 3 * (4 + 3) / backward))

    def test_rates_of_dense_attention_are_those_of_the_committed_schedules(self):
        rows = json.loads((RESULTS / "tpu_schedule.json").read_text())["rows"]
        for chip, rates in closed_form.SPLASH_RATE.items():
            for direction, rate in zip(("forward", "backward"), rates, strict=True):
                (row,) = (r for r in rows if (r["chip"], r["kernel"], r["direction"]) == (chip, "splash", direction))
                cores = chips.TPUS[chip].device_cores if direction == "backward" else 1
                assert rate == pytest.approx(row["share_of_peak"] / cores, abs=0.006)


class TestSummary:
    def test_a_summary_survives_its_text(self):
        assert Summary.from_json(SUMMARY.to_json()) == SUMMARY

    def test_times_are_the_limits_and_their_sum(self):
        limits = SUMMARY.limits
        assert limits == {
            "compute": pytest.approx(110e12 / 459e12 + 0.1),
            "HBM": pytest.approx(246e9 / 2.46e12),
            "ICI": 0.05,
            "DCN": 0.0,
        }
        assert (SUMMARY.bound, SUMMARY.best_seconds) == ("compute", limits["compute"])
        assert SUMMARY.step_seconds == pytest.approx(sum(limits.values()))

    def test_rates_follow_from_the_step(self):
        seconds = SUMMARY.step_seconds
        assert SUMMARY.mfu(seconds) == pytest.approx(1e14 / 459e12 / seconds)
        assert SUMMARY.tokens_per_second_per_chip == pytest.approx(4096 / seconds)
        assert SUMMARY.days_per_trillion == pytest.approx(1e12 / (64 * 4096) * seconds / 86400)
        halves = dataclasses.replace(SUMMARY, topology="tpu7x:4x4x2")
        assert (halves.chips, SUMMARY.chips) == (32, 64)


class TestTables:
    def test_one_row_per_slice(self):
        lines = report.overview([SUMMARY, REFUSED]).splitlines()
        assert len(lines) == 4
        assert len({len(line) for line in lines}) == 1
        assert f"| {SUMMARY.mfu(SUMMARY.step_seconds):.1%} " in lines[2]
        assert lines[3].rstrip(" |").endswith("too big")
        assert "%" not in lines[3]

    def test_details_name_buffers_by_what_they_are(self):
        text = report.details(SUMMARY)
        assert "forward: dynamic_update_slice" in text
        assert "state.params.blocks.query" in text
        assert "| all-gather | fsdp | 32      | 12       | 9.313    | 50.00  | 0.00   |" in text


class TestTooBig:
    def test_the_message_has_the_buffers_and_the_compiler_s_words(self):
        text = report.too_big(REFUSED, experiment())
        assert text.startswith("v5p:4x4x4: needs 111.0 GiB a device, 16.0 GiB more than the 95.00 GiB there are")
        assert "exceeds available HBM (95.74G)" in text
        assert " 30.00 GiB  bf16[4,2048,1024]  forward: dynamic_update_slice" in text

    @pytest.mark.parametrize(
        ("remat", "batch_size", "mesh", "first"),
        [
            ("none", 32, {}, "ModelConfig.remat = 'full'"),
            ("full", 128, {}, "TrainingConfig.accumulate = 2: 1 instead of 2 rows"),
            ("full", 64, {}, "MeshConfig.resource = 2"),
        ],
    )
    def test_remedies_are_those_that_apply_and_the_best_comes_first(self, remat, batch_size, mesh, first):
        base = experiment(remat=remat)
        config = dataclasses.replace(base, training=TrainingConfig(batch_size=batch_size))
        kept = dataclasses.replace(REFUSED.buffers[0], bytes=60 * GIB)
        remedies = report.advice(dataclasses.replace(REFUSED, buffers=(kept,)), config)
        assert remedies[0].startswith(first)
        assert all("GiB less)" in remedy for remedy in remedies)
        assert any("MeshConfig.data = 1, fsdp = 64" in remedy and "10.0 GiB less" in remedy for remedy in remedies)
        assert any("remat" in remedy for remedy in remedies) == (remat != "full")
