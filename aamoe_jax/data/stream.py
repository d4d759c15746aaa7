"""Prepared token streams on disk: where they lie, what is known of them, and their tokens by position."""

import difflib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import UInt

from aamoe_jax.config import DataConfig
from aamoe_jax.data.errors import DataError, shown
from aamoe_jax.data.integrity import forget, verify
from aamoe_jax.data.mirror import fetch_prepared, local_folder, prepared_names
from aamoe_jax.data.tokenizers import Tokenizer, load_tokenizer

VERSION = "1.1.0"
DOMAINS = ("code", "books", "papers")
"""The names that `aamoe prepare --domain` knows, beside tfds:NAME."""
_FOLDER = "token_stream"


def stream_name(name: str, tokenizer: Tokenizer, document_align: int) -> str:
    """Everything that changes the tokens is in the name, so differently prepared streams lie side by side."""
    return f"{re.sub('[^a-zA-Z0-9_]', '_', name)}-{tokenizer.name}-{document_align}"


def stream_dir(data_dir: str, name: str, tokenizer: Tokenizer, document_align: int) -> Path:
    """Where the token stream of `name` lies on this machine, prepared or not."""
    return local_folder(data_dir) / _FOLDER / stream_name(name, tokenizer, document_align) / VERSION


def read_metadata(
    data_dir: str, name: str, tokenizer: Tokenizer, document_align: int, *, remedy: str
) -> dict[str, Any]:
    """What `dataset_metadata` gives, once all files are verified.

    Args:
      remedy: what to do where they are damaged, for the message.

    Raises:
      DataError: a file is missing or damaged, or the folder holds another dataset than its name says.
    """
    directory = stream_dir(data_dir, name, tokenizer, document_align)
    verify(directory, remedy)
    path = directory / "metadata.json"
    wanted = {"corpus": name, "tokenizer_digest": tokenizer.digest, "document_align": document_align}
    try:
        metadata = json.loads(path.read_bytes())
        found = {key: metadata[key] for key in wanted}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({shown(repr(error))}); {remedy}") from error
    for key, value in wanted.items():
        if found[key] != value:
            raise DataError(f"{path}: {key} is {shown(repr(found[key]))} where {value!r} is wanted; {remedy}")
    return metadata


def prepare_command(config: DataConfig, name: str) -> str:
    """The shell command that prepares `name` for this config."""
    known = name in DOMAINS or name.startswith("tfds:")
    what = f"--domain={name}" if known else f"--text='DIR/**/*.txt' --name={name}"
    return (
        f"aamoe prepare {what} --data_dir={shlex.quote(config.data_dir)} --tokenizer={shlex.quote(config.tokenizer)} "
        f"--document_align={config.document_align}"
    )


def dataset_metadata(config: DataConfig, name: str) -> dict[str, Any]:
    """What checkpoints and results must record: corpus digest, tokenizer, documents, bytes and tokens per split.

    The first time after a change of the files they are read and compared with their digests.

    Raises:
      DataError: with the command that prepares the dataset, when it is missing or damaged.
    """
    return _prepared(config, name)[1]


def _prepared(config: DataConfig, name: str) -> tuple[Path, dict[str, Any]]:
    tokenizer = load_tokenizer(config.tokenizer)
    where = config.data_dir, name, tokenizer, config.document_align
    directory = stream_dir(*where)
    if not fetch_prepared(config.data_dir, directory):
        raise DataError(_missing(config, name, tokenizer))
    return directory, read_metadata(*where, remedy=_prepare_again(config, name))


def _prepare_again(config: DataConfig, name: str) -> str:
    return f"prepare it again: `{prepare_command(config, name)} --existing=replace`"


