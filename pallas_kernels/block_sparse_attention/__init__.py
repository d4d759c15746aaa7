"""Attention of every token over its own few blocks of keys."""

from pallas_kernels.block_sparse_attention.block_sizes import BlockSizes
from pallas_kernels.block_sparse_attention.interface import IMPLEMENTATIONS, block_sparse_attention
from pallas_kernels.block_sparse_attention.paged.interface import paged_attention
from pallas_kernels.block_sparse_attention.types import Attention, Pairs, Slots, Window

__all__ = [
    "IMPLEMENTATIONS",
    "Attention",
    "BlockSizes",
    "Pairs",
    "Slots",
    "Window",
    "block_sparse_attention",
    "paged_attention",
]
