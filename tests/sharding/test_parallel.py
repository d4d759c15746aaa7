"""Where resources are when they are divided: every one in one place, and no shard with more to do than the others."""

import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.aamoe.parallel import location_of, pair_bound
from aamoe_jax.shards import Shards


def homes(rows: int, count: int, experts: int, shards: int) -> tuple[np.ndarray, np.ndarray]:
    """(shard, place) of every resource of every row, rows first; `count` chunks per part, `experts` per shard."""
    resource = jnp.broadcast_to(jnp.arange((count + experts) * shards), (rows, 1, (count + experts) * shards))
    at = location_of(resource, count, experts, Shards(resource=shards))
    return np.asarray(at.shard)[:, 0], np.asarray(at.row)[:, 0]


@pytest.mark.parametrize(
    ("rows", "count", "experts", "shards"), [(2, 8, 3, 4), (3, 5, 1, 4), (1, 1, 2, 8), (2, 4, 0, 2)]
)
def test_every_resource_has_one_place(rows, count, experts, shards):
    shard, place = homes(rows, count, experts, shards)
    chunks = count * shards
    assert shard.min() == 0
    assert shard.max() == shards - 1
    of_chunks = set(zip(shard[:, :chunks].ravel().tolist(), place[:, :chunks].ravel().tolist(), strict=True))
    assert len(of_chunks) == rows * chunks
    # All rows share the experts, which come after the chunks of all rows.
    assert (shard[:, chunks:] == shard[0, chunks:]).all()
    assert (place[:, chunks:] == place[0, chunks:]).all()
    of_experts = set(zip(shard[0, chunks:].tolist(), place[0, chunks:].tolist(), strict=True))
    assert len(of_experts) == experts * shards
    assert not of_chunks & of_experts


@pytest.mark.parametrize(("count", "shards"), [(2, 8), (8, 32), (16, 64), (12, 8), (32, 8)])
def test_chunks_are_shared_out_evenly(count, shards):
    shard, _ = homes(1, count, 0, shards)
    held = np.bincount(shard[0], minlength=shards)
    assert held.max() == held.min() == count


def test_chunks_that_fewer_tokens_see_are_shared_out():
    count, shards = 32, 8
    shard, _ = homes(1, count, 0, shards)
    seen_by = np.arange(count * shards)[::-1]  # in chunks: those that come later
    load = np.bincount(shard[0], weights=seen_by)
    np.testing.assert_allclose(load, load.mean(), rtol=0.03)
    contiguous = seen_by.reshape(shards, count).sum(1)
    assert contiguous.max() / contiguous.mean() > 1.8


def test_the_bound_on_pairs():
    assert pair_bound(1000, Shards(resource=4)) == 1000
    assert pair_bound(1000, Shards(resource=4, pair_bound=1.5)) == 375
    assert pair_bound(1000, Shards(resource=4, pair_bound=9.0)) == 1000
