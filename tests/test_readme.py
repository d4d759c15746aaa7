"""The snippets of the README run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_there_are_two_snippets():
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["layer", "model"])
def test_snippet_runs_and_prints_what_it_says(snippet, capsys):
    """Every `print(...)  # text` of a snippet prints that text."""
    exec(compile(snippet, "README.md", "exec"), {})
    promised = re.findall(r"^print\(.*\)  # (.*)$", snippet, flags=re.MULTILINE)
    assert promised
    assert capsys.readouterr().out.splitlines() == promised
