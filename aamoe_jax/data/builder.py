"""Writes a corpus as a token stream: a TFDS dataset in array_record, read and written without TensorFlow.

The stream of a split is its documents one after the other, each ended by eos and padded to a multiple of
`document_align`, so that documents start where chunks start (decision 30). It is cut into records of `block` ids.
Tokenizing happens here, once: sentencepiece does 1 to 3 MB/s a core, which no loader could hide.
"""

import contextlib
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow_datasets as tfds
import tqdm
from jaxtyping import UInt

from aamoe_jax.config import DataConfig
from aamoe_jax.data import catalogue, fetch
from aamoe_jax.data.corpora import SPLITS, Corpus, Split, Survey, builtin_corpus, content_digest, describe, survey
from aamoe_jax.data.errors import DataError, shown
from aamoe_jax.data.integrity import write_sums
from aamoe_jax.data.mirror import fetch_prepared, local_folder, publish, published, require_writable
from aamoe_jax.data.stream import VERSION, dataset_metadata, read_metadata, stream_dir, stream_name
from aamoe_jax.data.tokenized import TokenizedBatches
from aamoe_jax.data.tokenizers import Tokenizer, id_type, load_tokenizer

Existing = Literal["keep", "replace"]

TARGET_BLOCK = 4096
"""Tokens per record, about: 8 KiB, where reading one record costs what opening it costs."""
BATCH = 2**23
"""Bytes of documents, about, that are tokenized at once, on all cores."""


class _LocalInfo(tfds.core.DatasetInfo):
    """TFDS looks for the description of an unknown dataset in a Google bucket; this one is known to be local."""

    def initialize_from_bucket(self) -> None:
        pass

    def write_to_directory(self, dataset_info_dir: Any, all_metadata: bool = True) -> None:
        """Ends the writing of a dataset, before its folder gets its name."""
        super().write_to_directory(dataset_info_dir, all_metadata)
        write_sums(Path(dataset_info_dir))


