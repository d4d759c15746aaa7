"""The ledger in `paper` mode: the formulas as they were published, slips included and named.

The six deconstructed variants and standard attention are those of "Deconstructing Attention" (DEC-13 to DEC-15): W^O is
not counted, a multiply-add is two FLOPs, bytes are of half precision. Those of AA-MoE are derived from its text
(AA-37). None counts norms, softmaxes or rotary turns.

Notation: B rows, L tokens per row (of context, in decoding), d width, h heads, t devices along which heads are divided,
m keys per resource, E experts, P pairs of a token and a resource in a row.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Quantity = Literal["prefill_flops", "decode_flops", "activation_bytes", "cache_bytes"]
Reading = Literal["printed", "corrected"]


class Formulas(NamedTuple):
    """One formula per quantity; None where nothing was published."""

    prefill_flops: str
    decode_flops: str
    activation_bytes: str | None
    cache_bytes: str


class Slip(NamedTuple):
    """Formulas that contradict the definition, or the same source elsewhere."""

    why: str
    corrected: dict[Quantity, str]


_STANDARD = Formulas("4BL²d + 6BLd²", "6Bd² + 4BLd", "8BLd + 2BL²h/t", "4BLd")
_FIXED_MAP = Formulas(
    "2L²d + 2BL²d + 6BLd²", "2Ld + 2BLd + 6Bd²", "4BLd + 8Ld + 2L²h/t", "2BLd + 2Ld"
)  # the cache is printed as 2(B+1)Ld

PRINTED: dict[str, Formulas] = {
    "attention": _STANDARD,
    "mlp": Formulas("6BLd²", "6Bd²", "8BLd/t", "0"),
    "approximate": Formulas("14BLd²", "10Bd²", "11BLd/t + 3Bd²/ht", "6Bd + 4Bd²/h"),
    "non_approximate": Formulas("6BLd²", "6Bd²", "8BLd + 4BLh/t", "2Bd + 4Bh"),
    "random_qk": _FIXED_MAP,
    "fixed_qk": _FIXED_MAP,
    "static_qk": _STANDARD,
    "aamoe": Formulas(
        "10BLd² + 2BLdE + BL²d/m + 2BLd + 4BmdP",
        "10Bd² + 2BdE + 2BLd/m + 2Bd + 4BmdP/L",
        None,
        "4BLd + 2BLd/m",  # 2 L d elements of keys and values, and one router key per chunk
    ),
}
"""What was published, by the name of the mixer that it is about."""

_BATCHED = Slip(
    "queries and keys of a fixed sequence have no batch axis: 4Ld² for both, not 4BLd²",
    {"prefill_flops": "2L²d + 2BL²d + 4Ld² + 2BLd²", "decode_flops": "2Ld + 2BLd + 4d² + 2Bd²"},
)

SLIPS: dict[str, Slip] = {
    "approximate": Slip(
        "1/h is missing on the products with the state, whose size the cache's own row gives as 4Bd²/h",
        {"prefill_flops": "6BLd² + 8BLd²/h", "decode_flops": "6Bd² + 8Bd²/h"},
    ),
    "random_qk": _BATCHED,
    "fixed_qk": _BATCHED,
}
"""Where a published formula is wrong, why, and what it should be."""

PRECOMPUTED_SLIP = Slip(
    "with maps computed beforehand the appendix prints 2L²d + 2BLd² and 2Ld + 2d²: rows mix values of their own",
    {"prefill_flops": "2BL²d + 2BLd²", "decode_flops": "2BLd + 2Bd²"},
)
"""Of `random_qk` and `fixed_qk` once more, when their maps are not computed anew."""


class Symbols(NamedTuple):
    """What the letters of a formula stand for."""

    B: int
    L: int
    d: int
    h: int
    t: int = 1
    m: int = 1
    E: int = 0
    P: int | float = 0


def formula(name: str, quantity: Quantity, reading: Reading = "printed") -> str | None:
    """The formula of a mixer; `corrected` puts a slip right. None where nothing was published."""
    if name not in PRINTED:
        return None
    corrected = SLIPS[name].corrected if reading == "corrected" and name in SLIPS else {}
    return corrected.get(quantity, getattr(PRINTED[name], quantity))


def evaluate(text: str, symbols: Symbols) -> float:
    """The value of a sum of products such as `8BLd + 2BL²h/t`.

    Raises:
      ValueError: for a term that is none.
    """
    return sum(_term(term, symbols) for term in text.split(" + "))


def _term(text: str, symbols: Symbols) -> float:
    found = re.fullmatch(r"(\d*)((?:[A-Za-z]²?)*)(?:/([A-Za-z]+))?", text)
    if not found or not text:
        raise ValueError(f"{text!r} is no product of a number and letters, such as 2BL²h/t")
    value = float(found[1] or 1)
    for letter, square in re.findall(r"([A-Za-z])(²?)", found[2]):
        value *= getattr(symbols, letter) ** (2 if square else 1)
    for letter in found[3] or "":
        value /= getattr(symbols, letter)
    return value
