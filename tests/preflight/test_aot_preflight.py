"""Preflight with the TPU compiler itself, where libtpu is installed: `make test-aot`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import pickle

import pytest

from aamoe_jax.config import ConfigError, MeshConfig, TrainingConfig
from aamoe_jax.preflight.collectives import SLICES
from aamoe_jax.preflight.hardware import Slice
from aamoe_jax.preflight.program import compile_apart
from aamoe_jax.preflight.report import too_big
from tests.preflight import golden

INSTALLED = importlib.util.find_spec("libtpu") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="libtpu is not installed: make test-aot")


@pytest.mark.parametrize("topology", golden.MESHES)
def test_the_step_is_what_it_was(topology):
    """Sizes that padding and scheduling touch within 5 %, everything else exactly."""
    known = json.loads(golden.FILE.read_text())
    version = importlib.metadata.version("libtpu")
    if version != known["libtpu"]:
        pytest.skip(f"the golden file is libtpu {known['libtpu']}'s, this is {version}: {golden.COMMAND}")
    found, expected = golden.compiled(topology), known[topology]
    for loose in ("temporaries", "moved_bytes"):
        assert found.pop(loose) == pytest.approx(expected.pop(loose), rel=0.05), loose
    assert found == expected


def test_too_big_is_said_in_our_words_with_the_compiler_s_limit():
    config = golden.experiment(MeshConfig(fsdp=4), vocab_size=32_768)
    config = dataclasses.replace(config, training=TrainingConfig(batch_size=1024))
    summary = compile_apart(config, "v5e:2x2", "train", "placed")
    assert not summary.fits
    assert summary.memory.peak > summary.memory.limit
    assert max(summary.buffers, key=lambda buffer: buffer.bytes) == summary.buffers[0]
    assert "32768]" not in summary.buffers[0].shape  # the loss does not hold the logits' gradient at the peak
    text = too_big(summary, config)
    assert "exceeds available HBM (15.75G)" in text
    assert "TrainingConfig.accumulate = 2: 128 instead of 256 rows at a time" in text


def test_an_executable_is_kept(tmp_path):
    config = golden.experiment(MeshConfig(fsdp=4), kernel="xla")
    summary = compile_apart(config, "v5e:2x2", "eval", "compiled", tmp_path / "step")
    assert summary.memory.code > 0
    assert summary.compiler_flops > 0
    payload, _, _ = pickle.loads((tmp_path / "step").read_bytes())
    assert len(payload) > summary.memory.code / 2


def test_only_gradients_cross_the_network_between_slices():
    """Of two slices, after they have been reduced over all rows of a slice; and scalars: norms and counts."""
    summary = compile_apart(golden.experiment(MeshConfig(data=4, fsdp=8)), "2xv5e:4x4", "train", "placed")
    assert summary.devices == summary.chips == 32
    (across,) = (part for part in summary.network if part.dcn_seconds > 0)
    assert (across.collective.kind, across.collective.axes, across.seconds) == ("all-reduce", (SLICES,), 0)
    # Float32; 8 devices divide the parameters, 2 in a slice have the same part; of it each sends what the other lacks.
    assert across.collective.sent == pytest.approx(4 * summary.parameters / 8 / 2, rel=0.1)
    assert summary.limits["DCN"] == pytest.approx(across.collective.sent / Slice.parse(summary.topology).kind.dcn)


def test_sums_over_tokens_are_scattered_and_not_taken_whole():
    """Along `tensor`, statistics and gradients of parameters that are whole there are all that is summed whole."""
    config = golden.experiment(MeshConfig(fsdp=8, tensor=8), d_model=1024, num_heads=8)
    network = compile_apart(config, "v5p:4x4x4", "train", "placed").network
    sent = {part.collective.kind: part.collective.sent for part in network if part.collective.axes == ("tensor",)}
    assert sent.get("all-reduce", 0) < 0.5 * sent["reduce-scatter"]


def test_a_mesh_that_does_not_make_the_slice_is_refused():
    with pytest.raises(ConfigError, match=r"MeshConfig: .* does not make 4 devices"):
        compile_apart(golden.experiment(MeshConfig(data=3, fsdp=1)), "v5e:2x2", "train", "placed")
