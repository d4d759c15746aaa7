"""Bytes to token ids and back, exactly.

A tokenizer here is a table: id -> the bytes it stands for. Decoding is a look-up, and so is the number of bytes of a
token, from which bits per byte are counted: the one unit in which runs with different tokenizers compare.
"""

import base64
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer, UInt

from aamoe_jax.data.errors import DataError, shown

MAX_VOCAB_SIZE = 2**20
SETTINGS = "tokenizer_config.json"
"""Beside a tokenizer.json: says which token ends a text."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Tokens that end a text, where nothing says so."""
SAMPLE = " a  b\n\n\tÀ e\u0301 ﬁ ▁ \U0001f600\x00 ".encode()
"""What a tokenizer must give back as it is."""


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

    def encode(self, text: bytes) -> UInt[np.ndarray, "n"]:
        """The tokens of a text, without special ones, in the `id_type` of the vocabulary."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt[np.ndarray, "n"]]:
        """`encode` of every text, on all cores where the library can."""
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

    def encode(self, text: bytes) -> UInt[np.ndarray, "n"]:
        return np.frombuffer(text, np.uint8).astype(np.uint16) + np.uint16(self._offset)

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt[np.ndarray, "n"]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Integer[np.ndarray, "n"]) -> bytes:
        ids = np.asarray(ids, np.int64)
        return (ids[self.byte_lengths[ids] == 1] - self._offset).astype(np.uint8).tobytes()


class PieceTokenizer:
    """A tokenizer of a library, as a table: what every id stands for."""

    name: str
    vocab_size: int
    _pieces: list[bytes]

    @functools.cached_property
    def byte_lengths(self) -> Int32[np.ndarray, "vocab"]:
        return np.array([len(piece) for piece in self._pieces], np.int32)

    def encode(self, text: bytes) -> UInt[np.ndarray, "n"]:
        """The tokens of a text, which must be UTF-8."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[UInt[np.ndarray, "n"]]:
        """The tokens of texts, which must be UTF-8; in as many threads as there are cores."""
        try:
            decoded = [text.decode("utf-8") for text in texts]
        except UnicodeDecodeError as error:
            raise DataError(
                f"the tokenizer {self.name!r} reads UTF-8 only ({error}); 'bytes' reads anything"
            ) from error
        return [np.array(ids, id_type(self.vocab_size)) for ids in self._ids(decoded)]

    def _ids(self, texts: list[str]) -> Iterator[Sequence[int]]:
        """What the library makes of every text."""
        raise NotImplementedError

    def decode(self, ids: Integer[np.ndarray, "n"]) -> bytes:
        return b"".join(self._pieces[index] for index in ids)


class SentencePieceTokenizer(PieceTokenizer):
    """A sentencepiece model that loses nothing: byte fallback, no normalisation, no invented spaces.

    sentencepiece writes a space as U+2581, so a true U+2581 in the text would come back as a space. Its three bytes are
    therefore written as byte pieces.
    """

    def __init__(self, path: str | Path):
        sentencepiece = _imported("sentencepiece")
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
        if min(self.eos_id, self.pad_id) < 0:
            raise DataError(f"tokenizer {str(path)!r}: must have an eos and a pad id (train with pad_id=0, eos_id=1)")
        refuse_unfit(
            self,
            f"tokenizer {str(path)!r}",
            "train with byte_fallback, normalization_rule_name='identity', remove_extra_whitespaces=False and "
            "add_dummy_prefix=False, as `aamoe prepare --train_tokenizer=bpe:8192` does",
        )

    def _ids(self, texts: list[str]) -> Iterator[Sequence[int]]:
        parts = [text.split("▁") for text in texts]
        encoded = iter(self._processor.encode([part for text in parts for part in text]))
        return (self._joined(next(encoded) for _ in text) for text in parts)

    def _joined(self, parts: Iterator[list[int]]) -> list[int]:
        """The pieces of a text out of those of its parts, between which U+2581 stood."""
        ids = next(parts)
        for part in parts:
            ids += self._escaped_space + part
        return ids


