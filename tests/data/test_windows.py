import dataclasses
import itertools

import numpy as np
import pytest

from aamoe_jax import data
from aamoe_jax.config import ConfigError
from tests.data.helpers import ALIGN, SEQ_LEN, prepared, random_documents

EOS, PAD = 1, 0


def brute_force(window):
    """Token by token."""
    example = {key: [] for key in ("tokens", "targets", "segment_ids", "positions", "loss_mask")}
    segment, position, previous = 0, 0, PAD
    for token, target in itertools.pairwise(window):
        if token != PAD and previous in (PAD, EOS):
            segment, position = segment + 1, 0
        example["tokens"].append(token)
        example["targets"].append(target)
        example["segment_ids"].append(segment if token != PAD else 0)
        example["positions"].append(position if token != PAD else 0)
        example["loss_mask"].append(int(token not in (PAD, EOS) and target != PAD))
        position, previous = position + 1, token
    return example


def test_examples_match_the_definition(tmp_path):
    source = data.WindowSource(prepared(tmp_path, random_documents(train=60)), "tiny", "train")
    for index in range(len(source)):
        example = data.to_example(source[index], eos_id=EOS, pad_id=PAD)
        assert {key: value.tolist() for key, value in example.items()} == brute_force(source[index].tolist())
        assert {value.dtype for value in example.values()} == {np.dtype(np.int32)}


def test_documents_start_at_chunk_boundaries_of_every_row(tmp_path):
    source = data.WindowSource(prepared(tmp_path, random_documents(train=60)), "tiny", "train")
    for index in range(len(source)):
        example = data.to_example(source[index], eos_id=EOS, pad_id=PAD)
        starts = np.flatnonzero((example["positions"] == 0) & (example["segment_ids"] > 0))
        assert not (starts % ALIGN).any()
        assert example["segment_ids"][0] == 1, "no row begins with padding"


def test_every_token_is_a_target_once(tmp_path):
    documents = random_documents(train=60)
    source = data.WindowSource(prepared(tmp_path, documents), "tiny", "train")
    targets = []
    for index in range(len(source)):
        example = data.to_example(source[index], eos_id=EOS, pad_id=PAD)
        targets += example["targets"][example["loss_mask"] == 1].tolist()
    # All but the first token of a document, in order, each document with its eos.
    assert targets == [token for _, text in documents["train"] for token in [*(b + 3 for b in text[1:]), EOS]]


def test_a_document_of_one_token_and_a_full_row():
    window = np.array([5, EOS, 6, EOS, 7, 8, 9, 10, 11])
    example = data.to_example(window, eos_id=EOS, pad_id=PAD)
    assert example["segment_ids"].tolist() == [1, 1, 2, 2, 3, 3, 3, 3]
    assert example["positions"].tolist() == [0, 1, 0, 1, 0, 1, 2, 3]
    assert example["loss_mask"].tolist() == [1, 0, 1, 0, 1, 1, 1, 1]


def test_padding_alone_is_fully_masked():
    example = data.to_example(np.full(9, PAD), eos_id=EOS, pad_id=PAD)
    assert not any(value.any() for value in example.values())


def test_seq_len_must_keep_the_alignment(tmp_path):
    config = prepared(tmp_path, random_documents())
    with pytest.raises(ConfigError, match=r"DataConfig\.seq_len = 36: must be a multiple of document_align = 8"):
        data.WindowSource(dataclasses.replace(config, seq_len=SEQ_LEN + 4), "tiny", "train")
