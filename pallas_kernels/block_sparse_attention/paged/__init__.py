"""Attention of one token per sequence over the few pages and experts that it was given: what decoding does."""

from pallas_kernels.block_sparse_attention.paged.interface import IMPLEMENTATIONS, paged_attention
from pallas_kernels.block_sparse_attention.paged.types import Slots

__all__ = ["IMPLEMENTATIONS", "Slots", "paged_attention"]
