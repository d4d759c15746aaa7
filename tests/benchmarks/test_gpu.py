"""The GPU benchmark, without a GPU: its inputs, its refusals, its report, and the whole of it in XLA."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu

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
