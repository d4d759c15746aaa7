"""Which kernel attends on which device; splash attention, interpreted, is flash attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from aamoe_jax.mixers import fastest, flash
from aamoe_jax.mixers.fastest import fastest_attention
from aamoe_jax.mixers.flash import Attended, Band, flash_attention
from aamoe_jax.mixers.splash import splash_attention
from pallas_kernels import chips

LENGTH, HEADS, GROUPS, SIZE = 256, 4, 2, 8


def arrays_of(dtype: str = "bfloat16"):
    """Queries, keys, values, a cotangent; documents, of which one crosses every block."""
    random = np.random.default_rng(0)
    shapes = (HEADS, GROUPS, GROUPS, HEADS)
    arrays = [jnp.asarray(random.normal(size=(2, LENGTH, n, SIZE)), dtype) for n in shapes]
    return arrays, jnp.asarray(np.stack([np.arange(LENGTH) // 90 + 1, np.ones(LENGTH, int)]))


def both_passes(attend):
    """Output, and gradients of queries, keys and values."""

    def run(query, key, value, d_output, *more):
        output, pull_back = jax.vjp(lambda *x: attend(*x, *more), query, key, value)
        return output, *pull_back(d_output)

    return jax.jit(run)


@pytest.mark.parametrize("reach", [None, 1, 70, 200])
def test_splash_attention_is_flash_attention(reach):
    arrays, segments = arrays_of("float32")
    found = both_passes(lambda *x: splash_attention(*x, reach=reach, interpret=True))(*arrays, segments)
    wanted = both_passes(lambda *x: flash_attention(*x, Band(reach=reach)).output)(*arrays, segments)
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5, rtol=1e-4)


def recorded(monkeypatch) -> list[str]:
    """What attends, in place of attending."""
    taken: list[str] = []

    def stand_in(name):
        def attend(*arrays, **options):
            taken.append(name)
            assert options.get("reach") in (None, 7)
            return jnp.zeros_like(arrays[0])

        return attend

    monkeypatch.setattr(fastest, "splash_attention", stand_in("splash"))
    monkeypatch.setattr(fastest, "flash_attention", lambda *x, **_: Attended(stand_in("flash")(*x), x[0]))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, **_: stand_in("cudnn")(*x))
    return taken


def test_each_device_has_its_own(monkeypatch):
    taken, (arrays, segments) = recorded(monkeypatch), arrays_of()

    def attended(query=arrays[0], keys=LENGTH, reach=7) -> list[str]:
        taken.clear()
        key, value = (x[:, :keys] for x in arrays[1:3])
        jax.eval_shape(lambda: fastest_attention(query, key, value, segments[:, :keys], reach=reach))
        return list(taken)

    assert attended() == ["flash"]
    with chips.assume("v5e"):
        assert attended() == ["splash"]
        assert attended(reach=None) == ["splash"]
        assert attended(arrays[0][:, :128]) == ["flash"], "a part of the queries"
        assert attended(arrays[0][:, :200], keys=200) == ["flash"], "no whole tiles"
        assert attended(arrays[0].astype("float32")) == ["flash"]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert sorted(attended()) == ["cudnn", "flash"], "whichever the documents allow"
    assert attended(arrays[0][:, :128]) == ["flash"]


@pytest.mark.parametrize("reach", [None, 40])
def test_cudnn_is_told_what_is_seen_and_gets_rows_of_one_document(monkeypatch, reach):
    """JAX's own words to cuDNN, computed by XLA."""
    arrays, segments = arrays_of()
    wanted = fastest_attention(*arrays[:3], jnp.ones_like(segments), reach=reach)
    packed = fastest_attention(*arrays[:3], segments, reach=reach)
    by_xla = jax.nn.dot_product_attention
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(flash, "GPU_BLOCK", flash.BLOCK)  # the same bits
    calls = []

    def dot_product_attention(*x, implementation, **options):
        calls.append(implementation)
        return by_xla(*x, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    found = fastest_attention(*arrays[:3], jnp.ones_like(segments), reach=reach)
    assert calls == ["cudnn"]
    np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), atol=0.03)
    np.testing.assert_array_equal(fastest_attention(*arrays[:3], segments, reach=reach), packed)


def test_splash_attention_inside_a_mesh():
    """Which asks every kernel over which axes its results vary."""
    arrays, segments = arrays_of("float32")
    attend = both_passes(lambda *x: splash_attention(*x, interpret=True))
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (PartitionSpec("data", None, "tensor"),) * 4
    over = jax.shard_map(attend, mesh=mesh, in_specs=(*specs, PartitionSpec("data")), out_specs=specs)
    for one, two in zip(jax.jit(over)(*arrays, segments), attend(*arrays, segments), strict=True):
        np.testing.assert_array_equal(one, two)
