"""What every implementation of block-sparse attention must do; a subclass names the implementation."""

import functools
import re
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_sparse_attention import block_sparse_attention
from tests.pallas_kernels.cases import (
    SHARDED,
    Inputs,
    Shape,
    Static,
    evaluate,
    number_compiled,
    over_heads,
    random_inputs,
)

NAMED = {
    "plain": Shape(),
    "scores with a bound, budget nearly reached": Shape(bounded=True, spare=3),
    "every slot used, bound reached": Shape(count=4),
    "no pairs at all": Shape(count=0),
    "no experts, last chunk incomplete, bound reached": Shape(tokens=25, experts=0, slots=3, window=False, spare=0),
    "no slots": Shape(slots=0),
    "experts alone, more pairs than a tile, another scale": Shape(
        tokens=301, m=2, num_context=0, experts=5, slots=4, window=False, count=4, spare=3, scale=0.3
    ),
    "one key a resource": Shape(tokens=9, m=1, num_context=9, segments=1),
}
"""Shapes differ where they must: what compiles once serves several cases, and compiling is what takes the time."""
WINDOW_KERNELS = ("local_window_forward", "local_window_backward")


class BlockSparseAttentionTest:
    implementation: str
    random_shapes = 4

    def expected(self, inputs: Inputs, static: Static):
        return evaluate(inputs, static, "reference")

    def check(self, inputs: Inputs, static: Static, rtol: float = 1e-5):
        """Everything agrees within rtol of the largest value; nothing is NaN, and -inf is where it should be."""
        actual, expected = evaluate(inputs, static, self.implementation), self.expected(inputs, static)
        for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
            assert_close(a, e, rtol, jax.tree_util.keystr(path))
        return actual

    @pytest.mark.parametrize("name", NAMED)
    def test_shapes(self, name):
        self.check(*random_inputs(NAMED[name]))

    def test_random_shapes(self):
        # Every implementation runs this test; with no database there is nothing that one could replay for another.
        @hypothesis.settings(max_examples=self.random_shapes, deadline=None, derandomize=True, database=None)
        @hypothesis.given(shapes())
        def agrees(shape):
            self.check(*random_inputs(shape))

        agrees()

    def test_one_resource_takes_everything(self):
        inputs, static = random_inputs(Shape(count=1))
        self.check(inputs._replace(pairs=inputs.pairs._replace(resource=jnp.full((24, 4), 3, jnp.int32))), static)

    def test_ties(self):
        inputs, static = random_inputs(Shape())
        same = {name: jnp.zeros_like(getattr(inputs, name)) for name in ("query", "query_expert", "key")}
        pairs = inputs.pairs._replace(bias=jnp.zeros_like(inputs.pairs.bias))
        self.check(inputs._replace(**same, pairs=pairs), static)

    def test_large_scores_do_not_overflow(self):
        inputs, static = random_inputs(Shape())
        # Products of 900 or so: float32 itself has an error of 1e-4 in the exponent, and the softmax inherits it.
        self.check(inputs._replace(query=inputs.query * 30, key=inputs.key * 30), static, rtol=1e-3)

    def test_tokens_that_attend_to_nothing(self):
        inputs, static = random_inputs(Shape(count=0))
        window = inputs.window._replace(bias=jnp.full(24, -jnp.inf))
        attention, gradients = self.check(inputs._replace(window=window), static)
        assert np.all(np.asarray(attention.output) == 0)
        assert np.all(np.asarray(attention.lse) == -np.inf)
        assert all(np.all(np.asarray(x) == 0) for x in (attention.mass, *gradients))

    def test_hidden_pairs(self):
        """By their bias, or by no key of theirs being visible."""
        inputs, static = random_inputs(Shape())
        bias = inputs.pairs.bias.at[::2, 0].set(-jnp.inf)
        visible = inputs.pairs.visible.at[1::4].set(0)
        self.check(inputs._replace(pairs=inputs.pairs._replace(bias=bias, visible=visible)), static)

    def test_unused_slots_may_hold_anything(self):
        inputs, static = random_inputs(Shape())
        unused = np.arange(4) >= np.asarray(inputs.pairs.count)[:, None]
        for resource, bias, visible in ((-1, np.nan, -5), (2**31 - 1, np.inf, 2**30)):
            junk = (jnp.where(unused, *x) for x in zip((resource, bias, visible), inputs.pairs[:3], strict=True))
            other = inputs._replace(
                pairs=inputs.pairs._replace(**dict(zip(inputs.pairs._fields[:3], junk, strict=True)))
            )
            expected, actual = (evaluate(x, static, self.implementation) for x in (inputs, other))
            jax.tree.map(np.testing.assert_array_equal, actual, expected)

    def test_a_resource_that_is_not_in_the_table_is_hidden(self):
        """As by its bias; no token meets one twice for it."""
        inputs, static = random_inputs(Shape(count=4))
        unknown, hidden = unknown_resources(inputs)
        actual, expected = evaluate(unknown, static, self.implementation), self.expected(hidden, static)
        for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
            assert_close(a, e, 1e-5, jax.tree_util.keystr(path))

    def test_a_chunk_of_another_row_is_hidden(self):
        """As by its bias: most of what these three rows of two chunks want."""
        inputs, static = random_inputs(Shape(tokens=48, num_context=6, count=4))
        rows = static._replace(row_chunks=2)
        actual = evaluate(inputs, rows, self.implementation)
        expected = self.expected(without_other_rows(inputs, rows), static)
        for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
            assert_close(a, e, 1e-5, jax.tree_util.keystr(path))

    def test_masses_sum_to_one(self):
        """Where there is no window, and something is seen."""
        inputs, static = random_inputs(Shape(count=3))
        window = inputs.window._replace(bias=jnp.full(24, -jnp.inf))
        attention, _ = evaluate(inputs._replace(window=window), static, self.implementation)
        np.testing.assert_allclose(np.asarray(attention.mass).sum(1), 1.0, rtol=1e-5)

    def test_mass_where_it_is_wanted_alone(self):
        """Which is known when the program runs: it is compiled once. What else it gives is the same to the bit."""
        inputs, static = random_inputs(NAMED["plain"])
        (wanted, gradients) = evaluate(inputs, static, self.implementation)
        compiled = number_compiled()
        (unwanted, same_gradients) = evaluate(inputs, static, self.implementation, with_mass=False)
        assert number_compiled() == compiled
        assert np.any(wanted.mass)
        assert not np.any(unwanted.mass)
        expected = wanted._replace(mass=unwanted.mass), gradients
        jax.tree.map(np.testing.assert_array_equal, (unwanted, same_gradients), expected)

    def test_bfloat16(self):
        """Against float32 on the same rounded inputs: 2e-3 of the largest value, plus what no arithmetic could avoid.

        That is half a unit in the last place, 2^-9: of each value, where it is stored in bfloat16; and of the largest
        value, for the gradients that are products with probabilities or score gradients rounded to bfloat16.
        """
        inputs, static = random_inputs(
            Shape(tokens=96, m=16, num_context=6, d=16, experts=3, bounded=True), jnp.bfloat16
        )
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, inputs)
        (actual, gradients), (expected, exact_gradients) = (
            evaluate(inputs, static, self.implementation),
            self.expected(exact, static),
        )
        assert actual.output.dtype == jnp.bfloat16
        assert actual.lse.dtype == actual.mass.dtype == gradients.pair_bias.dtype == jnp.float32
        for name, a, e in zip(actual._fields, actual, expected, strict=True):
            assert_close(a, e, 2e-3, name, rounding=2.0**-9 if a.dtype == jnp.bfloat16 else 0.0)
        for name, a, e in zip(gradients._fields, gradients, exact_gradients, strict=True):
            rounding = 2.0**-9 if a.dtype == jnp.bfloat16 else 0.0
            assert_close(a, e, 2e-3 + rounding, name, rounding)

    def test_causal_to_the_bit(self):
        """Nothing that later tokens hold, nor where they go, moves a bit of an earlier token."""
        shape = Shape(tokens=160, m=8, num_context=20, experts=4, slots=6, heads=2, d=8, bounded=True)
        (inputs, static), (other, _) = (random_inputs(Shape(**{**vars(shape), "seed": seed})) for seed in (0, 1))
        for cut in (1, 8, 50, 125):
            # A causal caller routes a token to complete earlier chunks and experts alone.
            first, second = causal(inputs, cut, inputs), causal(inputs, cut, other)
            for a, b in zip(*(attend(x, static, self.implementation) for x in (first, second)), strict=True):
                np.testing.assert_array_equal(np.asarray(a)[:cut], np.asarray(b)[:cut])

    def test_a_bound_that_is_too_large_to_help(self):
        inputs, static = random_inputs(Shape(bounded=True, spare=3))
        self.check(inputs._replace(query=inputs.query * 30, max_score=jnp.float32(600.0)), static, rtol=1e-3)

    def test_scan_and_remat(self):
        inputs, static = random_inputs(Shape(window=False))

        def layer(query, implementation):
            return query + attend(inputs._replace(query=query), static, implementation).output

        def looped(query):
            step = jax.checkpoint(lambda query, _: (layer(query, self.implementation), None))
            return jnp.sum(jax.lax.scan(step, query, length=2)[0] ** 2)

        def plain(query):
            return jnp.sum(layer(layer(query, "reference"), "reference") ** 2)

        actual, expected = (jax.jit(jax.grad(loss))(inputs.query) for loss in (looped, plain))
        assert_close(actual, expected, 1e-5, "gradient")

    def test_new_counts_do_not_recompile(self):
        evaluate(*random_inputs(Shape(count=0)), self.implementation)
        compiled = number_compiled()
        for count in (1, 2):
            evaluate(*random_inputs(Shape(count=count)), self.implementation)
        assert number_compiled() == compiled

    def test_sharded_over_devices(self):
        """On two devices, in a process of its own: their number is fixed when JAX starts."""
        command = [sys.executable, "-m", "tests.pallas_kernels.sharded", self.implementation]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["2", "devices", "agree"]