class TokenStream(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """One corpus through one tokenizer. Not in the TFDS registry: it is built here and read from its folder."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(
        self,
        corpus: Corpus,
        found: Survey,
        tokenizer: Tokenizer,
        batches: TokenizedBatches,
        document_align: int,
        data_dir: str,
        progress: Any,
    ):
        self._corpus, self._found, self._tokenizer, self._batches = corpus, found, tokenizer, batches
        self._align, self._progress = document_align, progress
        self._block = document_align * max(1, TARGET_BLOCK // document_align)
        name = stream_name(corpus.name, tokenizer, document_align)
        config = tfds.core.BuilderConfig(name=name, description=corpus.description)
        super().__init__(data_dir=data_dir, config=config, file_format="array_record")

    def _create_builder_config(self, builder_config: tfds.core.BuilderConfig, version: Any) -> tfds.core.BuilderConfig:
        """TFDS warns of every configuration that is not a constant of the class."""
        del version
        return builder_config

    def _info(self) -> _LocalInfo:
        return _LocalInfo(
            builder=self,
            description="Documents as one stream of tokens, in records of raw integers.",
            # Text stores bytes untouched; tensor features decode several times slower.
            features=tfds.features.FeaturesDict({"tokens": tfds.features.Text()}),
            disable_shuffling=True,  # the order of records is the stream
            license=self._corpus.licence,
            metadata=tfds.core.MetadataDict(
                corpus=self._corpus.name,
                description=self._corpus.description,
                licence=self._corpus.licence,
                corpus_digest=self._found.digest,
                tokenizer=self._tokenizer.name,
                tokenizer_digest=self._tokenizer.digest,
                vocab_size=self._tokenizer.vocab_size,
                eos_id=self._tokenizer.eos_id,
                pad_id=self._tokenizer.pad_id,
                document_align=self._align,
                block=self._block,
                dtype=np.dtype(id_type(self._tokenizer.vocab_size)).name,
                documents=self._found.documents,
                bytes=self._found.bytes,
                left_out=describe(self._found.left_out),
                # Filled while the records are written, before TFDS writes this.
                tokens={},
                length={},
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, bytes]]]]:
        del dl_manager  # everything is local by now
        return {
            split: (
                (number, {"tokens": block.tobytes()}) for number, block in enumerate(self._generate_examples(split))
            )
            for split in SPLITS
        }

    def _generate_examples(self, split: Split) -> Iterator[UInt[np.ndarray, "block"]]:
        """The stream of a split, record by record; counts its tokens into the metadata."""
        dtype = id_type(self._tokenizer.vocab_size)
        padding = functools.partial(np.full, fill_value=self._tokenizer.pad_id, dtype=dtype)
        rest = np.empty(0, dtype)
        tokens = start = length = documents = 0
        for ids in self._encoded(split):
            documents += 1
            document = np.append(ids, dtype(self._tokenizer.eos_id))
            tokens += len(document)
            length = start + len(document)
            start = length + -length % self._align
            rest = np.concatenate([rest, document, padding(start - length)])
            whole = len(rest) // self._block * self._block
            yield from rest[:whole].reshape(-1, self._block)
            rest = rest[whole:]
        if len(rest):
            yield np.concatenate([rest, padding(self._block - len(rest))])
        if documents != self._found.documents[split]:
            raise self._changed()
        self.info.metadata["tokens"][split] = tokens
        self.info.metadata["length"][split] = length  # up to the last eos

    def _encoded(self, split: Split) -> Iterator[UInt[np.ndarray, "n"]]:
        """The tokens of every document."""
        batch: list[bytes] = []
        size = 0
        for text in self._documents(split):
            batch.append(text)
            size += len(text)
            if size >= BATCH:
                yield from self._batches.encode(batch)
                self._progress.update(size)
                batch, size = [], 0
        if batch:
            yield from self._batches.encode(batch)
        self._progress.update(size)

    def _documents(self, split: Split) -> Iterator[bytes]:
        """The documents that the survey kept, as it found them."""
        for name, text in self._corpus.documents(split):
            if name in self._found.kept:
                if content_digest(text) != self._found.kept[name]:
                    raise self._changed()
                yield text

    def _changed(self) -> DataError:
        return DataError(f"{self._corpus.name}: its files changed while they were read; run it again")


def prepare(
    corpus: Corpus, *, data_dir: str, tokenizer: Tokenizer, document_align: int, existing: Existing = "keep"
) -> dict[str, Any]:
    """Writes the token stream of a corpus below `data_dir` unless it is there. Returns its metadata. Into a bucket it
    is copied when all of it is written here.

    The folder appears in one rename when all of it is written, so a prepare that was killed leaves nothing that looks
    finished. It leaves the batches that it had tokenized, which the next one reads.

    Args:
      existing: "keep" a finished dataset of the same corpus, or "replace" it.

    Raises:
      DataError: the corpus has an empty split or cannot be read; the folder cannot be written; or a finished dataset is
        damaged, or was made from another state of the corpus.
    """
    found = survey(corpus)
    for split, count in found.documents.items():
        if count == 0:
            left_out = f"; left out: {describe(found.left_out)}" if found.left_out else ""
            advice = f"; {corpus.advice}" if corpus.advice else ""
            raise DataError(
                f"{corpus.name}: no documents for the split {split!r} ({corpus.description}){left_out}{advice}"
            )
    where = data_dir, corpus.name, tokenizer, document_align
    directory = stream_dir(*where)
    batches = TokenizedBatches(directory.parent.with_name(f"{directory.parent.name}.tokenized"), tokenizer)
    remedy = "pass --existing=replace, or another --data_dir"
    if existing == "keep" and fetch_prepared(data_dir, directory):
        metadata = read_metadata(*where, remedy=remedy)
        if metadata["corpus_digest"] != found.digest:
            raise DataError(
                f"{directory} holds another state of the corpus: its digest is {metadata['corpus_digest']}, the corpus "
                f"now has {found.digest} (another Python, or changed files); {remedy}"
            )
        return metadata
    require_writable(data_dir)
    if existing == "keep" and directory.is_dir() and published(data_dir, directory) != directory:
        with contextlib.suppress(DataError):  # a whole one is what could not be copied into the bucket the last time
            metadata = read_metadata(*where, remedy=remedy)
            if metadata["corpus_digest"] == found.digest:
                publish(data_dir, directory)
                return metadata
    local = str(local_folder(data_dir))
    try:
        if directory.is_dir():
            # Before the builder opens it (TFDS would take the old description for the new one), and out of sight first,
            # so that a removal cut short leaves nothing that looks finished either.
            doomed = directory.rename(directory.with_name(f"incomplete.{os.getpid()}"))
            shutil.rmtree(doomed)
        # Says how long it takes, where standard error is a terminal.
        with tqdm.tqdm(
            desc=corpus.name, total=sum(found.bytes.values()), unit="B", unit_scale=True, leave=False, disable=None
        ) as progress:
            _write(TokenStream(corpus, found, tokenizer, batches, document_align, local, progress), directory)
        batches.remove()
    except (OSError, RuntimeError) as error:  # the second is what a full disk becomes in TFDS
        raise DataError(f"{directory}: cannot be written ({shown(error)}); name another folder: --data_dir") from error
    publish(data_dir, directory)
    return read_metadata(*where, remedy=remedy)


def _write(builder: TokenStream, directory: Path) -> None:
    tfds.disable_progress_bar()
    settings = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        # TFDS prints that it downloads something and makes a folder for it. It downloads nothing.
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as downloads:
            builder.download_and_prepare(download_config=settings, download_dir=downloads)
    except OSError:
        # Two programs that prepare the same dataset at once: the second rename finds the first one's folder.
        if not directory.is_dir():
            raise


def open_corpus(name: str, *, data_dir: str, catalogue_dir: str | None = None) -> Corpus:
    """The corpus that a mixture entry names; fetches `books` and `papers` on first use.

    Args:
      catalogue_dir: where datasets of the TFDS catalogue lie; None: in `data_dir`.
    """
    local = local_folder(data_dir)
    if name.startswith(catalogue.PREFIX):
        return catalogue.catalogue_corpus(name, catalogue_dir or str(local))
    cache_dir = local / "fetched"
    corpus = builtin_corpus(name, cache_dir)
    fetch.fetch(name, cache_dir)
    return corpus


def ensure_prepared(config: DataConfig) -> None:
    """Prepares `code` where it is missing, since it needs no download. Whatever else is missing is an error.

    Raises:
      DataError: with the command that prepares the dataset which is missing or damaged.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    for name, _ in config.mixture:
        directory = stream_dir(config.data_dir, name, tokenizer, config.document_align)
        if name == "code" and not fetch_prepared(config.data_dir, directory):
            corpus = open_corpus(name, data_dir=config.data_dir)
            prepare(corpus, data_dir=config.data_dir, tokenizer=tokenizer, document_align=config.document_align)
        dataset_metadata(config, name)
