"""A user's own files as a corpus (AA-36): files of any kind and size, of which only text is read."""

import codecs
import glob
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from aamoe_jax.data.corpora import SPLITS, Corpus, Split, describe, name_hash
from aamoe_jax.data.errors import DataError, shown
from aamoe_jax.data.records import FORMATS, format_of, record_corpus
from aamoe_jax.data.stream import DOMAINS

FEW_FILES = 20
"""From this many files on whole files are held out; below it, the ends of every file."""
PIECE = 2**24
"""A larger file is read as several files of about so many bytes, cut between lines: no more is ever held in memory."""
HEAD = 8192
"""Bytes by which a file is judged."""

# UTF-16's mark of little-endian is how UTF-32's begins.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ADVICE = (
    f"with fewer than {FEW_FILES} files (of at most {PIECE // 2**20} MiB; larger ones count as several) the last tenth "
    f"of every file is held out, so give it files with more text in them, or {FEW_FILES} files"
)


class _Piece(NamedTuple):
    path: Path
    name: str
    size: int
    """Of the whole file, in bytes."""
    start: int = 0
    """Where the piece begins: at the next line."""


def text_corpus(name: str, pattern: str, field: str | None = None) -> Corpus:
    """The files that `pattern` matches (`**` crosses folders): one file, one document; 5 % validation, 5 % test.

    Files of records (`records.FORMATS`: JSON lines, Parquet, tar) have many documents, in `field`.

    Files that are no text, empty ones, pipes and devices are left out, and counted. Links to folders are not followed
    by `**`. Text is UTF-8, or UTF-16 or UTF-32 with a byte order mark; line ends become LF.

    Raises:
      DataError: the name or the pattern cannot be used, or there is no text in what it matches.
    """
    if not name.isidentifier() or name in DOMAINS:
        raise DataError(f"--name={shown(name)!r}: must be letters, digits and _, and not {', '.join(DOMAINS)}")
    paths = _matches(pattern)
    if any(map(format_of, paths)):
        if plain := next((path for path in paths if not format_of(path)), None):
            raise DataError(
                f"--text={shown(pattern)!r}: matches files of records and others, such as {shown(plain)}; prepare them "
                "under two names, and mix them: DataConfig.mixture"
            )
        return record_corpus(name, paths, field, f"{len(paths)} files of records: {shown(pattern)}")
    if field is not None:
        raise DataError(f"--text_field={shown(field)}: is of files that end in {', '.join(FORMATS)}")
    pieces, left_out = _pieces(paths)
    if not pieces:
        raise DataError(f"--text={shown(pattern)!r}: none of the files that match has text: {describe(left_out)}")
    files = len({piece.path for piece in pieces})
    read = _ends_of_files if len(pieces) < FEW_FILES else _whole_files
    description = f"{files} files: {shown(pattern)}"
    return Corpus(name, description, "the user's", lambda split: read(pieces, split), left_out, _ADVICE)


def _matches(pattern: str) -> list[Path]:
    """What a pattern matches, except folders: a file, a link, a pipe, ... in order."""
    flag, whole = f"--text={shown(pattern)!r}", Path(pattern)
    if not pattern.strip():
        raise DataError(f"{flag}: is empty; name text files, such as --text='notes/**/*.txt'")
    if os.path.isdir(whole):
        raise DataError(f"{flag}: is a folder; name the files in it: --text='{shown(whole)}/**/*.txt'")
    if os.path.lexists(whole):
        return [whole]
    fixed = next((at for at, part in enumerate(whole.parts) if glob.has_magic(part)), len(whole.parts))
    root, rest = Path(*whole.parts[:fixed]), whole.parts[fixed:]
    if not rest:
        raise DataError(f"{flag}: there is no such file")
    if not os.path.isdir(root):
        raise DataError(f"{flag}: there is no folder {shown(root)!r}")
    if rest[-1] == "**":
        rest = (*rest, "*")
    try:
        # Not glob.glob, which follows links to folders: with two links in a circle it never ends.
        found = set(root.glob(os.path.join(*rest)))
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"{flag}: is no pattern ({shown(error)}); ** stands for folders, between two /") from error
    hidden = any(part.startswith(".") for part in rest)
    found = {path for path in found if hidden or not any(p.startswith(".") for p in path.relative_to(root).parts)}
    files = sorted(path for path in found if not os.path.isdir(path))
    if not files:
        what = "it matches folders only" if found else "no file matches"
        raise DataError(f"{flag}: {what}; quote it, and use ** to search in folders: --text='DIR/**/*.txt'")
    return files


