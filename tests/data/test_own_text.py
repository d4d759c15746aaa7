"""A user's own files: what is read of them, what is left out, and what is said of it."""

import os
import re
import resource
import subprocess
import sys

import pytest

from aamoe_jax.data import SPLITS, ByteTokenizer, DataError, own_text, prepare, survey, text_corpus

LINES = "".join(f"line {i} of a text\n" for i in range(2000))


def everything(corpus):
    return [item for split in SPLITS for item in corpus.read(split)]


def joined(pattern) -> str:
    return b"".join(text for _, text in everything(text_corpus("mine", str(pattern)))).decode()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_links_in_a_circle_end(tmp_path):
    write(tmp_path / "a" / "one.txt", LINES)
    write(tmp_path / "a" / "b" / "two.txt", LINES[::-1])
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    corpus = text_corpus("mine", f"{tmp_path}/**/*.txt")
    assert [name for name, _ in corpus.read("test")] == ["b/two.txt#test", "one.txt#test"]


def test_a_link_that_is_named_is_followed(tmp_path):
    write(tmp_path / "a" / "one.txt", LINES)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "same.md").symlink_to(tmp_path / "a" / "one.txt")
    assert joined(tmp_path / "link" / "*.txt") == joined(tmp_path / "a" / "same.md") == LINES


def test_hidden_files_are_read_when_they_are_named(tmp_path):
    write(tmp_path / ".git" / "one.txt", "hidden")
    write(tmp_path / "a" / "two.txt", LINES)
    assert joined(tmp_path / "**") == joined(tmp_path / "**/*.txt") == LINES
    assert joined(tmp_path / ".git" / "*.txt") == "hidden"


def test_what_is_no_text_is_left_out_and_counted(tmp_path):
    for i in range(3):
        write(tmp_path / f"good{i}.txt", LINES.replace("text", f"text {i}"))
    write(tmp_path / "empty.txt", b"")
    write(tmp_path / "latin.txt", "caf\u00e9 ".encode("latin-1") * 99)
    write(tmp_path / "binary.txt", b"text\0" + LINES.encode())
    write(tmp_path / "copy.txt", LINES.replace("text", "text 0"))
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.txt")
    corpus = text_corpus("mine", f"{tmp_path}/*.txt")
    metadata = prepare(corpus, data_dir=str(tmp_path / "data"), tokenizer=ByteTokenizer(), document_align=8)
    assert set(re.split(r"(?<=\)), ", metadata["left_out"])) == {
        "1 binary (binary.txt)",
        "1 empty (empty.txt)",
        "2 no regular files (device.txt, pipe.txt)",
        "1 not readable: No such file or directory (dangling.txt)",
        "3 not UTF-8 (latin.txt#test, latin.txt#validation, ...)",
        "3 copies of others (good0.txt#test, good0.txt#validation, ...)",
    }


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_text_with_a_byte_order_mark_is_read(tmp_path, encoding):
    text = LINES + "caf\u00e9 \u2028 \x85 \U0001f600\n"
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert joined(tmp_path / "a.txt") == text


def test_line_ends_become_one_and_other_separators_stay(tmp_path):
    write(tmp_path / "a.txt", "one\r\ntwo\rthree\nfour\u2028five\x85six\x0b\x0c\n")
    assert joined(tmp_path / "a.txt") == "one\ntwo\nthree\nfour\u2028five\x85six\x0b\x0c\n"


@pytest.mark.parametrize(
    "text", [LINES, "\u00e9\u4e2d" * 9000, LINES.replace("\n", "\r\n")], ids=["lines", "long", "crlf"]
)
def test_a_large_file_is_read_in_pieces_and_nothing_is_lost(tmp_path, monkeypatch, text):
    monkeypatch.setattr(own_text, "PIECE", 1500)
    write(tmp_path / "a.txt", text)
    corpus = text_corpus("mine", str(tmp_path / "a.txt"))
    found = dict(everything(corpus))
    pieces = sorted(found, key=lambda name: int(f"{name}@0".split("@")[1]))
    assert len(pieces) > own_text.FEW_FILES, "so that whole pieces are held out"
    assert b"".join(found[name] for name in pieces).decode() == text.replace("\r\n", "\n")
    assert all(len(piece) <= 1600 for piece in found.values())
    # Copies apart (of the text without lines), all of it is text.
    assert "not UTF-8" not in survey(corpus).left_out


