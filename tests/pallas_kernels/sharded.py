"""Heads over the two devices of a mesh, tables replicated: the same numbers as on one device. Run as a program."""

import functools
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels.block_sparse_attention import Attention, Pairs, Window, block_sparse_attention
from tests.pallas_kernels.cases import Gradients, Inputs, Shape, evaluate, random_inputs


def main(implementation: str) -> None:
    devices = jax.devices()
    assert len(devices) == 2, devices
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    inputs, static = random_inputs(Shape(heads=4, bounded=True))
    expected = evaluate(inputs, static, implementation)

    head, table, pairs = P(None, "tensor"), P(None, None, "tensor"), Pairs(P(), P(), P(), P())
    specs = Inputs(head, head, table, table, pairs, Window(P(), P()), head, head, P())

    # Bias is replicated: its gradient and the mass are sums over the devices' heads.
    outputs = Attention(head, head, P()), Gradients(head, head, table, table, P(), P())

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=outputs)
    def run(x: Inputs):
        def loss(query, query_expert, key, value, pair_bias, window_bias):
            a = block_sparse_attention(
                query,
                query_expert,
                key,
                value,
                x.pairs._replace(bias=pair_bias),
                window=x.window._replace(bias=window_bias),
                max_score=x.max_score,
                implementation=implementation,
                **static._asdict(),
            )
            lse = jax.numpy.where(a.lse > -jax.numpy.inf, a.lse, 0.0)
            return (a.output * x.d_output).sum() + (lse * x.d_lse).sum(), a

        arguments = *x[:4], x.pairs.bias, x.window.bias
        gradients, a = jax.grad(loss, argnums=tuple(range(6)), has_aux=True)(*arguments)
        return a._replace(mass=jax.lax.pmean(a.mass, "tensor")), Gradients(*gradients)

    actual = jax.jit(run)(inputs)
    assert len(actual[0].output.sharding.device_set) == 2
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)
    print(len(devices), "devices agree")


if __name__ == "__main__":
    main(sys.argv[1])
