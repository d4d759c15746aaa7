"""Damage to prepared datasets: it is found, named in one line, and never trained on."""

import itertools
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from aamoe_jax import data
from aamoe_jax.config import DataConfig
from aamoe_jax.data import integrity
from tests.data.helpers import ALIGN, memory_corpus, prepared, random_documents

COMMAND = r"aamoe prepare --text='DIR/\*\*/\*\.txt' --name=tiny .*--existing=replace"


@pytest.fixture
def config(tmp_path) -> DataConfig:
    return prepared(tmp_path, random_documents(train=400))


def folder_of(config: DataConfig) -> Path:
    return next(Path(config.data_dir).glob("token_stream/tiny-*/*"))


def record_file(config: DataConfig, split: str = "train") -> Path:
    return next(folder_of(config).glob(f"*-{split}.array_record*"))


def everything(config: DataConfig) -> dict:
    """All that a run reads."""
    data.ensure_prepared(config)
    streams = {split: data.Stream(config, "tiny", split) for split in data.SPLITS}
    return {
        "metadata": data.dataset_metadata(config, "tiny"),
        **{split: stream.read(0, len(stream)).tolist() for split, stream in streams.items()},
    }


def start_of_a_process(monkeypatch) -> None:
    monkeypatch.setattr(integrity, "_checked", {})


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """The names of the files that are read to be verified."""
    names, sha256 = [], integrity._sha256
    monkeypatch.setattr(integrity, "_sha256", lambda path: names.append(path.name) or sha256(path))
    return names


def test_sums_are_those_of_sha256sum(config):
    lines = (folder_of(config) / "SHA256SUMS").read_text().splitlines()
    listed = {line.split("  ")[1] for line in lines}
    assert listed | {"SHA256SUMS", "checked.json"} == {path.name for path in folder_of(config).iterdir()}
    assert record_file(config).name in listed


def test_files_are_read_once(config, hashed, monkeypatch):
    for _ in range(2):
        start_of_a_process(monkeypatch)
        everything(config)
    assert not hashed, "prepare has verified them"
    os.utime(record_file(config))
    everything(config)
    assert record_file(config).name in hashed
    hashed.clear()
    start_of_a_process(monkeypatch)
    everything(config)
    assert not hashed


def test_a_folder_that_cannot_be_written_is_verified_by_every_process(config, hashed, monkeypatch):
    (folder_of(config) / "checked.json").unlink()
    refused = OSError(30, "Read-only file system")
    monkeypatch.setattr(integrity.tempfile, "TemporaryDirectory", lambda **_: (_ for _ in ()).throw(refused))
    for _ in range(2):
        start_of_a_process(monkeypatch)
        everything(config)
        everything(config)
        assert len(hashed) == len(set(hashed)) > 0, "once in each"
        hashed.clear()
    assert not (folder_of(config) / "checked.json").exists()


def test_other_text_in_a_valid_record_file_is_refused(config, tmp_path):
    other = prepared(tmp_path / "other", random_documents(seed=1, train=400))
    shutil.copy(record_file(other), record_file(config))
    with pytest.raises(data.DataError, match=rf"train\.array_record.*: damaged.*{COMMAND}"):
        data.training_batches(config, batch_size=1, seed=0)


def test_other_lengths_are_refused(config):
    path = folder_of(config) / "metadata.json"
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps(metadata | {"length": {key: 10 * value for key, value in metadata["length"].items()}}))
    with pytest.raises(data.DataError, match=rf"metadata\.json: damaged.*{COMMAND}"):
        data.dataset_metadata(config, "tiny")


def test_another_dataset_in_the_folder_is_refused(config, tmp_path):
    other = prepared(tmp_path, random_documents(), "other")
    folder = folder_of(config)
    shutil.rmtree(folder)
    shutil.copytree(next(tmp_path.glob("token_stream/other*/*")), folder)
    with pytest.raises(data.DataError, match="corpus is 'other' where 'tiny' is wanted"):
        everything(config)
    assert data.dataset_metadata(other, "other")