def _pieces(paths: list[Path]) -> tuple[list[_Piece], dict[str, list[str]]]:
    """The text in files, and the names of files that have none, by the reason."""
    sizes: dict[Path, int] = {}
    left_out: dict[str, list[str]] = {}
    reasons = {path: _look(path, sizes) for path in paths}
    # Names are relative to the common folder, so that the same files elsewhere are the same corpus.
    common = os.path.commonpath([path.parent for path in sizes or paths])
    pieces = []
    for path, reason in reasons.items():
        name = os.fsencode(os.path.relpath(path, common)).decode(errors="backslashreplace")
        if reason:
            left_out.setdefault(reason, []).append(name)
            continue
        starts = range(0, sizes[path], PIECE)
        pieces += [_Piece(path, f"{name}@{start}" if start else name, sizes[path], start) for start in starts]
    return pieces, left_out


def _look(path: Path, sizes: dict[Path, int]) -> str | None:
    """Why a file is left out, if it is. Notes the size of a regular file; opens no other."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "no regular files"
        sizes[path] = found.st_size
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except OSError as error:
        return f"not readable: {error.strerror}"
    if not head:
        return "empty"
    if _encoding(head) != "utf-8":
        return (
            f"{_encoding(head)} of more than {PIECE // 2**20} MiB (turn them into UTF-8)"
            if found.st_size > PIECE
            else None
        )
    return "binary" if b"\0" in head else None


def _encoding(text: bytes) -> str:
    return next((encoding for mark, encoding in _MARKS if text.startswith(mark)), "utf-8")


def _text(piece: _Piece) -> bytes:
    with open(piece.path, "rb") as file:
        start, stop = _cut(file, piece.start, piece.size), _cut(file, piece.start + PIECE, piece.size)
        file.seek(start)
        text = file.read(stop - start)
    if (encoding := _encoding(text)) != "utf-8" and piece.size <= PIECE:
        try:
            text = text.decode(encoding).encode("utf-8")
        except UnicodeError:
            return text  # as it is, it is left out as no UTF-8
    return text.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _cut(file: BinaryIO, at: int, size: int) -> int:
    """Where the piece begins that would begin at byte `at`."""
    if not 0 < at < size:
        return min(at, size)
    file.seek(at)
    within = PIECE // 50
    return at + _line_end(file.read(within), within)


def _whole_files(pieces: list[_Piece], split: Split) -> Iterator[tuple[str, bytes]]:
    # Every 20th in the order of hashes, so that no split is ever empty.
    order = sorted((piece.name for piece in pieces), key=name_hash)
    held_out = {"test": set(order[0::20]), "validation": set(order[1::20])}
    for piece in pieces:
        if split == next((held for held, members in held_out.items() if piece.name in members), "train"):
            yield piece.name, _text(piece)


def _ends_of_files(pieces: list[_Piece], split: Split) -> Iterator[tuple[str, bytes]]:
    for piece in pieces:
        text = _text(piece)
        cuts = [0, _held_out(text, 0.90), _held_out(text, 0.95), len(text)]
        index = SPLITS.index(split)
        yield f"{piece.name}#{split}", text[cuts[index] : cuts[index + 1]]


def _held_out(text: bytes, fraction: float) -> int:
    """Where the part after that fraction begins."""
    start, within = int(len(text) * fraction), len(text) // 50 + 1
    return start + _line_end(text[start : start + within + 4], within)


def _line_end(text: bytes, within: int) -> int:
    """Bytes to the end of the line, if it has at most so many; else to the end of the character."""
    line = text.find(b"\n", 0, within) + 1
    return line or next((at for at, byte in enumerate(text) if byte & 0xC0 != 0x80), len(text))
