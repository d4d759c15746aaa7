"""Products as a TPU takes them, on a CPU; and what fewer of them change."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from aamoe_jax.config import ConfigError, ExperimentConfig, to_dict
from aamoe_jax.model import LanguageModel, split
from experiments import router_precision
from tests.aamoe.helpers import model_config


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def in_passes(x: np.ndarray, y: np.ndarray, passes: int) -> np.ndarray:
    """By NumPy, in float64."""
    found = rounded(x) @ rounded(y)
    if passes == 3:
        found += rounded(x) @ rounded(y - rounded(y)) + rounded(x - rounded(x)) @ rounded(y)
    return found


@pytest.fixture
def operands() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=shape).astype(np.float32) for shape in ((24, 96), (96, 40), (24, 40))]


@pytest.mark.parametrize(("precision", "passes"), [("high", 3), ("default", 1)])
def test_a_cpu_takes_the_passes_of_a_tpu(operands, precision, passes):
    """Forward and backward; and only within."""
    x, y, cotangent = operands

    def products(x, y):
        multiply = jax.jit(lambda x, y: jnp.einsum("ij,jk->ik", x, y, precision=precision))
        found, pull_back = jax.vjp(multiply, x, y)
        return found, *pull_back(cotangent)

    def wanted(multiply):
        return multiply(x, y), multiply(cotangent, y.T), multiply(x.T, cotangent)

    with router_precision.tpu_passes():
        inside = products(x, y)
    exact = wanted(lambda a, b: a.astype(np.float64) @ b)
    errors = []
    for found, outside, one, truth in zip(
        inside, products(x, y), wanted(lambda a, b: in_passes(a, b, passes)), exact, strict=True
    ):
        np.testing.assert_allclose(found, one, atol=3e-5)
        np.testing.assert_allclose(outside, truth, atol=3e-5)
        errors.append(np.abs(found - truth).max())
    assert 5e-5 < min(errors) < max(errors) < 2e-3 if passes == 3 else min(errors) > 0.02


def test_products_that_ask_for_nothing_less_are_exact(operands):
    x, y, _ = operands
    with router_precision.tpu_passes():
        for precision in (None, "highest"):
            found = jax.jit(lambda x, y, p=precision: jnp.matmul(x, y, precision=p))(x, y)
            np.testing.assert_allclose(found, x.astype(np.float64) @ y, atol=3e-5)


def test_elsewhere_than_on_a_cpu_it_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ConfigError, match="imitates a TPU on a CPU: set JAX_PLATFORMS=cpu"):
        router_precision.main()


@pytest.mark.slow
def test_choices_change_where_the_products_do():
    model = model_config(router="pooled", num_layers=2, vocab_size=64)
    _, params = split(LanguageModel(model, rngs=nnx.Rngs(0)))
    batch = {"tokens": np.random.default_rng(0).integers(0, 64, (4, 128))}
    on_a_cpu = router_precision.changed_choices(model, params, [batch])
    assert on_a_cpu == {name: [0.0, 0.0] for name in router_precision.PRECISIONS}
    with router_precision.tpu_passes():
        found = router_precision.changed_choices(model, params, [batch])
    assert found["highest"] == [0.0, 0.0]
    assert found["high"][0] < found["default"][0] < 0.05
    assert min(found["default"]) > 0


def test_the_report_has_a_line_for_every_precision():
    def result(bits, seed):
        about = {"steps": 10, "evaluation": {"tokens": 1000}, "corpus_digest": "0" * 20, "versions": {"jax": "0"}}
        return about | {"bits_per_byte": bits, "seed": seed, "config": to_dict(ExperimentConfig())}

    results = {name: [result(2.0 + i / 10 + seed / 100, seed) for seed in (0, 1)] for i, name in enumerate(PRECISIONS)}
    choices = [{name: [i / 100, i / 50] for i, name in enumerate(PRECISIONS)}] * 2
    text = router_precision.report(results, choices, "the command")
    assert "| highest | 2.0000 | 2.0100 | 2.0050 | +0.0000 | 0.000% | 0.000% |" in text
    assert "| default | 2.2000 | 2.2100 | 2.2050 | +0.2000 | 2.000% | 4.000% |" in text
    assert "the command" in text
    text = router_precision.report({"highest": results["highest"]}, choices, "the command")
    assert "| high | not trained | not trained | not trained | not trained | 1.000% | 2.000% |" in text


PRECISIONS = router_precision.PRECISIONS