class HuggingFaceTokenizer(PieceTokenizer):
    """A byte-level tokenizer out of a `tokenizer.json`, such as those of GPT-2, Llama 3, Qwen and OLMo.

    Names of special tokens that occur in a text are text. A normalizer is left out: it would change bytes. Where there
    is no token of its own for padding, an id past the last is.
    """

    def __init__(self, path: str | Path):
        library, path = _imported("tokenizers"), Path(path)
        self._name = f"DataConfig.tokenizer = {str(path)!r}"
        if not path.is_file():
            raise DataError(f"{self._name}: there is no such file; copy the tokenizer.json of a model there")
        model = path.read_bytes()
        try:
            self._tokenizer = library.Tokenizer.from_buffer(model)
        except Exception as error:  # the library has no class of its own for it
            raise DataError(f"{self._name}: is no tokenizer.json, or damaged ({shown(error)})") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.normalizer = None
        self._tokenizer.encode_special_tokens = True
        self._pieces = self._table()
        end, padding = self._special(path.with_name(SETTINGS))
        self.eos_id, self.pad_id = end, padding
        self.vocab_size = len(self._pieces)
        self.digest = hashlib.sha256(model + f"\0{end} {padding}".encode()).hexdigest()
        self.name = f"{re.sub(r'[^a-zA-Z0-9_]', '_', path.parent.name) or 'tokenizer'}-{self.digest[:8]}"
        refuse_unfit(
            self,
            f"tokenizer {str(path)!r}",
            "take one whose pre-tokenizer is ByteLevel, a sentencepiece .model, or 'bytes'",
        )

    def _ids(self, texts: list[str]) -> Iterator[Sequence[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return (text.ids for text in encoded)

    def _table(self) -> list[bytes]:
        """What every id stands for; nothing for special tokens, and for ids that are not there."""
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        byte_of = {letter: byte for byte, letter in enumerate(letters())}
        for token, index in vocabulary.items():
            if index in added:
                table[index] = b"" if added[index].special else token.encode()
            elif token and set(token) <= byte_of.keys():
                table[index] = bytes(byte_of[letter] for letter in token)
            else:
                raise DataError(
                    f"{self._name}: token {index} is {shown(repr(token), 40)}, which is not written in the letters of "
                    "bytes; take a byte-level tokenizer, a sentencepiece .model, or 'bytes'"
                )
        return table

    def _special(self, settings: Path) -> tuple[int, int]:
        """The ids of the end of a text and of padding, for which the table gets a place if it has none."""
        named: dict[str, Any] = {}
        if settings.is_file():
            try:
                named = dict(json.loads(settings.read_bytes()))
            except (ValueError, TypeError) as error:
                raise DataError(f"{settings}: is no JSON object ({shown(error)})") from error
        tokens = {key: self._id(named.get(f"{key}_token")) for key in ("eos", "pad")}
        ends = [tokens["eos"], *map(self._id, ENDS)]
        end = next((index for index in ends if index is not None), None)
        if end is None:
            raise DataError(
                f"{self._name}: nothing says which token ends a text; write {settings} with "
                '{"eos_token": "..."}, a special token of it'
            )
        padding = tokens["pad"]
        if padding is None or padding == end:
            padding = len(self._pieces)
            self._pieces.append(b"")
        self._pieces[end] = self._pieces[padding] = b""
        return end, padding

    def _id(self, token: Any) -> int | None:
        """Of a token, as settings name it."""
        content = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(content) if isinstance(content, str) else None


class TiktokenTokenizer(PieceTokenizer):
    """The ranks of a `.tiktoken` file. A `tokenizer_config.json` beside it has what such a file lacks.

    That is `pat_str`, the regular expression that cuts a text before its bytes are merged. `special_tokens`, names and
    ids, and `eos_token`, one of them, may be left out. Padding is an id past the last.
    """

    def __init__(self, path: str | Path):
        library, path = _imported("tiktoken"), Path(path)
        settings = path.with_name(SETTINGS)
        ranks, model = _ranks(path)
        pattern, special, end = self._settings(settings, ranks)
        try:
            self._encoding = library.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except ValueError as error:
            raise DataError(f"{settings}: pat_str cannot be used ({shown(error)})") from error
        self.eos_id, self.pad_id = special[end], 1 + max(*ranks.values(), *special.values())
        self.vocab_size = self.pad_id + 1
        self._pieces = [b""] * self.vocab_size
        for piece, index in ranks.items():
            self._pieces[index] = piece
        self.digest = hashlib.sha256(model + json.dumps([pattern, sorted(special.items()), end]).encode()).hexdigest()
        self.name = f"{re.sub(r'[^a-zA-Z0-9_]', '_', path.stem)}-{self.digest[:8]}"
        refuse_unfit(self, f"tokenizer {str(path)!r}", f"correct the pat_str of {settings}")

    @staticmethod
    def _settings(path: Path, ranks: dict[bytes, int]) -> tuple[str, dict[str, int], str]:
        """The regular expression, the special tokens, and which of them ends a text."""
        if not path.is_file():
            raise DataError(
                f'{path}: there is no such file; write {{"pat_str": "..."}} there, the regular expression of the '
                "model, such as tiktoken.get_encoding('cl100k_base')._pat_str"
            )
        try:
            named = json.loads(path.read_bytes())
            pattern = str(named["pat_str"])
            special = {str(token): int(index) for token, index in dict(named.get("special_tokens", {})).items()}
            end = named.get("eos_token", ENDS[0])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}: must be a JSON object with pat_str, a text ({shown(repr(error))})") from error
        special.setdefault(end, 1 + max(*ranks.values(), *special.values()))
        if taken := set(ranks.values()) & set(special.values()):
            raise DataError(f"{path}: special_tokens has ids that other tokens have: {shown(sorted(taken))}")
        return pattern, special, end

    def _ids(self, texts: list[str]) -> Iterator[Sequence[int]]:
        encoded = self._encoding.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        for ids, text in zip(encoded, texts, strict=True):
            # tiktoken is silent about text that the regular expression does not match.
            if self.byte_lengths[ids].sum() != len(text.encode()):
                raise DataError(f"the tokenizer {self.name!r}: its pat_str leaves out some of a text")
            yield ids


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` names."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec.endswith(".model"):
        return SentencePieceTokenizer(spec)
    if spec.endswith(".json"):
        return HuggingFaceTokenizer(spec)
    if spec.endswith(".tiktoken"):
        return TiktokenTokenizer(spec)
    raise DataError(
        f"DataConfig.tokenizer = {spec!r}: must be 'bytes', or the path of a sentencepiece .model, a tokenizer.json "
        "or a .tiktoken file"
    )


def id_type(vocab_size: int) -> type[np.unsignedinteger]:
    """In which token streams hold ids of such a vocabulary."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def refuse_unfit(tokenizer: Tokenizer, name: str, remedy: str) -> None:
    """Refuses what the pipeline cannot use.

    Raises:
      DataError: there are too many tokens, or some texts do not come back as they were.
    """
    if tokenizer.vocab_size > MAX_VOCAB_SIZE:
        raise DataError(f"{name}: vocab_size = {tokenizer.vocab_size} exceeds {MAX_VOCAB_SIZE}")
    for text in (SAMPLE, SAMPLE.strip()):
        ids = tokenizer.encode(text)
        if tokenizer.decode(ids) != text or {tokenizer.eos_id, tokenizer.pad_id} & set(ids.tolist()):
            raise DataError(
                f"{name}: changes the text, so bits per byte would count bytes that are not there; {remedy}"
            )


def train_sentencepiece(documents: Iterable[bytes], *, kind: str, vocab_size: int) -> bytes:
    """A sentencepiece model of UTF-8 documents, as bytes. `kind`: "bpe" or "unigram"."""
    sentencepiece = _imported("sentencepiece")
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


def _imported(library: str) -> Any:
    if importlib.util.find_spec(library) is None:
        install = "pip install -c constraints.txt -e '.[text]'"
        raise DataError(f"{library} is not installed: {install}, or use tokenizer 'bytes'")
    return importlib.import_module(library)


def _ranks(path: Path) -> tuple[dict[bytes, int], bytes]:
    """The tokens of a `.tiktoken` file, and its content."""
    named = f"DataConfig.tokenizer = {str(path)!r}"
    if not path.is_file():
        raise DataError(f"{named}: there is no such file; copy the .tiktoken file of a model there")
    model = path.read_bytes()
    try:
        lines = (line.split() for line in model.splitlines())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise DataError(f"{named}: is no file of tiktoken, or damaged ({shown(error)})") from error
    # tiktoken would abort at such a byte.
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(f"{named}: is damaged: it has no token for byte {missing[0]}")
    return ranks, model


@functools.cache
def letters() -> tuple[str, ...]:
    """The letter that stands for every byte in vocabularies of byte-level tokenizers: itself where it is printed, else
    one of those from U+0100 on, in order (Radford et al. 2019, GPT-2)."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printed else next(others)) for byte in range(256))


def _piece_bytes(processor: Any, index: int) -> bytes:
    if processor.is_byte(index):
        return bytes([int(processor.id_to_piece(index)[3:5], 16)])
    if processor.is_control(index) or processor.is_unknown(index):
        return b""
    return processor.id_to_piece(index).replace("▁", " ").encode()
