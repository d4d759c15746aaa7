"""Markdown tables, with columns of equal width so that they read as plain text too."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A Markdown table.

    Args:
      heads: one per column.
      rows: each with as many cells as there are heads.
      numbers: columns are aligned to the right.
    """
    cells = [list(heads), *map(list, rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(heads))]
    justify = str.rjust if numbers else str.ljust
    lines = [
        "| " + " | ".join(justify(cell, width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rules = ["-" * (width + 1) + (":" if numbers else "-") for width in widths]
    return "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])
