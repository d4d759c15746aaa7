"""An inspection as one HTML page that needs nothing else: no server, no network, no font, no library.

The template lies in `page/`: structure, style and behaviour. Numbers travel as JSON inside the page; the script puts
every piece of text in as text, never as markup.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from aamoe_jax.analysis import copying
from aamoe_jax.analysis.inspection import UNUSED, Inspection, expert_uses
from aamoe_jax.config import AAMoEConfig
from aamoe_jax.data.tokenizers import Tokenizer

FORMS = {"text": "t", "head": "h", "tail": "c", "byte": "x", "special": "s"}
"""How a token is shown: as text; as a character of which it is the first part; as a further part of that character, as
bytes that are no UTF-8 (both in hex); by the name of an id that stands for no text."""


def glyphs(pieces: Sequence[bytes]) -> tuple[list[str], list[str]]:
    """What to show for each piece of a text, and in which of FORMS.

    A character that is split over pieces stands in the first of them.
    """
    data = b"".join(pieces)
    owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    texts, forms = [""] * len(pieces), ["text"] * len(pieces)
    begin = 0
    while begin < len(data):
        character, first = _character(data, begin), owner[begin]
        end = begin + (len(character.encode()) if character else 1)
        if character is None:
            forms[first] = "byte"
        elif owner[end - 1] != first:
            forms[first] = "head"
            for index in range(first + 1, owner[end - 1] + 1):
                forms[index] = "tail"
        texts[first] += character or ""
        begin = end
    shown = [
        piece.hex(" ") if form in ("byte", "tail") else text
        for piece, text, form in zip(pieces, texts, forms, strict=True)
    ]
    return shown, forms


def _character(data: bytes, begin: int) -> str | None:
    """The character whose UTF-8 begins there; None where none does."""
    for length in range(1, 5):
        try:
            return data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError:
            continue
    return None


def page_data(
    inspection: Inspection,
    config: AAMoEConfig,
    tokenizer: Tokenizer,
    *,
    source: str,
    facts: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """What the page's script reads: integers, rounded floats, strings.

    Args:
      source: name of the text.
      facts: (name, value) pairs for the head of the page.
      notes: what a reader must know, such as that the text was cut.
    """
    texts, forms = glyphs([tokenizer.decode(inspection.tokens[i : i + 1]) for i in range(len(inspection.tokens))])
    ledger = copying.ledger_of(inspection)
    repeat = copying.longest_repeat(inspection.tokens, np.ones(len(inspection.tokens), np.int32))
    return {
        "source": source,
        "facts": [list(fact) for fact in facts],
        "notes": list(notes),
        "chunk": inspection.chunk_size,
        "experts": inspection.num_experts,
        "local": config.local,
        "text": texts,
        "forms": "".join(FORMS[form] for form in forms),
        "bits": [None if math.isnan(bits) else round(bits, 3) for bits in inspection.bits.tolist()],
        "likely": inspection.likely.tolist(),
        "likelyShare": _rounded(inspection.likely_probability, 3),
        "names": {int(token): _name(tokenizer, int(token)) for token in np.unique(inspection.likely)},
        "repeat": repeat.tolist(),
        "copies": [_rounded_tree(copying.compare(ledger, n)) for n in copying.NGRAMS],
        "layers": [_layer(inspection, index) for index in range(len(inspection.layers))],
    }


def _name(tokenizer: Tokenizer, token: int) -> list[str]:
    """An id outside the passage, as [text, form]."""
    special = {tokenizer.eos_id: "end of document", tokenizer.pad_id: "padding"}
    piece = b"" if token in special else tokenizer.decode(np.array([token]))
    if not piece:
        return [special.get(token, f"unused id {token}"), FORMS["special"]]
    (text,), (form,) = glyphs([piece])
    return [text, FORMS[form]]


def _layer(inspection: Inspection, index: int) -> dict[str, Any]:
    """One layer; slots of all tokens one after the other, `spent` of them per token."""
    used = inspection.kind[index] != UNUSED
    expert, start, stop = (x[index][used] for x in (inspection.expert, inspection.start, inspection.stop))
    return {
        "number": inspection.layers[index],
        "spent": inspection.spent[index].tolist(),
        "budget": _rounded(inspection.budget[index], 2),
        "kind": "".join("lce"[kind] for kind in inspection.kind[index][used]),
        # Where the text begins, or which expert; and how much text.
        "place": np.where(expert >= 0, expert, start).tolist(),
        "length": (stop - start).tolist(),
        "probability": _rounded(inspection.probability[index][used], 4),
        "mass": _rounded(inspection.mass[index][used], 4),
        "totals": _rounded_tree({name: values[index] for name, values in inspection.totals.items()}),
        "uses": [
            {"expert": use.expert, "tokens": use.tokens, "mass": round(use.mass, 3), "examples": list(use.examples)}
            for use in expert_uses(inspection, index)
        ],
    }


def _rounded(values: np.ndarray, digits: int) -> list[Any]:
    return np.round(np.asarray(values, np.float64), digits).tolist()


def _rounded_tree(value: Any) -> Any:
    """The same with four digits after the point, and None for what is no number."""
    if isinstance(value, dict):
        return {name: _rounded_tree(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded_tree(item) for item in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


def render(data: dict[str, Any]) -> str:
    """The page of `page_data`, or of what came back from its JSON."""
    folder = importlib.resources.files("aamoe_jax.analysis") / "page"
    part = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    values = {
        "title": html.escape(f"{data['source']} · where the budget went"),
        "style": part["page.css"],
        "script": part["page.js"],
        "data": embedded_json(data),
    }
    # In one pass: what is put in is never searched for places.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], part["page.html"])


def embedded_json(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or begin another."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
