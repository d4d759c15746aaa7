"""Choices among continuations, against the model asked one token at a time (DEC-23)."""

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.config import ConfigError
from aamoe_jax.data import ByteTokenizer
from aamoe_jax.evaluation import choices
from aamoe_jax.evaluation.choices import Item, _row, accuracies, log_probabilities, read_items
from aamoe_jax.model import merge, structure
from tests.aamoe.helpers import M, model_config
from tests.evaluation.helpers import random_params

LENGTH = 3 * M
ITEMS = [
    Item("The cat", (" sat", " ran away", "!"), 1),
    Item("a much longer context than any row of these has room for", (" yes", " no"), 0),
]
CONFIG = model_config(num_layers=1)


class TestDEC23:
    def test_log_probabilities_are_those_of_the_forward_pass(self):
        params, graphdef = jax.tree.map(jnp.asarray, random_params(CONFIG)), structure(CONFIG)
        how = {"budget": "prefix", "length": LENGTH}
        found = log_probabilities(graphdef, params, ITEMS, ByteTokenizer(), batch_size=2, **how)
        assert [len(one) for one in found] == [3, 2]
        forward = jax.jit(lambda tokens: jax.nn.log_softmax(merge(graphdef, params)(tokens, budget="prefix")[0][0]))
        for item, one in zip(ITEMS, found, strict=True):
            for choice, log_p in zip(item.choices, one, strict=True):
                tokens = np.frombuffer((item.context + choice).encode(), np.uint8).astype(np.int32)[-LENGTH:] + 3
                # Budgets are causal: padding behind the text changes nothing of it.
                padded = jnp.asarray(np.pad(tokens, (0, LENGTH - len(tokens))))[None]
                by_place = forward(padded)
                places = range(len(tokens) - len(choice), len(tokens))
                assert log_p == pytest.approx(sum(float(by_place[i - 1, tokens[i]]) for i in places), abs=1e-4)

    def test_the_likeliest_is_judged_with_and_without_the_length(self):
        log_p = [np.array([-4.0, -5.0, -9.0]), np.array([-1.0, -2.0])]
        # Per byte: -1, -0.56, -9; and -0.25, -0.67.
        assert accuracies(ITEMS, log_p) == {
            "items": 2,
            "accuracy": 0.5,
            "accuracy_per_byte": 1.0,
            "chance": pytest.approx((1 / 3 + 1 / 2) / 2),
        }

    def test_items_are_read_and_what_is_none_is_named(self, tmp_path):
        path = tmp_path / "items.jsonl"
        path.write_text('{"context": "a", "choices": [" b", " c"], "answer": 1}\n\n')
        assert read_items(path) == [Item("a", (" b", " c"), 1, f"{path}:1")]
        for line, message in (
            ("{", r"items.jsonl:1: wanted .*JSONDecodeError"),
            ('{"context": "a", "choices": ["b", "c"]}', r":1: wanted .*KeyError: 'answer'"),
            ('{"context": "a", "choices": ["b"], "answer": 0}', "no text of it empty"),
            ('{"context": "a", "choices": "yes", "answer": 0}', r'wanted .*"choices": \["..."'),
            ('{"context": "a", "choices": ["b", "c"], "answer": true}', "answer = True: must be the place of a choice"),
            ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer = 2: must be the place of a choice"),
            ('{"context": "\\ud800", "choices": ["b", "c"], "answer": 0}', r":1: wanted .*surrogates not allowed"),
            ('{"context": "a", "choices": ["b", "c"], "answer": 1' + "0" * 5000 + "}", r":1: wanted .*ValueError"),
            ("[" * 10**5, r":1: wanted .*RecursionError"),
            ('{"context": "\ud83d", "choices": ["b", "c"], "answer": 0}', r":1: wanted .*UnicodeDecodeError"),
        ):
            path.write_bytes(line.encode("utf-8", "surrogatepass"))
            with pytest.raises(ConfigError, match=message):
                read_items(path)
        path.write_text("\n")
        with pytest.raises(ConfigError, match="holds no item"):
            read_items(path)

    def test_lines_end_where_json_lines_does(self, tmp_path):
        path = tmp_path / "items.jsonl"
        line = '{"context": "a\u2028\u2029\x85", "choices": [" b\u2028", " c"], "answer": 1}'
        path.write_bytes(f"\ufeff{line}\r\n\n{line}".encode())
        context, answers = "a\u2028\u2029\x85", (" b\u2028", " c")
        assert read_items(path) == [Item(context, answers, 1, f"{path}:{number}") for number in (1, 3)]

    def test_a_file_that_is_no_list_of_items_is_read_in_bounds(self, tmp_path, monkeypatch):
        monkeypatch.setattr(choices, "LINE", 1000)
        path = tmp_path / "items.jsonl"
        path.write_bytes(b"x" * 5000)
        with pytest.raises(ConfigError, match=r"items.jsonl:1: wanted .*on a line of less than"):
            read_items(path)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_items(tmp_path)
        path.write_bytes("\ufeffno".encode("utf-16"))
        with pytest.raises(ConfigError, match=r"items.jsonl:1: wanted .*UnicodeDecodeError"):
            read_items(path)

    def test_any_bytes_are_items_or_told_in_one_line(self, tmp_path):
        path, complaints = tmp_path / "items.jsonl", []
        line = '{"context": "a \\ud83d\\ude00 \u2028", "choices": [" b", " \u00e9"], "answer": 1}\n'.encode()
        pieces = [b'"', b"\\", b"\\ud800", b"\xff", b"\n", b"\x00", b"[" * 3000, b"9" * 5000, b"null", b"{", b"]", b","]
        for seed in range(400):
            generator = random.Random(seed)
            text = line * 2
            for _ in range(generator.randint(1, 3)):
                at, cut = generator.randrange(len(text)), generator.choice([0, 1, 10])
                text = text[:at] + generator.choice([*pieces, generator.randbytes(2), b""]) + text[at + cut :]
            path.write_bytes(text)
            try:
                found = read_items(path)
                assert all(_row(item, choice, ByteTokenizer(), 9999) for item in found for choice in item.choices)
            except ConfigError as error:
                complaints.append(str(error))
        assert all(re.match(rf"{path}:(\d+: | holds no item)", complaint) for complaint in complaints)
        assert all("\n" not in complaint and len(complaint) < 600 for complaint in complaints)
        assert 200 < len(complaints) < 400

    def test_a_choice_without_room_is_refused(self):
        long = [Item("a", ("b" * LENGTH, "c"), 0, "items.jsonl:1")]
        expected = rf"items.jsonl:1: choice 'b+': {LENGTH} tokens; a row of {LENGTH} can hold 1 to {LENGTH - 1}"
        with pytest.raises(ConfigError, match=expected):
            log_probabilities(
                structure(CONFIG),
                random_params(CONFIG),
                long,
                ByteTokenizer(),
                budget="prefix",
                length=LENGTH,
                batch_size=2,
            )
