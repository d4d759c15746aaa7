"""Datasets in a bucket, against a server of the tests' own: prepared into it, and read from it on other machines."""

from __future__ import annotations

import dataclasses
import os
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gcsfs", reason="pip install -c constraints.txt -e '.[gcs]'")

import gcsfs.retry
from array_record.python.array_record_data_source import ArrayRecordDataSource

from aamoe_jax.config import DataConfig
from aamoe_jax.data import ByteTokenizer, DataError, Stream, dataset_metadata, ensure_prepared, prepare
from aamoe_jax.data.integrity import SUMS, _checked
from aamoe_jax.data.mirror import local_folder
from aamoe_jax.files import SaveError
from tests.data.helpers import memory_corpus, random_documents
from tests.fake_gcs import FakeGCS


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, FakeGCS("bucket") as running:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running


async def at_once(seconds: float) -> None:
    """In place of the wait before a request is sent again."""
    del seconds


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes this another machine, which has nothing yet."""

    def change(name: str) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        _checked.clear()
        return tmp_path / name

    change("first")
    return change


def config_of(request) -> DataConfig:
    address = f"gs://bucket/{request.node.name}"
    return DataConfig(mixture=(("tiny", 1.0),), data_dir=address, seq_len=64, document_align=8)


def write(config: DataConfig, documents=None, **how) -> dict:
    corpus = memory_corpus(documents or random_documents())
    return prepare(corpus, data_dir=config.data_dir, tokenizer=ByteTokenizer(), document_align=8, **how)


def tokens_of(config: DataConfig) -> np.ndarray:
    stream = Stream(config, "tiny", "train")
    return stream.read(0, len(stream))


def folder_in_bucket(server, config: DataConfig) -> str:
    (sums,) = (name for name in server.names("bucket", config.data_dir.removeprefix("gs://bucket/")) if SUMS in name)
    return sums.removesuffix(SUMS)


def test_what_one_machine_prepares_another_one_reads(server, machine, request):
    config = config_of(request)
    written = write(config)
    held = {name: found.generation for name, found in server.objects["bucket"].items() if request.node.name in name}
    assert max(held, key=lambda name: held[name]).endswith(SUMS)  # written last
    expected = tokens_of(config)
    machine("second")
    assert dataset_metadata(config, "tiny") == written
    np.testing.assert_array_equal(tokens_of(config), expected)
    before = len(server.requests)
    tokens_of(config)
    assert not [name for name in server.requests[before:] if "array_record" in name]  # read from the copy


def test_one_whose_copy_into_the_bucket_was_cut_short_is_not_prepared(server, machine, request):
    config = config_of(request)
    write(config)
    sums = folder_in_bucket(server, config) + SUMS
    kept = server.objects["bucket"].pop(sums)
    with pytest.raises(DataError, match=r"dataset 'tiny' is not prepared .* Prepared there: nothing"):
        dataset_metadata(config, "tiny")
    server.put("bucket", sums, kept.data)
    machine("second")
    assert dataset_metadata(config, "tiny")["corpus"] == "tiny"


def test_a_damaged_copy_is_copied_again_and_a_damaged_original_is_told(server, machine, request):
    config = config_of(request)
    write(config)
    expected = tokens_of(config)
    (record,) = local_folder(config.data_dir).rglob("*train*array_record*")
    record.write_bytes(record.read_bytes()[:-1] + b"!")
    np.testing.assert_array_equal(tokens_of(config), expected)
    name = folder_in_bucket(server, config) + record.name
    server.put("bucket", name, server.objects["bucket"][name].data[:-1] + b"!")
    machine("second")
    with pytest.raises(DataError, match="damaged, its digest is not that of SHA256SUMS; prepare it again"):
        dataset_metadata(config, "tiny")


def test_a_replaced_dataset_is_read_everywhere(server, machine, request):
    config = config_of(request)
    write(config)
    old = tokens_of(config)
    first = os.environ["XDG_CACHE_HOME"]
    machine("second")
    write(config, random_documents(seed=1), existing="replace")
    new = tokens_of(config)
    assert not np.array_equal(old, new)
    machine(Path(first).name)
    np.testing.assert_array_equal(tokens_of(config), new)
    with pytest.raises(DataError, match="holds another state of the corpus"):
        write(config)


def test_code_is_prepared_where_it_is_missing(server, machine, request, monkeypatch):
    config = dataclasses.replace(config_of(request), mixture=(("code", 1.0),))
    corpus = memory_corpus(random_documents(), name="code")
    monkeypatch.setattr("aamoe_jax.data.builder.open_corpus", lambda name, data_dir: corpus)
    ensure_prepared(config)
    machine("second")
    monkeypatch.setattr("aamoe_jax.data.builder.open_corpus", None)
    ensure_prepared(config)


def test_without_a_bucket_or_storage_there_is_one_line(machine, server, request, monkeypatch):
    with pytest.raises(DataError, match=r"dataset 'tiny' is not prepared .*no-bucket"):
        dataset_metadata(dataclasses.replace(config_of(request), data_dir="gs://no-bucket/data"), "tiny")
    with pytest.raises(DataError, match="no such object, or no bucket 'no-bucket'"):
        write(dataclasses.replace(config_of(request), data_dir="gs://no-bucket/data"))
    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=at_once))
    server.fail(1.0, (503,))
    with pytest.raises(SaveError, match="fails by intention"):
        dataset_metadata(config_of(request), "tiny")
    server.fail(0)
    monkeypatch.setattr(server, "denied", True)
    with pytest.raises(DataError, match=r"the storage refuses .* log in"):
        dataset_metadata(config_of(request), "tiny")


def test_what_could_not_be_copied_into_the_bucket_is_copied_the_next_time(machine, server, request, monkeypatch):
    """And not tokenized again."""
    config = config_of(request)
    with monkeypatch.context() as patch:
        patch.setattr("aamoe_jax.data.builder.publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write(config)
    monkeypatch.setattr("aamoe_jax.data.builder._write", None)
    written = write(config)
    machine("second")
    assert dataset_metadata(config, "tiny") == written


@pytest.mark.distributed
def test_sixty_four_megabytes_are_the_same_on_both_sides(server, machine, request):
    config = config_of(request)
    text = np.random.default_rng(0).integers(0, 128, 2**26 - 2**20, np.uint8).tobytes()  # more would be two files
    documents = random_documents()
    documents["train"] = [(str(start), text[start : start + 2**20]) for start in range(0, len(text), 2**20)]
    write(config, documents)
    (name,) = (name for name in server.names("bucket", request.node.name) if "train" in name and "array_record" in name)
    assert len(server.objects["bucket"][name].data) > 64_000_000
    expected = tokens_of(config)
    machine("second")
    np.testing.assert_array_equal(tokens_of(config), expected)
    # array_record's own reader, too, which asks for the end of the file first: `bytes=-1048576`.
    source = ArrayRecordDataSource([f"gs://bucket/{name}"])
    assert len(source) == -(-len(expected) // 4096)
    assert source[len(source) - 1]
