"""The reader of a compiled layer, on a module thinned from a real one and listings by hand."""

import json

import pytest

from benchmarks import compiled_layer
from pallas_kernels.chips import TPUS

MODULE = """\
HloModule jit_step, is_scheduled=true

FileNames
1 "aamoe_jax/aamoe/pooled.py"
2 "pallas_kernels/block_sparse_attention/tables.py"
3 "aamoe_jax/aamoe/budget.py"

FunctionNames
1 "scores"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=1 end_line=1 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=1 end_line=1 column=1 end_column=2}

StackFrames
7 {file_location_id=1 parent_frame_id=1}
8 {file_location_id=2 parent_frame_id=1}
9 {file_location_id=3 parent_frame_id=1}

%fused.1 (p.1: bf16[256,128], p.2: bf16[128,128]) -> bf16[256,128] {
  %p.1 = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.2 = bf16[128,128]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = bf16[256,128]{1,0:T(8,128)(2,1)} convolution(%p.1, %p.2), dim_labels=bf_io->bf
}

%fused.2 (p.3: s32[1024], p.4: s32[8]) -> s32[8] {
  %p.3 = s32[1024]{0:T(1024)} parameter(0)
  %p.4 = s32[8]{0:T(128)} parameter(1)
  ROOT %gather.1 = s32[8]{0:T(128)} gather(%p.3, %p.4), offset_dims={}
}

%condition.1 (state.1: (s32[], s32[8])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, s32[8]{0:T(128)}) parameter(0)
  %bound.1 = s32[]{:T(128)} constant(6)
  %counter.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less.1 = pred[]{:T(512)} compare(%counter.1, %bound.1), direction=LT
}

%body.1 (state.2: (s32[], s32[8])) -> (s32[], s32[8]) {
  %state.2 = (s32[]{:T(128)}, s32[8]{0:T(128)}) parameter(0)
  ROOT %add.1 = s32[8]{0:T(128)S(1)} add(%state.2, %state.2), metadata={op_name="x" stack_frame_id=9}
}

%cheap.1 (q.1: f32[8]) -> f32[8] {
  %q.1 = f32[8]{0:T(128)} parameter(0)
  ROOT %tanh.1 = f32[8]{0:T(128)S(1)} tanh(%q.1), metadata={op_name="x" stack_frame_id=9}
}

%dear.1 (q.2: f32[8]) -> f32[8] {
  %q.2 = f32[8]{0:T(128)} parameter(0)
  ROOT %tanh.2 = f32[8]{0:T(128)S(1)} tanh(%q.2), metadata={op_name="x" stack_frame_id=9}
}

ENTRY %main.1 (a.1: bf16[256,128], b.1: bf16[128,128]) -> bf16[256,128] {
  %a.1 = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(0)
  %b.1 = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %table.1 = s32[1024]{0:T(1024)} parameter(2)
  %index.1 = s32[8]{0:T(128)S(1)} parameter(3)
  %fusion.1 = bf16[256,128]{1,0:T(8,128)(2,1)} fusion(%a.1, %b.1), kind=kOutput, calls=%fused.1, metadata={op_name="x" stack_frame_id=7}
  %fusion.2 = s32[8]{0:T(128)} fusion(%table.1, %index.1), kind=kCustom, calls=%fused.2, metadata={op_name="x" stack_frame_id=8}
  %fusion.3 = s32[8]{0:T(128)} fusion(%table.1, %fusion.2), kind=kCustom, calls=%fused.2, metadata={op_name="x" stack_frame_id=8}
  %while.1 = (s32[]{:T(128)}, s32[8]{0:T(128)}) while(%table.1), condition=%condition.1, body=%body.1
  %cond.1 = f32[8]{0:T(128)} conditional(%index.1, %a.1, %a.1), branch_computations={%cheap.1, %dear.1}
  %copy-start.1 = (bf16[256,128]{1,0:T(8,128)(2,1)}, u32[]) copy-start(%fusion.1)
  %empty.1 = bf16[256,128]{1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer", metadata={op_name="x" stack_frame_id=8}
  %copy.1 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} copy(%fusion.1)
  %block_sparse_attention_forward.3 = bf16[256,128]{1,0:T(8,128)(2,1)} custom-call(%copy.1), custom_call_target="tpu_custom_call", metadata={op_name="x" stack_frame_id=8}
  ROOT %selection.1 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} custom-call(%copy.1), custom_call_target="tpu_custom_call", metadata={op_name="x" stack_frame_id=8}
}
"""  # noqa: E501
LISTING = """\
     0   :  {} /* entry bundle */
  0x10 LB: > {  %s1_s1 = sadd.s32 1, %s2_s2 }
  0x11   : > {  %p1_p1 = scmp.ge.s32.totalorder %s1_s1, TRIPS /* loop exit test */ }
  0x20   :  {  %3 = vsyncpa [#allocation1], 1 }
"""


def listing(trips: int) -> str:
    """Two bundles, and `trips` times another two."""
    return LISTING.replace("TRIPS", str(trips))


@pytest.fixture
def dump(tmp_path):
    trips = {"fusion.1": 100, "fusion.2": 30, "add.1": 4, "tanh.1": 1, "tanh.2": 9, "copy.1": 2, "selection.1": 5}
    for number, (name, count) in enumerate(trips.items()):
        (tmp_path / f"17{number}-{name}-71-final_bundles.txt").write_text(listing(count))
        (tmp_path / f"17{number}-{name}-72-schedule-analysis_final_bundles.txt").write_text("none")
    equal = "key:fusion.2\nordinal:1\nequivalent_hlos[size=2]:\n  fusion.2\n  fusion.3\n"
    (tmp_path / "17-TLP-00-deduplication-map.txt").write_text(equal)
    return tmp_path


