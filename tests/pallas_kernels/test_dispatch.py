"""Which path a TPU takes, and that it is told apart from the others by nothing but time."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import chips
from pallas_kernels.block_sparse_attention import IMPLEMENTATIONS, interface, operation
from pallas_kernels.block_sparse_attention.tpu import dispatch
from tests.pallas_kernels.base import attend
from tests.pallas_kernels.cases import Shape, random_inputs


def problem(length: int, pairs: int, experts: int = 64, m: int = 128) -> operation.Problem:
    """One row of 1024 lanes, with so many pairs a token."""
    chunks = length // m
    slots = chunks + experts
    return operation.Problem(
        length, 8, 128, chunks + experts, m, slots, jnp.dtype(jnp.bfloat16), chunks, pairs * length, 0.1
    )


@pytest.mark.parametrize("chip", chips.TPUS)
def test_every_chip_goes_from_dense_to_resident_as_pairs_become_few(chip):
    with chips.assume(chip):
        everything, few = (dispatch.fastest(problem(2048, pairs), row_chunks=16) for pairs in (70, 4))
    assert (everything, few) == ("dense", "resident")


def test_long_rows_are_gathered_where_fast_memory_is_small():
    times = {length: dispatch.modelled(problem(length, 4), length // 128, "v5p") for length in (4096, 2**20)}
    ratio = {length: time["resident"] / time["gathered"] for length, time in times.items()}
    assert ratio[4096] < 1 < ratio[2**20]


def test_short_rows_in_a_batch_are_dense_although_the_batch_is_long():
    with chips.assume("v6e"):
        whole, rows = (dispatch.fastest(problem(2**16, 10, experts=8), row_chunks=n) for n in (512, 4))
    assert whole != "dense"
    assert rows == "dense"


def test_a_chip_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"chip='v9'.*v5e"), chips.assume("v9"):
        pass


def test_the_choice_is_handed_on(monkeypatch):
    """Through the interface, with a name of its own for what was picked."""
    called = []

    def record(name, *args, **kwargs):
        called.append(name)
        return IMPLEMENTATIONS["xla"](*args, **kwargs)

    for name in ("resident", "gathered", "dense"):
        monkeypatch.setitem(interface.IMPLEMENTATIONS, f"pallas_tpu_{name}", functools.partial(record, name))
    monkeypatch.setattr(dispatch, "fastest", lambda problem, row_chunks: "gathered")
    inputs, static = random_inputs(Shape())
    jax.eval_shape(lambda inputs: attend.__wrapped__(inputs, static, "pallas_tpu"), inputs)
    assert called == ["gathered"]
