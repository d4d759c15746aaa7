"""Static selections (UNI-08): each computes what its mask says, in less time, and remembers no more than it sees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.mixers.base import Context
from aamoe_jax.mixers.build import build_mixer, costs
from aamoe_jax.mixers.cache import Ring
from aamoe_jax.mixers.costs import Setting
from aamoe_jax.mixers.sparse_attention import SparseAttentionConfig
from aamoe_jax.shards import Shards
from tests.aamoe.helpers import model_config
from tests.generation.helpers import assert_parity
from tests.test_model import params_of

NAMES = ["local_attention", "sink_attention", "strided_attention"]
SPARSE = [
    SparseAttentionConfig(window=1, stride=1, sinks=1),
    SparseAttentionConfig(window=7, stride=5, sinks=3),
    SparseAttentionConfig(window=60, stride=50, sinks=30),
    SparseAttentionConfig(window=500, stride=400, sinks=300),
]


def packed(length: int) -> Context:
    """Documents of 1, 2 and 3 tokens among longer ones; and two, the first without its first token, and padding."""
    random = np.random.default_rng(3)
    segments = np.stack([np.sort(random.integers(1, 5, length)), np.ones(length, int)])
    segments[0, 9:] += 4
    segments[0, :9] = [1, 2, 2, 3, 3, 3, 4, 4, 4]
    segments[1, length // 3 :] = 2
    segments[1, -5:] = 0
    begins = np.diff(segments, axis=1, prepend=-1) != 0
    positions = np.arange(length) - np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    positions[1, : length // 3] += 1
    return Context(jnp.asarray(segments), jnp.asarray(positions), "prefix", 1.0)


@pytest.mark.parametrize("sparse", SPARSE, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_is_the_masked_square(name, sparse):
    """Values and gradients, at a length that is no multiple of anything, in several blocks."""
    length, config = 283, model_config(own=(sparse,), num_kv_heads=2)
    part, context = build_mixer(name, config, rngs=nnx.Rngs(0)).parts["attention"], packed(length)
    random = np.random.default_rng(1)
    arrays = [jnp.asarray(random.normal(size=(2, length, n, 8)), jnp.float32) for n in (4, 2, 2)]
    d_output = random.normal(size=(2, length, 4, 8))
    mask = part._visible(context)[:, None]
    real = (context.segment_ids > 0)[..., None, None]

    def gradients(attend):
        loss = lambda *x: ((output := jnp.where(real, attend(*x), 0)) * d_output).sum() + 0 * output.sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)

    found = jnp.where(real, jax.jit(lambda *x: part._attend(*x, context))(*arrays), 0)
    wanted = jnp.where(real, jax.nn.dot_product_attention(*arrays, mask=mask), 0)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    both = (
        gradients(lambda *x: part._attend(*x, context)),
        gradients(lambda *x: jax.nn.dot_product_attention(*x, mask=mask)),
    )
    for one, two in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(one, two, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("sparse", SPARSE[1:3], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_the_queries_is_that_part_of_the_row(name, sparse):
    """As on a mesh that divides rows: 3 parts of 31 tokens, which is no multiple of a stride or a window."""
    length, config = 93, model_config(own=(sparse,))
    part, context = build_mixer(name, config, rngs=nnx.Rngs(0)).parts["attention"], packed(length)
    arrays = [jax.random.normal(jax.random.key(i), (2, length, 4, 8)) for i in range(3)]
    whole = jax.jit(lambda *x: part._attend(*x, context))(*arrays)

    def of_part(query, key, value):
        inside = dataclasses.replace(context, shards=Shards(resource=3))
        return part._attend(query, key, value, inside)

    parts = jnp.stack(jnp.split(arrays[0], 3, axis=1))
    found = jax.jit(jax.vmap(of_part, in_axes=(0, None, None), axis_name="resource"))(parts, *arrays[1:])
    real = np.asarray(context.segment_ids > 0)
    np.testing.assert_allclose(np.concatenate(found, axis=1)[real], np.asarray(whole)[real], atol=1e-5)


@pytest.mark.parametrize("sparse", SPARSE[1:3], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_it_decodes_as_it_was_trained(name, sparse):
    """Prompts shorter and longer than a window; rings that go round more than once; the last token sees the first."""
    config = model_config(pattern=(name,), own=(sparse,), num_layers=1)
    assert_parity(config, params_of(config), length=35, starts=[1, 9, 24])
    assert_parity(config, params_of(config), length=36, starts=[9])


@pytest.mark.parametrize("ring", [Ring(0, 5), Ring(3, 5), Ring(3, 1)], ids=str)
def test_a_ring_holds_what_was_written_last(ring):
    held = {}
    for position in range(23):
        held[int(ring.place(jnp.asarray(position)))] = position
        found = np.asarray(ring.held(jnp.asarray([position]), ring.places))[0]
        assert all(found[place] == at for place, at in held.items())
        assert (found >= 0).all() and (found <= position).all()  # noqa: PT018
        assert sorted(held) == list(range(min(position + 1, ring.places)))
        seen = {at for at in range(position + 1) if at < ring.kept or position - at < ring.window}
        assert seen <= set(held.values())


def test_caches_and_work_are_those_of_what_is_seen():
    config = model_config(own=(SparseAttentionConfig(window=128, stride=32, sinks=4),))
    at = {
        length: {name: costs(name, Setting(config, 1, length)) for name in [*NAMES, "attention"]}
        for length in (4096, 16384)
    }
    token = 2 * 32 * 4
    assert at[16384]["attention"].cache_bytes == at[16384]["strided_attention"].cache_bytes == 16384 * token
    assert at[16384]["local_attention"].cache_bytes == 128 * token
    assert at[16384]["sink_attention"].cache_bytes == 132 * token
    for name in ("local_attention", "sink_attention"):
        assert at[16384][name].prefill_flops < 4.1 * at[4096][name].prefill_flops
        assert at[16384][name].decode_flops == at[4096][name].decode_flops
    attention, strided = (at[16384][name] for name in ("attention", "strided_attention"))
    projections = 2 * 2 * 32 * 64
    ratio = (attention.decode_flops - projections) / (strided.decode_flops - projections)
    assert ratio == pytest.approx(16384 / (32 + 511))


@pytest.mark.parametrize("name", NAMES)
def test_model_flops_count_what_a_token_sees_on_average(name):
    """4 d for every key, beside projections."""
    sparse, length = SparseAttentionConfig(window=13, stride=6, sinks=4), 101
    config = model_config(own=(sparse,))
    part = build_mixer(name, config, rngs=nnx.Rngs(0)).parts["attention"]
    seen = float(part._visible(Context.of_rows(config, 1, length)).sum()) / length
    beside = costs("attention", Setting(config, 1, length)).model_flops - 4 * 32 * (length + 1) / 2
    assert costs(name, Setting(config, 1, length)).model_flops - beside == pytest.approx(4 * 32 * seen)
