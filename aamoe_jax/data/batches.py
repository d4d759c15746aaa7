"""Batches as a function of (seed, step). Nothing else is state: a run is resumed by its step number alone."""

import functools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Int32

from aamoe_jax.config import ConfigError, DataConfig
from aamoe_jax.data.windows import WindowSource, to_example

Batch = dict[str, Int32[np.ndarray, "B L"]]


def training_batches(
    config: DataConfig, *, batch_size: int, seed: int, split: str = "train", shard_index: int = 0, shard_count: int = 1
) -> grain.MapDataset[Batch]:
    """An endless dataset whose element `step` is batch number `step`, the rows of this shard.

    Every dataset of the mixture is shuffled as a whole, anew in each of its epochs; rows are drawn from the datasets in
    proportion to their weights. The shards of a step, one after the other, are the batch of a single shard: which rows
    a step sees, and in which order, does not depend on the number of hosts.
    """
    rows_per_shard = _rows_per_shard(batch_size, shard_index, shard_count)
    datasets = [_endless(config, name, split, seed) for name, _ in config.mixture]
    weights = [weight for _, weight in config.mixture]
    rows = datasets[0] if len(datasets) == 1 else grain.MapDataset.mix(datasets, weights)
    return rows.batch(rows_per_shard)[shard_index::shard_count]


def _endless(config: DataConfig, name: str, split: str, seed: int) -> grain.MapDataset:
    source = WindowSource(config, name, split)
    # As good as endless. Truly endless ones have length sys.maxsize, which overflows when a batch holds one row.
    epochs = 2**62 // len(source)
    # The name goes into the seed: two datasets of equal size would otherwise share one permutation.
    shuffled = grain.MapDataset.source(source).shuffle(seed=zlib.crc32(f"{seed}/{name}".encode())).repeat(epochs)
    return shuffled.map(functools.partial(to_example, eos_id=source.stream.eos_id, pad_id=source.stream.pad_id))


def iterate(
    dataset: grain.MapDataset[Batch], start_step: int = 0, *, threads: int = 1, buffered: int = 4
) -> Iterator[Batch]:
    """Batches start_step, start_step + 1, ...; `threads` read ahead, at most `buffered` batches are held.

    One thread is the fastest from a local disk (the work is Python's); more pay where every read waits for a network.
    """
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=buffered)
    return iter(dataset[start_step:].to_iter_dataset(options))


class EvaluationBatches(Sequence[Batch]):
    """All windows of a split in order, each once; the last batch is filled up with rows of padding."""

    def __init__(self, source: WindowSource, seq_len: int, batch_size: int, shard_index: int, shard_count: int):
        self._source, self._batch_size = source, batch_size
        self._rows = _rows_per_shard(batch_size, shard_index, shard_count)
        self._offset = shard_index * self._rows
        self._padding = np.full(seq_len + 1, source.stream.pad_id, source.stream.dtype)

    def __len__(self) -> int:
        return -(-len(self._source) // self._batch_size)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        first = index * self._batch_size + self._offset
        rows = [self._row(number) for number in range(first, first + self._rows)]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}

    def _row(self, number: int) -> dict[str, Int32[np.ndarray, "L"]]:
        window = self._source[number] if number < len(self._source) else self._padding
        return to_example(window, eos_id=self._source.stream.eos_id, pad_id=self._source.stream.pad_id)


def evaluation_batches(
    config: DataConfig, name: str, *, split: str, batch_size: int, shard_index: int = 0, shard_count: int = 1
) -> EvaluationBatches:
    """The batches of one dataset's split, for measuring: in order, every target counted exactly once."""
    return EvaluationBatches(WindowSource(config, name, split), config.seq_len, batch_size, shard_index, shard_count)


def _rows_per_shard(batch_size: int, shard_index: int, shard_count: int) -> int:
    if batch_size % shard_count:
        raise ConfigError(f"batch_size = {batch_size}: must be divisible by the number of data shards, {shard_count}")
    if not 0 <= shard_index < shard_count:
        raise ConfigError(f"shard_index = {shard_index}: must be in [0, {shard_count})")
    return batch_size // shard_count
