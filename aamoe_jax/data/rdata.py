"""Reads character vectors out of an R lazy-load database (Rdata.rdx and Rdata.rdb). Needs no R.

Just enough of R's serialisation (R Internals, section 1.8, XDR format) for a package that keeps text as data: an index
of variables with their offsets, and for each one a compressed, serialised value.
"""

import bz2
import lzma
import struct
import zlib
from pathlib import Path
from typing import Any

from aamoe_jax.data.errors import DataError, shown

_SYMBOL, _PAIRLIST, _CHAR, _LOGICAL, _INTEGER, _REAL, _STRING, _LIST = 1, 2, 9, 10, 13, 14, 16, 19
_REFERENCE, _NIL = 255, 254
_HAS_ATTRIBUTES, _HAS_TAG = 1 << 9, 1 << 10


def character_vectors(folder: Path) -> dict[str, list[bytes]]:
    """name -> its strings, for every variable of the database that is a character vector.

    Raises:
      DataError: the database is damaged, or missing.
    """
    try:
        return _character_vectors(folder)
    except Exception as error:  # damage shows in many ways
        raise DataError(f"{folder}: cannot be read ({shown(error)}); remove its package and fetch it again") from error


def _character_vectors(folder: Path) -> dict[str, list[bytes]]:
    index = zlib.decompress((folder / "Rdata.rdx").read_bytes(), wbits=47)  # of zlib or gzip
    database = (folder / "Rdata.rdb").read_bytes()
    found = {}
    for name, (offset, length) in _Reader(index).value()["variables"].items():
        value = _Reader(_decompress(database[offset : offset + length])).value()
        if isinstance(value, list) and all(isinstance(item, bytes) for item in value):
            found[name] = value
    return found


def _decompress(segment: bytes) -> bytes:
    """A segment is its plain length, then zlib data, or a letter that names the method and its data."""
    (length,) = struct.unpack(">I", segment[:4])
    method, body = segment[4:5], segment[5:]
    match method:
        case b"2":
            plain = bz2.decompress(body)
        case b"Z":
            plain = lzma.decompress(body, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6}])
        case b"0":
            plain = body
        case _:
            plain = zlib.decompress(segment[4:])
    if len(plain) != length:
        raise DataError(f"R database: a segment has {len(plain)} bytes where {length} were promised")
    return plain


class _Reader:
    """One serialised value. Named lists become dicts, strings bytes, missing strings b""."""

    def __init__(self, raw: bytes):
        if raw[:2] != b"X\n":
            raise DataError(f"R database: starts with {raw[:2]!r}, only the XDR format 'X' is read")
        self._raw, self._at = raw, 2
        self._symbols: list[Any] = []
        version, _, _ = self._integers(3)
        if version == 3:
            self._take(self._integer())  # the name of the native encoding

    def value(self) -> Any:
        flags = self._integer()
        kind = flags & 0xFF
        if kind == _PAIRLIST:
            return self._pairlist(flags)
        value = self._plain(kind, flags)
        attributes = self.value() if flags & _HAS_ATTRIBUTES and kind != _CHAR else {}
        names = attributes.get("names") if isinstance(attributes, dict) else None
        if kind == _LIST and names is not None:
            return dict(zip((name.decode() for name in names), value, strict=True))
        return value

    def _plain(self, kind: int, flags: int) -> Any:
        if kind == _NIL:
            return None
        if kind == _REFERENCE:
            return self._symbols[(flags >> 8) - 1]
        if kind == _SYMBOL:
            self._symbols.append(self.value())
            return self._symbols[-1]
        if kind == _CHAR:
            return self._take(max(self._integer(), 0))  # -1: missing
        if kind in (_STRING, _LIST):
            return [self.value() for _ in range(self._integer())]
        if kind in (_LOGICAL, _INTEGER):
            return self._integers(self._integer())
        if kind == _REAL:
            count = self._integer()
            return list(struct.unpack(f">{count}d", self._take(8 * count)))
        raise DataError(f"R database: values of type {kind} are not read (byte {self._at})")

    def _pairlist(self, flags: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while flags & 0xFF == _PAIRLIST:
            if flags & _HAS_ATTRIBUTES:
                self.value()
            tag = self.value() if flags & _HAS_TAG else b""
            pairs[tag.decode()] = self.value()
            flags = self._integer()
        return pairs

    def _take(self, count: int) -> bytes:
        self._at += count
        return self._raw[self._at - count : self._at]

    def _integer(self) -> int:
        return self._integers(1)[0]

    def _integers(self, count: int) -> list[int]:
        return list(struct.unpack(f">{count}i", self._take(4 * count)))
