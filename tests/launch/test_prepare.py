import os
import re
import subprocess
import sys

import pytest

from aamoe_jax import data
from aamoe_jax.config import DataConfig
from launch import prepare


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "launch.prepare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)


@pytest.fixture
def notes(tmp_path):
    lines = "".join(f"line {i} of the notes\n" for i in range(800))
    (tmp_path / "notes.txt").write_text(lines)
    return str(tmp_path / "*.txt"), lines.encode()


def test_own_files_with_a_tokenizer_of_their_own(tmp_path, notes):
    pattern, text = notes
    arguments = [f"--text={pattern}", "--name=notes", f"--data_dir={tmp_path}/data", "--document_align=16"]
    done = run(*arguments, "--train_tokenizer=bpe:300")
    assert done.returncode == 0, done.stderr
    model = f"{tmp_path}/data/tokenizers/notes_bpe_300.model"
    assert f"tokenizer {model}" in done.stdout
    assert "corpus digest" in done.stdout
    config = DataConfig(mixture=(("notes", 1.0),), data_dir=f"{tmp_path}/data", tokenizer=model, document_align=16)
    assert b"".join(b"".join(data.documents_of(config, "notes", split)) for split in data.SPLITS) == text
    assert data.training_batches(config, batch_size=2, seed=0)[0]["tokens"].max() < 300

    again = run(*arguments, f"--tokenizer={model}")
    assert again.returncode == 0, again.stderr
    assert "was there already" in again.stdout


@pytest.mark.parametrize("flag", ["data_dir", "tokenizer", "text"])
def test_other_addresses_are_refused(tmp_path, flag):
    given = {"data_dir": str(tmp_path), "text": str(tmp_path / "*"), "name": "x"} | {flag: "s3://bucket/a"}
    done = run(*(f"--{name}={value}" for name, value in given.items()))
    assert done.returncode == 1
    wanted = "a path or gs://BUCKET/FOLDER" if flag == "data_dir" else "a path"
    assert done.stderr == (
        f"error: --{flag} = 's3://bucket/a': must be {wanted}; mount other storage and give its path here\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_expected_error_is_one_line_and_exit_code_1(tmp_path):
    done = run("--domain=poems", f"--data_dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: --domain='poems': there are code, books, papers and tfds:NAME; for your own files: "
        "`aamoe prepare --text='DIR/**/*.txt' --name=NAME`"
    ]


def test_a_tokenizer_to_train_is_named_by_kind_and_size(tmp_path):
    with pytest.raises(data.DataError, match="'wordpiece': must be bpe:SIZE or unigram:SIZE"):
        prepare.train_tokenizer([], "wordpiece", data_dir=str(tmp_path))


@pytest.mark.parametrize("extra", [[], ["--train_tokenizer=bpe:300"]])
def test_a_data_dir_that_cannot_be_written_is_one_line(tmp_path, notes, extra):
    done = run(f"--text={notes[0]}", "--name=notes", f"--data_dir={tmp_path}/notes.txt", *extra)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: .*cannot be written \(.*Not a directory.*; name another folder: --data_dir\n", done.stderr
    )


def test_what_is_left_out_is_said_in_one_line(tmp_path, notes):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 99)
    (tmp_path / "empty.txt").touch()
    done = run(f"--text={notes[0]}", "--name=notes", f"--data_dir={tmp_path}/data")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("left out: ")]
    assert lines == ["left out: 1 empty (empty.txt), 3 not UTF-8 (latin.txt#test, latin.txt#validation, ...)"]
    assert "latin" not in done.stderr
