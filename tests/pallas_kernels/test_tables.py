"""The tables: every pair once, sorted by resource and token, tiles of one resource only."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import tables


def random_allocation(tokens=60, slots=5, resources=9, seed=0):
    rng = np.random.default_rng(seed)
    resource = np.argsort(rng.random((tokens, resources)), axis=1)[:, :slots]
    return jnp.asarray(resource, jnp.int32), jnp.asarray(rng.integers(0, slots + 1, tokens), jnp.int32)


@pytest.mark.parametrize("tile", [1, 4, 7, 128])
@pytest.mark.parametrize("limit", [tables.INT32_MAX, 0])  # 0: as if the packed sort key did not fit
def test_tiles_hold_every_pair_once_in_order(tile, limit, monkeypatch):
    monkeypatch.setattr(tables, "INT32_MAX", limit)
    resource, count = random_allocation()
    table = tables.build(resource, count, num_resources=9, max_pairs=300, tile=tile)
    tiles, used = int(table.begin[-1]), int(count.sum())
    seen = []
    for pair, r in zip(np.asarray(table.pair)[:tiles], np.asarray(table.resource)[:tiles], strict=True):
        real = pair[pair < 300]
        assert len(real) >= 1
        assert np.all(pair[len(real) :] == 300)
        tokens = np.asarray(table.numbering.token)[real]
        assert np.all(np.diff(tokens) > 0)
        slots = real - np.asarray(table.numbering.first)[tokens]
        assert np.all(np.asarray(resource)[tokens, slots] == r)
        seen += real.tolist()
    assert sorted(seen) == list(range(used))
    assert np.all(np.diff(np.asarray(table.resource)[:tiles]) >= 0)
    assert np.all(np.asarray(table.pair)[tiles:] == 300)


def test_begin_is_the_first_tile_of_every_resource():
    resource, count = random_allocation()
    table = tables.build(resource, count, num_resources=9, max_pairs=300, tile=4)
    begin = np.asarray(table.begin)
    for r in range(9):
        assert np.all(np.asarray(table.resource)[begin[r] : begin[r + 1]] == r)


def test_slots_and_pairs_correspond():
    resource, count = random_allocation()
    table = tables.build(resource, count, num_resources=9, max_pairs=300, tile=4)
    there = tables.from_slots(resource, table.numbering, fill=-1)
    used = np.arange(5) < np.asarray(count)[:, None]
    np.testing.assert_array_equal(there[: int(count.sum())], np.asarray(resource)[used])
    assert np.all(np.asarray(there)[int(count.sum()) :] == -1)
    np.testing.assert_array_equal(tables.to_slots(there, table.numbering, 5), np.where(used, resource, 0))


def test_the_bound_cuts_the_last_tokens():
    resource, _ = random_allocation()
    table = tables.build(resource, jnp.full(60, 2, jnp.int32), num_resources=9, max_pairs=31, tile=4)
    assert np.asarray(table.numbering.count).tolist() == [2] * 15 + [1] + [0] * 44
