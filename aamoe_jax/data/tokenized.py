"""Batches of tokenized documents on disk: what a prepare that was stopped had done is not done again."""

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt

from aamoe_jax.data.tokenizers import ByteTokenizer, Tokenizer


class TokenizedBatches:
    """Tokens by the content of their documents, in a folder that is removed once they are in the dataset."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self._folder, self._tokenizer = folder, tokenizer

    def encode(self, batch: Sequence[bytes]) -> list[UInt[np.ndarray, "n"]]:
        """The tokens of every document: those of an earlier run, or the tokenizer's, which it keeps. Those of bytes are
        not kept: to read them back takes longer than to make them again.

        Raises:
          OSError: they cannot be written.
        """
        if isinstance(self._tokenizer, ByteTokenizer):
            return self._tokenizer.encode_batch(batch)
        digest = hashlib.sha256(self._tokenizer.digest.encode())
        for text in batch:
            digest.update(hashlib.sha256(text).digest())
        path = self._folder / f"{digest.hexdigest()}.npy"
        try:
            with open(path, "rb") as file:
                ends, tokens = np.load(file), np.load(file)
                return np.split(tokens, ends[:-1])
        except (OSError, ValueError, EOFError):
            pass  # there is none, or a machine that lost its power has left a part of it
        documents = self._tokenizer.encode_batch(batch)
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        written = self._folder / f"incomplete.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # another program has finished, and removed the folder
            self._folder.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()  # np.save to a file tells of a full disk by numbers of bytes alone
            np.save(content, ends)
            np.save(content, np.concatenate(documents))
            written.write_bytes(content.getbuffer())
            written.rename(path)
        return documents

    def remove(self) -> None:
        """Frees the disk."""
        shutil.rmtree(self._folder, ignore_errors=True)
