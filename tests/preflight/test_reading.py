"""The compiler's text, read: loops as often as they run, bytes as they move, axes as the mesh has them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from aamoe_jax.preflight import buffers, collectives, hlo, work
from pallas_kernels.block_sparse_attention.interface import SELDOM
from tests.preflight import programs
from tests.preflight.samples import ASSIGNED, LIVE, PROGRAM

LAYERS = 12
ROWS = 2048 * 1024 * 2  # bytes of [2048, 1024] in bfloat16


@pytest.fixture(scope="module")
def sample() -> hlo.Module:
    return hlo.parse(PROGRAM)


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The compiled programs by mesh."""
    command = [sys.executable, "-m", "tests.preflight.programs"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestProgram:
    def test_instructions_run_as_often_as_their_loops(self, sample):
        times = {run.instruction.name: run.times for run in hlo.runs(sample)}
        assert (times["loop"], times["gathered"], times["conv"], times["attend.3"]) == (1, LAYERS, LAYERS, 1)

    @pytest.mark.parametrize(
        ("old", "new", "trips"),
        [
            ("constant(12)", "constant(7)", 7),
            ("%start = s32[]{:T(128)} constant(0)", "%start = s32[]{:T(128)} constant(5)", 7),
            ("direction=LT", "direction=NE", 1),
            ("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}', 3),
        ],
    )
    def test_trip_counts_come_from_the_condition(self, old, new, trips):
        changed = hlo.parse(PROGRAM.replace(old, new))
        assert next(run.times for run in hlo.runs(changed) if run.instruction.name == "gathered") == trips

    def test_attributes_of_several_lines_end_no_computation(self):
        """As those of JAX's kernels: what comes after them runs too. Where no bytes are attached, arrays are moved."""
        splash = (
            '  %splash.3 = f32[8,128]{1,0} custom-call(%last), custom_call_target="tpu_custom_call", '
            'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{}"\n}}, backend_config={"flops":"7"}\n'
        )
        module = hlo.parse(PROGRAM.replace("  ROOT %attend.3", f"{splash}  ROOT %attend.3"))
        kernels = {kernel.name: kernel for kernel in work.measure(module, hlo.runs(module)).kernels}
        assert kernels["splash"] == work.Kernel("splash", 1, 7, 4 * 8 * 128 + ROWS)
        assert kernels["attend"] == work.Kernel("attend", 1, 1000, 500)

    # Of sizes of their own: programs that differ in names alone are compiled once.
    @pytest.mark.parametrize(("scope", "size", "counts"), [("every_step", 32, True), (SELDOM, 64, False)])
    def test_of_a_conditional_the_longer_branch_counts_or_the_one_that_most_steps_take(self, scope, size, counts):
        @jax.jit
        def step(x, wanted):
            with jax.named_scope(scope):
                return jax.grad(lambda x: jnp.sum(jax.lax.cond(wanted, lambda: jnp.sin(x @ x), lambda: x)))(x)

        array = jax.ShapeDtypeStruct((size, size), jnp.float32)
        text = step.lower(array, jax.ShapeDtypeStruct((), jnp.bool_)).compile().as_text()
        runs = list(hlo.runs(hlo.parse(text)))
        assert any(run.instruction.opcode == "conditional" for run in runs)
        assert (work.measure(hlo.parse(text), runs).product_flops > 0) == counts

    def test_text_without_a_program_is_refused(self):
        with pytest.raises(ValueError, match="no ENTRY computation"):
            hlo.parse("HloModule nothing")

    def test_types_have_shapes_and_places(self):
        one, other = hlo.shapes("(bf16[2,3]{1,0:T(8,128)(2,1)S(1)}, s4[5]{0})")
        assert (one.bytes, one.in_main_memory, other.bytes, other.in_main_memory) == (12, False, 3, True)
        assert hlo.shapes("f8e4m3fn[4]{0}")[0].bytes == 4


class TestWork:
    def test_products_and_kernels_are_counted_as_they_run(self, sample):
        done = work.measure(sample, hlo.runs(sample))
        assert done.product_flops == done.pass_flops == LAYERS * 2 * 2048 * 1024 * 1024
        assert done.kernels == (work.Kernel("attend", 1, 1000, 500),)

    def test_bytes_are_of_slices_and_updates_and_of_main_memory_alone(self, sample):
        done = work.measure(sample, hlo.runs(sample))
        update, cut, product = 2 * ROWS, 256 * 1024 * 2, 2 * ROWS
        collective, counter = (
            0,
            4 + 4,
        )  # both sides of the gather are in fast memory; the counter is added to a constant
        assert done.bytes == LAYERS * (update + cut + product + collective + counter) + LAYERS * 2 * 4 + 8

    def test_another_tiling_of_an_operand_inside_a_fusion_moves_nothing(self, sample):
        """As TPU7x's compiler writes slices and updates of stacked arrays."""
        text = PROGRAM
        for name, type_ in (("p0", "bf16[12,2048,1024]{2,1,0:T(16,128)(2,1)}"), ("q0", "bf16[12,256,1024]{2,1,0}")):
            text = text.replace(f"(%{name},", f"(%tiled.{name},")
            (line,) = (line for line in text.splitlines() if line.startswith(f"  %{name} = "))
            view = f"  %tiled.{name} = {type_} fusion(%{name}), kind=kLoop, {work.IN_PLACE}, calls=%product"
            text = text.replace(line, f"{line}\n{view}")
        module = hlo.parse(text)
        assert text.count(work.IN_PLACE) == 2
        assert work.measure(module, hlo.runs(module)).bytes == work.measure(sample, hlo.runs(sample)).bytes

    @pytest.mark.parametrize(
        ("line", "flops"),
        [
            ("f32[8,16] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 16 * 32),
            ("f32[8,16] convolution(%a, %b), dim_labels=bf_io->bf", 2 * 8 * 16 * 32),
        ],
    )
    def test_float32_products_take_their_passes(self, line, flops):
        for precision, passes in (("", 1), (", operand_precision={highest,highest}", 6)):
            text = "ENTRY %main (a: f32[8,32], b: f32[32,16]) -> f32[8,16] {\n  %a = f32[8,32] parameter(0)\n"
            text += f"  %b = f32[32,16] parameter(1)\n  ROOT %c = {line}{precision}\n}}\n"
            module = hlo.parse(text)
            done = work.measure(module, hlo.runs(module))
            assert (done.product_flops, done.pass_flops) == (flops, passes * flops)

    def test_a_batched_product_written_as_a_convolution_counts_its_diagonal(self):
        """Batches become a spatial dimension whose window meets one input each."""
        batch, m, k, n = 4, 8, 16, 32
        window = f"window={{size={batch} stride={batch - 1} lhs_dilate={batch}}}"
        text = f"""ENTRY %main (a: f32[{batch},{m},{k}], b: f32[{batch},{k},{n}]) -> f32[{batch},{m},{n}] {{
  %a = f32[{batch},{m},{k}]{{2,1,0}} parameter(0)
  %b = f32[{batch},{k},{n}]{{2,1,0}} parameter(1)
  ROOT %c = f32[{batch},{m},{n}]{{2,1,0}} convolution(%a, %b), {window}, dim_labels=0bf_0io->0bf
}}
"""
        module = hlo.parse(text)
        assert work.measure(module, hlo.runs(module)).product_flops == 2 * batch * m * k * n

    def test_the_products_of_a_compiled_program_are_the_model_s(self, texts):
        for sizes, text in texts.items():
            data, fsdp, _, tensor = map(int, sizes.split())
            module = hlo.parse(text)
            rows, width = programs.ROWS // (data * fsdp), programs.WIDTH
            expected = programs.LAYERS * 2 * rows * width * width / tensor
            assert work.measure(module, hlo.runs(module)).product_flops == expected, sizes


class TestCollectives:
    @pytest.mark.parametrize(
        ("written", "groups"),
        [
            ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
            ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
            ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
            ("source_target_pairs={{0,1},{1,2}}", [[0, 1], [1, 2]]),
            ("replica_groups={}", [[0, 1, 2, 3]]),
        ],
    )
    def test_groups_are_read_as_they_are_written(self, written, groups):
        assert collectives.device_groups(f"channel_id=1, {written}, dimensions={{0}}", 4) == groups

    def test_axes_are_those_along_which_members_differ(self):
        axes = {"data": 2, "fsdp": 2, "resource": 1, "tensor": 2}
        for groups, expected in (
            ([[0, 4], [1, 5]], ("data",)),
            ([[0, 2]], ("fsdp",)),
            ([[0, 1, 2, 3]], ("fsdp", "tensor")),
            ([list(range(8))], ("data", "fsdp", "tensor")),
        ):
            assert collectives.axes_of(groups, axes) == expected

    def test_loops_count(self, sample):
        axes = {"data": 2, "fsdp": 4, "resource": 1, "tensor": 2}
        (gather,) = collectives.collectives(sample, hlo.runs(sample), axes)
        assert (gather.kind, gather.axes, gather.group, gather.count) == ("all-gather", ("fsdp",), 4, LAYERS)
        assert gather.sent == LAYERS * 1024 * 1024 * 2 * 3 / 4
        assert gather.source.endswith("all_gather")

    def test_what_goes_between_slices_is_sent_by_hosts(self):
        handler = 'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        lines = [
            f"%{name} = ({shape}, u32[], token[]) send(%{operand}, %t), is_host_transfer=true, {handler}"
            f'_xla_megascale_transfer_type="{kind}"}}'
            for name, shape, operand, kind in (
                ("a", "f32[8,128]", "p", "ALL_REDUCE"),
                ("b", "f32[8,128]", "p", "ALL_REDUCE"),
                ("c", "bf16[64]", "q", "ALL_GATHER"),
                ("d", "bf16[64]", "q", "COLLECTIVE_PERMUTE"),
            )
        ]
        parameters = ["%p = f32[8,128] parameter(0)", "%q = bf16[64] parameter(1)", "%t = token[] after-all()"]
        body = "\n  ".join([*parameters, *lines, "ROOT %r = f32[8,128] copy(%p)"])
        module = hlo.parse(f"HloModule x\n\nENTRY %main (p: f32[8,128], q: bf16[64]) -> f32[8,128] {{\n  {body}\n}}\n")
        reduced, gathered, permuted = collectives.between_slices(list(hlo.runs(module)), 4)
        assert (reduced.kind, reduced.axes, reduced.group, reduced.count) == ("all-reduce", ("slices",), 4, 2)
        assert reduced.sent == 2 * 2 * 3 / 4 * 4 * 8 * 128
        assert (gathered.kind, gathered.count, gathered.sent) == ("all-gather", 1, 3 * 2 * 64)
        assert (permuted.kind, permuted.sent) == ("collective-permute", 2 * 64)
        assert collectives.collectives(module, hlo.runs(module), {"data": 8}) == ()

    def test_an_argument_that_a_fusion_has_no_use_for_moves_nothing(self):
        inside = "\n  ".join(["%p = f32[8,128] parameter(0)", "ROOT %n = f32[8,128] negate(%p)"])
        body = "\n  ".join(
            [
                "%a = f32[8,128] parameter(0)",
                "%b = f32[64,128] parameter(1)",
                "ROOT %r = f32[8,128] fusion(%a, %b), kind=kLoop, calls=%f",
            ]
        )
        heads = "%f (p: f32[8,128], q: f32[64,128]) -> f32[8,128]", "ENTRY %main (a: f32[8,128]) -> f32[8,128]"
        text = "".join(f"{head} {{\n  {lines}\n}}\n\n" for head, lines in zip(heads, (inside, body), strict=True))
        module = hlo.parse(f"HloModule x\n\n{text}")
        assert work.measure(module, hlo.runs(module)).bytes == 2 * 4 * 8 * 128

    def test_those_of_a_compiled_program_run_along_the_axes_that_it_names(self, texts):
        for sizes, text in texts.items():
            axes = dict(zip(programs.AXES, map(int, sizes.split()), strict=True))
            module = hlo.parse(text)
            found = {(part.kind, part.axes): part for part in collectives.collectives(module, hlo.runs(module), axes)}
            expected = {("all-reduce", tuple(axis for axis in ("data", "fsdp", "tensor") if axes[axis] > 1))}
            expected |= {("all-gather", ("fsdp",))} if axes["fsdp"] > 1 else set()
            expected |= {("reduce-scatter", ("tensor",))} if axes["tensor"] > 1 else set()
            assert set(found) == expected, sizes
            if axes["fsdp"] > 1:
                gather = found["all-gather", ("fsdp",)]
                whole = programs.WIDTH**2 * 4 / axes["tensor"]
                assert (gather.count, gather.group) == (programs.LAYERS, axes["fsdp"])
                assert math.isclose(gather.sent, programs.LAYERS * whole * (1 - 1 / axes["fsdp"]))


class TestBuffers:
    def test_kinds_add_up_and_fast_memory_is_left_out(self, sample):
        found = buffers.assignment(sample, ASSIGNED, LIVE)
        expected = {"argument": 6291456 + 4194304, "output": 4096, "temporary": 54525952, "constant": 512}
        assert found.bytes == expected

    def test_the_biggest_at_the_peak_come_first_with_what_they_are(self, sample):
        found = buffers.assignment(sample, ASSIGNED, LIVE).buffers
        assert [(buffer.name, buffer.kind) for buffer in found] == [
            ("saved", "temporary"),
            ("w", "argument"),
            ("x.1", "argument"),
            ("y", "temporary"),
        ]
        assert (found[0].shape, found[0].source.endswith("dynamic_update_slice")) == ("bf16[12,2048,1024]", True)

    def test_a_folder_without_notes_has_none(self, tmp_path):
        assert buffers.read_notes(tmp_path) is None
