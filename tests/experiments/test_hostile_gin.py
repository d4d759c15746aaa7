"""Gin that no one would write on purpose: every refusal is a ConfigError of one line, and none takes long."""

from __future__ import annotations

import random

import pytest

from aamoe_jax.config import ConfigError
from experiments.binding import CONFIGS, bindable_fields, load_experiment
from experiments.program import LONGEST, shorten

VALUES = [
    *("1e3", "-0.0", "1e999", "-1e999", "1e308", "5e-324", "0", "-1", "2147483647", "2147483648", "-2147483649"),
    *("9" * 400, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000, "99999999999999", "1e12", "0.1"),
    *("None", "True", "()", "[]", "{}", "('',)", "((),)", "(None,)", "(1, 'a')", "{'a': 1}", "{1}", "1 + 1", "1j"),
    *("''", "'x'", "'\\ud800'", "'\\x00'", "'\\n'", "'٣'", "'🦊'", f"'{'x' * 5000}'", "b'x'", "'aamoe*999999999'"),
    *("'even(aamoe, aamoe)'", "('aamoe*99999999999999999999',)", "('+',)", "(('code', 1e999),)", "(('code', -1),)"),
    *("(" * 60 + ")" * 60, "(1,) * 9", "@fn()", "%none", "%", "nan", "inf", f"({'1,' * 2000})", f"('{'a+' * 500}a',)"),
]


def outcome(files=(), params=()) -> str:
    """What is refused, or nothing."""
    try:
        load_experiment(files, params)
    except ConfigError as error:
        message = shorten(str(error))
        assert len(message) <= LONGEST
        assert "\n" not in message, message
        return message
    return ""


@pytest.mark.slow
def test_every_field_takes_or_refuses_every_value():
    refused = [
        bool(outcome(params=[f"{name} = {value}"]))
        for at, name in enumerate(bindable_fields())
        for value in VALUES[at % 3 :: 3]
    ]
    assert len(refused) > 1400
    assert 0.5 < sum(refused) / len(refused) < 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ModelConfig.d_model = " + "(" * 20_000, "nested too deeply"),
        ("ModelConfig.d_model = " + "(" * 20_000 + ")" * 20_000, "nested too deeply"),
        ("ModelConfig.d_model = " + "[" * 150 + "]" * 150, "expected int"),
        ("".join(f"m{i} = %m{i + 1}\n" for i in range(3000)) + "m3000 = 4\nModelConfig.d_model = %m0", "too deeply"),
        ("a = (%b, %b)\nb = (%a,)\nModelConfig.d_model = %a", "is defined by itself"),
        ("ModelConfig.num_layers = 2147483647", "must be at most 10000"),
        ("BudgetConfig.slack = 99999999999999", "must be less than 2**31"),
        ("MoEConfig.capacity_tokens = 1e12", "must be less than 2**31"),
        ("include 'run.gin'", "includes itself"),
        (f"include '{'x' * 5000}'", "no gin file is called"),
        ("\ud800", "cannot be read"),
    ],
)
def test_a_hostile_file_is_refused(tmp_path, monkeypatch, text, message):
    (tmp_path / "run.gin").write_bytes(text.encode("utf-8", "surrogatepass"))
    monkeypatch.chdir(tmp_path)
    assert message in outcome(["run.gin"])


def test_a_macro_of_macros_is_resolved_once(tmp_path):
    lines = [f"m{i} = (%m{i + 1}, %m{i + 1}, %m{i + 1}, %m{i + 1})\n" for i in range(60)]
    file = tmp_path / "bomb.gin"
    file.write_text("".join(lines) + "m60 = 1\nModelConfig.pattern = %m0\n")
    assert "expected tuple[str, ...]" in outcome([str(file)])


def test_many_includes_are_refused(tmp_path):
    for i in range(1200):
        (tmp_path / f"{i}.gin").write_text(f"include '{i + 1}.gin'\n")
    (tmp_path / "1200.gin").write_text("ModelConfig.num_layers = 2\n")
    assert "nested too deeply" in outcome([str(tmp_path / "0.gin")])


def test_mutated_files_are_taken_or_refused(tmp_path):
    draw = random.Random(0)
    text = (CONFIGS / "aamoe.gin").read_text(encoding="utf-8")
    symbols = [*"()[]{}'\"%@=,.:/\\\n\t #\0\r\x0c\u2028é", "include ", "import ", "'''", "1e999", "    "]
    refused = 0
    for number in range(150):
        letters = list(text)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(letters))
            letters[at : at + draw.randint(0, 3)] = draw.choice(symbols)
        file = tmp_path / f"{number}.gin"
        file.write_bytes("".join(letters).encode())
        refused += bool(outcome([str(file)]))
    assert 20 < refused < 150


def test_whole_numbers_may_be_written_as_floats():
    assert load_experiment([], ["TrainingConfig.steps = 1e3"]).training.steps == 1000
    assert type(load_experiment([], ["TrainingConfig.steps = 1e3"]).training.steps) is int


def test_a_suggested_gin_file_is_like_the_one_asked_for():
    assert "did you mean" not in outcome(["nope.gin"])
    assert outcome(["amoe.gin"]).endswith("did you mean 'aamoe.gin'?")
