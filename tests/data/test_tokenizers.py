import importlib.util
import random

import numpy as np
import pytest

from aamoe_jax.data import ByteTokenizer, DataError, SentencePieceTokenizer, load_tokenizer, train_sentencepiece

SAMPLE = b"def window(start, stop):\n\treturn tokens[start:stop]  # a window of tokens\n\n" * 40


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tiny.model"
    path.write_bytes(train_sentencepiece([SAMPLE], kind="bpe", vocab_size=320))
    return path


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    text = np.random.default_rng(0).bytes(10_000)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.min() >= 3
    assert ids.max() < tokenizer.vocab_size
    assert tokenizer.byte_lengths[ids].sum() == len(text)


def test_special_tokens_decode_to_nothing():
    tokenizer = ByteTokenizer()
    ids = np.concatenate([[tokenizer.eos_id], tokenizer.encode(b"ab"), [tokenizer.pad_id, 2, 383]])
    assert tokenizer.decode(ids) == b"ab"
    assert not tokenizer.byte_lengths[[tokenizer.pad_id, tokenizer.eos_id, 2, 383]].any()


@pytest.mark.parametrize("text", [SAMPLE, b"", b" ", "  é ▁▁ 😀\x00\r\n\t".encode(), "▁".encode(), b"<0x41></s><pad>"])
def test_sentencepiece_comes_back(model_path, text):
    tokenizer = SentencePieceTokenizer(model_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text)
    assert not np.isin([tokenizer.eos_id, tokenizer.pad_id], ids).any()


def test_texts_at_once_are_texts_one_by_one(model_path):
    texts = [SAMPLE, b"", "a▁b▁".encode(), "▁".encode(), "é 😀".encode()]
    for tokenizer in (SentencePieceTokenizer(model_path), ByteTokenizer()):
        for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))
            assert tokenizer.decode(ids) == text


def test_sentencepiece_compresses_and_its_training_repeats(model_path):
    assert len(SentencePieceTokenizer(model_path).encode(SAMPLE)) < len(SAMPLE) / 2
    assert train_sentencepiece([SAMPLE], kind="bpe", vocab_size=320) == model_path.read_bytes()


def test_a_model_of_text_without_spaces_still_knows_them(tmp_path):
    path = tmp_path / "dense.model"
    path.write_bytes(train_sentencepiece([b"abcabcab" * 50], kind="bpe", vocab_size=270))
    tokenizer = SentencePieceTokenizer(path)
    assert tokenizer.decode(tokenizer.encode(b" a b")) == b" a b"


def test_the_name_tells_models_apart(model_path, tmp_path):
    other = tmp_path / "tiny.model"
    other.write_bytes(train_sentencepiece([SAMPLE], kind="bpe", vocab_size=310))
    names = {load_tokenizer(str(path)).name for path in (model_path, other)}
    assert len(names) == 2
    assert all(name.startswith("tiny-") for name in names)


def test_text_that_is_not_utf8_is_refused(model_path):
    with pytest.raises(DataError, match="UTF-8"):
        SentencePieceTokenizer(model_path).encode(b"\xff\xfe")


def test_a_model_that_changes_the_text_is_refused(tmp_path):
    import sentencepiece

    prefix = tmp_path / "lossy"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAMPLE.decode().splitlines()),
        model_prefix=str(prefix),
        vocab_size=300,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(DataError, match="changes the text"):
        SentencePieceTokenizer(f"{prefix}.model")


def test_a_damaged_model_is_told_or_another_one(model_path, tmp_path):
    path, complaints = tmp_path / "tiny.model", []
    for seed in range(200):
        generator, raw = random.Random(seed), bytearray(model_path.read_bytes())
        raw = raw[: generator.randrange(len(raw))] if seed % 2 else raw
        for _ in range(generator.randint(0, 3)):
            raw[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
        path.write_bytes(raw)
        try:
            other = load_tokenizer(str(path))
            assert raw == model_path.read_bytes() or other.name != load_tokenizer(str(model_path)).name
        except DataError as error:
            complaints.append(str(error))
    assert len(complaints) > 100
    assert all(str(path) in complaint and len(complaint.splitlines()) == 1 for complaint in complaints)


def test_a_vocabulary_too_large_for_its_text_is_an_error():
    with pytest.raises(DataError, match="could not train bpe:9999"):
        train_sentencepiece([SAMPLE], kind="bpe", vocab_size=9999)


def test_bad_names_say_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"'gpt2': must be 'bytes', or the path of a sentencepiece"):
        load_tokenizer("gpt2")
    with pytest.raises(DataError, match="train_tokenizer=bpe:8192"):
        load_tokenizer(str(tmp_path / "absent.model"))
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="not a sentencepiece model"):
        load_tokenizer(str(tmp_path / "broken.model"))


def test_absent_sentencepiece_names_the_extra(model_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install -c constraints.txt -e '\.\[text\]'"):
        load_tokenizer(str(model_path))
