"""Files of records: every kind holds the same documents, and what is wrong with one is said."""

import gzip
import io
import json
import tarfile

import pyarrow
import pyarrow.parquet
import pytest

from aamoe_jax.data import SPLITS, ByteTokenizer, DataError, prepare, text_corpus
from aamoe_jax.data.records import FORMATS, split_of

TEXTS = [f"document {i}\nof a few lines, é ▁ \U0001f600\n" * (i % 7 + 1) for i in range(200)]


def json_lines(field: str = "text") -> bytes:
    records = ({"id": i, field: text, "more": [1, {"a": None}]} for i, text in enumerate(TEXTS))
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet(field: str = "text") -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), field: TEXTS}), file, row_group_size=64)
    return file.getvalue()


def tar(ending: str = "txt", mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for i, text in enumerate(TEXTS):
            for name, content in ((f"{i:06}.{ending}", text.encode()), (f"{i:06}.json", b"{}")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


FILES = {
    ".jsonl": json_lines,
    ".jsonl.gz": lambda field="text": gzip.compress(json_lines(field)),
    ".jsonl.zst": lambda field="text": pyarrow.compress(json_lines(field), codec="zstd", asbytes=True),
    ".parquet": parquet,
    ".tar": tar,
    ".tar.gz": lambda field="txt": tar(field, "w:gz"),
}


def documents(path, field=None) -> dict[str, list[tuple[str, bytes]]]:
    corpus = text_corpus("mine", str(path), field)
    return {split: list(corpus.documents(split)) for split in SPLITS}


@pytest.mark.parametrize("ending", FILES)
def test_every_kind_of_file_has_the_same_documents(tmp_path, ending):
    assert set(FILES) == set(FORMATS)
    (tmp_path / f"shard{ending}").write_bytes(FILES[ending]())
    found = documents(tmp_path / f"shard{ending}")
    texts = [text.decode() for split in SPLITS for _, text in found[split]]
    assert sorted(texts) == sorted(TEXTS)
    assert all(split_of(name) == split for split in SPLITS for name, _ in found[split])
    assert 100 < len(found["train"]) < 198
    assert 0 < len(found["validation"]) < 40 > len(found["test"]) > 0
    assert [name for name, _ in found["train"]] == [name for name, _ in documents(tmp_path / f"*{ending}")["train"]]


@pytest.mark.parametrize("ending", FILES)
def test_text_may_have_another_name(tmp_path, ending):
    path = tmp_path / f"shard{ending}"
    path.write_bytes(FILES[ending]("body"))
    assert sum(map(len, documents(path, "body").values())) == len(TEXTS)
    with pytest.raises(DataError, match=r"--text_field=(NAME|ENDING)"):
        documents(path)


def test_what_grows_keeps_what_was_held_out(tmp_path):
    path = tmp_path / "shard.jsonl"
    path.write_bytes(json_lines()[:-1])  # the last line need not end
    before = documents(path)
    path.write_bytes(json_lines() + json_lines())
    after = documents(path)
    assert all(after[split][: len(before[split])] == before[split] for split in SPLITS)


def test_records_become_a_token_stream(tmp_path):
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines())
    corpus = text_corpus("web", f"{tmp_path}/*.jsonl")
    metadata = prepare(corpus, data_dir=str(tmp_path / "data"), tokenizer=ByteTokenizer(), document_align=8)
    assert sum(metadata["documents"].values()) == len(TEXTS)
    assert "200 copies of others" in metadata["left_out"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: is no JSON \("),
        (b"[1, 2]\n", r"a\.jsonl, line 1: is no JSON object: b'\[1, 2\]'"),
        (b'{"body": "a", "id": 3}\n', r"line 1: there is no field 'text', but body, id; name it: --text_field=NAME"),
        (b'{"text": 7}\n', r"line 1: field 'text' is 7, and no text"),
        (b'\xff{"text": "a"}\n', r"a\.jsonl, line 1: is no JSON \("),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, complaint):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        documents(path)


@pytest.mark.parametrize("ending", sorted(set(FILES) - {".jsonl"}))
def test_a_damaged_file_is_named(tmp_path, ending):
    path = tmp_path / f"torn{ending}"
    for content in (FILES[ending]()[:300], b"nothing of the kind"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"torn{ending}"):
            documents(path)


def test_a_lone_surrogate_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines() + b'{"text": "\\ud800"}\n')
    corpus = text_corpus("web", f"{tmp_path}/a.jsonl")
    metadata = prepare(corpus, data_dir=str(tmp_path / "data"), tokenizer=ByteTokenizer(), document_align=8)
    assert metadata["left_out"] == "1 not UTF-8 (a.jsonl:201)"


def test_records_and_plain_files_do_not_mix(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines())
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"files of records and others, such as .*b\.txt"):
        documents(tmp_path / "*")
    with pytest.raises(DataError, match=r"--text_field=body: is of files that end in \.jsonl, "):
        documents(tmp_path / "b.txt", "body")