def test_a_list_that_was_cut_short_hides_nothing(config):
    sums = folder_of(config) / "SHA256SUMS"
    for kept in (0, 2):
        sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:kept]))
        with pytest.raises(data.DataError, match="SHA256SUMS: damaged, it does not list"):
            everything(config)


def test_prepare_tells_damage_and_replaces_it(config, tmp_path):
    record_file(config).unlink()
    corpus = memory_corpus(random_documents(train=400))
    how = {"data_dir": str(tmp_path), "tokenizer": data.ByteTokenizer(), "document_align": ALIGN}
    with pytest.raises(data.DataError, match=r"train\.array_record.*No such file.*--existing=replace"):
        data.prepare(corpus, **how)
    data.prepare(corpus, **how, existing="replace")
    assert everything(config)


@pytest.mark.parametrize("threads", [0, 2])
def test_damage_in_the_middle_of_training_is_one_line(config, monkeypatch, hashed, threads):
    batches = data.iterate(data.training_batches(config, batch_size=1, seed=0), threads=threads, buffered=1)
    next(batches)
    os.truncate(record_file(config), 1000)
    with pytest.raises(data.DataError, match=rf"record \d+ of tiny-bytes-8/train .*{COMMAND}") as raised:
        list(itertools.islice(batches, 1000))
    assert_one_line(raised.value, config)
    start_of_a_process(monkeypatch)
    with pytest.raises(data.DataError, match="damaged"):
        everything(config)
    assert hashed


# --- fuzzing ----------------------------------------------------------------------------------------------------------


def assert_one_line(error: data.DataError, config: DataConfig) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) <= 600 + 3 * len(config.data_dir), error
    assert "token_stream/tiny-bytes-8" in str(error) or "'tiny' is not prepared" in str(error)


def damage(folder: Path, generator: random.Random, only: str = "") -> str:
    """One thing that happens to files. Says which."""
    files = sorted(path for path in folder.iterdir() if only in path.name)
    path, other = generator.choice(files), generator.choice(files)
    raw = path.read_bytes()
    at = generator.randrange(max(len(raw), 1))
    match kind := generator.choice(["truncate", "flip", "delete", "swap", "append", "empty", "folder", "zeros"]):
        case "truncate":
            os.truncate(path, at)
        case "flip":
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << generator.randrange(8)]) + raw[at + 1 :])
        case "delete":
            path.unlink()
        case "swap":
            path.write_bytes(other.read_bytes())
            other.write_bytes(raw)
        case "append":
            path.write_bytes(raw + generator.randbytes(generator.randrange(1, 100)))
        case "empty":
            os.truncate(path, 0)
        case "folder":
            path.unlink()
            path.mkdir()
        case "zeros":
            path.write_bytes(raw[:at] + bytes(len(raw) - at))
    return f"{kind} {path.name}"


def test_any_damage_is_told_or_harmless(config, tmp_path, monkeypatch):
    whole, folder = everything(config), folder_of(config)
    shutil.copytree(folder, tmp_path / "whole")
    told = 0
    for seed in range(250):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "whole", folder)  # with the times of the files, as a backup would
        done = damage(folder, random.Random(seed))
        start_of_a_process(monkeypatch)
        try:
            assert everything(config) == whole, done
        except data.DataError as error:
            assert_one_line(error, config)
            told += 1
    assert told > 150, "most damage matters"


def test_any_damage_while_training_is_told_or_harmless(config, tmp_path):
    folder = folder_of(config)
    shutil.copytree(folder, tmp_path / "whole")
    batches = data.training_batches(config, batch_size=1, seed=0)
    whole = [batches[step]["tokens"] for step in range(100)]
    told = 0
    for seed in range(60):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "whole", folder)
        batches = data.training_batches(config, batch_size=1, seed=0)
        done = damage(folder, random.Random(seed), only="train.array_record")
        try:
            for step, expected in enumerate(whole):
                np.testing.assert_array_equal(batches[step]["tokens"], expected, err_msg=done)
        except data.DataError as error:
            assert_one_line(error, config)
            told += 1
    assert told > 20
