"""Flags that do not fit: every program ends with one line and exit code 1, before it has done anything."""

from __future__ import annotations

import pytest

from experiments.program import LONGEST
from tests.launch.session import calls, calls_of

pytestmark = pytest.mark.slow

TEXTS = ("", "\r\t", "x" * 5000, "٣", "\x1b[0m", "-1", "1e999", "nan", "$(x)", "None", "../..", "9" * 5000)
NUMBERS = ("", "x", "1.5", "-1", "9" * 5000, "٣x", "nan", "None")
OUTPUT = "--output=/proc/none/report"
NOWHERE = "--checkpoint=/nowhere/at/all"
GIN = [[f"--gin_file={text}"] for text in TEXTS] + [[f"--gin_param={text}"] for text in TEXTS if text.strip()]
UNKNOWN = [["--gin_fil=x"], ["stray"], ["--"], ["-x"], ["--=x"], ["--nope=" + "x" * 5000]]


def numbers(*names: str) -> list[list[str]]:
    """Flags that are numbers, with what is none."""
    return [[f"--{name}={text}"] for name in names for text in NUMBERS]


HOSTILE = {
    "train": [[], *([*words, "--run_dir=/proc/none"] for words in (*GIN, *UNKNOWN[:2], *UNKNOWN[3:]))],
    "evaluate": [
        [],
        *([f"--checkpoint={text}"] for text in TEXTS),
        *([*words, NOWHERE] for words in (*UNKNOWN, *numbers("batch_size", "budget_scale", "max_batches"))),
    ],
    "generate": [
        [],
        *([f"--checkpoint={text}", "--prompt=x"] for text in TEXTS),
        *([*words, NOWHERE] for words in (*UNKNOWN, *numbers("tokens", "cache", "seed", "top_k", "top_p"))),
        ["--tokens=2000000000", NOWHERE, "--prompt=x"],
        ["--cache=2000000000", NOWHERE, "--prompt=x"],
        [NOWHERE, "a positional prompt"],
    ],
    "inspect": [[], *([f"--text={text}", NOWHERE] for text in TEXTS), *([*words, NOWHERE] for words in UNKNOWN)],
    "draw": [[], *([f"--run_dir={text}"] for text in TEXTS), *numbers("window", "tokens")],
    "config": [
        [],
        ["shw"],
        ["show", "BudgetConfg"],
        ["diff"],
        *(["resolve", *words] for words in (*GIN, *UNKNOWN[3:])),
    ],
    "match": [
        [],
        ["--gin_file=aamoe.gin", "--field=ModelConfig.d_ff"],
        *(["--gin_file=aamoe.gin"] * 2 + [f"--field={text}"] for text in TEXTS),
    ],
    "ledger": [*GIN, *numbers("rows", "length"), *UNKNOWN[3:]],
    "compile": [[], *([f"--topology={text}"] for text in TEXTS), *UNKNOWN],
    "prepare": [
        *([f"--domain={text}"] for text in TEXTS),
        *([f"--tokenizer={text}", "--data_dir=/nowhere"] for text in TEXTS if text != "bytes"),
        *(
            [f"--train_tokenizer={text}"]
            for text in (*TEXTS, "bpe:", "bpe:x", "bpe:1", "bpe:-5", "word:100", "bpe:1e9")
            if text
        ),
        *([f"--text={text}", "--name=mine"] for text in TEXTS if text),
        *([f"--name={text}", "--text=/nowhere/*"] for text in TEXTS),
        *([*words, "--data_dir=/nowhere"] for words in (*UNKNOWN, *numbers("document_align"))),
    ],
    "choose": [
        [],
        *([f"--checkpoint={text}", "--items=/nowhere"] for text in TEXTS),
        *([*words, NOWHERE, "--items=/nowhere"] for words in (*UNKNOWN, *numbers("batch_size"))),
    ],
    "export": [
        [],
        *([f"--checkpoint={text}", "--output=/nowhere/out"] for text in TEXTS),
        *([*words, NOWHERE, "--output=/nowhere/out"] for words in UNKNOWN),
    ],
    "neurons": [
        [],
        *([f"--checkpoint={text}"] for text in TEXTS),
        *([*words, NOWHERE] for words in (*UNKNOWN, *numbers("messages", "clusters", "batch_size", "max_batches"))),
    ],
    "systems": [*UNKNOWN[:2], *UNKNOWN[3:]],
    "goodput": [[], *([f"--run_dir={text}"] for text in TEXTS), *([*words, "--run_dir=/nowhere"] for words in UNKNOWN)],
    "experiments.studies": [
        [],
        *([f"--study={text}", OUTPUT] for text in TEXTS),
        *(
            [*words, "--study=selection", OUTPUT]
            for words in (*UNKNOWN, *GIN, *numbers("steps", "eval_batches", "seeds"))
        ),
    ],
    "experiments.recall": [
        [],
        *([f"--task={text}", OUTPUT] for text in TEXTS),
        *([*words, "--task=copy", OUTPUT] for words in (*UNKNOWN, *GIN, *numbers("steps", "seeds"))),
    ],
    "experiments.local_context": [[], *([*words, OUTPUT] for words in (*UNKNOWN, *GIN, *numbers("steps", "seeds")))],
    "experiments.router_precision": [[], *([*words, OUTPUT] for words in (*UNKNOWN, *GIN, *numbers("steps", "seeds")))],
    "experiments.drill": [
        [],
        *([*words, OUTPUT] for words in (*UNKNOWN, *numbers("steps", "scenarios", "at_once", "seed"))),
    ],
    "cluster.__main__": [
        [],
        *([f"--cluster={text}"] for text in TEXTS),
        *(["--cluster=slurm", *words] for words in UNKNOWN),
    ],
}


def test_a_hostile_flag_ends_in_one_line():
    programs = [(program, words) for program, hostile in HOSTILE.items() for words in hostile]
    assert len(programs) > 400
    for (program, words), outcome in zip(programs, calls_of(programs, JAX_PLATFORMS="cpu"), strict=True):
        said = (program, [word[:60] for word in words], outcome)
        assert outcome.code == 1, said
        assert outcome.stderr.startswith("error: "), said
        assert outcome.stderr.count("\n") == 1, said
        assert len(outcome.stderr) <= LONGEST + len("error: \n"), said


def test_what_is_wrong_is_named():
    said = [outcome.stderr for outcome in calls("generate", [[], [NOWHERE, "text"], ["--tokens=0", NOWHERE]])]
    assert said[0] == "error: --checkpoint is missing: Run folder, or one checkpoint in it.\n"
    assert said[1] == "error: unknown argument 'text': inputs are given as --flag=value; see --help\n"
    assert "--tokens=0" in said[2]


def test_names_that_are_misspelt_are_met_with_a_suggestion(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    asked = [
        ("config", ["show", "BudgetConfg"]),
        ("match", ["--gin_file=aamoe.gin", "--gin_file=dense.gin", "--field=BudgetConfig.bta"]),
        ("match", ["--gin_file=aamoe.gin", "--field=ModelConfig.d_ff"]),
        ("draw", [f"--run_dir={tmp_path}"]),
    ]
    show, match, one_file, draw = [outcome.stderr for outcome in calls_of(asked, JAX_PLATFORMS="cpu")]
    assert "did you mean 'BudgetConfig'?" in show
    assert "did you mean 'BudgetConfig.beta'?" in match
    assert one_file == "error: give --gin_file twice, the reference first; there are 1\n"
    assert draw == f"error: --run_dir={tmp_path}: metrics.jsonl has no step of training yet; go on with aamoe train\n"