def test_every_operation_counts_as_often_as_it_runs(dump):
    """Equal ones by one listing, bodies of loops by their trips, of a conditional the dearer branch; no kernel of
    attention, and no copy beside other work."""
    costs = compiled_layer.costs_of(compiled_layer.parse(MODULE), dump)
    assert [(cost.part, cost.cycles, cost.times) for cost in costs] == [
        ("router products", 202, 1),
        ("tables", 62, 1),
        ("tables", 62, 1),
        ("budget", 10, 6),
        ("budget", 20, 1),
        ("tables", 0, 1),
        ("copies", 6, 1),
        ("selection", 12, 1),
    ]


def test_bytes_are_those_of_hbm_and_of_what_is_read_of_a_table(dump):
    product, first, second, *_, empty, copy, _ = compiled_layer.costs_of(compiled_layer.parse(MODULE), dump)
    assert product.bytes == 2 * 256 * 128 * 2  # the other factor is in VMEM
    assert first.bytes == 2 * 8 * 4  # eight numbers of a table, and the result
    assert second.bytes == 3 * 8 * 4
    assert empty.bytes == 0  # room for what a kernel writes
    assert copy.bytes == 256 * 128 * 2  # to VMEM


UPDATE = """\
HloModule jit_step

%fused.1 (p.1: f32[64,128], p.2: f32[8,128], p.3: s32[]) -> f32[64,128] {
  %p.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %p.2 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %p.3 = s32[]{:T(128)} parameter(2)
  ROOT %update.1 = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%p.1, %p.2, %p.3, %p.3)
}

ENTRY %main.1 (a.1: f32[64,128]) -> f32[64,128] {
  %a.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %b.1 = f32[8,128]{1,0:T(8,128)} parameter(1)
  %c.1 = s32[]{:T(128)S(6)} parameter(2)
  %fusion.1 = f32[64,128]{1,0:T(8,128)} fusion(%a.1, %b.1, %c.1), kind=kLoop, calls=%fused.1
  %d.1 = f32[64,128]{1,0:T(8,128)} dynamic-update-slice(%a.1, %b.1, %c.1, %c.1)
  ROOT %less.1 = pred[64,128]{1,0:T(8,128)(4,1)} compare(%d.1, %d.1), direction=LT
}
"""


def test_an_update_in_place_moves_what_it_writes_and_booleans_are_bytes(tmp_path):
    fused, plain, compared = compiled_layer.costs_of(compiled_layer.parse(UPDATE), tmp_path)
    assert fused.bytes == plain.bytes == 2 * 8 * 128 * 4
    assert compared.bytes == 2 * 64 * 128 * 4 + 64 * 128


def test_time_is_issue_or_bytes():
    chip = TPUS["v5e"]
    assert compiled_layer.Cost("x", 1500, 0, 2).nanoseconds(chip) == pytest.approx(2000)
    assert compiled_layer.Cost("x", 1, 820_000, 1).nanoseconds(chip) == pytest.approx(1000)


def test_rows_fill_a_device_and_a_dense_layer_is_compiled_once():
    """Longer rows than it has tokens are one row."""
    assert compiled_layer.wanted(["v5e", "v6e"], [128], [256, 1024, 8192], 1024) == [
        ("v5e", "aamoe", 128, 256, 4),
        ("v5e", "dense", None, 1024, 1),
        ("v6e", "aamoe", 128, 256, 4),
        ("v6e", "dense", None, 1024, 1),
        ("v5e", "aamoe", 128, 1024, 1),
        ("v6e", "aamoe", 128, 1024, 1),
        ("v5e", "aamoe", 128, 8192, 1),
        ("v5e", "dense", None, 8192, 1),
        ("v6e", "aamoe", 128, 8192, 1),
        ("v6e", "dense", None, 8192, 1),
    ]
    assert compiled_layer.wanted(["v5e"], [128, 256], [512], 0) == [
        ("v5e", "aamoe", 128, 512, 1),
        ("v5e", "dense", None, 512, 1),
        ("v5e", "aamoe", 256, 512, 1),
    ]


def test_larger_resources_are_fewer_and_have_as_many_keys():
    for m in (64, 128, 256):
        layer = compiled_layer.config(m).aamoe
        keys = [count * layer.chunk_size for count in (layer.num_experts, layer.budget.beta, layer.max_resources)]
        assert keys == [8192, 1024, 4096]


def test_what_is_done_is_kept_and_the_rest_is_compiled(tmp_path, monkeypatch):
    output, compiled = tmp_path / "x.json", []
    done = {"chip": "v5e", "layer": "aamoe", "m": 128, "length": 256, "rows": 2, "parts": {"products": 3.0}}
    output.write_text(json.dumps({"command": "python -m first", "rows": [done]}))

    def measured(*key):
        compiled.append(key)
        return dict(zip(compiled_layer.Key._fields, key, strict=True)) | {"parts": {"tables": 2.0}}

    monkeypatch.setattr(compiled_layer, "measured", measured)
    flags = {"output": str(output), "chips": ["v5e"], "sizes": ["128"], "lengths": ["256"], "tokens": 512}
    monkeypatch.setattr(compiled_layer, "FLAGS", type("Flags", (), flags))
    compiled_layer.main()
    assert compiled == [("v5e", "dense", None, 512, 1)]
    record = json.loads(output.read_text())
    assert record["rows"][0] == done
    first, second = record["command"].splitlines()
    assert (first, "benchmarks.compiled_layer" in second) == ("python -m first", True)
    text = output.with_suffix(".md").read_text()
    assert "not measured" in text
    assert "| v5e | aamoe | 128 | 256 | 2 | 3 | 3 | 0 |" in text
