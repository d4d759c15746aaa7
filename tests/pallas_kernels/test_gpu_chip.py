"""The GPU kernels on a Hopper or a B200: `JAX_PLATFORMS=cuda python -m pytest tests/pallas_kernels/test_gpu_chip.py`.

`test_gpu` interprets the same kernels on a CPU, and `test_aot_gpu` compiles them without a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.base import NAMED, assert_close, attend, causal, unknown_resources
from tests.pallas_kernels.cases import Inputs, Shape, Static, evaluate, random_inputs

HERE = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability in ("9.0", "10.0")
pytestmark = pytest.mark.skipif(
    not HERE, reason="there is no Hopper GPU or B200 here, or JAX_PLATFORMS does not let JAX use it"
)

ROUNDING = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half a unit in the last place."""
SHAPES = {
    "heads of 128": Shape(tokens=384, heads=2, d=128, m=128, num_context=3, experts=5),
    "heads of 64": Shape(tokens=256, heads=4, d=64, m=64, num_context=4, experts=4, slots=6),
    "ragged": Shape(tokens=300, heads=1, d=80, m=100, num_context=3, experts=4),
    "small": Shape(tokens=24, heads=2, d=4, m=8),
    "many keys": Shape(tokens=600, heads=1, d=128, m=300, num_context=2, experts=3),
    "many keys of small heads": Shape(tokens=1024, heads=2, d=64, m=512, num_context=2, experts=2),
    "parts of keys": Shape(tokens=70, heads=1, d=66, m=576, num_context=2, experts=2, window=False),
    "blocks of threads share a resource": Shape(
        tokens=4096, heads=1, d=128, m=64, num_context=3, experts=2, window=False
    ),
    **{name: NAMED[name] for name in ("no pairs at all", "no slots", "one key a resource")},
}


def exact(inputs: Inputs, static: Static):
    """The definition of the same rounded inputs, in float32."""
    wide = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        return evaluate(wide, static, "reference")


def check(inputs: Inputs, static: Static) -> None:
    """Results within 2e-3 of the largest value and half a unit in the last place; gradients within 4 half units of the
    largest value, since probabilities and gradients of scores are rounded before they are multiplied."""
    half = ROUNDING[inputs.query.dtype.name]
    (actual, gradients), (expected, exact_gradients) = evaluate(inputs, static, "pallas_gpu"), exact(inputs, static)
    for name, a, e in zip(actual._fields, actual, expected, strict=True):
        assert_close(a, e, 2e-3, name, rounding=half if a.dtype == inputs.query.dtype else 0.0)
    for name, a, e in zip(gradients._fields, gradients, exact_gradients, strict=True):
        assert_close(a, e, 4 * half, name)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", SHAPES)
def test_the_definition(name, dtype):
    check(*random_inputs(SHAPES[name], dtype))


def test_one_resource_takes_everything():
    inputs, static = random_inputs(Shape(tokens=2000, heads=2, d=64, m=64, count=1, window=False), jnp.bfloat16)
    pairs = inputs.pairs._replace(resource=jnp.full_like(inputs.pairs.resource, 3))
    check(inputs._replace(pairs=pairs), static)


def test_pairs_that_are_hidden_or_not_in_the_table():
    inputs, static = random_inputs(Shape(tokens=192, heads=2, d=64, m=64, count=4), jnp.bfloat16)
    visible = inputs.pairs.visible.at[1::4].set(0)
    check(inputs._replace(pairs=inputs.pairs._replace(visible=visible)), static)
    unknown, hidden = unknown_resources(inputs)
    jax.tree.map(
        np.testing.assert_array_equal, *(evaluate(x, static, "pallas_gpu")[0].output for x in (unknown, hidden))
    )


def test_the_same_bits_every_time():
    inputs, static = random_inputs(
        Shape(tokens=4096, heads=4, d=128, m=128, num_context=32, experts=16, slots=8), jnp.bfloat16
    )
    first, *others = (jax.device_get(evaluate(inputs, static, "pallas_gpu")) for _ in range(4))
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_causal_to_the_bit():
    """Nothing that later tokens hold, nor where they go, moves a bit of an earlier token."""
    shape = functools.partial(Shape, tokens=1280, m=64, num_context=20, experts=4, slots=6, heads=2, d=64)
    (inputs, static), (other, _) = (random_inputs(shape(seed=seed), jnp.bfloat16) for seed in (0, 1))
    for cut in (1, 64, 500, 1000):
        both = (causal(inputs, cut, x) for x in (inputs, other))
        for a, b in zip(*(attend(x, static, "pallas_gpu") for x in both), strict=True):
            np.testing.assert_array_equal(np.asarray(a)[:cut], np.asarray(b)[:cut])
