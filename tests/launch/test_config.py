"""launch.config explains, resolves and compares; the flags and one-line errors that all programs share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aamoe_jax.config import BudgetConfig, ConfigError
from experiments.binding import bindable_fields, load_experiment
from launch.config import diff, field_docs, show
from tests.launch import session


class TestShow:
    def test_names_every_field_with_type_and_default(self):
        text = show([])
        for field in bindable_fields().values():
            assert f"  {field.name}: " in text
        assert "norm: 'rms' | 'layer' = 'rms'" in text
        assert "d_ff: int | None = None" in text

    def test_one_room_or_one_field(self):
        assert "d_model" not in show(["BudgetConfig"])
        assert "Mean number of resources per token" in show(["beta"])
        assert "normalizer" not in show(["BudgetConfig.beta"])

    def test_refuses_a_name_that_is_nothing(self):
        with pytest.raises(ConfigError, match="no config, no field and no mixer is called nonsense"):
            show(["nonsense"])

    def test_docs_are_the_literals_under_the_fields(self):
        docs = field_docs(BudgetConfig)
        assert docs["slack"].startswith("Pairs by which the running spend")
        assert set(docs) == set(BudgetConfig.__dataclass_fields__)


class TestDiff:
    def test_two_files(self):
        assert diff(["aamoe.gin", "dense.gin"]).splitlines()[1:] == [
            "ModelConfig.pattern: ('aamoe',) -> ('parallel',)",
            "ModelConfig.d_ff: None -> 4096",
        ]

    def test_one_file_is_compared_with_the_defaults(self):
        assert diff(["aamoe.gin"]).startswith("# defaults -> aamoe.gin: ")

    def test_params_apply_to_both_sides(self):
        assert "d_ff" not in diff(["aamoe.gin", "dense.gin"], ["ModelConfig.d_ff = 64"])

    def test_equal_files(self):
        assert diff(["dense.gin", "dense.gin"]).endswith(": 0 of " + f"{len(bindable_fields())} fields differ")


CALLS = {
    "resolve": ("--gin_file=quickstart.gin", "--gin_param=BudgetConfig.beta = 8.0", "--gin_param=ModelConfig.d_ff=9"),
    "error": ("--gin_param=ModelConfig.d_modle = 3",),
    "misspelt": ("--gin_fil=aamoe.gin",),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, session.Outcome]:
    """Of `resolve` with the flags above, and of a command that there is not."""
    calls = [("resolve", *arguments) for arguments in CALLS.values()]
    return dict(zip([*CALLS, "unknown"], session.calls("config", [*calls, ("explain",)]), strict=True))


class TestProgram:
    def test_resolve_prints_text_that_loads_to_the_same_config(self, outcomes):
        result = outcomes["resolve"]
        assert result.code == 0, result.stderr
        expected = load_experiment(["quickstart.gin"], ["BudgetConfig.beta = 8.0", "ModelConfig.d_ff = 9"])
        assert load_experiment([], [result.stdout]) == expected

    def test_a_config_error_is_one_line_and_exit_code_1(self, outcomes):
        complaint = "ModelConfig has no field 'd_modle'; did you mean 'd_model'?"
        assert outcomes["error"] == (1, "", f"error: --gin_param 'ModelConfig.d_modle = 3': {complaint}\n")

    def test_a_misspelt_flag_is_met_with_a_suggestion(self, outcomes):
        assert outcomes["misspelt"].code == 1
        assert "Did you mean: gin_file" in outcomes["misspelt"].stderr
        assert "Traceback" not in outcomes["misspelt"].stderr

    def test_help_says_what_there_is_to_do(self):
        command = [sys.executable, "-m", "launch.config", "--help"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        for word in ("show", "resolve", "diff", "--gin_file", "--gin_param"):
            assert word in result.stdout

    def test_an_unknown_command(self, outcomes):
        assert outcomes["unknown"].code == 1
        assert "the commands are: show [NAME...], resolve, diff A.gin [B.gin]" in outcomes["unknown"].stderr
