"""Tokenizers of Hugging Face: bytes come back, special tokens stay out of texts, large vocabularies fit a stream."""

import base64
import importlib.util
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from aamoe_jax.config import DataConfig
from aamoe_jax.data import DataError, WindowSource, load_tokenizer, prepare, text_corpus
from aamoe_jax.data.stream import Stream, documents_of
from aamoe_jax.data.tokenizers import id_type, letters

TEXT = "def f(x):\n    return x  # naïve \U0001f600\n" * 20
END = "<|endoftext|>"


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def saved(tmp_path, tokenizer: Tokenizer, **settings) -> str:
    folder = tmp_path / "my model"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder / "tokenizer.json")


def test_bytes_are_written_in_the_letters_of_the_library():
    assert set(letters()) == set(pre_tokenizers.ByteLevel.alphabet())
    ((written, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é \n")
    assert written == "".join(letters()[byte] for byte in "é \n".encode())


def test_ids_are_those_of_the_library_and_bytes_come_back(tmp_path):
    theirs = trained()
    ours = load_tokenizer(saved(tmp_path, theirs))
    ids = ours.encode(TEXT.encode())
    assert ids.tolist() == theirs.encode(TEXT).ids
    assert ids.dtype == np.uint16
    assert len(ids) < len(TEXT) / 2
    assert ours.decode(ids) == TEXT.encode()
    assert ours.byte_lengths[ids].sum() == len(TEXT.encode())
    assert ours.name.startswith("my_model-")


def test_texts_at_once_are_texts_one_by_one(tmp_path):
    ours = load_tokenizer(saved(tmp_path, trained()))
    texts = [TEXT.encode(), b"", "\u2581 é".encode(), b"<|endoftext|> x"]
    for ids, text in zip(ours.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, ours.encode(text))
        assert ours.decode(ids) == text


def test_names_of_special_tokens_in_a_text_are_text(tmp_path):
    theirs = trained()
    theirs.add_tokens(["return x"])
    ours = load_tokenizer(saved(tmp_path, theirs))
    text = f"return x{END}<pad>".encode()
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert ours.eos_id == theirs.token_to_id(END)
    assert not {ours.eos_id, ours.pad_id} & set(ids.tolist())
    assert ids[0] == theirs.token_to_id("return x")
    assert ours.decode(np.array([ours.eos_id, ours.pad_id])) == b""


@pytest.mark.parametrize("named", ["<stop>", {"content": "<stop>", "lstrip": False}], ids=["name", "object"])
def test_settings_say_which_token_ends_a_text(tmp_path, named):
    theirs = trained()
    theirs.add_special_tokens(["<stop>", "<pad>"])
    ours = load_tokenizer(saved(tmp_path, theirs, eos_token=named, pad_token="<pad>"))
    assert (ours.eos_id, ours.pad_id) == (theirs.token_to_id("<stop>"), theirs.token_to_id("<pad>"))
    assert ours.vocab_size == theirs.get_vocab_size()
    same = load_tokenizer(saved(tmp_path, theirs, eos_token=named, pad_token=named))
    assert same.pad_id == theirs.get_vocab_size() == same.vocab_size - 1
    assert same.digest != ours.digest


def test_what_a_model_does_around_a_text_is_left_out(tmp_path):
    """A normalizer, a template, truncation and padding."""
    theirs = trained()
    plain = load_tokenizer(saved(tmp_path, theirs)).encode("e\u0301 A".encode()).tolist()
    theirs.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    theirs.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, theirs.token_to_id(END))]
    )
    theirs.enable_truncation(2)
    theirs.enable_padding(length=50, pad_id=7)
    assert load_tokenizer(saved(tmp_path, theirs)).encode("e\u0301 A".encode()).tolist() == plain


def test_ids_above_two_bytes_have_four_in_a_stream(tmp_path):
    assert (id_type(2**16), id_type(2**16 + 1)) == (np.uint16, np.uint32)
    theirs = trained()
    theirs.add_tokens([f"<{i}>" for i in range(70_000)])
    tokenizer = load_tokenizer(saved(tmp_path, theirs))
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"{TEXT}<{69_000 + number}>")
    made = prepare(
        text_corpus("mine", f"{tmp_path}/*.txt"), data_dir=str(tmp_path), tokenizer=tokenizer, document_align=8
    )
    assert (made["dtype"], made["vocab_size"]) == ("uint32", tokenizer.vocab_size)
    path = str(tmp_path / "my model" / "tokenizer.json")
    config = DataConfig(data_dir=str(tmp_path), tokenizer=path, document_align=8, seq_len=64, mixture=(("mine", 1.0),))
    stream = Stream(config, "mine", "train")
    assert stream.read(0, len(stream)).max() > 2**16
    assert stream.read(0, len(stream)).dtype == np.uint32
    texts = {text.decode() for text in documents_of(config, "mine", "train")}
    assert texts <= {f"{TEXT}<{69_000 + number}>" for number in range(30)}
    assert len(texts) == made["documents"]["train"] > 20
    source = WindowSource(config, "mine", "train")
    assert len(source[len(source) - 1]) == 65  # padded