def _missing(config: DataConfig, name: str, tokenizer: Tokenizer) -> str:
    """What to say of a dataset that is not there: what is, and what would make it fit."""
    prepared = sorted(prepared_names(config.data_dir, _FOLDER, VERSION))
    names = {folder.split("-")[0] for folder in prepared}
    where = f"in DataConfig.data_dir = {config.data_dir!r}"
    there = f"Prepared there: {shown(', '.join(prepared)) or 'nothing'}"
    command = prepare_command(config, name)
    prefix = stream_name(name, tokenizer, 0).removesuffix("0")
    aligns = sorted(int(folder.removeprefix(prefix)) for folder in prepared if re.fullmatch(f"{prefix}[0-9]+", folder))
    if aligns:
        # A multiple of what the config reads is one of the model's chunk size too.
        fits = [align for align in aligns if align % config.document_align == 0 == config.seq_len % align]
        bind = f", or bind DataConfig.document_align = {fits[0]}" if fits else ""
        return (
            f"dataset {name!r} is prepared {where} for document_align = {', '.join(map(str, aligns))}, and not for "
            f"document_align = {config.document_align}: run `{command}`{bind}. {there}"
        )
    missing = (
        f"dataset {name!r} is not prepared {where} for tokenizer {config.tokenizer!r} and document_align = "
        f"{config.document_align}"
    )
    close = [] if name in names else difflib.get_close_matches(name, {*names, *DOMAINS}, n=1)
    meant = f"did you mean {close[0]!r} in DataConfig.mixture? Else run" if close else "run"
    return f"{missing}: {meant} `{command}`. {there}"


class Stream:
    """The tokens of one split by position, up to the eos of its last document. Nothing is held in memory."""

    def __init__(self, config: DataConfig, name: str, split: str):
        self._directory, self.metadata = _prepared(config, name)
        self._remedy = _prepare_again(config, name)
        if split not in self.metadata["length"]:
            raise DataError(f"{name}: there is no split {split!r}; there are {', '.join(self.metadata['length'])}")
        self.eos_id, self.pad_id = self.metadata["eos_id"], self.metadata["pad_id"]
        self.dtype = np.dtype(self.metadata["dtype"])
        self._length, self._block = self.metadata["length"][split], self.metadata["block"]
        self._label = f"{self._directory.parent.name}/{split}"
        try:
            self._records = tfds.builder_from_directory(self._directory).as_data_source(split)
        except Exception as error:  # of many kinds, as below
            raise self._damaged(f"{self._label} cannot be opened ({shown(repr(error))})") from error

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Stream({self._label})"

    def read(self, start: int, stop: int) -> UInt[np.ndarray, "n"]:
        """Tokens [start, stop); past the end of the stream there is padding."""
        first, last = start // self._block, min((stop - 1) // self._block, len(self._records) - 1)
        # One by one: array_record starts a pool of threads for every read of several records.
        raw = b"".join(self._record(number) for number in range(first, last + 1))
        tokens = np.frombuffer(raw, self.dtype)[start - first * self._block : stop - first * self._block]
        missing = stop - start - len(tokens)
        return np.pad(tokens, (0, missing), constant_values=self.pad_id) if missing else tokens

    def _record(self, number: int) -> bytes:
        what = f"record {number} of {self._label}"
        try:
            record = self._records[number]["tokens"]
        except Exception as error:  # of many kinds: the reader's and those of the file system
            raise self._damaged(f"{what} cannot be read ({shown(repr(error))})") from error
        if record is None or len(record) != self._block * self.dtype.itemsize:
            raise self._damaged(f"{what} is cut short")
        return record

    def _damaged(self, what: str) -> DataError:
        forget(self._directory)
        return DataError(
            f"{self._directory}: {what}, though the files were whole when they were last verified. Start again, which "
            f"verifies them anew; if they are damaged, {self._remedy}"
        )


def documents_of(config: DataConfig, name: str, split: str) -> Iterator[bytes]:
    """The documents of a split, out of the token stream: the very bytes a model is evaluated on."""
    stream, tokenizer = Stream(config, name, split), load_tokenizer(config.tokenizer)
    block = stream.metadata["block"]
    unfinished = np.empty(0, stream.dtype)
    for start in range(0, len(stream), block):
        tokens = np.concatenate([unfinished, stream.read(start, min(start + block, len(stream)))])
        ends = np.flatnonzero(tokens == stream.eos_id) + 1
        *documents, unfinished = np.split(tokens, ends)
        # Padding and eos decode to nothing.
        yield from (tokenizer.decode(document) for document in documents)
