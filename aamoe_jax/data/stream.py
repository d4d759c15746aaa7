"""Prepared token streams on disk: where they lie, what is known of them, and their tokens by position."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import UInt16

from aamoe_jax.config import DataConfig
from aamoe_jax.data.errors import DataError
from aamoe_jax.data.tokenizers import Tokenizer, load_tokenizer

VERSION = "1.0.0"
_FOLDER = "token_stream"


def stream_name(name: str, tokenizer: Tokenizer, document_align: int) -> str:
    """Everything that changes the tokens is in the name, so differently prepared streams lie side by side."""
    return f"{re.sub('[^a-zA-Z0-9_]', '_', name)}-{tokenizer.name}-{document_align}"


def stream_dir(data_dir: str, name: str, tokenizer: Tokenizer, document_align: int) -> Path:
    """Where the token stream of `name` lies, prepared or not."""
    return Path(data_dir) / _FOLDER / stream_name(name, tokenizer, document_align) / VERSION


def read_metadata(directory: Path) -> dict[str, Any]:
    """What `dataset_metadata` gives, from the folder itself."""
    return json.loads((directory / "metadata.json").read_text())


def prepare_command(config: DataConfig, name: str) -> str:
    """The shell command that prepares `name` for this config."""
    known = name in ("code", "books", "papers") or name.startswith("tfds:")
    what = f"--domain={name}" if known else f"--text='DIR/**/*.txt' --name={name}"
    return (
        f"aamoe prepare {what} --data_dir={config.data_dir} --tokenizer={config.tokenizer} "
        f"--document_align={config.document_align}"
    )


def dataset_metadata(config: DataConfig, name: str) -> dict[str, Any]:
    """What checkpoints and results must record: corpus digest, tokenizer, documents, bytes and tokens per split.

    Raises:
      DataError: with the command that prepares the dataset, when it is missing.
    """
    return read_metadata(_prepared_dir(config, name))


def _prepared_dir(config: DataConfig, name: str) -> Path:
    directory = stream_dir(config.data_dir, name, load_tokenizer(config.tokenizer), config.document_align)
    if not directory.is_dir():
        there = sorted(path.parent.name for path in Path(config.data_dir).glob(f"{_FOLDER}/*/{VERSION}"))
        raise DataError(
            f"dataset {name!r} is not prepared in DataConfig.data_dir = {config.data_dir!r} for tokenizer "
            f"{config.tokenizer!r} and document_align = {config.document_align}: run "
            f"`{prepare_command(config, name)}`. Prepared there: {', '.join(there) or 'nothing'}"
        )
    return directory


class Stream:
    """The tokens of one split by position, up to the eos of its last document. Nothing is held in memory."""

    def __init__(self, config: DataConfig, name: str, split: str):
        directory = _prepared_dir(config, name)
        self.metadata = read_metadata(directory)
        if split not in self.metadata["length"]:
            raise DataError(f"{name}: there is no split {split!r}; there are {', '.join(self.metadata['length'])}")
        self.eos_id, self.pad_id = self.metadata["eos_id"], self.metadata["pad_id"]
        self._length, self._block = self.metadata["length"][split], self.metadata["block"]
        self._label = f"{directory.parent.name}/{split}"
        self._records = tfds.builder_from_directory(directory).as_data_source(split)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"Stream({self._label})"

    def read(self, start: int, stop: int) -> UInt16[np.ndarray, "n"]:
        """Tokens [start, stop); past the end of the stream there is padding."""
        first, last = start // self._block, min((stop - 1) // self._block, len(self._records) - 1)
        # One by one: array_record starts a pool of threads for every read of several records.
        raw = b"".join(self._record(number) for number in range(first, last + 1))
        tokens = np.frombuffer(raw, np.uint16)[start - first * self._block : stop - first * self._block]
        missing = stop - start - len(tokens)
        return np.pad(tokens, (0, missing), constant_values=self.pad_id) if missing else tokens

    def _record(self, number: int) -> bytes:
        return self._records[number]["tokens"]


def documents_of(config: DataConfig, name: str, split: str) -> Iterator[bytes]:
    """The documents of a split, out of the token stream: the very bytes a model is evaluated on."""
    stream, tokenizer = Stream(config, name, split), load_tokenizer(config.tokenizer)
    block = stream.metadata["block"]
    unfinished = np.empty(0, np.uint16)
    for start in range(0, len(stream), block):
        tokens = np.concatenate([unfinished, stream.read(start, min(start + block, len(stream)))])
        ends = np.flatnonzero(tokens == stream.eos_id) + 1
        *documents, unfinished = np.split(tokens, ends)
        # Padding and eos decode to nothing.
        yield from (tokenizer.decode(document) for document in documents)
