"""From the compiler's notes to a summary, without a compiler."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import pytest

from aamoe_jax.config import DataConfig, ExperimentConfig, ModelConfig
from aamoe_jax.preflight import buffers, compiler, program
from aamoe_jax.preflight.hardware import Slice
from tests.preflight.samples import ASSIGNED, LIVE, PROGRAM

LAYERS = 12
PLACES = [[x, y, 0, 0] for x, y in itertools.product(range(4), range(4))]
TRACED = compiler.Traced({"data": 2, "fsdp": 4, "resource": 1, "tensor": 2}, PLACES, parameters=10, tokens=16 * 2048)


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    return ExperimentConfig(model=ModelConfig(d_model=1024, num_layers=LAYERS), data=DataConfig(seq_len=2048))


def summarize(config: ExperimentConfig, outcome: compiler.Outcome):
    return program.summarize(
        config, Slice.parse("v5e:4x4"), "train", TRACED, outcome, (PROGRAM, ASSIGNED, LIVE), seconds=1.0
    )


def test_a_summary_is_of_one_device(config):
    found = summarize(config, compiler.Outcome(code_bytes=7, flops=5.0))
    assert (found.devices, found.tokens, found.compiler_flops, found.fits) == (16, 16 * 2048, 5.0, True)
    memory = found.memory
    assert (memory.arguments, memory.output, memory.aliased, memory.code) == (10485760, 4096, 6291456, 7)
    assert memory.peak == 10485760 + 4096 + 54525952 + 512 + 7
    (gather,) = found.network
    assert gather.collective.axes == ("fsdp",)
    # Devices 0, 2, 4, 6 of the mesh: (0, 0), (0, 2), (1, 0), (1, 2): neighbours in x, every other one in y.
    assert gather.seconds == pytest.approx(gather.collective.sent / (1.5 * 50e9))


def test_what_the_compiler_refused_does_not_fit(config):
    found = summarize(config, compiler.Outcome(refusal="RESOURCE_EXHAUSTED: too much"))
    assert not found.fits
    assert found.product_flops == summarize(config, compiler.Outcome()).product_flops


def test_notes_are_read_from_the_biggest_program(tmp_path):
    for name, text in (("a", PROGRAM), ("b", "HloModule")):
        stem = f"module_{name}.after_optimizations"
        for end, content in (("", text), ("-buffer-assignment", ASSIGNED * (name == "a")), ("-live-range", LIVE)):
            (tmp_path / f"{stem}{end}.txt").write_text(content)
    assert buffers.read_notes(tmp_path) == (PROGRAM, ASSIGNED, LIVE)
    assert not buffers.are_placed(tmp_path)
    (tmp_path / "module_a.after_optimizations_after_buffer_assignment.txt").write_text("")
    assert buffers.are_placed(tmp_path)


def test_a_slice_is_refused_before_anything_starts(config):
    with pytest.raises(program.ConfigError, match="expected such as"):
        program.compile_apart(config, "v9:2x2", "train")


def test_a_step_is_traced_over_the_devices_that_are_given(config, monkeypatch):
    """On this machine's own device, which has no place in a torus but what it is given here."""
    device = jax.devices()[0]
    small = dataclasses.replace(
        config,
        model=ModelConfig(d_model=32, num_heads=2, num_layers=1, vocab_size=64, kernel="xla"),
        data=DataConfig(seq_len=64),
        training=dataclasses.replace(config.training, batch_size=2),
    )
    monkeypatch.setattr(compiler, "place_of", lambda _: [0, 0, 0, 0])
    for mode, mark in (("train", "learning_rate"), ("eval", "nll")):
        lowered, traced = compiler.trace(small, mode, [device])
        assert (traced.tokens, traced.places, set(traced.mesh.values())) == (128, [[0, 0, 0, 0]], {1})
        assert mark in str(lowered.out_info)
