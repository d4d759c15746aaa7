"""Prepares text for training: fetches it, tokenizes it, and writes token streams.

aamoe prepare                                        # code: the standard library, no download
aamoe prepare --domain=books,papers                  # fetches 40 MB, installs and runs nothing of it
aamoe prepare --text='notes/**/*.txt' --name=notes   # your own files
aamoe prepare --text='web/*.jsonl.zst' --text_field=content --name=web   # records: JSON lines, Parquet, tar
aamoe prepare --data_dir=gs://bucket/data            # into a bucket
aamoe prepare --domain=tfds:pg19 --tfds_dir=/data/tfds       # out of the TFDS catalogue
aamoe prepare --domain=code,books --train_tokenizer=bpe:8192 # a sentencepiece model of both, used for both
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

from aamoe_jax.bucket import BucketPath, location
from aamoe_jax.data import DataError, corpora, open_corpus, prepare, text_corpus
from aamoe_jax.data.builder import Existing
from aamoe_jax.data.corpora import SPLITS, Corpus
from aamoe_jax.data.mirror import fetch_prepared, published
from aamoe_jax.data.stream import stream_dir
from aamoe_jax.data.tokenizers import load_tokenizer, train_sentencepiece
from launch import program

TRAINING_BYTES = 8_000_000
"""Text that a tokenizer learns from, spread evenly over the corpora: plenty for vocabularies of 8 to 32 thousand."""


def define_flags() -> None:
    """The flags of this program. They are defined when it runs, so that importing it adds none to another program."""
    flags.DEFINE_list("domain", ["code"], "code, books, papers or tfds:NAME; several with commas between.")
    flags.DEFINE_string("text", None, "Pattern of your own text files, quoted; ** crosses folders. Needs --name.")
    flags.DEFINE_string("text_field", None, "Field or column of files of records; of tar the ending of members.")
    flags.DEFINE_string("name", None, "The name of --text in a mixture.")
    flags.DEFINE_string("data_dir", "data", "Where prepared datasets lie (DataConfig.data_dir).")
    flags.DEFINE_string("tokenizer", "bytes", "bytes, a sentencepiece .model, or a tokenizer.json (DataConfig).")
    flags.DEFINE_string("train_tokenizer", None, "bpe:SIZE or unigram:SIZE: train it on the domains, then use it.")
    flags.DEFINE_integer("document_align", 64, "Documents start at multiples of it (DataConfig.document_align).")
    flags.DEFINE_enum("existing", "keep", ["keep", "replace"], "What to do with a dataset that is there already.")
    flags.DEFINE_string("tfds_dir", None, "Where datasets of the TFDS catalogue lie; default: --data_dir.")


def main(argv: list[str]) -> None:
    args = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}; quote the pattern of --text")
    if (args.text is None) != (args.name is None):
        raise DataError("--text and --name go together: --text='DIR/**/*.txt' --name=NAME")
    if not args.domain:
        raise DataError("--domain: names nothing; name code, books, papers or tfds:NAME")
    if args.document_align < 1:
        raise DataError(f"--document_align={args.document_align}: must be at least 1")
    folder = location("--data_dir", args.data_dir)
    if args.train_tokenizer is not None and isinstance(folder, BucketPath):
        raise DataError(
            f"--data_dir={folder}: tokenizers are files of this machine: train one into a folder of its own"
        )
    if args.text is not None:
        opened = [text_corpus(args.name, args.text, args.text_field)]
    else:
        opened = [open_corpus(name, data_dir=args.data_dir, catalogue_dir=args.tfds_dir) for name in args.domain]
    spec = args.tokenizer
    if args.train_tokenizer is not None:
        spec = train_tokenizer(opened, args.train_tokenizer, data_dir=args.data_dir)
        print(f"tokenizer {spec}")
    for corpus in opened:
        _prepare(corpus, args.data_dir, spec, args.document_align, args.existing)


def train_tokenizer(opened: list[Corpus], spec: str, *, data_dir: str) -> str:
    """Trains `bpe:SIZE` or `unigram:SIZE` on the training splits. Returns the path of the model, in `data_dir`."""
    match = re.fullmatch(r"(bpe|unigram):(\d+)", spec)
    if match is None:
        raise DataError(f"--train_tokenizer={spec!r}: must be bpe:SIZE or unigram:SIZE, such as bpe:8192")
    kind, size = match.groups()
    share = TRAINING_BYTES // len(opened)
    documents = (text for corpus in opened for text in _training_text(corpus, share))
    model = train_sentencepiece(documents, kind=kind, vocab_size=int(size))
    names = "_".join(re.sub(r"\W", "_", corpus.name) for corpus in opened)
    path = Path(data_dir) / "tokenizers" / f"{names}_{kind}_{size}.model"
    incomplete = path.with_suffix(f".incomplete{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        incomplete.write_bytes(model)
        incomplete.rename(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); name another folder: --data_dir") from error
    return str(path)


def _training_text(corpus: Corpus, max_bytes: int) -> Iterator[bytes]:
    """Documents from all over the training split: the first ones alone would be of one kind."""
    found = corpora.survey(corpus)
    every = max(1, round(found.bytes["train"] / max_bytes))
    kept = (text for name, text in corpus.documents("train") if name in found.kept)
    yield from (text for number, text in enumerate(kept) if number % every == 0)


def _prepare(corpus: Corpus, data_dir: str, tokenizer_spec: str, document_align: int, existing: Existing) -> None:
    start = time.perf_counter()
    tokenizer = load_tokenizer(tokenizer_spec)
    directory = stream_dir(data_dir, corpus.name, tokenizer, document_align)
    was_there = existing == "keep" and fetch_prepared(data_dir, directory)
    metadata = prepare(corpus, data_dir=data_dir, tokenizer=tokenizer, document_align=document_align, existing=existing)
    print(f"{metadata['corpus']:<12}{'documents':>12}{'bytes':>14}{'tokens':>14}{'records':>10}")
    for split in SPLITS:
        records = -(-metadata["length"][split] // metadata["block"])
        documents, size, tokens = (metadata[key][split] for key in ("documents", "bytes", "tokens"))
        print(f"{split:<12}{documents:>12,}{size:>14,}{tokens:>14,}{records:>10,}")
    if metadata["left_out"]:
        print(f"left out: {metadata['left_out']}")
    seconds, size = time.perf_counter() - start, sum(metadata["bytes"].values())
    done = "was there already" if was_there else f"{seconds:.1f} s, {size / seconds / 1e6:.1f} MB/s"
    print(f"{published(data_dir, directory)}: {done}, corpus digest {metadata['corpus_digest']}")


if __name__ == "__main__":
    define_flags()
    program.run(main)