class TpuAttentionTest(BlockSparseAttentionTest):
    """A path of TPU kernels, interpreted; `test_aot*` compiles the same kernels for the chips."""

    kernels: tuple[str, ...]
    random_shapes = 1

    def test_sharded_over_devices(self):
        """Lowered for two TPUs: jax 0.10 cannot interpret a kernel under shard_map's check of varying axes."""
        mesh = jax.sharding.AbstractMesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        inputs, static = random_inputs(SHARDED)
        run = jax.jit(over_heads(mesh, static, self.implementation))
        program = run.trace(inputs).lower(lowering_platforms=("tpu",)).as_text()
        assert sorted(re.findall(r'kernel_name = "(\w+)"', program)) == sorted(self.kernels + WINDOW_KERNELS)
        assert program.count("all_reduce") == 3  # gradients of both biases, and the mass


def unknown_resources(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Some slots with resources that do not exist; and the same slots with their resource, hidden by bias -inf."""
    pairs, resources = inputs.pairs, len(inputs.key)
    number = jnp.arange(pairs.resource.size).reshape(pairs.resource.shape)
    which = jnp.asarray([-1, resources, resources + 1, 2**31 - 1, -(2**31)], jnp.int32)[number % 5]
    bad = number % 3 == 1
    unknown = pairs._replace(resource=jnp.where(bad, which, pairs.resource))
    hidden = pairs._replace(bias=jnp.where(bad, -jnp.inf, pairs.bias))
    return inputs._replace(pairs=unknown), inputs._replace(pairs=hidden)


def without_other_rows(inputs: Inputs, static: Static) -> Inputs:
    """What is of another row hidden by bias -inf."""
    pairs, rows = inputs.pairs, static.num_context // static.row_chunks
    row = np.arange(len(inputs.query)) * rows // len(inputs.query)
    other = (pairs.resource < static.num_context) & (pairs.resource // static.row_chunks != row[:, None])
    assert other.any()
    return inputs._replace(pairs=pairs._replace(bias=jnp.where(other, -jnp.inf, pairs.bias)))


@st.composite
def shapes(draw) -> Shape:
    """Anything small."""
    number = lambda low, high: draw(st.integers(low, high))  # noqa: E731
    m, num_context, experts, window = number(1, 9), number(1, 5), number(0, 5), draw(st.booleans())
    return Shape(
        tokens=m * num_context if window else number(1, 40),
        heads=number(1, 3),
        d=number(1, 9),
        m=m,
        num_context=num_context,
        experts=experts,
        slots=number(0, num_context + experts),
        window=window,
        segments=number(1, 4),
        spare=draw(st.none() | st.integers(0, 20)),
        seed=number(0, 99),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def attend(inputs: Inputs, static: Static, implementation: str | None):
    return block_sparse_attention(
        *inputs[:5],
        window=inputs.window,
        max_score=inputs.max_score,
        implementation=implementation,
        **static._asdict(),
    )


def causal(inputs: Inputs, cut: int, later: Inputs) -> Inputs:
    """`inputs` up to token `cut`, `later` from there on; tokens before the cut see complete chunks before it only."""
    tokens, m = len(inputs.query), inputs.key.shape[1]
    chunks = tokens // m

    def pick(a, b):
        return jnp.concatenate([a[:cut], b[cut:]])

    def pick_keys(a, b):
        context = pick(*(x[:chunks].reshape(tokens, *x.shape[2:]) for x in (a, b)))
        return jnp.concatenate([context.reshape(chunks, m, *context.shape[1:]), a[chunks:]])

    pairs = jax.tree.map(pick, inputs.pairs, later.pairs)
    chunk_T1 = (jnp.arange(tokens) // m)[:, None]
    # A slot that names a chunk which is not complete yet is hidden; later tokens may do what they like.
    early = (jnp.arange(tokens) < cut)[:, None] & (pairs.resource < chunks) & (pairs.resource >= chunk_T1)
    return inputs._replace(
        query=pick(inputs.query, later.query),
        query_expert=pick(inputs.query_expert, later.query_expert),
        key=pick_keys(inputs.key, later.key),
        value=pick_keys(inputs.value, later.value),
        pairs=pairs._replace(bias=jnp.where(early, -jnp.inf, pairs.bias)),
        window=jax.tree.map(pick, inputs.window, later.window),
    )


def assert_close(actual, expected, rtol: float, name: str, rounding: float = 0.0) -> None:
    """Within rtol of the largest finite value, plus `rounding` of each value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, name
    assert not np.isnan(actual).any(), f"{name} has a NaN"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(actual), finite, err_msg=name)
    size = np.abs(expected[finite]).max(initial=0.0)
    allowed = rtol * max(size, 1e-3) + rounding * np.abs(expected[finite])
    excess = np.abs(actual[finite] - expected[finite]) - allowed
    assert excess.max(initial=-1.0) <= 0, (
        f"{name} is off by {excess.max():.3g} beyond the tolerance; largest value {size:.3g}"
    )
