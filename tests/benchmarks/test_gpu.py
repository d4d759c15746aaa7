"""The GPU benchmark, without a GPU: its inputs, its refusals, its report, and the whole of it in XLA."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu

pytestmark = pytest.mark.slow

POINT = gpu.Point(length=32, width=8, head_size=4, m=8, budget=2, experts=3)


def test_tokens_meet_distinct_earlier_chunks_and_experts_alone():
    pairs = gpu.random_arrays(POINT).pairs
    for token, (resource, count) in enumerate(zip(np.asarray(pairs.resource), np.asarray(pairs.count), strict=True)):
        given = resource[:count].tolist()
        assert len(set(given)) == len(given)
        assert all(r < token // POINT.m or 4 <= r < POINT.resources for r in given)
    assert 0 < pairs.count.min() + 1 < pairs.count.max() <= POINT.slots


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    sparse = gpu.sparse

    def wrong(point, max_pairs, implementation):
        attend = sparse(point, max_pairs, implementation)
        return attend if implementation == "reference" else lambda *arrays: 1.02 * attend(*arrays)

    monkeypatch.setattr(gpu, "sparse", wrong)
    with pytest.raises(RuntimeError, match=r"xla is wrong at Point.*output"):
        gpu.verify("xla", POINT)


def test_out_of_memory_is_a_result_and_other_errors_are_not(monkeypatch):
    def fail(message):
        def seconds(function):
            raise jax.errors.JaxRuntimeError(message)

        monkeypatch.setattr(gpu.measure, "seconds", seconds)

    fail("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")
    assert gpu.milliseconds(jnp.sum, (jnp.ones(2),)) == gpu.OUT_OF_MEMORY
    fail("INTERNAL: the kernel has crashed")
    with pytest.raises(jax.errors.JaxRuntimeError, match="crashed"):
        gpu.milliseconds(jnp.sum, (jnp.ones(2),))


def test_time_of_kernels_is_read_from_a_profile(monkeypatch):
    """As an H100 gave it, by a stand-in for the profile: there is no GPU here."""
    event = lambda name, ms: types.SimpleNamespace(name=name, duration_ns=ms * 1e6)  # noqa: E731
    kernels = [event(f"block_sparse_attention_{name}_mosaic_gpu_kernel", 1.5) for name in ("forward", "d_key")]
    lines = [
        types.SimpleNamespace(name="Stream #14(Compute)", events=[*kernels * gpu.CALLS, event("loop_add_fusion", 9.0)]),
        types.SimpleNamespace(name="XLA Ops", events=kernels),
    ]
    planes = [types.SimpleNamespace(name=name, lines=lines) for name in ("/host:CPU", "/device:GPU:0")]
    profile = types.SimpleNamespace(from_file=lambda path: types.SimpleNamespace(planes=planes))
    assert gpu.kernel_milliseconds(jnp.sum, (jnp.ones(2),)) == {}
    monkeypatch.setattr(jax.profiler, "ProfileData", profile)
    assert gpu.kernel_milliseconds(jnp.sum, (jnp.ones(2),)) == {"forward": 1.5, "d_key": 1.5}


def test_what_is_measured_stays_when_the_machine_is_taken_away(monkeypatch, tmp_path):
    values = gpu.SMOKE | {"lengths": ["256", "512"], "output": str(tmp_path / "gpu.json"), "smoke": False}
    values |= {"widths": ["64"], "head_size": 32, "others_up_to": 256, "minutes": 9.0}
    flags = Flags({name: types.SimpleNamespace(value=value) for name, value in values.items()})
    monkeypatch.setattr(gpu, "FLAGS", flags)
    measured = gpu.measure_point

    def point(point):
        if point.length == 512:
            raise KeyboardInterrupt
        return measured(point)

    monkeypatch.setattr(gpu, "measure_point", point)
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["length"] for row in record["rows"]] == [256]
    assert record["left_out"] == 1
    assert "1 further points were not measured" in (tmp_path / "gpu.md").read_text()


class Flags(dict):
    """Stands in for the flags of a program."""

    def __getattr__(self, name):
        return self[name].value


def test_it_runs_and_writes_both_tables(tmp_path):
    output = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--smoke", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())
    (row,) = record["rows"]
    assert record["left_out"] == 0
    assert all(0 < error < gpu.TOLERANCE for error in record["errors"]["64"].values())
    assert row["length"] == 256
    both = row["xla"]["both"]
    flops = 14 * row["m"] * row["width"] * row["pairs"]
    assert both["teraflops_per_second"] == pytest.approx(flops / both["milliseconds"] / 1e9)
    assert output.with_suffix(".md").read_text() == done.stdout
