"""Questions with given answers: the answer that the model finds most likely (DEC-23).

An item is a text and several ways to go on, one of them right: ARC, BoolQ, COPA, HellaSwag, PIQA, RTE, SciQ all come to
that. Nothing is generated: log P(answer | text) is read off the forward pass under causal budgets.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from aamoe_jax.config import ConfigError
from aamoe_jax.data.errors import shown
from aamoe_jax.data.tokenizers import Tokenizer
from aamoe_jax.mixers.base import BudgetMode
from aamoe_jax.model import merge
from aamoe_jax.sharding import on_host


class Item(NamedTuple):
    """One question."""

    context: str
    choices: tuple[str, ...]
    """How the context may go on, leading space included."""
    answer: int
    """Which choice is right, counted from 0."""
    where: str = ""
    """File and line, for messages."""


class Row(NamedTuple):
    """A context and one of its choices, as tokens."""

    tokens: Int[np.ndarray, "n"]
    scored: int
    """How many of the last tokens are the choice's."""


LINE = 2**24
"""Bytes that one line of a file of items may have."""


def read_items(path: str | Path) -> list[Item]:
    """Items from a UTF-8 file with one JSON object per line, ended by LF or CRLF: `context`, `choices`, `answer`.

    Raises:
      ConfigError: there is no such file, nothing in it, or a line that is no item. It says which.
    """
    items = []
    try:
        with open(path, "rb") as file:
            for number in itertools.count(1):
                line = file.readline(LINE)
                if not line:
                    break
                line = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"")
                if line.strip():
                    items.append(_item(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as text ({error.strerror})") from error
    if not items:
        raise ConfigError(f"{path}: holds no item")
    return items


def log_probabilities(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    items: Sequence[Item],
    tokenizer: Tokenizer,
    *,
    budget: BudgetMode,
    length: int,
    batch_size: int,
) -> list[Float[np.ndarray, "_"]]:
    """log P(choice | context) of all choices of every item, in nats.

    Args:
      length: tokens of a row. Of a longer context the end is kept.

    Raises:
      ConfigError: a choice that does not fit into a row with a token before it, or has no token.
    """
    rows = [_row(item, choice, tokenizer, length) for item in items for choice in item.choices]
    found, _ = score_rows(graphdef, params, rows, budget=budget, length=length, batch_size=batch_size)
    ends = np.cumsum([len(item.choices) for item in items])[:-1]
    return np.split(found, ends)


def score_rows(
    graphdef: nnx.GraphDef,
    params: dict[str, Any],
    rows: Sequence[Row],
    *,
    budget: BudgetMode,
    length: int,
    batch_size: int,
) -> tuple[Float[np.ndarray, "rows"], Bool[np.ndarray, "rows"]]:
    """log P of the scored tokens of every row, in nats, and whether each of them is the most probable one.

    Args:
      length: tokens that the longest row may have; all are padded to it.
    """
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def score(
        params: dict[str, Any], tokens: Int[Array, "b L"], size: Int[Array, "b"], scored: Int[Array, "b"]
    ) -> tuple[Float[Array, "b"], Bool[Array, "b"]]:
        place = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        segments = (place < size[:, None]).astype(jnp.int32)
        logits, _ = merge(graphdef, params)(tokens, segments, place, budget=budget)
        logits, wanted = logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), wanted[..., None], axis=-1)[..., 0]
        target = place[:, 1:]
        counts = (target < size[:, None]) & (target >= (size - scored)[:, None])
        greedy = (logits.argmax(-1) == wanted) | ~counts
        return jnp.where(counts, log_p, 0).sum(-1), greedy.all(-1)

    log_p, greedy = np.zeros(len(rows), np.float32), np.zeros(len(rows), bool)
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        # The last batch is filled up with rows of padding.
        tokens, sizes = np.zeros((batch_size, length), np.int32), np.zeros((2, batch_size), np.int32)
        for at, row in enumerate(batch):
            tokens[at, : len(row.tokens)], sizes[:, at] = row.tokens, (len(row.tokens), row.scored)
        found = on_host(score(params, tokens, *sizes))
        for kept, part in zip((log_p, greedy), found, strict=True):
            kept[start : start + len(batch)] = part[: len(batch)]
    return log_p, greedy


def accuracies(items: Sequence[Item], log_p: Sequence[Float[np.ndarray, "_"]]) -> dict[str, int | float]:
    """Shares of items whose right choice is the likeliest; the same per byte of the choice; and of guessing."""
    likeliest = [int(np.argmax(one)) == item.answer for item, one in zip(items, log_p, strict=True)]
    sizes = [np.array([max(len(choice.encode()), 1) for choice in item.choices]) for item in items]
    per_byte = [int(np.argmax(one / size)) == item.answer for item, one, size in zip(items, log_p, sizes, strict=True)]
    return {
        "items": len(items),
        "accuracy": float(np.mean(likeliest)),
        "accuracy_per_byte": float(np.mean(per_byte)),
        "chance": float(np.mean([1 / len(item.choices) for item in items])),
    }


def _item(line: bytes, where: str) -> Item:
    wanted = 'wanted {"context": "...", "choices": ["...", "..."], "answer": 0}'
    if len(line) == LINE:
        raise ConfigError(f"{where}: {wanted}, on a line of less than {LINE // 2**20} MiB")
    try:
        # As text, so that json does not guess another encoding than UTF-8.
        found = json.loads(line.decode("utf-8"))
        json.dumps(found, ensure_ascii=False).encode("utf-8")  # half a character, as in "\\ud800", is no text
        item = Item(found["context"], tuple(found["choices"]), found["answer"], where)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: {wanted} ({type(error).__name__}: {shown(error)})") from error
    texts = (item.context, *item.choices)
    is_list = isinstance(found["choices"], list)  # a string would be as many choices as it has letters
    if not (is_list and len(texts) > 2 and all(isinstance(text, str) and text for text in texts)):
        raise ConfigError(f"{where}: {wanted}, no text of it empty")
    if not (type(item.answer) is int and 0 <= item.answer < len(item.choices)):
        raise ConfigError(
            f"{where}: answer = {shown(repr(item.answer))}: must be the place of a choice, counted from 0"
        )
    return item


def _row(item: Item, choice: str, tokenizer: Tokenizer, length: int) -> Row:
    context, chosen = (tokenizer.encode(text.encode()).astype(np.int32) for text in (item.context, choice))
    if not len(chosen) or len(chosen) >= length:
        where = f"{item.where}: " if item.where else ""
        raise ConfigError(
            f"{where}choice {shown(choice, 60)!r}: {len(chosen)} tokens; a row of {length} can hold 1 to {length - 1}"
        )
    return Row(np.concatenate([context[-(length - len(chosen)) :], chosen]), len(chosen))
