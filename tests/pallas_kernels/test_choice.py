"""The router's softmax against NumPy: every implementation, its gradients, and what it refuses."""

import functools
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import chips
from pallas_kernels.choice import IMPLEMENTATIONS, attention_shares, tpu
from tests.pallas_kernels.base import assert_close
from tests.pallas_kernels.simulated import as_compiled


class Shape(NamedTuple):
    """Sizes of a case."""

    rows: int = 2
    tokens: int = 300
    heads: int = 3
    d: int = 128
    chunks: int = 5
    experts: int = 9
    pooled: int = 4


SHAPES = {
    "ragged: two tiles, no whole registers of resources": Shape(),
    "whole tiles and registers, two registers a head": Shape(1, 256, 2, 256, 8, 16, 2),
    "two groups of heads": Shape(1, 8, 16, 128, 3, 8, 1),
}


def inputs_of(shape: Shape, dtype=jnp.float32):
    """Arrays, which chunks are available, and a cotangent that leaves out what means nothing."""
    rng = np.random.default_rng(len(str(shape)))
    rows, tokens, heads, d, chunks, experts, pooled = shape
    draw = lambda *size: jnp.asarray(rng.normal(size=size), jnp.float32)  # noqa: E731
    queries = (draw(rows, tokens, heads, d).astype(dtype) for _ in range(2))
    keys = draw(rows, chunks, pooled, heads, d), 2 * draw(experts, pooled, heads, d)
    available = rng.random((rows, tokens, chunks)) < 0.6
    available[:, 0] = False  # experts alone
    means = np.concatenate([available, np.ones((rows, tokens, experts), bool)], -1)
    return (*queries, *keys), jnp.asarray(available), jnp.where(means, draw(rows, tokens, chunks + experts), 0.0)


def definition(arrays, available):
    """For every head a softmax over all pooled keys; the mean over heads."""
    query, query_expert, chunk_key, expert_key = (np.asarray(x, np.float64) for x in arrays)
    scale = query.shape[-1] ** -0.5
    of_chunks = scale * np.einsum("bthk,blghk->bthlg", query, chunk_key)
    of_chunks = np.where(np.asarray(available)[:, :, None, :, None], of_chunks, -np.inf)
    of_experts = scale * np.einsum("bthk,eghk->btheg", query_expert, expert_key)
    score = np.concatenate([of_chunks, of_experts], -2)
    weight = np.exp(score - score.max((-2, -1), keepdims=True))
    return (weight / weight.sum((-2, -1), keepdims=True)).sum(-1).mean(2)


@functools.partial(jax.jit, static_argnames=("implementation", "precision"))
def both_passes(arrays, available, cotangent, implementation, precision="highest"):
    """The shares, and all gradients; the queries have others from elsewhere."""
    run = lambda *arrays: attention_shares(*arrays, available, precision=precision, implementation=implementation)  # noqa: E731
    (found, *queries), pull_back = jax.vjp(run, *arrays)
    return jnp.where(cotangent == 0, 0.0, found), pull_back((cotangent, *queries))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_the_definition(shape, implementation):
    arrays, available, cotangent = inputs_of(shape)
    found, _ = both_passes(arrays, available, cotangent, implementation)
    wanted = np.where(np.asarray(cotangent) == 0, 0.0, definition(arrays, available))
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_have_the_gradients_of_plain_xla(shape):
    arrays, available, cotangent = inputs_of(shape)
    found, wanted = (both_passes(arrays, available, cotangent, name)[1] for name in ("pallas_tpu", "xla"))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "gradient"), found, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_who_reads_the_queries_afterwards_has_gradients_too(implementation):
    arrays, available, cotangent = inputs_of(Shape(1, 40, 2, 128, 3, 8, 2))
    found = both_passes(arrays, available, 0 * cotangent, implementation)[1][:2]
    for gradient, query in zip(found, arrays[:2], strict=True):
        np.testing.assert_array_equal(gradient, query)