def test_what_cannot_be_used_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"there is no such file; copy the tokenizer\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"is no tokenizer\.json, or damaged"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    words = Tokenizer(models.WordLevel({"one": 0, "two words": 1, END: 2}, unk_token=END))
    with pytest.raises(DataError, match="token 1 is 'two words', which is not written in the letters of bytes"):
        load_tokenizer(saved(tmp_path, words))
    spaced = trained()
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(DataError, match="changes the text"):
        load_tokenizer(saved(tmp_path, spaced))
    endless = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters())}, []))
    endless.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(DataError, match=r"nothing says which token ends a text; write .*tokenizer_config"):
        load_tokenizer(saved(tmp_path, endless))
    good = saved(tmp_path, trained())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install -c constraints.txt -e '\.\[text\]'"):
        load_tokenizer(good)


PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Of GPT-2, which ByteLevel has for its default."""


def ranked(folder, theirs: Tokenizer, **settings) -> str:
    """The same vocabulary as a file of tiktoken: tokens in the order in which they were merged."""
    byte_of = {letter: byte for byte, letter in enumerate(letters())}
    vocabulary = sorted((index, token) for token, index in theirs.get_vocab().items() if token != END)
    tokens = [bytes(byte_of[letter] for letter in token) for _, token in vocabulary]
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / "my-ranks.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"pat_str": PATTERN} | settings))
    return str(folder / "my-ranks.tiktoken")


def test_files_of_tiktoken_give_the_same_tokens(tmp_path):
    theirs = trained()
    ours = load_tokenizer(ranked(tmp_path, theirs))
    texts = [TEXT.encode(), b"", f"{END} it's \u2581 12\n\n".encode()]
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        # The first id of the other vocabulary is the special token.
        assert (ids + 1).tolist() == load_tokenizer(saved(tmp_path, theirs)).encode(text).tolist()
        assert ours.decode(ids) == text
    size = theirs.get_vocab_size() - 1
    assert (ours.eos_id, ours.pad_id, ours.vocab_size) == (size, size + 1, size + 2)
    assert ours.name == f"my_ranks-{ours.digest[:8]}"
    special = {"<stop>": 450, "<start>": 451}
    named = load_tokenizer(ranked(tmp_path, theirs, special_tokens=special, eos_token="<stop>"))
    assert (named.eos_id, named.pad_id, named.vocab_size) == (450, 452, 453)
    assert named.digest != ours.digest
    assert not named.byte_lengths[size:].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pat_str": "("}, r"tokenizer_config.json: pat_str cannot be used"),
        ({"pat_str": r"\p{L}+"}, "its pat_str leaves out some of a text"),
        ({"special_tokens": {"a": 200}}, r"special_tokens has ids that other tokens have: \[200\]"),
        ({"special_tokens": {"a": "b"}}, "must be a JSON object with pat_str"),
        ({"special_tokens": 3}, "must be a JSON object with pat_str"),
        (None, r'tokenizer_config.json: there is no such file; write \{"pat_str"'),
    ],
)
def test_settings_of_tiktoken_that_do_not_fit_are_told(tmp_path, settings, message):
    path = ranked(tmp_path, trained(), **(settings or {}))
    if settings is None:
        (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=message):
        load_tokenizer(path)


def test_damaged_files_of_tiktoken_are_told(tmp_path):
    path = tmp_path / "my-ranks.tiktoken"
    ranked(tmp_path, trained())
    lines = path.read_bytes().splitlines(keepends=True)
    for content, message in (
        (b"".join(lines[:20]), "it has no token for byte"),
        (b"{}", "is no file of tiktoken"),
        (b"!!! 4\n", "is no file of tiktoken"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(str(path))
    with pytest.raises(DataError, match="there is no such file; copy"):
        load_tokenizer(str(tmp_path / "other.tiktoken"))
