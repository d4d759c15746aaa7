"""Files of many documents (JSON lines, Parquet, tar): one record, one document.

Arrow is imported where it is used: that takes a third of a second, and most programs open no such file.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aamoe_jax.data.corpora import Corpus, Split
from aamoe_jax.data.errors import DataError, shown

SHARE = 20
"""One document of so many is test text, and another validation text."""
BATCH = 1024
"""Records of a Parquet file that are held at a time."""
ADVICE = f"one of {SHARE} records, by the hash of its file and number, is held out for each: give it more records"

Documents = Iterator[tuple[str, bytes]]
Wanted = Callable[[str], bool]


class Format(NamedTuple):
    """A kind of file with documents in it."""

    read: Callable[[Path, str, str, Wanted], Documents]
    """(path, its name, field, which are wanted by id) -> (id, text)."""
    field: str
    """Where the text is, unless the user says otherwise."""


def format_of(path: Path) -> Format | None:
    """By the end of a file's name; None: it is no file of records."""
    name = path.name.lower()
    return next((format for ends, format in FORMATS.items() if name.endswith(ends)), None)


def record_corpus(name: str, paths: Sequence[Path], field: str | None, description: str) -> Corpus:
    """The documents in these files: 5 % are validation text, 5 % test text, by the hash of file and number.

    So a file that grows at its end keeps what was held out.

    Args:
      field: of JSON lines the field, of Parquet the column, of tar the ending of the members that are text. None:
        `text`, of tar `txt`.
    """
    common = os.path.commonpath([path.parent for path in paths])

    def read(split: Split) -> Documents:
        from pyarrow import ArrowException

        for path in paths:
            format, label = format_of(path), os.path.relpath(path, common)
            assert format is not None
            try:
                yield from format.read(path, label, field or format.field, lambda name: split_of(name) == split)
            except (ArrowException, tarfile.TarError, EOFError) as error:
                raise DataError(f"{shown(path)}: is damaged, or not what its name says ({shown(error)})") from error

    return Corpus(name, description, "the user's", read, advice=ADVICE)


def split_of(name: str) -> Split:
    """Of a record, by its id alone."""
    held_out: Mapping[int, Split] = {0: "test", 1: "validation"}
    return held_out.get(hashlib.blake2b(name.encode(), digest_size=8).digest()[0] * SHARE // 256, "train")


def _json_lines(path: Path, label: str, field: str, wanted: Wanted) -> Documents:
    from pyarrow import input_stream

    with input_stream(str(path), compression="detect") as file:
        for number, line in enumerate(_lines(file), 1):
            if not line.strip() or not wanted(name := f"{label}:{number}"):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{shown(path)}, line {number}: is no JSON ({shown(error)})") from error
            if not isinstance(record, dict):
                raise DataError(f"{shown(path)}, line {number}: is no JSON object: {shown(line[:40])}")
            yield name, _text(record, field, f"{shown(path)}, line {number}")


def _lines(file: Any) -> Iterator[bytes]:
    """Without the whole file in memory."""
    rest = b""
    while block := file.read(2**20):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _parquet(path: Path, label: str, field: str, wanted: Wanted) -> Documents:
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(path)
    if field not in file.schema_arrow.names:
        raise DataError(_no_field(shown(path), "column", field, file.schema_arrow.names))
    number = 0
    for batch in file.iter_batches(BATCH, columns=[field]):
        for value in batch.column(0):
            number += 1
            if wanted(name := f"{label}:{number}"):
                yield name, _text({field: value.as_py()}, field, f"{shown(path)}, row {number}")


def _tar(path: Path, label: str, field: str, wanted: Wanted) -> Documents:
    """Members such as `000017.txt`, as WebDataset has them."""
    found = False
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isfile() or not member.name.endswith(f".{field}"):
                continue
            found = True
            if wanted(name := f"{label}:{member.name}"):
                file = archive.extractfile(member)
                assert file is not None, "of a regular file there is one"
                yield name, file.read()
    if not found:
        raise DataError(f"{shown(path)}: no member ends in .{field}; name the ending: --text_field=ENDING")


def _text(record: Mapping[str, Any], field: str, where: str) -> bytes:
    if field not in record:
        raise DataError(_no_field(where, "field", field, list(record)))
    if not isinstance(record[field], str):
        raise DataError(f"{where}: field {field!r} is {shown(repr(record[field]), 40)}, and no text")
    return record[field].encode("utf-8", "surrogatepass")  # a lone surrogate is left out as no UTF-8


def _no_field(where: str, kind: str, field: str, names: Sequence[str]) -> str:
    return f"{where}: there is no {kind} {field!r}, but {shown(', '.join(names)) or 'none'}; name it: --text_field=NAME"


FORMATS: Mapping[str, Format] = {
    ".jsonl": Format(_json_lines, "text"),
    ".jsonl.gz": Format(_json_lines, "text"),
    ".jsonl.zst": Format(_json_lines, "text"),
    ".parquet": Format(_parquet, "text"),
    ".tar": Format(_tar, "txt"),
    ".tar.gz": Format(_tar, "txt"),
}
"""By the end of a file's name."""
