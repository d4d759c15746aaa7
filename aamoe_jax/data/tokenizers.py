"""Bytes to token ids and back, exactly.

A tokenizer here is a table: id -> the bytes it stands for. Decoding is a look-up, and so is the number of bytes of a
token, from which bits per byte are counted: the one unit in which runs with different tokenizers compare.
"""

import functools
import hashlib
import importlib.util
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer, UInt16

from aamoe_jax.data.errors import DataError, shown

MAX_VOCAB_SIZE = 2**16
"""Token streams are stored as uint16."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer. eos and pad never occur inside an encoded document."""

    name: str
    digest: str
    vocab_size: int
    eos_id: int
    pad_id: int

    @property
    def byte_lengths(self) -> Int32[np.ndarray, "vocab"]:
        """Bytes that each token stands for; 0 for pad, eos and ids that are never written."""
        ...

    def encode(self, text: bytes) -> UInt16[np.ndarray, "n"]:
        """The tokens of a text, without special ones."""
        ...

    def decode(self, ids: Integer[np.ndarray, "n"]) -> bytes:
        """The inverse of `encode`; special tokens decode to nothing."""
        ...


class ByteTokenizer:
    """ByT5's ids: 0 pad, 1 eos, 2 unknown (never written), then the 256 bytes. 384 = 3 * 128 rows tile well."""

    name = "bytes"
    digest = "byt5"
    vocab_size = 384
    pad_id = 0
    eos_id = 1
    _offset = 3

    @functools.cached_property
    def byte_lengths(self) -> Int32[np.ndarray, "vocab"]:
        lengths = np.zeros(self.vocab_size, np.int32)
        lengths[self._offset : self._offset + 256] = 1
        return lengths

    def encode(self, text: bytes) -> UInt16[np.ndarray, "n"]:
        return np.frombuffer(text, np.uint8).astype(np.uint16) + np.uint16(self._offset)

    def decode(self, ids: Integer[np.ndarray, "n"]) -> bytes:
        ids = np.asarray(ids, np.int64)
        return (ids[self.byte_lengths[ids] == 1] - self._offset).astype(np.uint8).tobytes()


class SentencePieceTokenizer:
    """A sentencepiece model that loses nothing: byte fallback, no normalisation, no invented spaces.

    sentencepiece writes a space as U+2581, so a true U+2581 in the text would come back as a space. Its three bytes are
    therefore written as byte pieces.
    """

    def __init__(self, path: str | Path):
        sentencepiece = _import_sentencepiece()
        path = Path(path)
        if not path.is_file():
            raise DataError(
                f"DataConfig.tokenizer = {str(path)!r}: there is no such file. Train one with "
                "`aamoe prepare --train_tokenizer=bpe:8192`, or use 'bytes'"
            )
        try:
            model = path.read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.vocab_size = self._processor.vocab_size()
            self._pieces = [_piece_bytes(self._processor, index) for index in range(self.vocab_size)]
        except (OSError, RuntimeError, ValueError, MemoryError) as error:  # a piece that is no text is a ValueError
            raise DataError(
                f"DataConfig.tokenizer = {str(path)!r}: not a sentencepiece model, or damaged ({shown(error)})"
            ) from error
        self.digest = hashlib.sha256(model).hexdigest()
        self.name = f"{path.stem}-{self.digest[:8]}"
        self.eos_id = self._processor.eos_id()
        self.pad_id = self._processor.pad_id()
        self._escaped_space = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in "▁".encode()]
        self._refuse_unfit(path)

    @functools.cached_property
    def byte_lengths(self) -> Int32[np.ndarray, "vocab"]:
        return np.array([len(piece) for piece in self._pieces], np.int32)

    def encode(self, text: bytes) -> UInt16[np.ndarray, "n"]:
        """The pieces of a text, which must be UTF-8."""
        try:
            parts = text.decode("utf-8").split("▁")
        except UnicodeDecodeError as error:
            raise DataError(
                f"the tokenizer {self.name!r} reads UTF-8 only ({error}); 'bytes' reads anything"
            ) from error
        ids: list[int] = self._processor.encode(parts[0])
        for part in parts[1:]:
            ids += self._escaped_space + self._processor.encode(part)
        return np.array(ids, np.uint16)

    def decode(self, ids: Integer[np.ndarray, "n"]) -> bytes:
        return b"".join(self._pieces[index] for index in ids)

    def _refuse_unfit(self, path: Path) -> None:
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise DataError(
                f"tokenizer {str(path)!r}: vocab_size = {self.vocab_size} exceeds {MAX_VOCAB_SIZE} (uint16)"
            )
        if min(self.eos_id, self.pad_id) < 0:
            raise DataError(f"tokenizer {str(path)!r}: must have an eos and a pad id (train with pad_id=0, eos_id=1)")
        sample = " a  b\n\n\tÀ ﬁ ▁ \U0001f600\x00 ".encode()
        if self.decode(self.encode(sample)) != sample:
            raise DataError(
                f"tokenizer {str(path)!r}: changes the text, so bits per byte would count bytes that are not there. "
                "Train with byte_fallback, normalization_rule_name='identity', remove_extra_whitespaces=False and "
                "add_dummy_prefix=False, as `aamoe prepare --train_tokenizer=bpe:8192` does"
            )


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` names."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec.endswith(".model"):
        return SentencePieceTokenizer(spec)
    raise DataError(f"DataConfig.tokenizer = {spec!r}: must be 'bytes' or the path of a sentencepiece .model file")


def train_sentencepiece(documents: Iterable[bytes], *, kind: str, vocab_size: int) -> bytes:
    """A sentencepiece model of UTF-8 documents, as bytes. `kind`: "bpe" or "unigram"."""
    sentencepiece = _import_sentencepiece()
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(documents),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            # Indentation: without these pieces code costs half as many tokens again.
            allow_whitespace_only_pieces=True,
            # The space itself, also where the text has none: its byte pieces are not the bytes of a space.
            required_chars="▁",
            split_digits=True,
            # Lines are sentences here, so that the model would never see a line end.
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=65536,
            # One thread, so that the same text gives the same model everywhere.
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(f"sentencepiece could not train {kind}:{vocab_size}: {error}") from error
    return model.getvalue()


def _lines(documents: Iterable[bytes]) -> Iterator[str]:
    for document in documents:
        yield from (line for line in document.decode("utf-8").split("\n") if line)


def _import_sentencepiece() -> Any:
    if importlib.util.find_spec("sentencepiece") is None:
        raise DataError("sentencepiece is not installed: `pip install aamoe_jax[text]`, or use tokenizer 'bytes'")
    import sentencepiece

    return sentencepiece


def _piece_bytes(processor: Any, index: int) -> bytes:
    if processor.is_byte(index):
        return bytes([int(processor.id_to_piece(index)[3:5], 16)])
    if processor.is_control(index) or processor.is_unknown(index):
        return b""
    return processor.id_to_piece(index).replace("▁", " ").encode()
