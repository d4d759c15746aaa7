"""Every implementation against the definition, and the definition against loops in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention
from pallas_kernels.block_sparse_attention.tpu import resident
from tests.pallas_kernels.base import BlockSparseAttentionTest, attend
from tests.pallas_kernels.cases import Inputs, Shape, Static, evaluate, naive, random_inputs


class TestReference(BlockSparseAttentionTest):
    implementation = "reference"

    def expected(self, inputs: Inputs, static: Static):
        return naive(inputs, static)


class TestXla(BlockSparseAttentionTest):
    implementation = "xla"

    def test_pairs_past_the_bound_are_dropped_from_the_last_tokens(self):
        inputs, static = random_inputs(Shape(count=2))
        short = attend(inputs, static._replace(max_pairs=31), "xla")
        count = inputs.pairs.count.at[15:].set(0).at[15].set(1)
        expected = attend(inputs._replace(pairs=inputs.pairs._replace(count=count)), static, "xla")
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), short, expected)

    def test_memory_does_not_hold_the_scores(self):
        """Temporary memory grows by less than one copy of the scores of all pairs; a careless form keeps several."""
        sizes = []
        for tokens in (512, 2048):
            shape = Shape(tokens=tokens, m=128, num_context=tokens // 128, experts=32, heads=4, d=16, slots=4, count=4)
            inputs, static = random_inputs(shape)
            compiled = jax.jit(lambda x, s=static: evaluate(x, s, "xla")).lower(inputs).compile()
            sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        score_bytes = 4 * 128 * 4 * 4 * (2048 - 512)  # pairs a token, keys, heads, bytes
        assert sizes[1] - sizes[0] < score_bytes


class TestPallasTpu(BlockSparseAttentionTest):
    """Interpreted here; `test_aot` compiles the same kernels for the chips."""

    implementation = "pallas_tpu"

    @pytest.mark.skip(reason="jax 0.10 cannot interpret a kernel under shard_map's check of varying axes")
    def test_sharded_over_devices(self):
        """The kernels say over which axes their results vary; the interpreter does not follow."""

    @pytest.mark.parametrize(("heads", "d"), [(5, 256), (3, 64)])
    def test_whole_registers_and_groups_of_heads(self, heads, d):
        self.check(*random_inputs(Shape(tokens=16, m=8, num_context=2, heads=heads, d=d)))

    def test_more_tokens_than_fast_memory_holds_are_refused(self):
        layout = resident.choose_layout(tokens=20_000, heads=8, d=128, rows=1000.0)
        with pytest.raises(ValueError, match=r"20007 tokens need \d+ MiB of VMEM in one call; wanted at most 128"):
            resident.vmem_bytes(layout, m=128, itemsize=2)


def test_default_is_an_implementation_for_this_device():
    inputs, static = random_inputs(Shape())
    default, xla = (attend(inputs, static, name) for name in (None, "xla"))
    jax.tree.map(np.testing.assert_array_equal, default, xla)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "cuda"}, "implementation='cuda'.*reference.*xla"),
        ({"num_context": 6}, "num_context=6; wanted 0 to 5"),
        ({"max_pairs": -1}, "max_pairs=-1"),
        ({"num_context": 2}, "number of tokens is 24; wanted 16"),
    ],
)
def test_refusals_name_the_argument(change, message):
    inputs, static = random_inputs(Shape())
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(*inputs[:5], window=inputs.window, **{**static._asdict(), **change})


def test_mixed_dtypes_are_refused():
    inputs, static = random_inputs(Shape())
    with pytest.raises(ValueError, match=r"key\.dtype is bfloat16; wanted float32"):
        attend(inputs._replace(key=inputs.key.astype(jnp.bfloat16)), static, "xla")
