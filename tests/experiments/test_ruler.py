"""Long-context tasks of text: each can be solved from its prompt alone, which is as long as asked, and comes out again.

Another program than the one that wrote them solves them.
"""

import collections
import json
import re

import pytest
import yaml

from aamoe_jax.config import ConfigError
from aamoe_jax.data import ByteTokenizer, load_tokenizer, train_sentencepiece
from experiments.ruler import CHAIN, COMMON, KEYS, REPEATS, TASKS, VALUES, rows_of, tokens_of
from tests.launch import session

LENGTH = 600


def stored(prompt: str) -> dict[str, list[str]]:
    found = collections.defaultdict(list)
    for key, number in re.findall(r"The number of (\w+) is (\d+)\.", prompt):
        found[key].append(number)
    return found


def solve(task: str, prompt: str) -> set[str]:
    """The answers, read off the prompt."""
    context, question = prompt.rsplit("\n", 1)
    if task == "common_words":
        return {word for word, _ in collections.Counter(context.split()).most_common(COMMON)}
    if task == "variables":
        holding = set(re.findall(r"that are (\d+) are", question))
        for name, source in re.findall(r"(\w+) = (\w+)\.", context):
            holding |= {name} if source in holding else set()
        return {name for name in holding if not name.isdecimal()}
    (key,) = re.findall(r"numbers? of (\w+)", question)
    return set(stored(context)[key])


@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_has_the_answers_and_the_length(task):
    tokenizer = ByteTokenizer()
    rows = rows_of(task, 20, tokenizer, LENGTH, seed=0)
    for row in rows:
        assert set(row["answers"]) == solve(task, row["prompt"])
        assert re.findall(r"\w+", row["target"]) == row["answers"]
        size = len((row["prompt"] + row["target"]).encode())
        assert LENGTH - len("A dog slept by the door. ") - 2 <= size <= LENGTH
    assert len({row["prompt"] for row in rows}) == 20
    assert rows_of(task, 5, tokenizer, LENGTH, seed=0) == rows[:5]
    assert rows_of(task, 5, tokenizer, LENGTH, seed=1) != rows[:5]


def test_there_is_something_to_confuse_the_answer_with():
    rows = {task: rows_of(task, 10, ByteTokenizer(), LENGTH, seed=0) for task in TASKS}
    for row in rows["multikey"]:
        assert sorted(map(len, stored(row["prompt"]).values())) == [1] * KEYS
    assert all(len(row["answers"]) == VALUES for row in rows["multivalue"])
    for row in rows["variables"]:
        assert len(re.findall(r"\w+ = \w+\.", row["prompt"])) == 2 * CHAIN
    for row in rows["common_words"]:
        counts = collections.Counter(row["prompt"].split("\n")[0].split()).values()
        assert sorted(counts)[-COMMON - 1 :] == [1] + [REPEATS] * COMMON
    places = [row["prompt"].index("The number of") / LENGTH for row in rows["needle"]]
    assert min(places) < 0.3
    assert max(places) > 0.6


def test_tokens_are_those_of_the_tokenizer(tmp_path):
    sample = "\n".join(row["prompt"] for row in rows_of("needle", 20, ByteTokenizer(), LENGTH, seed=0))
    path = tmp_path / "bpe.model"
    path.write_bytes(train_sentencepiece([sample.encode()], kind="bpe", vocab_size=340))
    tokenizer = load_tokenizer(str(path))
    for row in rows_of("needle", 5, tokenizer, 200, seed=0):
        size = tokens_of(tokenizer, row["prompt"]) + tokens_of(tokenizer, row["target"])
        assert 180 <= size <= 200 < len(row["prompt"])


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="--length=100: a row of 'common_words' does not fit; give more tokens"):
        rows_of("common_words", 1, ByteTokenizer(), 100, seed=0)


def test_the_program_writes_tasks_and_nothing_where_one_does_not_fit(tmp_path):
    calls = [
        ["--length=400", "--rows=3", f"--output={tmp_path / 'a'}"],
        ["--length=400", "--rows=3", f"--output={tmp_path / 'b'}", "--task=needle"],
        ["--length=100", "--rows=3", f"--output={tmp_path / 'c'}"],
    ]
    whole, one, short = session.calls("experiments.ruler", calls)
    assert whole.code == one.code == 0, whole.stderr
    assert "needle.jsonl: 3 rows of" in whole.stdout
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        f"{task}.{kind}" for task in TASKS for kind in ("yaml", "jsonl")
    }
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"needle.yaml", "needle.jsonl"}
    assert (tmp_path / "a" / "needle.jsonl").read_bytes() == (tmp_path / "b" / "needle.jsonl").read_bytes()
    assert short.code == 1
    assert "error: --length=100" in short.stderr
    assert not (tmp_path / "c").exists()
    rows = [json.loads(line) for line in (tmp_path / "a" / "multivalue.jsonl").read_text().splitlines()]
    text = (tmp_path / "a" / "multivalue.yaml").read_text().replace("!function ", "")
    task = yaml.safe_load(text)
    assert task["generation_kwargs"]["max_gen_toks"] >= max(len(row["target"]) for row in rows)
    assert task["dataset_kwargs"]["data_files"] == {"test": str(tmp_path / "a" / "multivalue.jsonl")}
