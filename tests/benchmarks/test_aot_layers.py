"""Benchmarks that ask the real TPU compilers, where libtpu is installed: `make test-aot`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compiled_layer
from pallas_kernels.chips import TPUS
from tests.pallas_kernels.test_aot import needs_libtpu

ROOT = Path(__file__).parents[2]


@needs_libtpu
def test_products_of_a_compiled_layer_take_no_less_than_the_chips_peak_allows(monkeypatch):
    monkeypatch.setattr(compiled_layer, "LAYERS", {"dense": ("feed_forward",)})
    length, width = 1024, compiled_layer.config().d_model
    parts = compiled_layer.measured("v5e", "dense", None, length)["parts"]
    least = 1e9 * 3 * 2 * 2 * width * 4 * width / TPUS["v5e"].flops  # two matrices, three times
    assert least < parts[compiled_layer.PRODUCTS] < 2 * least
    assert sum(parts.values()) < 3 * least


@needs_libtpu
@pytest.mark.parametrize("length", [256])
def test_mixers_are_compiled_for_a_chip(tmp_path, length):
    command = [sys.executable, "-m", "benchmarks.mixers", "--chip=v5e", f"--lengths={length}", "--mixers=feed_forward"]
    command += ["--width=128", "--heads=1", "--dtype=bfloat16", f"--output={tmp_path / 'x.json'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"]
    for figures in row["mixers"].values():
        assert figures["compiled_bytes"] > 0
        assert figures["milliseconds"] is None
    assert "One v5e, compiled for and not there" in (tmp_path / "x.md").read_text()
