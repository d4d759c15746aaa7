import dataclasses
import itertools

import numpy as np
import pytest

from aamoe_jax import data
from aamoe_jax.config import ConfigError, DataConfig
from tests.data.helpers import ALIGN, SEQ_LEN, prepared, random_documents


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> DataConfig:
    """Three datasets, told apart by their names."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("one", "two", "three")):
        prepared(folder, random_documents(seed=number, train=50), name)
    return DataConfig(data_dir=str(folder), mixture=(("one", 1.0),), seq_len=SEQ_LEN, document_align=ALIGN)


def rows_of(batches):
    return [row.tobytes() for batch in batches for row in batch["tokens"]]


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


def windows(config, name):
    source = data.WindowSource(config, name, "train")
    return [source[i][:-1].astype(np.int32).tobytes() for i in range(len(source))]


def test_a_batch_is_a_function_of_seed_and_step(config):
    make = lambda seed: data.training_batches(config, batch_size=4, seed=seed)  # noqa: E731
    assert_same(make(3)[17], make(3)[17])
    assert rows_of([make(3)[0]]) != rows_of([make(4)[0]])
    assert rows_of([make(3)[0]]) != rows_of([make(3)[1]])
    assert make(3)[17]["tokens"].shape == (4, SEQ_LEN)
    assert make(3)[10**9]["loss_mask"].any(), "endless"


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_a_run_resumes_at_its_step(config, threads):
    dataset = data.training_batches(config, batch_size=4, seed=0)
    straight = list(itertools.islice(data.iterate(dataset, threads=threads), 12))
    resumed = list(itertools.islice(data.iterate(dataset, 7, threads=threads), 5))
    for step, batch in enumerate(straight):
        assert_same(batch, dataset[step])
    for a, b in zip(straight[7:], resumed, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("shard_count", [1, 2, 4])
def test_shards_together_are_the_batch(config, shard_count):
    mixed = dataclasses.replace(config, mixture=(("one", 1.0), ("two", 2.0)))
    whole = data.training_batches(mixed, batch_size=8, seed=0)
    shards = [
        data.training_batches(mixed, batch_size=8, seed=0, shard_index=index, shard_count=shard_count)
        for index in range(shard_count)
    ]
    for step in range(20):
        parts = [shard[step] for shard in shards]
        assert_same({key: np.concatenate([part[key] for part in parts]) for key in parts[0]}, whole[step])


def test_every_epoch_is_another_permutation(config):
    expected = windows(config, "one")
    batches = data.training_batches(config, batch_size=1, seed=0)
    epochs = [
        rows_of(batches[i] for i in range(start, start + len(expected)))
        for start in (0, len(expected), 2 * len(expected))
    ]
    assert all(sorted(epoch) == sorted(expected) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs} | {tuple(expected)}) == 4


def test_mixtures_follow_their_weights(config):
    mixed = dataclasses.replace(config, mixture=(("one", 0.5), ("two", 0.3), ("three", 0.2)))
    batches = data.training_batches(mixed, batch_size=10, seed=0)
    rows = rows_of(batches[step] for step in range(100))
    counts = {
        name: sum(row in members for row in rows)
        for name in ("one", "two", "three")
        for members in [set(windows(config, name))]
    }
    assert counts == {"one": 500, "two": 300, "three": 200}
    # Each of them as a whole: the rows of "three" come from all over it.
    assert set(windows(config, "three")) <= set(rows)


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_evaluation_counts_every_token_once(config, batch_size):
    batches = data.evaluation_batches(config, "one", split="test", batch_size=batch_size)
    counted = [batch["targets"][batch["loss_mask"] == 1] for batch in batches]
    expected = [token for text in data.documents_of(config, "one", "test") for token in [*(b + 3 for b in text[1:]), 1]]
    assert np.concatenate(counted).tolist() == expected
    assert len(counted) == len(batches)
    assert all(batch["tokens"].shape == (batch_size, SEQ_LEN) for batch in batches)


def test_evaluation_can_be_sharded(config):
    whole = data.evaluation_batches(config, "one", split="test", batch_size=4)
    shards = [
        data.evaluation_batches(config, "one", split="test", batch_size=4, shard_index=index, shard_count=2)
        for index in range(2)
    ]
    for number in range(len(whole)):
        parts = [shard[number] for shard in shards]
        assert_same({key: np.concatenate([part[key] for part in parts]) for key in parts[0]}, whole[number])
    with pytest.raises(IndexError):
        whole[len(whole)]


def test_shards_that_do_not_fit_are_refused(config):
    with pytest.raises(ConfigError, match="batch_size = 6: must be divisible by the number of data shards, 4"):
        data.training_batches(config, batch_size=6, seed=0, shard_count=4)
    with pytest.raises(ConfigError, match="shard_index = 2"):
        data.training_batches(config, batch_size=4, seed=0, shard_index=2, shard_count=2)
