"""Attention to clusters against softmax over whole squares: what is read, ragged blocks, packed rows, parts of rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.mixers.flash import LOWEST, Attended
from aamoe_jax.mixers.routed import BLOCK, Routes, Sizes, Tokens, _Problem, loop, routed_attention, sort_by_cluster

HEADS, GROUPS, SIZE, CLUSTERS = 4, 2, 8, 5
ROUTES = "cluster", "read", "start", "beside"


def case(length: int, first: int, reads: int, dtype: str = "float32"):
    """(arrays, who reads what) of two rows: some keys are of no cluster, some queries read less than others."""
    random = np.random.default_rng(length + first)
    queries = length - first
    shapes = (queries, HEADS, SIZE), (length, GROUPS, SIZE), (length, GROUPS, SIZE)
    arrays = [jnp.asarray(random.normal(size=(2, *shape)), dtype) for shape in shapes]
    arrays.append(jnp.asarray(random.normal(size=(2, length, GROUPS)), jnp.float32))
    cluster = random.integers(0, CLUSTERS + 1, (2, length, GROUPS))
    read = random.random((2, queries, HEADS, CLUSTERS)).argsort(-1)[..., :reads]
    read = np.where(random.random(read.shape) < 0.2, CLUSTERS, read)
    read[0, -1] = CLUSTERS  # nothing at all
    start = np.minimum(random.integers(0, length, (2, queries)), first + np.arange(queries))
    # A key is read once: beside a query's clusters only where its own is none of them.
    own = np.repeat(cluster[:, first:], HEADS // GROUPS, axis=2)
    beside = (read != own[..., None]).all(-1) & (random.random(own.shape) < 0.8)
    beside[0, -1] = False
    return arrays, tuple(map(jnp.asarray, (cluster, read, start, beside)))


def definition(query, key, value, bias, *, cluster, read, start, beside, first):
    """In whole squares."""
    key, value, bias, cluster = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (key, value, bias, cluster))
    place = jnp.arange(key.shape[1])
    own = (read[..., None] == cluster.swapaxes(1, 2)[:, None][:, :, :, None]) & (read[..., None] < CLUSTERS)
    own &= place >= start[:, :, None, None, None]
    last = first + jnp.arange(query.shape[1])[:, None, None]
    seen = own.any(3) & (place <= last)  # [b, q, H, S]
    seen |= beside[..., None] & (place == last)
    scores = SIZE**-0.5 * jnp.einsum("bihk,bjhk->bihj", query, key) + bias.swapaxes(1, 2)[:, None]
    top = jax.lax.stop_gradient(jnp.where(seen, scores, -99.0).max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    lse = jnp.where(seen.any(-1), (top + jnp.log(jnp.where(total > 0, total, 1)))[..., 0], LOWEST)
    return Attended(jnp.einsum("bihj,bjhk->bihk", weights / jnp.maximum(total, 1e-9), value), lse)


def value_and_gradients(attend, arrays):
    random = np.random.default_rng(5)
    d_output, d_lse = random.normal(size=arrays[0].shape), random.normal(size=arrays[0].shape[:-1])

    def loss(*arrays):
        output, lse = attend(*arrays)
        return (output * d_output).sum() + jnp.where(lse > LOWEST / 2, lse * d_lse, 0).sum(), (output, lse)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)


@pytest.mark.parametrize(
    ("length", "first", "reads", "block"), [(50, 0, 2, 8), (50, 17, 3, 16), (37, 0, 1, 8), (23, 5, 5, 64)]
)
def test_it_is_its_definition(length, first, reads, block):
    """Values, log-sum-exp and all gradients; a query that reads nothing gets 0."""
    arrays, routes = case(length, first, reads)
    routes = dict(zip(ROUTES, routes, strict=True))
    at = jnp.int32(first) if first else 0  # as a mesh says it, and as one device does
    attend = functools.partial(_attend, **routes, first=at, block=block)
    wanted = functools.partial(definition, **routes, first=first)
    found, expected = (value_and_gradients(x, arrays) for x in (attend, wanted))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5), found, expected)
    np.testing.assert_array_equal(found[1][0][0, -1], 0)


def _attend(query, key, value, bias, *, cluster, read, start, **options):
    return routed_attention(query, key, value, cluster, read, start, clusters=CLUSTERS, bias=bias, **options)


def test_in_bfloat16():
    """Products are rounded, sums and softmax are not."""
    arrays, routes = case(150, 0, 2, "bfloat16")
    options = dict(zip(ROUTES, routes, strict=True))
    found = _attend(*arrays, **options).output
    assert found.dtype == jnp.bfloat16
    exact = definition(*(x.astype(jnp.float32) for x in arrays), **options, first=0).output
    assert jnp.abs(found.astype(jnp.float32) - exact).max() < 0.02


def test_what_is_later_changes_no_bit():
    """Neither keys and values, nor how many of which cluster there are, nor what later queries read."""
    (arrays, routes), (others, other_routes) = case(60, 0, 2), case(60, 0, 3)
    past = 29

    def mixed(x, y):
        return jnp.concatenate([x[:, :past], y[:, past:]], axis=1)

    reads = min(routes[1].shape[-1], other_routes[1].shape[-1])
    changed = [mixed(x, y[..., ::-1] if x.ndim == 4 else y) for x, y in zip(arrays, others, strict=True)]
    cluster, read, start, beside = routes
    new = mixed(cluster, (cluster + 1) % CLUSTERS), mixed(read, (read[..., :reads] + 2) % CLUSTERS)
    attend = jax.jit(functools.partial(_attend, block=8))
    before = attend(*arrays, cluster=cluster, read=read, start=start, beside=beside)
    after = attend(*changed, cluster=new[0], read=new[1], start=start, beside=beside)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[:, :past], y[:, :past])
        assert jnp.abs(x - y)[:, past:].max() > 0.1


def test_clusters_begin_blocks_and_keep_the_order_of_the_text():
    cluster = jnp.asarray([2, 0, 5, 2, 2, 0, 1, 5, 2, 2])
    found = sort_by_cluster(cluster, clusters=5, block=2)
    assert found.content[:5].tolist() == [[1, 5], [6, 10], [0, 3], [4, 8], [9, 10]]
    assert (found.content[5:] == 10).all()
    assert found.cluster.tolist() == [0, 1, 2, 2, 2] + [5] * (len(found.cluster) - 5)
    flat = found.content.reshape(-1)
    for thing, place in enumerate(found.place.tolist()):
        if cluster[thing] < 5:
            assert flat[place] == thing
        else:
            assert place == flat.size


@pytest.mark.parametrize(("clusters", "kept"), [(4, 1), (4, 2), (8, 2), (4, 4)])
def test_what_is_computed_is_what_is_read(clusters, kept):
    """Of even clusters as many blocks as `loop` says, which is a part of those of causal attention."""
    length = 4096
    token = np.arange(length)
    read = (token[:, None] // clusters + np.arange(kept)) % clusters
    nothing = jnp.zeros((length, 4))
    tokens = Tokens(nothing, nothing, nothing, nothing[:, 0])
    routes = Routes(*map(jnp.asarray, (token % clusters, read, 0 * token, token, token < 0)))

    def computed(tokens, routes):
        problem = _Problem(Sizes(clusters, BLOCK, 1), tokens, routes)
        return (problem.end - problem.begin).sum()

    turns, blocks = int(jax.jit(computed)(tokens, routes)), length // BLOCK
    assert BLOCK**2 * turns == loop(length, clusters, kept)
    assert turns == pytest.approx(kept / clusters * blocks * (blocks + 1) / 2, rel=0.4)


def test_other_documents_are_not_computed():
    """Sixteen documents in a row: a block meets the keys of its own alone."""
    length, parts = 2048, 16
    token = np.arange(length)
    nothing = jnp.zeros((length, 4))
    start = token // (length // parts) * (length // parts)
    tokens = Tokens(nothing, nothing, nothing, nothing[:, 0])
    routes = Routes(*map(jnp.asarray, (0 * token, 0 * token[:, None], start, token, token < 0)))
    problem = jax.jit(lambda *x: (lambda p: (p.begin, p.end))(_Problem(Sizes(1, BLOCK, 1), *x)))(tokens, routes)
    np.testing.assert_array_equal(problem[1] - problem[0], 1)
