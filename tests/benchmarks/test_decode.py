"""The decode benchmark: runs as people call it, and counts bytes as the arrays do."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from aamoe_jax import cost
from aamoe_jax.aamoe.costs import bytes_per_pair
from aamoe_jax.generation.decoder import Decoder
from tests.aamoe.helpers import D, E, M, model_config
from tests.test_model import params_of

pytestmark = pytest.mark.slow


def test_it_runs_and_writes_both_tables(tmp_path):
    output = tmp_path / "decode.json"
    small = ["--layers=1", "--width=16", "--heads=2", "--chunk_size=8", "--experts=4", f"--output={output}"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.decode", "--contexts=64,128", "--turns=1", *small],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [row["context"] for row in rows] == [64, 128]
    for row in rows:
        # Every token got the local window and at most K_max = 16 resources.
        assert 1 <= row["pairs_per_token"] <= 16
        assert row["aamoe"]["milliseconds"] > 0
        # Keys and values of the dense cache: 2 d 4 bytes per token.
        assert row["dense"]["cache_bytes"] == row["context"] * 2 * 16 * 4
    assert output.with_suffix(".md").read_text() == done.stdout


def test_bytes_touched_are_those_of_the_arrays():
    """A dense model touches all its parameters but one table's other rows, and its whole cache."""
    config = model_config(pattern=("parallel",), qk_norm="none")
    params, context = params_of(config), 5 * M
    decoder = Decoder(config, params, length=context)
    state = decoder.prefill([np.ones(1, np.int32)])
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(params["periods"])) - 2 * 4 * D  # norms are left out
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches))
    ends = params["readout"].nbytes + 4 * D
    assert cost.decode_bytes(config, context) == arrays + caches + ends


def test_a_layer_touches_its_pages_and_all_router_keys():
    config = model_config(num_layers=1)
    fixed = cost.decode_bytes(config, 10 * M)
    assert bytes_per_pair(config) == 2 * M * D * 4
    assert cost.decode_bytes(config, 11 * M) - fixed == D * 4
    assert fixed == 4 * (5 * D**2 + D * E + D * 10) + 4 * D * (config.vocab_size + 1)
