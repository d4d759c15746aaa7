"""Paged attention of one token per sequence against the definition of block-sparse attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import Pairs, Slots, block_sparse_attention, paged_attention
from pallas_kernels.block_sparse_attention.paged import GROUP

ROWS, PAGES, M, E, H, SIZE = 3, 5, 8, 4, 2, 16


def inputs(slots: int, count, seed: int = 0, experts: int = E, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    normal = lambda *size: jnp.asarray(rng.normal(size=size), dtype)  # noqa: E731
    resource = np.stack([rng.permutation(PAGES + experts)[:slots] for _ in range(ROWS)])
    arrays = (normal(ROWS, H, SIZE), normal(ROWS, H, SIZE))
    pages, table = ((normal(*shape), normal(*shape)) for shape in ((ROWS, PAGES, M, H, SIZE), (experts, M, H, SIZE)))
    end = rng.integers(1, M + 1, (ROWS, slots))
    given = Slots(
        jnp.asarray(resource, jnp.int32),
        jnp.asarray(rng.normal(size=(ROWS, slots)), jnp.float32),
        jnp.zeros((ROWS, slots), jnp.int32),
        jnp.asarray(end, jnp.int32),
        jnp.asarray(count, jnp.int32),
    )
    return (*arrays, *pages, *table, given)


def definition(query, query_expert, page_key, page_value, expert_key, expert_value, slots):
    """One sequence at a time, its pages and the experts as one table."""
    outputs = []
    for row in range(len(query)):
        pairs = Pairs(slots.resource[row][None], slots.bias[row][None], slots.end[row][None], slots.count[row][None])
        outputs.append(
            block_sparse_attention(
                query[row][None],
                query_expert[row][None],
                jnp.concatenate([page_key[row], expert_key]),
                jnp.concatenate([page_value[row], expert_value]),
                pairs,
                num_context=page_key.shape[1],
                max_pairs=slots.resource.shape[1],
                implementation="reference",
            )
        )
    return tuple(jnp.concatenate([getattr(found, name) for found in outputs]) for name in ("output", "lse"))


@pytest.mark.parametrize(
    ("slots", "count"),
    [(1, [1, 1, 0]), (GROUP, [4, 1, 2]), (GROUP + 3, [7, 0, 5]), (PAGES + E, [9, 3, 8]), (3, [0] * 3)],
)
def test_it_is_block_sparse_attention(slots, count):
    given = inputs(slots, count)
    output, lse = jax.jit(paged_attention)(*given)
    wanted, wanted_lse = definition(*given)
    np.testing.assert_allclose(output, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    empty = np.asarray(count) == 0
    assert (np.asarray(output)[empty] == 0).all()


def test_unused_slots_may_hold_anything():
    *arrays, slots = inputs(6, [2, 5, 1])
    unused = jnp.arange(6) >= slots.count[:, None]
    junk = Slots(
        *(jnp.where(unused, bad, x) for x, bad in zip(slots[:4], (999, jnp.nan, -5, 99), strict=True)), slots[4]
    )
    for before, after in zip(paged_attention(*arrays, slots), paged_attention(*arrays, junk), strict=True):
        np.testing.assert_array_equal(before, after)


def test_ranges_of_keys_are_what_a_token_sees():
    """Two slots that share a page see each key once: together they are one slot over the whole."""
    *arrays, slots = inputs(2, [2, 2, 2])
    page, split = jnp.full((ROWS, 1), 3), jnp.full((ROWS, 1), 5)
    bias = slots.bias[:, :1]
    halves = Slots(
        jnp.concatenate([page, page], 1),
        jnp.concatenate([bias, bias], 1),
        jnp.concatenate([jnp.zeros_like(split), split], 1),
        jnp.concatenate([split, jnp.full_like(split, M)], 1),
        slots.count,
    )
    whole = Slots(page, bias, jnp.zeros_like(split), jnp.full_like(split, M), jnp.ones(ROWS, jnp.int32))
    for left, right in zip(paged_attention(*arrays, halves), paged_attention(*arrays, whole), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_keys_that_are_not_seen_may_hold_anything():
    """A page that is being filled holds what an earlier text left behind."""
    query, query_expert, page_key, page_value, *experts, slots = inputs(4, [4, 2, 3])
    hidden = np.ones((ROWS, PAGES, M), bool)
    for row in range(ROWS):
        for slot in range(int(slots.count[row])):
            if slots.resource[row, slot] < PAGES:
                hidden[row, slots.resource[row, slot], : int(slots.end[row, slot])] = False
    junk = [jnp.where(hidden[..., None, None], 1e4, x) for x in (page_key, page_value)]
    before = paged_attention(query, query_expert, page_key, page_value, *experts, slots)
    after = paged_attention(query, query_expert, *junk, *experts, slots)
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)


def test_without_experts_and_in_bfloat16():
    given = inputs(4, [4, 0, 2], experts=0)
    np.testing.assert_allclose(paged_attention(*given)[0], definition(*given)[0], atol=1e-5)
    rounded = inputs(6, [6, 3, 2], dtype=jnp.bfloat16)
    output, lse = paged_attention(*rounded)
    assert (output.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(output.astype(jnp.float32), definition(*rounded)[0].astype(jnp.float32), atol=0.02)


def test_expert_keys_are_normed_after_the_gather():
    given = inputs(5, [5, 4, 3])
    query, query_expert, page_key, page_value, expert_key, expert_value, slots = given
    found = paged_attention(*given, norm_expert_key=lambda key: 0.5 * key)
    wanted = paged_attention(query, query_expert, page_key, page_value, 0.5 * expert_key, expert_value, slots)
    np.testing.assert_array_equal(found[0], wanted[0])
