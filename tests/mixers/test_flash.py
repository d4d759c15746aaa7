"""Flash attention against softmax over whole squares: every band, ragged blocks, packed rows, parts of rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aamoe_jax.mixers.flash import BLOCK, CAUSAL, LOWEST, Attended, Band, block_size, flash_attention, loop, merged
from pallas_kernels import chips

HEADS, GROUPS, SIZE = 4, 2, 8
BANDS = [CAUSAL, Band(nearest=1), Band(reach=1), Band(reach=7), Band(nearest=2, reach=40)]


def rows_of(queries: int, keys: int, documents: int = 4, dtype: str = "float32"):
    """Random queries, keys, values and documents of two rows, of which the second is one document."""
    random = np.random.default_rng(queries + keys)
    shapes = (queries, HEADS), (keys, GROUPS), (keys, GROUPS)
    arrays = (jnp.asarray(random.normal(size=(2, *shape, SIZE)), dtype) for shape in shapes)
    segments = np.stack([np.sort(random.integers(1, documents + 1, keys)), np.ones(keys, int)])
    return *arrays, jnp.asarray(segments)


def definition(query, key, value, segment_ids, band, first) -> Attended:
    """In whole squares; `segment_ids` of documents that may come back."""
    key, value = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (key, value))
    place = first + jnp.arange(query.shape[1])
    seen = band.sees(place[:, None] - jnp.arange(key.shape[1]))
    seen = (seen & (segment_ids[:, place, None] == segment_ids[:, None]))[:, None]
    scores = jnp.where(seen, SIZE**-0.5 * jnp.einsum("bihk,bjhk->bhij", query, key), LOWEST)
    lse = jax.nn.logsumexp(scores, -1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - lse), 0)
    lse = jnp.where(seen.any(-1, keepdims=True), lse, LOWEST)[..., 0].swapaxes(1, 2)
    return Attended(jnp.einsum("bhij,bjhk->bihk", weights, value), lse)


def value_and_gradients(attend, arrays):
    """Both results, and the gradients of a random sum over them."""
    random = np.random.default_rng(5)
    shape = len(arrays[2]), *arrays[0].shape[1:]
    d_output, d_lse = random.normal(size=shape), random.normal(size=shape[:-1])

    def loss(*arrays):
        output, lse = attend(*arrays)
        return (output * d_output).sum() + jnp.where(lse > LOWEST / 2, lse * d_lse, 0).sum(), (output, lse)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys", "first", "block"), [(50, 50, 0, 8), (17, 50, 17, 8), (17, 50, 18, 8), (23, 50, 27, 64)]
)
def test_it_is_its_definition(band, queries, keys, first, block):
    """Values, log-sum-exp and all gradients."""
    *arrays, segments = rows_of(queries, keys)
    start = jnp.int32(first) if first else 0  # as a mesh says it, and as one device does
    flash = functools.partial(flash_attention, segment_ids=segments, band=band, first=start, block=block)
    found = value_and_gradients(flash, arrays)
    wanted = value_and_gradients(lambda *x: definition(*x, segments, band, first), arrays)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=1e-5)


def test_blocks_are_larger_on_a_gpu():
    arrays = rows_of(600, 600)
    small = flash_attention(*arrays)
    with chips.assume("b200"):
        large = flash_attention(*arrays)
        assert loop(1024, 1024).turn == 512**2
    assert loop(1024, 1024).turn == BLOCK**2
    for a, b in zip(small, large, strict=True):
        assert np.any(a != b)  # other sums
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_blocks_of_its_own_choice():
    *arrays, segments = rows_of(2 * BLOCK + 45, 2 * BLOCK + 45)
    found = value_and_gradients(lambda *x: flash_attention(*x, segments), arrays)
    wanted = value_and_gradients(lambda *x: definition(*x, segments, CAUSAL, 0), arrays)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_map_for_all_rows_is_that_of_every_row(dtype):
    """Queries and keys of one row, documents and values of two: their gradients are summed over rows."""
    query, key, value, segments = rows_of(50, 50, dtype=dtype)
    arrays = query[:1], key[:1], value
    found = value_and_gradients(lambda *x: flash_attention(*x, segments, block=8), arrays)

    def of_every_row(query, key, value):
        query, key = (x.astype(jnp.float32).repeat(2, axis=0) for x in (query, key))
        return definition(query, key, value.astype(jnp.float32), segments, CAUSAL, 0)

    wanted, close = value_and_gradients(of_every_row, arrays), 1e-5 if dtype == "float32" else 0.1
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.shape == two.shape
        np.testing.assert_allclose(one.astype(jnp.float32), two.astype(jnp.float32), atol=close, rtol=close)


def test_documents_may_come_back():
    *arrays, _ = rows_of(40, 40)
    segments = jnp.asarray([[1] * 9 + [3] * 13 + [1] * 18, [0] * 5 + [2] * 30 + [0] * 5])
    found = flash_attention(*arrays, segments, block=8)
    np.testing.assert_allclose(found.output, definition(*arrays, segments, CAUSAL, 0).output, atol=1e-5)


def test_bfloat16_is_near_float32():
    *arrays, segments = rows_of(60, 60)
    low = flash_attention(*(x.astype(jnp.bfloat16) for x in arrays), segments, block=16)
    assert low.output.dtype == jnp.bfloat16
    assert low.lse.dtype == jnp.float32
    wanted = flash_attention(*arrays, segments, block=16)
    np.testing.assert_allclose(low.output.astype(jnp.float32), wanted.output, atol=0.05)


def test_no_later_token_changes_a_bit():
    *arrays, _ = rows_of(45, 45)
    segments = jnp.ones((2, 45), int)
    attend = jax.jit(functools.partial(flash_attention, block=8))
    before = attend(*arrays, segments).output[:, :20]
    noise = jnp.where(jnp.arange(45)[:, None, None] < 20, 0, 1e3 * jax.random.normal(jax.random.key(0), (45, 1, SIZE)))
    after = attend(*(x + noise for x in arrays), segments.at[:, 20:].set(2)).output[:, :20]
    np.testing.assert_array_equal(before, after)


def test_blocks_that_nobody_sees_are_not_read():
    """NaN in a block that is met makes the output NaN even where a mask hides it."""
    (query, key, value, _), at = rows_of(64, 64), jnp.arange(64)
    segments = jnp.where(at < 16, 1, jnp.where(at < 48, 2, 3))[None].repeat(2, 0)

    def poisoned(block: int, band: Band) -> jax.Array:
        """Which blocks of queries meet that block of keys."""
        hurt = jnp.where((at // 8 == block)[:, None, None], jnp.nan, value)
        output = flash_attention(query, key, hurt, segments, band, block=8).output
        return jnp.isnan(output).reshape(2, 8, -1).any((0, 2))

    np.testing.assert_array_equal(poisoned(2, CAUSAL).nonzero()[0], [2, 3, 4, 5])
    np.testing.assert_array_equal(poisoned(2, Band(reach=9)).nonzero()[0], [2, 3])
    np.testing.assert_array_equal(poisoned(2, Band(reach=10)).nonzero()[0], [2, 3, 4])
    np.testing.assert_array_equal(poisoned(7, CAUSAL).nonzero()[0], [7])
    gradient = jax.grad(lambda key: flash_attention(query, key, value, segments, block=8).output[:, :16].sum())(key)
    assert not np.asarray(gradient)[:, 16:].any()


def test_attention_to_two_parts_is_attention_to_both():
    *arrays, segments = rows_of(50, 50)
    both = [Band(reach=6), Band(nearest=6)]

    def split(*arrays):
        output = merged([flash_attention(*arrays, segments, band, block=16) for band in both])
        return Attended(output, jnp.zeros(output.shape[:-1]))

    found, wanted = (
        value_and_gradients(attend, arrays)
        for attend in (split, lambda *x: definition(*x, segments, CAUSAL, 0)._replace(lse=jnp.zeros((2, 50, HEADS))))
    )
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5, rtol=1e-5)


def test_what_is_computed_is_counted():
    assert [block_size(length) for length in (5, 128, 129, 1024, 1000)] == [5, 128, 65, 128, 125]
    assert loop(1024, 1024) == (36 * 128**2, 128**2)
    assert loop(1024, 1024, Band(reach=128)) == (15 * 128**2, 128**2)
    assert loop(1024, 1024, Band(reach=129)) == (15 * 128**2, 128**2)
    assert loop(1024, 1024, Band(reach=130)) == (21 * 128**2, 128**2)
    assert loop(32, 33, Band(nearest=1), 1) == (33**2, 33**2)


@pytest.mark.parametrize("band", [CAUSAL, Band(reach=128)], ids=str)
def test_memory_is_linear_in_the_length(band):
    """Forward and backward pass, as the compiler lays them out: four times the length, four times the bytes."""

    def temporary(length: int) -> int:
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        arrays = shape((1, length, 4, 16)), shape((1, length, 2, 16)), shape((1, length, 2, 16))
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def both_passes(query, key, value, segments, cotangent):
            output, pull_back = jax.vjp(lambda *x: flash_attention(*x, segments, band).output, query, key, value)
            return output, pull_back(cotangent)

        compiled = jax.jit(both_passes).lower(*arrays, segments, arrays[0]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 4.2 * temporary(4096)
