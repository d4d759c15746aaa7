"""The best resources of every token, in order."""

from pallas_kernels.selection.interface import IMPLEMENTATIONS, Selection, select

__all__ = ["IMPLEMENTATIONS", "Selection", "select"]
