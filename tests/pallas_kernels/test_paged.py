"""Paged attention of one token per sequence, every implementation, against the definition of block-sparse attention."""

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sparse_attention import Pairs, Slots, block_sparse_attention, paged_attention
from pallas_kernels.block_sparse_attention.paged import tpu
from pallas_kernels.block_sparse_attention.paged.interface import IMPLEMENTATIONS
from tests.pallas_kernels.simulated import with_bug

ROWS, PAGES, M, E, H, SIZE = 3, 5, 8, 4, 2, 16
SLOTS = 7
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def rms_norm(key):
    """With weights that it closes over."""
    weight = jnp.linspace(0.5, 1.5, key.shape[-1])
    key32 = key.astype(jnp.float32)
    return (weight * key32 * jax.lax.rsqrt(jnp.square(key32).mean(-1, keepdims=True) + 1e-6)).astype(key.dtype)


NORMS = {"none": lambda key: key, "half": lambda key: 0.5 * key, "rms": rms_norm}


@functools.partial(jax.jit, static_argnames=("implementation", "norm"))
def attend(*given, implementation, norm="none"):
    return paged_attention(*given, norm_expert_key=NORMS[norm], implementation=implementation)


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


@every_implementation
@pytest.mark.parametrize(
    ("slots", "count"),
    [
        (1, [1, 1, 0]),
        (SLOTS, [4, 1, 2]),
        (SLOTS, [7, 0, 5]),
        (SLOTS, [0, 0, 6]),
        (SLOTS, [1, 0, 0]),
        (SLOTS, [0] * 3),
        (0, [0] * 3),
    ],
)
def test_it_is_block_sparse_attention(implementation, slots, count):
    given = inputs(slots, count)
    output, lse = attend(*given, implementation=implementation)
    wanted, wanted_lse = definition(*given)
    np.testing.assert_allclose(output, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    empty = np.asarray(count) == 0
    assert (np.asarray(output)[empty] == 0).all()


@every_implementation
def test_a_sequence_alone_gets_what_it_gets_among_others(implementation):
    """Its slots name pages and experts in any order, and read the norm of expert keys."""
    *arrays, slots = inputs(SLOTS, [7, 5, 6])
    among = attend(*arrays, slots, implementation=implementation, norm="rms")
    for row in range(ROWS):
        own = [x[row : row + 1] for x in arrays[:4]]
        alone = attend(
            *own, *arrays[4:], Slots(*(x[row : row + 1] for x in slots)), implementation=implementation, norm="rms"
        )
        for found, wanted in zip(alone, among, strict=True):
            np.testing.assert_allclose(found, wanted[row : row + 1], atol=1e-5)


@every_implementation
@pytest.mark.parametrize("seed", range(5))
def test_any_counts_and_biases(implementation, seed):
    """Also -inf, which hides a slot, and the largest scores."""
    rng = np.random.default_rng(seed)
    *arrays, slots = inputs(SLOTS, rng.integers(0, SLOTS + 1, ROWS), seed)
    bias = jnp.asarray(rng.choice([-jnp.inf, -80.0, 0.0, 80.0], (ROWS, SLOTS)), jnp.float32)
    given = (*arrays, slots._replace(bias=bias))
    for found, wanted in zip(attend(*given, implementation=implementation), definition(*given), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@every_implementation
def test_unused_slots_may_hold_anything(implementation):
    *arrays, slots = inputs(SLOTS, [2, 5, 1])
    unused = jnp.arange(SLOTS) >= slots.count[:, None]
    junk = Slots(
        *(jnp.where(unused, bad, x) for x, bad in zip(slots[:4], (999, jnp.nan, -5, 99), strict=True)), slots[4]
    )
    results = (attend(*arrays, given, implementation=implementation) for given in (slots, junk))
    for before, after in zip(*results, strict=True):
        np.testing.assert_array_equal(before, after)


@every_implementation
@pytest.mark.parametrize("experts", [0, E])
def test_a_resource_that_is_in_no_table_is_hidden(implementation, experts):
    """As by its bias; its neighbours among other sequences' pages are not read."""
    *arrays, slots = inputs(PAGES, [5, 4, 2], experts=experts)
    bad = (jnp.arange(ROWS * PAGES) % 3 == 1).reshape(ROWS, PAGES)
    for wrong in (-1, PAGES + experts, 2**31 - 1, -(2**31)):
        unknown = slots._replace(resource=jnp.where(bad, wrong, slots.resource))
        hidden = slots._replace(bias=jnp.where(bad, -jnp.inf, slots.bias))
        found = attend(*arrays, unknown, implementation=implementation)
        for left, right in zip(found, definition(*arrays, hidden), strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)


@every_implementation
def test_types_that_cannot_be_multiplied_are_refused(implementation):
    query, *rest = inputs(SLOTS, [1, 1, 1])
    untyped = inspect.unwrap(paged_attention)  # the tests' own check of annotations would come first
    with pytest.raises(ValueError, match=r"query\.dtype is int32; wanted a float"):
        untyped(query.astype(jnp.int32), *rest, implementation=implementation)
    if implementation == "pallas_tpu":
        with pytest.raises(ValueError, match=r"query\.dtype is float16; the TPU kernels take.*implementation='xla'"):
            paged_attention(query.astype(jnp.float16), *rest, implementation=implementation)


@every_implementation
def test_ranges_of_keys_are_what_a_token_sees(implementation):
    """Two slots that share a page see each key once: together they are one slot over the whole."""
    *arrays, slots = inputs(SLOTS, [2, 2, 2])
    page, split, whole = (jnp.full((ROWS, SLOTS), number) for number in (3, 5, M))
    second = jnp.arange(SLOTS) == 1
    bias = jnp.broadcast_to(slots.bias[:, :1], (ROWS, SLOTS))
    halves = Slots(page, bias, jnp.where(second, split, 0), jnp.where(second, whole, split), slots.count)
    both = Slots(page, bias, jnp.zeros_like(split), whole, jnp.ones(ROWS, jnp.int32))
    results = (attend(*arrays, given, implementation=implementation) for given in (halves, both))
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


@every_implementation
def test_keys_that_are_not_seen_may_hold_anything(implementation):
    """A page that is being filled holds what an earlier text left behind."""
    query, query_expert, page_key, page_value, *experts, slots = inputs(SLOTS, [4, 2, 3])
    hidden = np.ones((ROWS, PAGES, M), bool)
    for row in range(ROWS):
        for slot in range(int(slots.count[row])):
            if slots.resource[row, slot] < PAGES:
                hidden[row, slots.resource[row, slot], : int(slots.end[row, slot])] = False
    junk = [jnp.where(hidden[..., None, None], 1e4, x) for x in (page_key, page_value)]
    results = (
        attend(query, query_expert, *pages, *experts, slots, implementation=implementation)
        for pages in ((page_key, page_value), junk)
    )
    for left, right in zip(*results, strict=True):
        np.testing.assert_array_equal(left, right)


@every_implementation
def test_without_experts(implementation):
    given = inputs(4, [4, 0, 2], experts=0)
    np.testing.assert_allclose(attend(*given, implementation=implementation)[0], definition(*given)[0], atol=1e-5)


@every_implementation
def test_in_bfloat16_with_experts_in_float32(implementation):
    *arrays, slots = inputs(SLOTS, [6, 3, 2], dtype=jnp.bfloat16)
    given = (*arrays[:4], *(x.astype(jnp.float32) for x in arrays[4:]), slots)
    output, lse = attend(*given, implementation=implementation)
    assert (output.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    wanted = definition(*arrays, slots)[0].astype(jnp.float32)
    np.testing.assert_allclose(output.astype(jnp.float32), wanted, atol=0.02)


@every_implementation
@pytest.mark.parametrize("norm", ["half", "rms"])
def test_expert_keys_are_normed_where_they_are_fetched(implementation, norm):
    given = inputs(SLOTS, [5, 4, 3])
    found = attend(*given, implementation=implementation, norm=norm)
    normed = (*given[:4], NORMS[norm](given[4]), *given[5:])
    for left, right in zip(found, attend(*normed, implementation=implementation), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


def test_the_copies_of_the_kernel_do_not_race(capfd):
    """The chip's memories and copies, simulated: nothing is read before it has arrived, or overwritten before it was
    read; what was never written is NaN."""
    given = inputs(SLOTS, [3, 0, 2])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        found = jax.jit(functools.partial(paged_attention, implementation="pallas_tpu"))(*given)
        jax.block_until_ready(found)
    assert "RACE DETECTED" not in capfd.readouterr().out
    for left, right in zip(found, attend(*given, implementation="xla"), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


BUGS = {
    "no wait": ("each_copy(i, resource, buffer, lambda copy: copy.wait())", "pass"),
    "the next page overwrites this one": ("fetch_next(k, 1 - buffer)", "fetch_next(k, buffer)"),
    "one semaphore for both buffers": ("semaphores.at[buffer, which]", "semaphores.at[0, which]"),
}
"""Of the copies of the kernel: a text, and what it becomes."""


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_notices_a_bug_in_the_copies(bug, monkeypatch, capfd):
    monkeypatch.setitem(IMPLEMENTATIONS, "broken", with_bug(tpu, *BUGS[bug]).attend)
    given = inputs(SLOTS, [3, 0, 2])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        found = jax.block_until_ready(jax.jit(functools.partial(paged_attention, implementation="broken"))(*given))
    alike = [np.allclose(*pair, atol=1e-4) for pair in zip(found, attend(*given, implementation="xla"), strict=True)]
    assert "RACE DETECTED" in capfd.readouterr().out or not all(alike)


def test_sequences_over_the_devices_of_a_mesh():
    command = [sys.executable, "-m", "tests.pallas_kernels.sharded_decode"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["2 devices agree"], result.stderr


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match=r"implementation='paged' is unknown; available: pallas_tpu, xla"):
        paged_attention(*inputs(1, [1, 1, 1]), implementation="paged")
