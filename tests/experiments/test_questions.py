"""Questions out of held-out text: what they promise is read off the documents by other means, and shares are judged."""

import json
import re

import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.evaluation.choices import read_items
from aamoe_jax.model import structure
from experiments import questions
from experiments.studies import Study, Variant
from tests.experiments.test_local_context import tiny_experiment

LENGTH = 400


def prose(seed: int, lines: int = 120) -> str:
    """Lines of a few words out of forty, some of them with letters of two bytes."""
    random = np.random.default_rng(seed)
    vocabulary = [f"{'wörd' if number % 3 else 'term'}_{number}" for number in range(40)]
    return "".join("  " + " ".join(random.choice(vocabulary, random.integers(1, 12))) + "\n" for _ in range(lines))


TEXTS = [prose(0), prose(1, 40)]
DOCUMENTS = [questions.document(text) for text in TEXTS]


@pytest.fixture(scope="module", params=questions.KINDS)
def asked(request):
    return request.param, questions.questions(request.param, DOCUMENTS, 60, LENGTH)


def right(item) -> str:
    return item.choices[item.answer]


def test_the_right_choice_is_what_follows_in_the_document(asked):
    for item, of in asked[1]:
        assert item.context + right(item) in TEXTS[of]
        assert len(set(item.choices)) == questions.CHOICES


def test_every_choice_fits_into_a_row_with_a_context_as_long_as_it_can_be(asked):
    sizes = []
    for item, of in asked[1]:
        size = max(len((item.context + choice).encode()) for choice in item.choices)
        assert size < LENGTH, "nothing of the context is cut off, whatever the choice"
        if not TEXTS[of].startswith(item.context):
            sizes.append(size)
    assert len(sizes) > 40
    assert min(sizes) > LENGTH - 24


def test_the_first_of_more_questions_are_the_same_and_answers_stand_in_every_place(asked):
    kind, found = asked
    assert questions.questions(kind, DOCUMENTS, 7, LENGTH) == found[:7]
    assert len({item.context for item, _ in found}) > 40
    assert {item.answer for item, _ in found} == set(range(questions.CHOICES))
    of = np.bincount([which for _, which in found])
    assert of[0] > 1.5 * of[1] > 0, "documents are drawn by their length"


def test_wrong_lines_are_of_the_document_and_about_as_long():
    apart = []
    for item, of in questions.questions("line", DOCUMENTS, 60, LENGTH):
        lines = TEXTS[of].splitlines(keepends=True)
        assert set(item.choices) <= set(lines)
        assert item.context.endswith("\n")
        apart += [abs(len(choice) - len(right(item))) for choice in item.choices]
    assert np.mean(apart) < 5 < np.std([len(line) for line in TEXTS[0].splitlines()])


def test_every_word_of_a_question_was_last_used_long_ago():
    for item, _ in questions.questions("word", DOCUMENTS, 60, LENGTH):
        for choice in item.choices:
            places = [found.start() for found in re.finditer(rf"\b{re.escape(choice[:-1])}\b", item.context)]
            assert places
            assert places[-1] < len(item.context) - questions.FAR
        assert len({choice[-1] for choice in item.choices}) == 1, "what follows the word does not tell"


def test_text_without_a_place_for_a_question_is_refused():
    with pytest.raises(ConfigError, match=r"--kind=word: no held-out document has a place for one in 400 tokens"):
        questions.questions("word", [questions.document("the same again\n" * 50)], 3, LENGTH)
    # A document without one gives way to another.
    found = questions.questions("line", [questions.document("short\n" * 500), DOCUMENTS[0]], 5, LENGTH)
    assert {of for _, of in found} == {1}


def answered(*shares: float, documents: int = 50, each: int = 20) -> list[dict]:
    """Results with these shares of right answers, alike in all documents."""
    return [
        {
            "seed": seed,
            "accuracy": share,
            "documents": [[share * each, each]] * documents,
            "corpus_digest": "0" * 20,
            "versions": {"jax": "0"},
            "config": {"data": {"seq_len": LENGTH}},
        }
        for seed, share in enumerate(shares)
    ]


def test_a_planted_difference_is_reported():
    text = questions.report({"line": {"a": answered(0.5, 0.6, 0.7), "b": answered(0.6, 0.65, 0.85)}}, "the command")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[-2] == ["a", "60.0%", "50.0%", "60.0%", "70.0%", ""]
    assert rows[-1][:5] == ["b", "70.0%", "60.0%", "65.0%", "85.0%"]
    mean, low, high = (float(x) for x in re.findall(r"[+-][\d.]+", rows[-1][5]))
    assert mean == 10
    assert 5 <= low < 10 < high <= 15
    assert "1000 questions with 4 choices, of 50 documents" in text
    assert "guessing answers 25%" in text


def test_documents_without_a_question_do_not_count():
    runs = {name: answered(*shares) for name, shares in (("a", (0.5, 0.6, 0.7)), ("b", (0.6, 0.65, 0.85)))}
    before = questions.more_answered(runs["a"], runs["b"])
    for of_seed in (*runs["a"], *runs["b"]):
        of_seed["documents"] = [*of_seed["documents"][:1], *[[0, 0]] * 4]
    after = questions.more_answered(runs["a"], runs["b"])
    assert np.isfinite(after[:3]).all()
    assert after.mean == pytest.approx(before.mean)


class TestRuns:
    """Of a study, with the smallest model there is."""

    def test_answers_are_counted_by_document_and_not_asked_again(self, tmp_path, monkeypatch):
        config = tiny_experiment(tmp_path / "data")
        study = Study("Title", {"a": Variant(), "without": Variant((), "a", frozenset({0}))}, [])
        asked = {"line": questions.questions("line", DOCUMENTS, 20, config.data.seq_len)}
        calls = []

        def knows_the_first_document(graphdef, params, items, *rest, **settings):
            calls.append(graphdef)
            answers = [item.answer if which == 0 else (item.answer + 1) % 4 for item, which in asked["line"]]
            return [np.eye(4)[answer] for answer in answers]

        monkeypatch.setattr(questions, "log_probabilities", knows_the_first_document)
        for _ in range(2):
            results = questions.conduct(study, dict.fromkeys(study.variants, config), asked, [0], tmp_path / "runs")
            (found,) = results["line"]["a"]
            of = np.bincount([which for _, which in asked["line"]]).tolist()
            assert found["documents"] == [[of[0], of[0]], [0, of[1]]]
            assert found["accuracy"] == of[0] / 20
            assert "\n20 questions with 4 choices, of 2 documents" in questions.report({"line": results["line"]}, "")
        stacks = [structure(config.model, variant.without) for variant in study.variants.values()]
        assert calls == stacks, "each once, by the same run"
        assert len(list((tmp_path / "runs").iterdir())) == 1

    def test_a_model_answers_and_the_questions_are_those_of_launch_choose(self, tmp_path):
        config = tiny_experiment(tmp_path / "data")
        asked = questions.questions("line", DOCUMENTS, 5, config.data.seq_len)
        path = tmp_path / "items.jsonl"
        questions.save(asked, path)
        assert [item._replace(where="") for item in read_items(path)] == [item for item, _ in asked]
        found = questions.answer(config, tmp_path / "run", "line", asked)
        assert 0 <= found["accuracy"] <= 1
        assert sum(size for _, size in found["documents"]) == 5
        assert json.loads((tmp_path / "run/questions_line_5.json").read_text()) == found
