"""`python -m launch.generate` as people call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import session
from tests.launch.helpers import save_run
from tests.training.helpers import experiment, model_config, tiny_data

KERNEL = {"num_layers": 1, "kernel": "reference"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run on causal budgets, and one on row budgets, with a predictor."""
    folder = tmp_path_factory.mktemp("runs")
    data = tiny_data(folder / "data")
    for name in ("prefix", "row"):
        save_run(folder / name, experiment(data, model_config("aamoe", name, **KERNEL)))
    return {name: folder / name for name in ("prefix", "row")}


def generate(run: Path, *arguments: str, **options) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "launch.generate", f"--checkpoint={run}", *arguments], capture_output=True, **options
    )


SAMPLED = ("--prompt=abc", "--tokens=5", "--top_k=20", "--top_p=0.9")
LONG = ("--tokens=60", "--temperature=1", "--top_k=300")


@pytest.fixture(scope="module")
def done(runs, tmp_path_factory) -> dict[str, session.Outcome]:
    """What was generated in one process, and what was refused."""
    prompt = tmp_path_factory.mktemp("prompts") / "prompt"
    prompt.write_bytes(b"\xff\xfe" + b"x" * 30)
    several = ("--prompt=ab", f"--prompt_file={prompt}", "--tokens=4", "--temperature=0")
    calls = {"sampled": ("row", *SAMPLED), "several": ("prefix", *several), "long": ("prefix", "--prompt=hello", *LONG)}
    calls |= {" ".join(arguments): ("prefix", *arguments) for arguments in REFUSED}
    arguments = [(f"--checkpoint={runs[run]}", *given) for run, *given in calls.values()]
    return dict(zip(calls, session.calls("generate", arguments), strict=True))


def test_a_prompt_is_continued_alike_for_one_seed(runs, done):
    first, second = done["sampled"], generate(runs["row"], *SAMPLED)
    assert first.code == 0, first.stderr
    assert first.stdout.startswith("abc")
    assert first.stdout.encode() == second.stdout


def test_prompts_of_different_lengths_and_bytes_that_are_no_text(done):
    """A byte tokenizer continues anything; what is no UTF-8 is shown as replacement characters."""
    assert done["several"].code == 0, done["several"].stderr
    first, second = done["several"].stdout.split("--- 2 of 2\n")
    assert first.startswith("--- 1 of 2\nab")
    assert second.startswith("��xxx")


def test_standard_input_and_a_stop(runs, done):
    new = done["long"].stdout.encode().removeprefix(b"hello")
    stop = next(bytes([byte]) for byte in new[5:] if 32 < byte < 127)  # the untrained model writes any bytes
    stopped = generate(runs["prefix"], "--prompt_file=-", *LONG, b"--stop=" + stop, input=b"hello")
    assert stopped.stdout == b"hello" + new[: new.index(stop) + 1] + b"\n"


REFUSED = {
    ("--prompt=",): "--prompt='': it is empty; give at least one byte to continue",
    ("--prompt_file=/dev/null",): "--prompt_file=/dev/null: there is no such file",
    (): "--prompt: give a text to continue",
    ("--prompt_file=/nowhere",): "--prompt_file=/nowhere: there is no such file",
    ("--prompt=abcdef", "--cache=8", "--tokens=4"): "prompt: 6 tokens and 4 new ones do not fit into a cache for 8",
    ("--prompt=a", "--budget=predictor"): "budget = 'predictor': this model has no budget predictor",
    ("--prompt=a", "--budget_scale=0"): "budget_scale = 0.0: must be a positive number",
    ("--prompt=a", "--budget_scale=1e308"): "budget_scale = 1e+308: must be at most 10000",
    ("--prompt=a", "--budget_scale=nan"): "budget_scale = nan: must be a positive number",
    ("--prompt=a", "--temperature=-1"): "temperature = -1.0: must be at least 0",
    ("--prompt=a", "--top_p=0"): "top_p = 0.0: must be above 0",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_cannot_be_done_is_said_in_one_line(done, arguments):
    refused = done[" ".join(arguments)]
    assert (refused.code, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"error: {REFUSED[arguments]}")
    assert refused.stderr.count("\n") == 1
