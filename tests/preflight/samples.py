# ruff: noqa: E501 (a program's lines are as long as its compiler writes them)
"""Compilers' text to read: cut down from what the TPU compiler writes, and summaries made up for the tests."""

from __future__ import annotations

import dataclasses

from aamoe_jax.preflight.buffers import Buffer
from aamoe_jax.preflight.collectives import Collective
from aamoe_jax.preflight.summary import Memory, Network, Summary
from aamoe_jax.preflight.work import Kernel

GIB = 2**30

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=16

%update (p0: bf16[12,2048,1024], p1: s32[], p2: bf16[2048,1024]) -> bf16[12,2048,1024] {
  %p0 = bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p2 = bf16[2048,1024]{1,0:T(8,128)(2,1)} parameter(2)
  %row = bf16[1,2048,1024]{2,1,0:T(8,128)(2,1)} bitcast(%p2)
  %p1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %dus = bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%p0, %row, %p1, %zero, %zero)
}

%slice (q0: bf16[12,256,1024], q1: s32[]) -> bf16[256,1024] {
  %q0 = bf16[12,256,1024]{2,1,0:T(8,128)(2,1)} parameter(0)
  %q1 = s32[]{:T(128)S(6)} parameter(1)
  %zero.1 = s32[]{:T(128)} constant(0)
  %cut = bf16[1,256,1024]{2,1,0} dynamic-slice(%q0, %q1, %zero.1, %zero.1), dynamic_slice_sizes={1,256,1024}
  ROOT %flat = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} bitcast(%cut)
}

%product (r0: bf16[2048,1024], r1: bf16[1024,1024]) -> bf16[2048,1024] {
  %r0 = bf16[2048,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %r1 = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %conv = bf16[2048,1024]{1,0:T(8,128)(2,1)} convolution(%r0, %r1), dim_labels=bf_io->bf, metadata={op_name="jit(step)/jvp()/while/body/dot_general"}
}

%body (arg: (s32[], bf16[2048,1024], bf16[12,2048,1024], bf16[12,256,1024])) -> (s32[], bf16[2048,1024], bf16[12,2048,1024], bf16[12,256,1024]) {
  %arg = (s32[]{:T(128)}, bf16[2048,1024]{1,0:T(8,128)(2,1)}, bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)}, /*index=3*/bf16[12,256,1024]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)S(6)} add(%i, %one)
  %x = bf16[2048,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=1
  %kept = bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=2
  %weights = bf16[12,256,1024]{2,1,0:T(8,128)(2,1)} get-tuple-element(%arg), index=3
  %saved = bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)} fusion(%kept, %i, %x), kind=kLoop, calls=%update, metadata={op_name="jit(step)/jvp()/while/body/dynamic_update_slice"}
  %part = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%weights, %i), kind=kLoop, calls=%slice
  %gathered = bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)} all-gather(%part), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7},{8,10,12,14},{9,11,13,15}}, dimensions={0}, metadata={op_name="jit(step)/jvp()/while/body/all_gather"}
  %y = bf16[2048,1024]{1,0:T(8,128)(2,1)} fusion(%x, %gathered), kind=kOutput, calls=%product
  ROOT %out = (s32[], bf16[2048,1024], bf16[12,2048,1024], bf16[12,256,1024]) tuple(%next, %y, %saved, %weights)
}

