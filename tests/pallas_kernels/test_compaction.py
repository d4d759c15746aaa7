"""Tiles by compaction: every pair once, in order of window, resource and token; and back to the slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention.tpu import compaction
from pallas_kernels.block_sparse_attention.tpu.layout import Layout
from tests.pallas_kernels.simulated import as_compiled


def random_pairs(tokens, slots, resources):
    """Ragged: some resources are unknown, some want nothing, one is nobody's, and one most tokens' first."""
    rng = np.random.default_rng(0)
    resource = np.argsort(rng.random((tokens, resources - 1)), axis=1)[:, :slots].astype(np.int32)
    resource[:, 0] = np.where((resource[:, 1:] == 1).any(1), resource[:, 0], 1)
    resource[rng.random(resource.shape) < 0.1] = resources
    count = rng.integers(0, slots + 1, tokens).astype(np.int32)
    bias = rng.normal(size=resource.shape).astype(np.float32)
    return resource, count, bias, rng.integers(0, 129, resource.shape).astype(np.int32)


def check(tokens, slots, resources, tile, windows, max_pairs):
    """Tiles, and what random values in them give to slots, against loops over windows and resources."""
    resource, count, bias, visible = random_pairs(tokens, slots, resources)
    a_window = -(-tokens // (windows * 8)) * 8
    layout = Layout(tile, windows, a_window, groups=1, heads=8, d=128)
    of_resources = resources, layout

    @jax.jit
    def tiles_and_slots(resource, count, bias, visible, value):
        tables = compaction.build(resource, count, resources, max_pairs, layout)
        tiles = compaction.to_tiles(bias, visible, tables, *of_resources)
        value = jnp.broadcast_to(value, tiles[0].shape) * (1 + jnp.arange(len(tiles[0]))[:, None, None])
        return tables, tiles, value, compaction.from_tiles(value, tiles[0], tables, *of_resources)

    value = np.random.default_rng(1).normal(size=tile).astype(np.float32)
    tables, tiles, value, found = jax.tree.map(np.asarray, tiles_and_slots(resource, count, bias, visible, value))

    kept = np.clip(max_pairs - np.cumsum(count) + count, 0, count)
    used = (np.arange(slots) < kept[:, None]) & (resource < resources)
    expected, n = np.zeros((tokens, slots), np.float32), 0
    for window in range(windows):
        here = np.arange(tokens)[:, None] // a_window == window
        for r in range(resources):
            assert tables.begin[window * resources + r] == n
            token, k = np.nonzero(here & used & (resource == r))
            for some in np.split(np.arange(len(token)), range(tile, len(token), tile)):
                if len(some) == 0:
                    continue
                at, padding = (token[some], k[some]), (0, tile - len(some))
                assert tables.resource[n] == window * resources + r
                wanted = token[some] - window * a_window, bias[at], visible[at]
                for x, y, fill in zip(tiles, wanted, (a_window, -np.inf, 0), strict=True):
                    np.testing.assert_array_equal(x[n, 0], np.pad(y, padding, constant_values=fill))
                expected[at] = value[n, 0, : len(some)]
                n += 1
    assert tables.begin[-1] == n < len(tables.resource)
    for x, fill in zip(tiles, (a_window, -np.inf, 0), strict=True):
        np.testing.assert_array_equal(x[n:], fill)
    np.testing.assert_array_equal(found[:tokens, :slots], expected)


RAGGED = [
    (200, 5, 9, 16, 1, 2000),  # tiles narrower than a register
    (300, 7, 140, 128, 2, 900),  # more resources than a square has, and fewer pairs than are wanted
    (1100, 9, 20, 256, 3, 9900),  # windows that are no whole tiles
    (40, 3, 5, 512, 1, 120),  # a tile that nothing fills
]


@pytest.mark.parametrize("sizes", RAGGED)
def test_tiles_and_slots(sizes):
    check(*sizes)


def test_the_code_that_a_tpu_runs_has_no_races(monkeypatch, capfd):
    """Several squares, and a window for each of two cores."""
    with as_compiled(compaction, monkeypatch, cores=2):
        check(150, 4, 140, 128, 2, 400)
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_pairs_of_a_whole_window_with_one_resource():
    """The matrix without a gap, and with as many as there can be: the last token alone."""
    layout = Layout(128, 1, 256, groups=1, heads=8, d=128)
    for count in (np.ones(256, np.int32), (np.arange(256) == 255).astype(np.int32)):
        resource = np.full((256, 1), 2, np.int32)
        tables = compaction.build(jnp.asarray(resource), jnp.asarray(count), 3, 256, layout)
        row, *_ = compaction.to_tiles(jnp.zeros((256, 1)), jnp.ones((256, 1), jnp.int32), tables, 3, layout)
        token = np.asarray(row).ravel()
        np.testing.assert_array_equal(token[token < 256], np.flatnonzero(count))
