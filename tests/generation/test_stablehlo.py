"""Exported functions, in a process that cannot import this package, compute what the model computes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.generation.decoder import Decoder
from aamoe_jax.generation.generate import stream_text
from aamoe_jax.generation.sampling import Sampling
from aamoe_jax.generation.stablehlo import export_functions
from aamoe_jax.generation.stream import stream
from aamoe_jax.model import merge, structure
from aamoe_jax.training.checkpoints import load_checkpoint
from aamoe_jax.training.exchange import export
from tests.evaluation.helpers import random_params
from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import experiment, model_config, tiny_data

pytestmark = pytest.mark.slow

LENGTH, NEW = 20, 6  # no whole chunks of 8
PROMPTS = [[7, 9, 11], [200, 3, 5, 8, 13, 21, 34, 55, 89, 144], [42]]
READER = """
import sys
for package in ("aamoe_jax", "pallas_kernels", "launch", "experiments", "flax"):
    sys.modules[package] = None  # cannot be imported

import json, pathlib
import jax, numpy as np, safetensors.numpy
from jax import export

folder, prompts, new = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
told = json.loads((folder / "functions.json").read_text())
params = safetensors.numpy.load_file(folder / "model.safetensors")
forward, prefill, decode = (
    jax.jit(export.deserialize((folder / f"{name}.stablehlo").read_bytes()).call)
    for name in ("forward", "prefill", "decode")
)
rows = np.zeros((len(prompts), told["length"]), np.int32)
for row, prompt in zip(rows, prompts):
    row[: len(prompt)] = prompt
lengths = np.array([len(prompt) for prompt in prompts], np.int32)
logits = forward(params, rows)
assert {name: held.dtype.name for name, held in params.items()} == {
    name: held["dtype"] for name, held in told["params"].items()
}
state, drawn = prefill(params, rows, lengths), []
for name, held in told["functions"]["decode"]["takes"]["state"].items():
    assert state[name].shape == tuple(len(rows) if size == "b" else size for size in held["shape"]), name
    assert state[name].dtype == held["dtype"]
for _ in range(new):
    drawn.append(np.argmax(state["logits"], -1).astype(np.int32))
    state = decode(params, state, drawn[-1])
np.savez(sys.argv[4], logits=logits, drawn=np.stack(drawn, 1), last=state["logits"])
"""


@pytest.mark.parametrize(("pattern", "layers"), [("aamoe", 1), ("aamoe,attention+swiglu", 2), ("attention+swiglu", 2)])
def test_logits_and_tokens_are_those_of_the_model(pattern, layers, tmp_path):
    """AA-MoE, a hybrid and a dense stack, of rows of different lengths."""
    config = dataclasses.replace(model_config(num_layers=layers), pattern=tuple(pattern.split(",")))
    params, folder = jax.tree.map(jax.numpy.asarray, random_params(config)), tmp_path / "out"
    export(params, {"step": 0}, "card", folder, lambda to: export_functions(config, params, to, length=LENGTH))
    found = tmp_path / "found.npz"
    reader = [sys.executable, "-c", READER, folder, json.dumps(PROMPTS), str(NEW), found]
    read = subprocess.run(reader, capture_output=True, text=True, cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    there = np.load(found)
    rows = np.zeros((len(PROMPTS), LENGTH), np.int32)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    logits, _ = merge(structure(config), params)(jax.numpy.asarray(rows), budget=causal_budget(config))
    np.testing.assert_allclose(there["logits"], logits, atol=2e-5)
    decoder = Decoder(config, params, length=LENGTH)
    prompts = [np.array(prompt, np.int32) for prompt in PROMPTS]
    drawn = list(stream(decoder, prompts, new_tokens=NEW, sampling=Sampling(temperature=0.0)))
    np.testing.assert_array_equal(there["drawn"], np.transpose(drawn))
    state = decoder.prefill(prompts)
    for tokens in drawn:
        state = decoder.append(state, np.array(tokens))
    np.testing.assert_allclose(there["last"], state.logits, atol=2e-5)


def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="length = 0: must be at least 1"):
        export_functions(model_config(), {}, tmp_path, length=0)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match="JAX runs on a tpu: export with JAX_PLATFORMS=cpu"):
        export_functions(model_config(), {}, tmp_path, length=8)


def test_the_code_of_the_page_generates_what_generate_does(tmp_path):
    """Exported for the same number of tokens; bytes that are not UTF-8 are shown as one sign each by both."""
    save_run(tmp_path / "run", experiment(tiny_data(tmp_path), model_config("attention", num_layers=1)))
    page = (Path(__file__).parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    names = {'folder = "quickstart-functions"': f'folder = "{tmp_path / "out"}"', 'b"def main"': 'b"def "'}
    for old, new in names.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    arguments = [
        f"--checkpoint={tmp_path / 'run'}",
        f"--output={tmp_path / 'out'}",
        "--format=stablehlo",
        "--length=64",
    ]
    (done,) = session.calls("export", [arguments])
    assert done.code == 0, done.stderr
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path, env=environment)
    assert read.returncode == 0, read.stderr.decode()
    checkpoint = load_checkpoint(tmp_path / "run")
    greedy = Sampling(temperature=0.0)
    pieces = stream_text(checkpoint, [b"def "], new_tokens=50, sampling=greedy, cache_length=64)
    assert read.stdout.decode() == "".join(piece.decode(errors="replace") for (piece,) in pieces)