%condition (arg.1: (s32[], bf16[2048,1024], bf16[12,2048,1024], bf16[12,256,1024])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %arg.1 = (s32[]{:T(128)}, bf16[2048,1024]{1,0}, bf16[12,2048,1024]{2,1,0}, bf16[12,256,1024]{2,1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (w: bf16[12,256,1024], x.1: bf16[2048,1024]) -> f32[8,128] {
  %start = s32[]{:T(128)} constant(0)
  %start.1 = s32[]{:T(128)} copy(%start)
  %w = bf16[12,256,1024]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %x.1 = bf16[2048,1024]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="x"}
  %room = bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %init = (s32[], bf16[2048,1024], bf16[12,2048,1024], bf16[12,256,1024]) tuple(%start.1, %x.1, %room, %w)
  %loop = (s32[], bf16[2048,1024], bf16[12,2048,1024], bf16[12,256,1024]) while(%init), condition=%condition, body=%body
  %last = bf16[2048,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
  ROOT %attend.3 = f32[8,128]{1,0:T(8,128)} custom-call(%last), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"AA(){}==","cost_estimate":{"flops":"1000","transcendentals":"7","bytes_accessed":"500"}}}
}
"""
ASSIGNED = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <5 add.19 @0> (size=512,offset=0): bf16[]{:T(256)}
allocation 1: size 6291456, parameter 0, shape |bf16[12,256,1024]| at ShapeIndex {}, output shape is |bf16[12,256,1024]|, maybe-live-out:
 value: <112 w @0> (size=6291456,offset=0): bf16[12,256,1024]{2,1,0:T(8,128)(2,1)}
allocation 2: size 4194304, parameter 1, shape |bf16[2048,1024]| at ShapeIndex {}:
 value: <107 x.1 @0> (size=4194304,offset=0): bf16[2048,1024]{1,0:T(8,128)(2,1)}
allocation 3: size 4096, maybe-live-out:
 value: <108 attend.3 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 4: size 512, constant:
 value: <104 start @0> (size=512,offset=0): s32[]{:T(128)}
allocation 5: size 54525952, preallocated-temp:
 value: <13 less @0> (size=512,offset=50331648): pred[]{:T(512)}
 value: <41 y @0> (size=4194304,offset=50331648): bf16[2048,1024]{1,0:T(8,128)(2,1)}
 value: <42 saved @0> (size=50331648,offset=0): bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)}
 value: <119 room @0> (size=50331648,offset=0): bf16[12,2048,1024]{2,1,0:T(8,128)(2,1)}
allocation 6: size 2621440, color 1, preallocated-temp:
 value: <40 gathered @1> (size=2097152,offset=0): bf16[1024,1024]{1,0:T(8,128)(2,1)S(1)}
"""
LIVE = """HloLiveRange (max 71):
  BufferLiveRange:
    saved{}:23-30
  Live ranges at 27 (peak):
    saved{}: 50331648 bytes (cumulative: 50331648 bytes)
    y{}: 4194304 bytes (cumulative: 54525952 bytes)
    w{}: 6291456 bytes (cumulative: 60817408 bytes)
    x.1{}: 4194304 bytes (cumulative: 65011712 bytes)
    gathered{}: 2097152 bytes (cumulative: 67108864 bytes)
"""

SUMMARY = Summary(
    topology="v5p:4x4x4",
    mode="train",
    mesh={"data": 2, "fsdp": 32, "resource": 1, "tensor": 1},
    devices=64,
    tokens=64 * 4096,
    parameters=10**9,
    memory=Memory(arguments=20 * GIB, output=GIB, aliased=19 * GIB, temporaries=40 * GIB, code=0, limit=95.0 * GIB),
    buffers=(
        Buffer("temporary", 30 * GIB, "saved", "bf16[4,2048,1024]", "jit(step)/jvp()/while/body/dynamic_update_slice"),
        Buffer("argument", 8 * GIB, "w", "f32[4,64,64]", "state.params['blocks']['query']"),
    ),
    refusal="",
    model_flops=1e14,
    product_flops=90 * 10**12,
    pass_flops=110 * 10**12,
    kernel_flops=0.4e14,
    compiler_flops=1e13,
    kernel_seconds=0.1,
    moved_bytes=246 * 10**9,
    kernels=(Kernel("block_sparse_attention_forward", 8, 10**12, 10**9),),
    network=(
        Network(Collective("all-gather", ("fsdp",), 32, 12, 1e10, tuple(range(32)), "jit(step)/all_gather"), 0.05),
    ),
    compile_seconds=60.0,
)
REFUSED = dataclasses.replace(
    SUMMARY,
    memory=dataclasses.replace(SUMMARY.memory, temporaries=90 * GIB),
    refusal="RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (111.00G) "
    "exceeds available HBM (95.74G).",
)
"""The same with more temporaries than there is room for."""