def test_large_files_of_other_encodings_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(own_text, "PIECE", 1500)
    write(tmp_path / "a.txt", LINES.encode("utf-16"))
    with pytest.raises(DataError, match=r"none of the files .* has text: 1 utf-16 of more than .*UTF-8"):
        text_corpus("mine", str(tmp_path / "a.txt"))


def test_memory_is_bounded(tmp_path):
    """Of 35 GB in two files with a hole, with less memory than either."""
    with open(tmp_path / "zeros.txt", "wb") as file:
        file.truncate(30 * 2**30)
    with open(tmp_path / "text.txt", "wb") as file:
        file.write(LINES.encode())
        file.truncate(5 * 2**30)
    program = f"""
import resource
from aamoe_jax.data import text_corpus
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
corpus = text_corpus("mine", "{tmp_path}/*.txt")
print(corpus.left_out, max(len(text) for _, text in corpus.read("test")))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.stdout == "{'binary': ['zeros.txt']} 16777216\n", done.stderr


def test_a_split_without_text_says_why_and_what_to_do(tmp_path):
    write(tmp_path / "two.txt", "ab")
    found = {"two.txt": "empty", "one_line.txt": "copies of others"}
    write(tmp_path / "one_line.txt", "x" * 10**5)
    for name, reason in found.items():
        corpus = text_corpus("mine", str(tmp_path / name))
        with pytest.raises(
            DataError, match=rf"no documents for the split .*left out: .*{reason} .*fewer than 20 files"
        ):
            prepare(corpus, data_dir=str(tmp_path / "data"), tokenizer=ByteTokenizer(), document_align=8)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "is empty; name text files"),
        (" ", "is empty; name text files"),
        ("{}", r"is a folder; name the files in it: --text='.*/\*\*/\*\.txt'"),
        ("{}/absent.txt", "there is no such file"),
        ("{}/absent/*.txt", "there is no folder '.*/absent'"),
        ("{}/*.md", "no file matches; quote it"),
        ("{}/*", "it matches folders only"),
        ("{}/a**b/*", r"no file matches|is no pattern"),
        ("{}/folder/*", r"none of the files that match has text: 1 empty \(empty\.txt\)"),
    ],
)
def test_a_pattern_without_text_says_what_is_wrong(tmp_path, pattern, message):
    write(tmp_path / "folder" / "empty.txt", "")
    with pytest.raises(DataError, match=rf"^--text='.*': {message}"):
        text_corpus("mine", pattern.format(tmp_path))


def test_files_that_change_or_vanish_while_they_are_read_are_told(tmp_path):
    write(tmp_path / "a.txt", LINES)
    corpus = text_corpus("mine", str(tmp_path / "a.txt"))
    how = {"data_dir": str(tmp_path / "data"), "tokenizer": ByteTokenizer(), "document_align": 8}

    class Changing(ByteTokenizer):
        def encode(self, text):
            write(tmp_path / "a.txt", LINES.replace("text", "TEXT"))
            return super().encode(text)

    with pytest.raises(DataError, match="mine: its files changed while they were read"):
        prepare(corpus, **how | {"tokenizer": Changing()})
    assert not list((tmp_path / "data").rglob("1.*"))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"mine: .*a\.txt cannot be read \(No such file or directory\)"):
        prepare(corpus, **how)


def test_a_name_that_is_no_text_is_no_obstacle(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\n.txt"
    with open(path, "wb") as file:
        file.write(LINES.encode())
    corpus = text_corpus("mine", str(tmp_path / "*.txt"))
    metadata = prepare(corpus, data_dir=str(tmp_path / "data"), tokenizer=ByteTokenizer(), document_align=8)
    assert metadata["documents"] == dict.fromkeys(SPLITS, 1)


def test_a_full_disk_is_one_line(tmp_path):
    write(tmp_path / "a.txt", "".join(f"{i * i} is {i} times {i}\n" for i in range(60000)))
    corpus = text_corpus("mine", str(tmp_path / "a.txt"))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, hard))
    try:
        with pytest.raises(
            DataError, match=r"cannot be written \(.*too large.*; name another folder: --data_dir"
        ) as error:
            prepare(corpus, data_dir=str(tmp_path / "data"), tokenizer=ByteTokenizer(), document_align=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    write(tmp_path / "a.txt", LINES)
    corpus = text_corpus("mine", str(tmp_path / "a.txt"))
    with pytest.raises(
        DataError, match=r"a\.txt.*: cannot be written \(.*Not a directory.*; name another folder: --data_dir"
    ):
        prepare(corpus, data_dir=str(tmp_path / "a.txt"), tokenizer=ByteTokenizer(), document_align=8)
