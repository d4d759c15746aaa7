"""Selection against a sort of Python's: every implementation, to the bit, and its gradient."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chips
from pallas_kernels.selection import IMPLEMENTATIONS, select, tpu
from tests.pallas_kernels.simulated import as_compiled

ROWS, LENGTH, RESOURCES, SLOTS = 2, 19, 37, 9
VALUES = np.array([-np.inf, -2.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 3.5, np.inf], np.float32)


@functools.partial(jax.jit, static_argnames=("slots", "implementation"))
def run(score, count, slots=SLOTS, implementation="xla"):
    return select(score, slots, count, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("implementation",))
def pull_back(score, count, cotangent, implementation):
    _, pull = jax.vjp(lambda score: select(score, SLOTS, count, implementation=implementation).score, score)
    return pull(cotangent)[0]


def definition(score, count, slots):
    """By falling value, 0 before -0, then by index; empty slots: resource 0, score -inf."""
    resource = np.zeros((*count.shape, slots), np.int32)
    best = np.full((*count.shape, slots), -np.inf, np.float32)
    for at in np.ndindex(count.shape):
        order = sorted(range(score.shape[-1]), key=lambda j: (-score[at][j], np.signbit(score[at][j]), j))
        chosen = order[: max(0, min(count[at], slots))]
        resource[at][: len(chosen)], best[at][: len(chosen)] = chosen, score[at][chosen]
    return resource, best


def assert_same_bits(found, wanted):
    for left, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(left).view(np.int32), np.asarray(right).view(np.int32))


def scores(kind: str, rng) -> np.ndarray:
    size = (ROWS, LENGTH, RESOURCES)
    return {
        "ties": lambda: rng.choice(VALUES, size),
        "different": lambda: rng.normal(size=size).astype(np.float32),
        "equal": lambda: np.full(size, 0.25, np.float32),
        "unavailable": lambda: np.full(size, -np.inf, np.float32),
    }[kind]()


COUNTS = {
    "ragged": lambda rng: rng.integers(-1, SLOTS + 3, (ROWS, LENGTH)),
    "none": lambda rng: np.zeros((ROWS, LENGTH)),
    "one": lambda rng: np.ones((ROWS, LENGTH)),
    "all": lambda rng: np.full((ROWS, LENGTH), SLOTS),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["ties", "different", "equal", "unavailable"])
@pytest.mark.parametrize("counts", COUNTS)
def test_it_is_the_head_of_a_sort(implementation, kind, counts):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        score, count = scores(kind, rng), COUNTS[counts](rng).astype(np.int32)
        assert_same_bits(run(score, count, implementation=implementation), definition(score, count, SLOTS))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("rows", "length", "resources", "slots"),
    [(1, 1, 1, 1), (1, 3, 130, 17), (2, 1024, 33, 2), (1, 1030, 4, 4), (2, 3, 5, 0), (0, 3, 5, 2)],
)
def test_ragged_shapes(implementation, rows, length, resources, slots):
    rng = np.random.default_rng(0)
    score = rng.choice(VALUES, (rows, length, resources))
    count = rng.integers(0, slots + 1, (rows, length)).astype(np.int32)
    assert_same_bits(run(score, count, slots, implementation), definition(score, count, slots))


@pytest.mark.slow
def test_the_code_that_a_tpu_runs_has_no_races(monkeypatch, capfd):
    """Several blocks of tokens."""
    rng = np.random.default_rng(0)
    score = rng.normal(size=(1, 300, RESOURCES)).astype(np.float32)
    count = rng.integers(0, SLOTS + 1, (1, 300)).astype(np.int32)
    with as_compiled(tpu, monkeypatch, cores=2):
        found = jax.block_until_ready(
            jax.jit(lambda *x: select(x[0], SLOTS, x[1], implementation="pallas_tpu"))(score, count)
        )
    assert "RACE DETECTED" not in capfd.readouterr().out
    assert_same_bits((found.resource, found.score), definition(score, count, SLOTS))


def test_without_counts_it_is_top_k():
    score = np.random.default_rng(1).choice(VALUES, (ROWS, LENGTH, RESOURCES))
    best, resource = jax.lax.top_k(score, SLOTS)
    assert_same_bits(select(jnp.asarray(score), SLOTS), (resource, best))


def test_nan_comes_first_as_in_top_k():
    rng = np.random.default_rng(4)
    score, count = scores("ties", rng), COUNTS["all"](rng).astype(np.int32)
    score[rng.random(score.shape) < 0.1] = np.nan
    found = run(score, count, implementation="pallas_tpu")
    assert np.isnan(found.score).any()
    assert_same_bits(found, run(score, count))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_go_to_what_was_selected(implementation):
    rng = np.random.default_rng(2)
    score, count = scores("ties", rng), COUNTS["ragged"](rng).astype(np.int32)
    cotangent = rng.normal(size=(ROWS, LENGTH, SLOTS)).astype(np.float32)
    resource, _ = definition(score, count, SLOTS)
    wanted = np.zeros_like(score)
    for *at, slot in np.ndindex(cotangent.shape):
        if slot < count[tuple(at)]:
            wanted[*at, resource[*at, slot]] += cotangent[*at, slot]
    np.testing.assert_array_equal(pull_back(score, count, cotangent, implementation), wanted)


def test_it_works_under_scan_and_remat():
    """Three layers that choose from what the one before made of its choice: gradients alike."""
    rng = np.random.default_rng(3)
    score = jnp.asarray(rng.normal(size=(ROWS, LENGTH, RESOURCES)), jnp.float32)
    count = jnp.asarray(COUNTS["ragged"](rng), jnp.int32)

    def loss(score, implementation):
        @jax.checkpoint
        def layer(score, _):
            best = select(score, SLOTS, count, implementation=implementation).score
            some = jnp.where(best > -jnp.inf, best, 0.0).sum(-1, keepdims=True)
            return jnp.sin(score + some), None

        return jax.lax.scan(layer, score, None, length=3)[0].sum()

    gradients = [jax.jit(jax.grad(loss), static_argnums=1)(score, name) for name in IMPLEMENTATIONS]
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-5)


def test_tokens_over_the_devices_of_a_mesh():
    command = [sys.executable, "-m", "tests.pallas_kernels.sharded_selection"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["2 devices agree"], result.stderr


@pytest.mark.parametrize(("chip", "expected"), [("v5e", "pallas_call"), ("v5p", "top_k")])
def test_by_default_the_kernel_gives_way_where_fast_memory_is_short(chip, expected, monkeypatch):
    """8000 resources need 97 MiB: v5e has 128, v5p 64."""
    monkeypatch.setattr(chips, "kernels_by_default", lambda: True)
    with chips.assume(chip):
        program = str(jax.make_jaxpr(lambda score: select(score, 4))(jnp.zeros((1, 8, 8000))))
    assert [name for name in ("pallas_call", "top_k") if name in program] == [expected]


def test_what_cannot_work_is_refused():
    score = jnp.zeros((1, 2, 3))
    with pytest.raises(ValueError, match=r"implementation='sort' is unknown; available: pallas_tpu, xla"):
        select(score, 2, implementation="sort")
    with pytest.raises(ValueError, match="slots=4; wanted 0 to 3"):
        select(score, 4)
    with pytest.raises(ValueError, match=r"score\.dtype is bfloat16; wanted float32"):
        select(score.astype(jnp.bfloat16), 2)
    with pytest.raises(ValueError, match=r"of 12000 resources need 14\d MiB of VMEM; wanted at most 64"):
        select(jnp.zeros((1, 1, 12000)), 1, implementation="pallas_tpu")