@pytest.mark.parametrize("precision", tpu.PARTS)
def test_bfloat16(precision):
    """Queries in bfloat16 against the same numbers in float32: by one part of a key alone is the result coarse."""
    arrays, available, cotangent = inputs_of(Shape(), jnp.bfloat16)
    found, gradients = both_passes(arrays, available, cotangent, "pallas_tpu", precision)
    wide = tuple(x.astype(jnp.float32) for x in arrays)
    wanted, wanted_gradients = both_passes(wide, available, cotangent, "xla")
    error = float(jnp.max(jnp.abs(found - wanted)))
    assert error < 2e-3
    assert (error > 1e-5) == (precision == "default")
    if precision != "default":
        # Half a unit in the last place: of the largest value, for gradients of scores are rounded to bfloat16; and of
        # each value, where it is stored so.
        for a, b in zip(gradients, wanted_gradients, strict=True):
            assert_close(a, b, 2e-3 + 2.0**-9, "gradient", rounding=2.0**-9 if a.dtype == jnp.bfloat16 else 0.0)


def test_a_token_sees_nothing_of_others():
    """Whatever lies in the rest of its tile."""
    arrays, available, cotangent = inputs_of(Shape(tokens=40))
    changed = (*(x.at[:, 20:].set(7.0) for x in arrays[:2]), *arrays[2:])
    one, other = (both_passes(x, available, cotangent, "pallas_tpu")[0] for x in (arrays, changed))
    np.testing.assert_array_equal(one[:, :20], other[:, :20])
    assert not np.array_equal(one[:, 20:], other[:, 20:])


def test_the_code_that_a_tpu_runs_has_no_races(monkeypatch, capfd):
    """Several rows, groups and tiles, gradients of keys added up over these."""
    arrays, available, cotangent = inputs_of(Shape(2, 300, 2, 128, 3, 9, 2))
    monkeypatch.setattr(tpu, "GROUP", 128)
    with as_compiled(tpu, monkeypatch, cores=2):
        found = jax.block_until_ready(both_passes.__wrapped__(arrays, available, cotangent, "pallas_tpu"))
    assert "RACE DETECTED" not in capfd.readouterr().out
    wanted = both_passes(arrays, available, cotangent, "xla")
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5, "simulated"), found, wanted)


def test_every_core_of_a_device_has_heads():
    for chip, groups in (("v5e", 1), ("v5p", 2)):
        with chips.assume(chip):
            assert tpu.layout_of(8, 128, 64, 4, 64).groups == groups
            assert tpu.layout_of(1, 128, 64, 4, 64).groups == 1


def test_what_the_kernels_cannot_do_is_plain_xla_unless_they_are_asked_for():
    """Narrow heads, one kind of resource, keys that fast memory does not hold."""
    bfloat16 = jnp.dtype(jnp.bfloat16)
    with chips.assume("v5e"):
        assert tpu.fits((1, 8, 2, 128), bfloat16, (1, 4, 2, 2, 128), 8, "high")
        for query, chunk_key, experts in (
            ((1, 8, 2, 64), (1, 4, 2, 2, 64), 8),
            ((1, 8, 2, 128), (1, 0, 2, 2, 128), 8),
            ((1, 8, 2, 128), (1, 4, 2, 2, 128), 0),
            ((1, 8, 8, 128), (1, 4096, 8, 8, 128), 8),
        ):
            assert not tpu.fits(query, bfloat16, chunk_key, experts, "high")
        assert not tpu.fits((1, 8, 2, 128), jnp.dtype(jnp.float16), (1, 4, 2, 2, 128), 8, "high")
    arrays, available, _ = inputs_of(Shape(1, 8, 2, 64))
    with pytest.raises(
        ValueError, match=r"float32, heads of 64, 5 chunks and 9 experts; wanted .* implementation='xla'"
    ):
        attention_shares(*arrays, available, precision="high", implementation="pallas_tpu")
    with pytest.raises(ValueError, match=r"implementation='cuda' is unknown; available: pallas_tpu, xla"):
        attention_shares(*arrays, available, precision="high", implementation="cuda")


@pytest.mark.parametrize(("d", "kernels"), [(128, True), (64, False)])
def test_by_default_a_tpu_has_the_kernels_where_they_can_do_it(d, kernels, monkeypatch):
    monkeypatch.setattr(chips, "kernels_by_default", lambda: True)
    arrays, available, _ = inputs_of(Shape(1, 8, 2, d))
    program = str(jax.make_jaxpr(lambda *x: attention_shares(*x, available, precision="high"))(*arrays))
    assert ("choice_forward" in program) == kernels


def test_each_device_of_a_mesh_takes_its_rows():
    command = [sys.executable, "-m", "tests.pallas_kernels.sharded_choice"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["2 devices agree"], result.stderr
